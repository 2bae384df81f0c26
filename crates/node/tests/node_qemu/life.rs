//! The life of sandboxes with real guests.

use crate::stage::{Act, Cast, TTL, pull, team};
use aenv_node::{
    control::Control,
    model::{EndCause, State},
};
use std::time::Duration;

pub(crate) fn template<'a>(cast: &'a Cast) -> Act<'a> {
    Box::pin(async move { pull(&cast.node).await })
}

pub(crate) fn start<'a>(cast: &'a Cast) -> Act<'a> {
    Box::pin(async move {
        let id = crate::stage::start(cast).await;
        cast.check(&id, "test \"$GIVEN\" = 'a b'").await;
        cast.check(&id, "test \"$(whoami)\" = user").await;
        cast.check(&id, &format!("test \"$E2B_SANDBOX_ID\" = {id} && test \"$(hostname)\" = {id}")).await;
        let now = jiff::Timestamp::now().as_second();
        cast.check(&id, &format!("d=$(( $(date +%s) - {now} )); test $d -ge -5 && test $d -le 30")).await;
        assert_eq!(cast.run(&id, "exit 7").await, 7);
        // Its root file system takes writes and its own address is the one of every guest.
        cast.check(
            &id,
            "echo x > ~/f && sync && ip -4 addr | grep -q 169.254.0.21 || hostname -I | grep -q 169",
        )
        .await;
    })
}

pub(crate) fn cycles<'a>(cast: &'a Cast) -> Act<'a> {
    Box::pin(async move {
        let rounds = std::env::var("AENV_CYCLES").ok().and_then(|n| n.parse().ok()).unwrap_or(12_u32);
        let id = crate::stage::start(cast).await;
        // A process that counts in its memory and tells when asked by a file, and a file with known content.
        let counter = "nohup python3 -c '
import os, time
n = 0
while True:
    n += 1
    if os.path.exists(\"/tmp/ask\"):
        os.unlink(\"/tmp/ask\")
        open(\"/tmp/told.new\", \"w\").write(str(n)); os.rename(\"/tmp/told.new\", \"/tmp/told\")
    time.sleep(0.01)
' >/dev/null 2>&1 & echo $! > /tmp/pid";
        cast.check(&id, counter).await;
        cast.check(
            &id,
            "head -c 3000000 /dev/urandom > ~/data && sha256sum ~/data > ~/sum && echo 0 > ~/last",
        )
        .await;
        cast.check(&id, "cat /proc/sys/kernel/random/boot_id > /tmp/boot").await;
        let mut pauses = Vec::new();
        let mut resumes = Vec::new();
        for round in 0..rounds {
            cast.node.pause(&team(), &id, true).await.expect("a pause");
            pauses.push(cast.node.get(&team(), &id).await.expect("a sandbox").phases);
            cast.node.connect(&team(), &id, TTL).await.expect("a resume");
            resumes.push(cast.node.get(&team(), &id).await.expect("a sandbox").phases);
            cast.check(&id, "sha256sum -c --quiet ~/sum && kill -0 $(cat /tmp/pid)").await;
            cast.check(&id, "test \"$(cat /tmp/boot)\" = \"$(cat /proc/sys/kernel/random/boot_id)\"").await;
            let asked = "rm -f /tmp/told; touch /tmp/ask; for i in $(seq 500); do test -e /tmp/told && break; \
                         sleep 0.01; done; test $(cat /tmp/told) -gt $(cat ~/last) && cp /tmp/told ~/last";
            cast.check(&id, asked).await;
            cast.check(
                &id,
                &format!("echo {round} >> ~/rounds && test $(wc -l < ~/rounds) -eq $(({round} + 1))"),
            )
            .await;
        }
        crate::speed::print("pause", &pauses);
        crate::speed::print("resume", &resumes);
    })
}

pub(crate) fn disk_only<'a>(cast: &'a Cast) -> Act<'a> {
    Box::pin(async move {
        let id = crate::stage::start(cast).await;
        cast.check(&id, "echo kept > ~/f && cat /proc/sys/kernel/random/boot_id > ~/boot").await;
        cast.node.pause(&team(), &id, false).await.expect("a pause");
        cast.node.connect(&team(), &id, TTL).await.expect("a resume");
        cast.check(&id, "test \"$(cat ~/f)\" = kept").await;
        cast.check(&id, "test \"$(cat ~/boot)\" != \"$(cat /proc/sys/kernel/random/boot_id)\"").await;
        cast.check(&id, "test \"$GIVEN\" = 'a b'").await;
        // And with memory from there on.
        cast.check(&id, "cat /proc/sys/kernel/random/boot_id > ~/boot").await;
        cast.node.pause(&team(), &id, true).await.expect("a pause with memory");
        cast.node.connect(&team(), &id, TTL).await.expect("a resume");
        cast.check(&id, "test \"$(cat ~/boot)\" = \"$(cat /proc/sys/kernel/random/boot_id)\"").await;
    })
}

pub(crate) fn clones<'a>(cast: &'a Cast) -> Act<'a> {
    Box::pin(async move {
        let made = futures_util::future::join_all((0..6).map(|_| crate::stage::start(cast))).await;
        for (n, id) in made.iter().enumerate() {
            cast.check(
                id,
                &format!("echo secret-{n} > ~/secret; head -c 16 /dev/urandom | sha256sum > ~/random"),
            )
            .await;
        }
        for (n, id) in made.iter().enumerate() {
            cast.check(id, &format!("test \"$(cat ~/secret)\" = secret-{n}")).await;
        }
        // Random numbers differ: one clone's is written into the others and compared there.
        let mut seen = std::collections::HashSet::new();
        for id in &made {
            let mut digit = 0;
            for place in 1..=4 {
                let code = cast.run(id, &format!("exit $((16#$(cut -c{place} ~/random)))")).await;
                digit = digit * 16 + code;
            }
            assert!(seen.insert(digit), "two clones drew the same random number");
        }
    })
}

pub(crate) fn power_off<'a>(cast: &'a Cast) -> Act<'a> {
    Box::pin(async move {
        let id = crate::stage::start(cast).await;
        let route = cast.node.route(&id).expect("a route");
        let slot = route.slot.expect("a slot");
        use aenv_node::seams::Guests;
        // The guest goes down under the command: no answer is expected.
        let args = ["-c", "echo o > /proc/sysrq-trigger; sleep 30"];
        let command = cast.guests.run(&slot, "root", "/bin/sh", &args, Duration::from_secs(20));
        let wait = async {
            loop {
                let sandbox = cast.node.get(&team(), &id).await.expect("a tombstone");
                if sandbox.state == State::Dead {
                    return sandbox;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let mut noticed = std::pin::pin!(tokio::time::timeout(Duration::from_secs(10), wait));
        let dead = tokio::select! {
            dead = &mut noticed => dead,
            _no_answer = command => noticed.await,
        };
        let dead = dead.expect("its end is noticed");
        let tombstone = dead.tombstone.expect("a tombstone");
        assert_eq!(tombstone.cause, EndCause::GuestShutdown, "{}", tombstone.detail);
    })
}
