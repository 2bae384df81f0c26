//! How quick it is. Bounds are the promises of SPECIFICATION.md on quiet cores; `AENV_NO_BOUNDS` only prints.

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

fn middle(mut all: Vec<Duration>) -> Duration {
    all.sort();
    all[all.len() / 2]
}

/// The promises of SPECIFICATION.md hold for optimised builds on quiet cores; others only print.
fn promise(what: &str, took: Duration, most: u64) {
    let checked = std::env::var_os("AENV_NO_BOUNDS").is_none() && !cfg!(debug_assertions);
    assert!(!checked || took <= Duration::from_millis(most), "{what} takes {took:?}, {most} ms are promised");
}

pub(crate) fn cold<'a>(cast: &'a Cast) -> Act<'a> {
    Box::pin(async move {
        promise("a cold start", starts(cast, "cold").await, 400);
        promise("a pause", pauses(cast).await, 150);
    })
}

async fn starts(cast: &Cast, what: &str) -> Duration {
    let (mut phases, mut first) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let began = Instant::now();
        let id = start(cast).await;
        cast.check(&id, "true").await;
        first.push(began.elapsed());
        phases.push(cast.node.get(&team(), &id).await.expect("a sandbox").phases);
        cast.node.kill(&team(), &id).await.expect("a kill");
    }
    print(&format!("{what} start"), &phases);
    let middle = middle(first);
    eprintln!("    {what} start to first command answered: p50 {:.1} ms", middle.as_secs_f64() * 1000.0);
    middle
}

async fn pauses(cast: &Cast) -> Duration {
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
    print("pause after dirtying 20 MB", &phases);
    middle(took)
}

/// With machines kept warm; waits for one before each start.
pub(crate) fn warm<'a>(dir: &'a std::path::Path) -> Act<'a> {
    Box::pin(async move { promise("a warm start", warm_starts(dir).await, 80) })
}

async fn warm_starts(dir: &std::path::Path) -> Duration {
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
    print("warm start", &phases);
    let middle = middle(first);
    eprintln!("    warm start to first command answered: p50 {:.1} ms", middle.as_secs_f64() * 1000.0);
    cast.end().await;
    middle
}
