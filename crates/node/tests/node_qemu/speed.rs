//! What the time is spent on, printed. Nothing here is timed: the promises of SPECIFICATION.md are measured by `aenv bench`.
//! Asserted is only which way a start or a pause took.

use crate::stage::{Act, Cast, TTL, cast as make, start, team};
use aenv_node::{control::Control, model::Phase};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

const ROUNDS: usize = 10;

/// Prints the middle value of every phase.
pub(crate) fn print(what: &str, all: &[Vec<Phase>]) {
    let mut by_name: BTreeMap<&str, (usize, Vec<u64>)> = BTreeMap::new();
    for phases in all {
        for (place, phase) in phases.iter().enumerate() {
            by_name.entry(&phase.name).or_insert((place, Vec::new())).1.push(phase.micros);
        }
    }
    let mut rows: Vec<_> = by_name.into_iter().collect();
    rows.sort_by_key(|(_, (place, _))| *place);
    let words: Vec<String> = rows
        .into_iter()
        .map(|(name, (_, mut micros))| {
            micros.sort_unstable();
            let most = micros.last().copied().unwrap_or(0);
            format!("{name} {:.1} (max {:.1})", ms(micros[micros.len() / 2]), ms(most))
        })
        .collect();
    eprintln!("    {what}, p50 of {} in ms: {}", all.len(), words.join(", "));
}

fn ms(micros: u64) -> f64 {
    Duration::from_micros(micros).as_secs_f64() * 1000.0
}

fn tell(what: &str, mut all: Vec<Duration>) {
    all.sort();
    eprintln!("    {what}: p50 {:.1} ms", all[all.len() / 2].as_secs_f64() * 1000.0);
}

/// Every one of `all` went through the phase called `name`.
fn all_went_through(all: &[Vec<Phase>], name: &str) {
    assert!(
        all.iter().all(|phases| phases.iter().any(|phase| phase.name == name)),
        "not all have '{name}': {all:?}"
    );
}

pub(crate) fn cold<'a>(cast: &'a Cast) -> Act<'a> {
    Box::pin(async move {
        starts(cast).await;
        pauses(cast).await;
    })
}

async fn starts(cast: &Cast) {
    let (mut phases, mut first) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let id = start(cast).await;
        cast.check(&id, "true").await;
        first.push(began.elapsed());
        phases.push(cast.node.get(&team(), &id).await.expect("a sandbox").phases);
        cast.node.kill(&team(), &id).await.expect("a kill");
    }
    all_went_through(&phases, "restore");
    print("cold start", &phases);
    tell("cold start to first command answered", first);
}

async fn pauses(cast: &Cast) {
    let (mut phases, mut took) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let id = start(cast).await;
        cast.check(&id, "head -c 20000000 /dev/urandom > /dev/shm/dirty").await;
        let began = Instant::now();
        cast.node.pause(&team(), &id, true).await.expect("a pause");
        took.push(began.elapsed());
        phases.push(cast.node.get(&team(), &id).await.expect("a sandbox").phases);
        cast.node.connect(&team(), &id, TTL).await.expect("a resume");
        cast.node.kill(&team(), &id).await.expect("a kill");
    }
    all_went_through(&phases, "memory");
    print("pause after dirtying 20 MB", &phases);
    tell("pause after dirtying 20 MB", took);
}

/// With machines kept warm; waits for one before each start.
pub(crate) fn warm<'a>(dir: &'a std::path::Path) -> Act<'a> {
    Box::pin(warm_starts(dir))
}

async fn warm_starts(dir: &std::path::Path) {
    let cast = make(dir, 2).await;
    let (mut phases, mut first) = (Vec::new(), Vec::new());
    // The first use tells the pool what is wanted.
    let id = start(&cast).await;
    cast.node.kill(&team(), &id).await.expect("a kill");
    for _ in 0..ROUNDS {
        let deadline = Instant::now() + Duration::from_secs(30);
        while cast.node.stats().warm.iter().map(|(_, count)| count).sum::<u64>() < 2 {
            assert!(Instant::now() < deadline, "no warm machine in time");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let began = Instant::now();
        let id = start(&cast).await;
        cast.check(&id, "true").await;
        first.push(began.elapsed());
        phases.push(cast.node.get(&team(), &id).await.expect("a sandbox").phases);
        cast.node.kill(&team(), &id).await.expect("a kill");
    }
    all_went_through(&phases, "continue");
    print("warm start", &phases);
    tell("warm start to first command answered", first);
    cast.end().await;
}
