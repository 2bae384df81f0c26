//! Machines restored, exercised once and stopped ahead of need.
//!
//! ```text
//!   template used ─► restore ─► one command run ─► stopped, waiting ─► taken by a create
//!                                                        └─► ended: template unused or replaced, memory needed, stop
//! ```
//! Running a command once fills the guest's caches and, under emulation, the monitor's translations: the next command of
//! a machine that is continued costs milliseconds. A waiting machine is made under a fresh sandbox id and keeps it, so
//! handing it out renames nothing. No record names it before that: after a crash it is reaped like any stray.
//!
//! Machines are made one at a time and only while nothing else starts.

use crate::{
    builds,
    catalog::Ready,
    machine::{Machine, Plan, Start, remove_dirs},
    model::{BuildId, SandboxId},
    node::Inner,
    options,
    sandbox::{home, machine_id},
    seams::Init,
    steps::{Clock, Named, StepError, guest, within},
};
use aenv_network::Egress;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// No start for this long before a machine is made: whoever just got a sandbox runs its first command first.
const QUIET: Duration = Duration::from_millis(150);
/// Commands run in a machine before it waits: the second one takes the paths that are only taken when the first is known.
const EXERCISES: usize = 2;
/// A template whose machine could not be made is left alone for this long.
const AFTER_FAILURE: Duration = Duration::from_secs(30);

/// A machine that waits.
pub(crate) struct Warm {
    pub(crate) id: SandboxId,
    pub(crate) machine: Machine,
}

pub(crate) struct Pool {
    options: options::Pool,
    held: Mutex<Held>,
    changed: Notify,
}

#[derive(Default)]
struct Held {
    waiting: HashMap<BuildId, Vec<Warm>>,
    used: HashMap<BuildId, Used>,
    last_start: Option<Instant>,
    closed: bool,
}

struct Used {
    ready: Arc<Ready>,
    at: Instant,
    not_before: Instant,
}

enum Next {
    Make(Arc<Ready>),
    Wait(Option<Duration>),
}

impl Pool {
    pub(crate) fn new(options: options::Pool) -> Self {
        Self { options, held: Mutex::default(), changed: Notify::new() }
    }

    /// A template is being used: takes a waiting machine of it, if there is one, and sees to it that more come.
    pub(crate) fn take(&self, ready: &Arc<Ready>) -> Option<Warm> {
        let mut held = self.held.lock();
        self.used(&mut held, ready);
        let waiting = held.waiting.get_mut(&ready.build)?;
        // One that died while it waited is left to the keeper.
        let at = waiting.iter().position(|warm| warm.machine.vm.exit().borrow().is_none())?;
        Some(waiting.swap_remove(at))
    }

    /// Expects use of a template, without taking.
    pub(crate) fn expect(&self, ready: &Arc<Ready>) {
        let mut held = self.held.lock();
        self.used(&mut held, ready);
        held.last_start = None;
    }

    fn used(&self, held: &mut Held, ready: &Arc<Ready>) {
        let now = Instant::now();
        held.last_start = Some(now);
        if self.options.size > 0 {
            let used = held.used.entry(ready.build);
            let used = used.or_insert_with(|| Used { ready: Arc::clone(ready), at: now, not_before: now });
            used.at = now;
        }
        self.changed.notify_one();
    }

    /// How long a template counts as in use.
    pub(crate) fn recent(&self) -> Duration {
        self.options.recent
    }

    /// Waiting machines by build.
    pub(crate) fn counts(&self) -> Vec<(BuildId, u64)> {
        let held = self.held.lock();
        held.waiting
            .iter()
            .map(|(build, waiting)| (*build, u64::try_from(waiting.len()).unwrap_or(0)))
            .collect()
    }

    /// Takes every machine out that waits in vain: dead, of a build that is no longer current, unused, or all of them.
    fn drain(&self, inner: &Inner, all: bool) -> Vec<Warm> {
        let mut held = self.held.lock();
        let now = Instant::now();
        held.used.retain(|_, used| {
            !all && now.duration_since(used.at) < self.options.recent && inner.catalog.is_current(&used.ready)
        });
        let mut out = Vec::new();
        let Held { waiting, used, .. } = &mut *held;
        for (build, machines) in waiting.iter_mut() {
            let keep = used.contains_key(build);
            out.extend(machines.extract_if(.., |warm| !keep || warm.machine.vm.exit().borrow().is_some()));
        }
        waiting.retain(|_, machines| !machines.is_empty());
        out
    }

    /// Ends all waiting machines; their room is free when this returns.
    pub(crate) async fn shrink(&self, inner: &Arc<Inner>) {
        end_all(inner, self.drain(inner, true)).await;
    }

    /// Looks again, because a build was replaced or deleted.
    pub(crate) fn review(&self) {
        self.changed.notify_one();
    }

    /// Puts a machine with those that wait, or notes that none could be made. Returns it when the pool is closed.
    fn put(&self, ready: &Ready, made: Result<Warm, StepError>) -> Option<Warm> {
        let mut held = self.held.lock();
        match made {
            Ok(warm) if held.closed => return Some(warm),
            Ok(warm) => held.waiting.entry(ready.build).or_default().push(warm),
            Err(error) => {
                tracing::warn!(build = %ready.build, %error, "no machine could be made ahead of need");
                if let Some(used) = held.used.get_mut(&ready.build) {
                    used.not_before = Instant::now() + AFTER_FAILURE;
                }
            }
        }
        None
    }

    fn next(&self, inner: &Inner) -> Next {
        let held = self.held.lock();
        let now = Instant::now();
        if let Some(last) = held.last_start {
            let quiet = now.duration_since(last);
            if quiet < QUIET && !held.used.is_empty() {
                return Next::Wait(Some(QUIET - quiet));
            }
        }
        let waiting = |build: &BuildId| held.waiting.get(build).map_or(0, Vec::len);
        let mib: u64 =
            held.waiting.values().flatten().map(|warm| u64::from(warm.machine.record.vm.memory_mib)).sum();
        let short = held.used.values().filter(|used| {
            waiting(&used.ready.build) < self.options.size
                && mib + u64::from(used.ready.memory_mib) <= self.options.max_memory_mib
                && inner.catalog.is_current(&used.ready)
        });
        // The one with the fewest waiting, then the one used last.
        let mut short: Vec<_> = short.collect();
        short.sort_by_key(|used| (waiting(&used.ready.build), std::cmp::Reverse(used.at)));
        match short.iter().find(|used| used.not_before <= now) {
            Some(used) => Next::Make(Arc::clone(&used.ready)),
            None => {
                let retry = short.iter().map(|used| used.not_before.duration_since(now)).min();
                let unused = held
                    .used
                    .values()
                    .map(|used| self.options.recent.saturating_sub(now.duration_since(used.at)))
                    .min();
                Next::Wait(retry.into_iter().chain(unused).min())
            }
        }
    }
}

/// Keeps the pool as it should be until the node stops, then ends what waits.
pub(crate) async fn keep(inner: Arc<Inner>) {
    let pool = &inner.pool;
    while !inner.stop.is_cancelled() {
        end_all(&inner, pool.drain(&inner, false)).await;
        match pool.next(&inner) {
            Next::Make(ready) => {
                let Some(turn) = inner.admission.idle_turn() else {
                    tokio::select! {
                        () = inner.admission.turn_ended() => {}
                        () = inner.stop.cancelled() => {}
                    }
                    continue;
                };
                let made = make(&inner, &ready).await;
                drop(turn);
                if let Some(unwanted) = pool.put(&ready, made) {
                    end_all(&inner, vec![unwanted]).await;
                }
            }
            Next::Wait(limit) => {
                tokio::select! {
                    () = pool.changed.notified() => {}
                    () = tokio::time::sleep(limit.unwrap_or_default()), if limit.is_some() => {}
                    () = inner.stop.cancelled() => {}
                }
            }
        }
    }
    pool.held.lock().closed = true;
    pool.shrink(&inner).await;
}

async fn end_all(inner: &Arc<Inner>, machines: Vec<Warm>) {
    futures_util::future::join_all(machines.into_iter().map(|warm| async move {
        inner.end_machine(warm.machine).await;
        remove_dirs(vec![inner.at(&home(&warm.id))]).await;
    }))
    .await;
}

async fn make(inner: &Arc<Inner>, ready: &Arc<Ready>) -> Result<Warm, StepError> {
    let room = inner.admission.admit(ready.memory_mib)?;
    let id = SandboxId::random();
    let plan = Plan {
        id: machine_id(&id, 1),
        vcpus: ready.vcpus,
        memory_mib: ready.memory_mib,
        disk: ready.disk.clone(),
        disk_size: ready.disk_size,
        upper: home(&id).join("upper-1"),
        egress: Egress::Internet,
        start: Start::Restore(ready.memory.clone()),
    };
    let mut clock = Clock::start();
    let made = match inner.launch(plan, Some(room), &mut clock).await {
        Ok(machine) => match ready_to_wait(inner, ready, &machine, &id).await {
            Ok(()) => Ok(Warm { id: id.clone(), machine }),
            Err(error) => {
                inner.end_machine(machine).await;
                Err(error)
            }
        },
        Err(error) => Err(error),
    };
    if made.is_err() {
        remove_dirs(vec![inner.at(&home(&id))]).await;
    }
    inner.journal.observe("warm", &clock.finish());
    made
}

async fn ready_to_wait(
    inner: &Arc<Inner>,
    ready: &Ready,
    machine: &Machine,
    id: &SandboxId,
) -> Result<(), StepError> {
    // All that happens between being handed out and the first command's end happens here once.
    let cancel = CancellationToken::new();
    let mut exit = machine.vm.exit();
    // Its name is known already: being named again then costs the guest no write.
    let identity = Init { sandbox: id.to_string(), ..builds::nobody(&ready.guest, &ready.template) };
    let init = inner.parts.guests.init(&machine.record.slot, &identity);
    guest("waiting for the guest agent", inner.deadlines.agent, &mut exit, &cancel, init).await?;
    for _ in 0..EXERCISES {
        exercise(inner, machine, &ready.guest.user, &cancel).await?;
    }
    let again = inner.parts.guests.init(&machine.record.slot, &identity);
    guest("waiting for the guest agent", inner.deadlines.agent, &mut exit, &cancel, again).await?;
    let vm = Arc::clone(&machine.vm);
    let work = async move { vm.pause().await.step("stopping the machine") };
    within("stopping the machine", inner.deadlines.machine, work).await
}

/// Runs a command as clients do, so that the next one finds everything warm.
pub(crate) async fn exercise(
    inner: &Arc<Inner>,
    machine: &Machine,
    user: &str,
    cancel: &CancellationToken,
) -> Result<(), StepError> {
    const STEP: &str = "running a first command";
    let mut exit = machine.vm.exit();
    let limit = inner.deadlines.exercise;
    let (guests, slot) = (&inner.parts.guests, &machine.record.slot);
    let bash = guests.run(slot, user, "/bin/bash", &["-l", "-c", "true"], limit);
    match guest(STEP, limit, &mut exit, cancel, bash).await {
        Ok(0) => return Ok(()),
        Ok(_) | Err(StepError::Guest { .. }) => {}
        Err(error) => return Err(error),
    }
    // An image without bash, or with a profile that fails.
    let sh = guests.run(slot, user, "/bin/sh", &["-c", "true"], limit);
    match guest(STEP, limit, &mut exit, cancel, sh).await {
        // An image without a shell is fine too: its agent answered.
        Ok(_) | Err(StepError::Guest { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}
