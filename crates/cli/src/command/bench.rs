//! `aenv bench`: what a caller waits for, measured over the public API.
//!
//! The number that counts is from the request to the first command answered. Variants (cold, warm, a container engine as
//! peer) are interleaved in one run, so that a busy machine is equally unkind to all of them. Nothing is left out:
//! failures are counted, not dropped, and every sample is in the JSON.

use super::{
    Context,
    bench_report::{Machine, Report, Sample, Variant},
};
use crate::{
    control::known,
    error::{Error, Result},
    guest::Guest,
    output,
    process::{Spec, collect, shell_code},
};
use aenv_api_types::{InspectedSandbox, NewSandbox, PhaseTiming, Sandbox};
use futures_util::future::join_all;
use std::{collections::BTreeMap, process::Stdio, time::Duration};
use tokio::{
    io::AsyncReadExt as _,
    time::{Instant, timeout},
};

const PEER_DEADLINE: Duration = Duration::from_secs(120);
/// How long the warm pool is given to fill up again between rounds.
const POOL_DEADLINE: Duration = Duration::from_secs(30);
const POOL_POLL: Duration = Duration::from_millis(20);
/// Life of a bench sandbox, should this client be killed before it removes it.
const LIFE_S: i64 = 300;

/// Measure starts, pauses and resumes.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Start to first command answered
    Start(StartArgs),
    /// Pause, and resume to first command answered, after memory was written
    Pause(PauseArgs),
}

/// Start to first command answered.
#[derive(Debug, clap::Args)]
pub struct StartArgs {
    /// Template
    #[arg(long, short = 'T', default_value = "base")]
    template: String,
    /// Samples of each variant
    #[arg(long, short, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    n: u32,
    /// Starts at once
    #[arg(long, short, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    concurrency: u32,
    /// From the pool of machines made ahead; waits for it to fill between rounds
    #[arg(long)]
    warm: bool,
    /// Without machines made ahead. With --warm too, both are measured in turn
    #[arg(long)]
    cold: bool,
    /// A peer in the same run: docker:IMAGE is `docker run --rm IMAGE echo`
    #[arg(long, value_name = "docker:IMAGE", value_parser = peer)]
    compare: Option<String>,
}

/// Pause and resume.
#[derive(Debug, clap::Args)]
pub struct PauseArgs {
    /// Template
    #[arg(long, short = 'T', default_value = "base")]
    template: String,
    /// Cycles
    #[arg(long, short, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    n: u32,
    /// Memory written with random bytes before each pause, MiB
    #[arg(long, value_name = "MIB", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=4096))]
    dirty: u32,
}

fn peer(text: &str) -> std::result::Result<String, String> {
    match text.split_once(':') {
        Some(("docker", image)) if !image.is_empty() && !image.starts_with('-') => Ok(image.to_owned()),
        _ => Err(format!("'{text}' is not docker:IMAGE")),
    }
}

pub(super) async fn run(context: &Context, command: Command) -> Result<u8> {
    let report = match command {
        Command::Start(args) => start(context, &args).await?,
        Command::Pause(args) => pause(context, &args).await?,
    };
    if context.json() {
        output::json(&report)?;
    } else {
        report.print()?;
    }
    Ok(u8::from(report.failures() > 0))
}

#[derive(Clone, Copy)]
enum Contestant<'a> {
    Ours { cold: bool, warm: bool },
    Docker(&'a str),
}

async fn start(context: &Context, args: &StartArgs) -> Result<Report> {
    let mut contestants: Vec<(&str, Contestant<'_>)> = Vec::new();
    if args.cold {
        contestants.push(("cold", Contestant::Ours { cold: true, warm: false }));
    }
    if args.warm {
        contestants.push(("warm", Contestant::Ours { cold: false, warm: true }));
    }
    if contestants.is_empty() {
        contestants.push(("start", Contestant::Ours { cold: false, warm: false }));
    }
    if let Some(image) = &args.compare {
        contestants.push(("docker run", Contestant::Docker(image)));
    }
    let mut variants: Vec<Variant> = contestants.iter().map(|(name, _)| Variant::new(name)).collect();
    let machine = Machine::here();
    let full = context.control.node().await.ok().and_then(|node| node.warm.get(&args.template).copied());
    let mut left = args.n;
    while left > 0 {
        let at_once = left.min(args.concurrency);
        for ((name, contestant), variant) in contestants.iter().zip(&mut variants) {
            let warm = matches!(contestant, Contestant::Ours { warm: true, .. });
            settle(context, &args.template, full, if warm { u64::from(at_once) } else { 0 }).await?;
            let round = (0..at_once).map(|_| async {
                match contestant {
                    Contestant::Ours { cold, .. } => one_start(context, &args.template, *cold).await,
                    Contestant::Docker(image) => one_docker(image).await,
                }
            });
            for outcome in Box::pin(join_all(round)).await {
                match outcome {
                    Ok(sample) => variant.samples.push(sample),
                    Err(error) => {
                        output::say(&format!("{name}: {error}"));
                        variant.failures += 1;
                    }
                }
            }
        }
        left -= at_once;
        output::say(&format!("{} of {} rounds' samples taken", args.n - left, args.n));
    }
    let settings = serde_json::json!({
        "bench": "start", "template": args.template, "n": args.n, "concurrency": args.concurrency,
        "warm": args.warm, "cold": args.cold, "compare": args.compare,
    });
    Ok(Report { machine, settings, variants })
}

async fn one_start(context: &Context, template: &str, cold: bool) -> Result<Sample> {
    let new = NewSandbox {
        template_id: template.to_owned(),
        timeout: Some(LIFE_S),
        auto_pause: Some(false),
        metadata: Some(BTreeMap::from([("aenv-bench".to_owned(), "start".to_owned())])),
        ..NewSandbox::default()
    };
    let begun = Instant::now();
    let created = context.control.create(&new, cold).await?;
    let answered = begun.elapsed();
    let sandbox: Sandbox = known(&created)?;
    let id = sandbox.sandbox_id.clone();
    let outcome: Result<Sample> = async {
        let guest = Guest::of(&context.settings, sandbox.sandbox_id, sandbox.envd_access_token, None)?;
        first_command(&guest).await?;
        let total = begun.elapsed();
        let phases = phases_of(context, &id).await?;
        let steps =
            BTreeMap::from([("request".to_owned(), answered), ("command".to_owned(), total - answered)]);
        Ok(Sample::new(total, &steps, phases))
    }
    .await;
    let killed = context.control.kill(&id).await;
    let sample = outcome?;
    killed?;
    Ok(sample)
}

/// The first command is answered when its output and its exit code are here.
async fn first_command(guest: &Guest) -> Result<()> {
    let spec = Spec { cmd: "/bin/echo".to_owned(), args: vec!["ready".to_owned()], ..Spec::default() };
    let (end, out, _) = collect(guest, &spec, 4096).await?;
    if shell_code(&end) != 0 || out != b"ready\n" {
        return Err(Error::Failed(format!("the first command answered {:?}", String::from_utf8_lossy(&out))));
    }
    Ok(())
}

async fn phases_of(context: &Context, id: &str) -> Result<Vec<PhaseTiming>> {
    let value = context.control.sandbox_in_full(id).await?;
    Ok(known::<InspectedSandbox>(&value)?.phases)
}

/// Waits until the pool is as full as it was before the bench: a machine being made for it takes the processor from
/// whatever is measured next. At least `wanted` machines must be there; 0 means that none is needed.
async fn settle(context: &Context, template: &str, full: Option<u64>, wanted: u64) -> Result<()> {
    let deadline = Instant::now() + POOL_DEADLINE;
    if full.is_none() && wanted == 0 {
        return Ok(());
    }
    loop {
        let node = context.control.node().await?;
        // A pool that was just emptied isn't listed until its next machine waits.
        let ready = node.warm.get(template).copied().unwrap_or(0);
        if ready >= full.unwrap_or(0).max(wanted) {
            return Ok(());
        }
        if Instant::now() > deadline {
            // A pool that others use may never be full again; what is needed is another matter.
            return if ready >= wanted {
                Ok(())
            } else {
                Err(Error::Failed(format!(
                    "the warm pool of '{template}' holds {ready} machines after {POOL_DEADLINE:?}; {wanted} are \
                     needed (a smaller --concurrency needs fewer, no --warm needs none; the server's setting is `warm`)"
                )))
            };
        }
        tokio::time::sleep(POOL_POLL).await;
    }
}

/// Until the answer is here, as with ours; the container's end is waited for but not counted.
async fn one_docker(image: &str) -> Result<Sample> {
    let begun = Instant::now();
    let mut child = tokio::process::Command::new("docker")
        .args(["run", "--rm", image, "echo", "ready"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| Error::Failed(format!("can't run docker: {e}")))?;
    let mut stdout = child.stdout.take().ok_or_else(|| Error::Failed("docker has no output".to_owned()))?;
    let watch = async {
        let mut answer = [0; 6];
        let read = stdout.read_exact(&mut answer).await;
        let total = begun.elapsed();
        let output = child.wait_with_output().await?;
        if read.is_err() || &answer != b"ready\n" || !output.status.success() {
            let words: String = String::from_utf8_lossy(&output.stderr).trim().chars().take(300).collect();
            return Err(Error::Failed(format!("docker run failed: {words}")));
        }
        Ok(Sample::new(total, &BTreeMap::new(), Vec::new()))
    };
    timeout(PEER_DEADLINE, watch)
        .await
        .map_err(|_| Error::Failed(format!("docker did not answer within {PEER_DEADLINE:?}")))?
}

async fn pause(context: &Context, args: &PauseArgs) -> Result<Report> {
    let new = NewSandbox {
        template_id: args.template.clone(),
        timeout: Some(LIFE_S),
        auto_pause: Some(false),
        metadata: Some(BTreeMap::from([("aenv-bench".to_owned(), "pause".to_owned())])),
        ..NewSandbox::default()
    };
    let machine = Machine::here();
    let sandbox: Sandbox = known(&context.control.create(&new, false).await?)?;
    let id = sandbox.sandbox_id.clone();
    let guest = Guest::of(&context.settings, sandbox.sandbox_id, sandbox.envd_access_token, None)?;
    let mut variants = vec![Variant::new("pause"), Variant::new("resume")];
    for cycle in 0..args.n {
        match one_cycle(context, &guest, &id, args.dirty).await {
            Ok((paused, resumed)) => {
                variants[0].samples.push(paused);
                variants[1].samples.push(resumed);
            }
            Err(error) => {
                output::say(&format!("cycle {}: {error}", cycle + 1));
                variants[0].failures += 1;
                variants[1].failures += 1;
                // It may be left paused; the next cycle needs it running, and a lost one ends the bench.
                if context.control.connect(&id, LIFE_S).await.is_err() {
                    break;
                }
            }
        }
    }
    context.control.kill(&id).await?;
    let settings = serde_json::json!({
        "bench": "pause", "template": args.template, "n": args.n, "dirtyMiB": args.dirty,
    });
    Ok(Report { machine, settings, variants })
}

async fn one_cycle(context: &Context, guest: &Guest, id: &str, dirty: u32) -> Result<(Sample, Sample)> {
    // Random, so that no page equals what a snapshot has already; in memory, not on disk.
    let script = format!("dd if=/dev/urandom of=/dev/shm/aenv-bench bs=1M count={dirty} 2>&1");
    let spec = Spec { cmd: "/bin/sh".to_owned(), args: vec!["-c".to_owned(), script], ..Spec::default() };
    let (end, out, _) = collect(guest, &spec, 64 << 10).await?;
    if shell_code(&end) != 0 {
        let words = String::from_utf8_lossy(&out).trim().to_owned();
        return Err(Error::Failed(format!(
            "could not write memory in the sandbox: {}",
            output::printable(&words)
        )));
    }
    let begun = Instant::now();
    context.control.pause(id, true).await?;
    let total = begun.elapsed();
    let paused = Sample::new(total, &BTreeMap::new(), phases_of(context, id).await?);

    let begun = Instant::now();
    context.control.connect(id, LIFE_S).await?;
    let answered = begun.elapsed();
    first_command(guest).await?;
    let total = begun.elapsed();
    let steps = BTreeMap::from([("request".to_owned(), answered), ("command".to_owned(), total - answered)]);
    Ok((paused, Sample::new(total, &steps, phases_of(context, id).await?)))
}
