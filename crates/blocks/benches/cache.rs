//! `cargo bench -p aenv-blocks --bench cache`: what reading through the cache costs, against the raw file in one run.
//! Times are of this machine in this run: compare lines, not machines.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::fs::File;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_blocks::cache::{Cache, Options};
use aenv_blocks::remote::{Digest, FetchError, RangeSource};
use aenv_overlaybd::ReadAt;
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const SIZE: usize = 256 << 20;

/// Bytes in memory, as far away as told.
struct Memory {
    bytes: Bytes,
    id: Digest,
    distance: Duration,
}

#[async_trait::async_trait]
impl RangeSource for Memory {
    fn id(&self) -> Digest {
        self.id
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn place(&self) -> String {
        "memory".into()
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Bytes, FetchError> {
        if !self.distance.is_zero() {
            tokio::time::sleep(self.distance).await;
        }
        let start = usize::try_from(offset).expect("inside");
        Ok(self.bytes.slice(start..start + len))
    }
}

fn main() {
    let dir =
        tempfile::tempdir_in(std::env::var_os("BENCH_DIR").unwrap_or(std::env::temp_dir().into())).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut bytes = vec![0; SIZE];
    StdRng::seed_from_u64(1).fill(&mut bytes[..]);
    let raw = dir.path().join("raw");
    std::fs::write(&raw, &bytes).unwrap();
    let raw = File::open(&raw).unwrap();
    let (bytes, id) = (Bytes::from(bytes.clone()), Digest::of(&bytes));
    let cache =
        Cache::open(Options::new(dir.path().join("cache"), 1 << 30), runtime.handle().clone()).unwrap();
    for distance in [Duration::ZERO, Duration::from_millis(20)] {
        let source = Arc::new(Memory { bytes: bytes.clone(), id, distance });
        let layer = cache.layer(source).unwrap();
        report(&format!("cold, sequential 128 KiB, source {distance:?} away"), sequential(&layer, 128 << 10));
        // The last blocks are stored after they were served.
        runtime.block_on(async {
            while cache.stat().bytes < SIZE as u64 || !layer.is_verified() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        cache.prune(aenv_blocks::cache::Prune::All);
    }
    let source = Arc::new(Memory { bytes, id, distance: Duration::ZERO });
    let layer = cache.layer(source).unwrap();
    sequential(&layer, 1 << 20);
    runtime.block_on(async {
        while !layer.is_verified() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    for chunk in [4096, 128 << 10, 1 << 20] {
        let what = format!("sequential, {} KiB at a time", chunk >> 10);
        let (base, warm) = (sequential(&raw, chunk), sequential(&layer, chunk));
        report(&format!("raw file, {what}"), base);
        report(&format!("warm cache, {what}"), warm);
    }
    for (name, from) in [("raw file", &raw as &dyn ReadAt), ("warm cache", &layer)] {
        println!("{name:<60} {:>12.2?}", random(from, 0));
        println!("{:<60} {:>12.2?}", format!("{name}, not aligned"), random(from, 512));
    }
}

fn report(what: &str, time: Duration) {
    let speed = SIZE as f64 / time.as_secs_f64() / f64::from(1 << 20);
    println!("{what:<60} {speed:>8.0} MiB/s");
}

/// The time to read all of it once.
fn sequential(from: &dyn ReadAt, chunk: usize) -> Duration {
    let mut buf = vec![0; chunk];
    let start = Instant::now();
    for at in (0..SIZE).step_by(chunk) {
        from.read_at(&mut buf, at as u64).unwrap();
        black_box(&buf);
    }
    start.elapsed()
}

/// Mean time of a random read of 4 KiB.
fn random(from: &dyn ReadAt, shift: u64) -> Duration {
    let mut rng = StdRng::seed_from_u64(2);
    let mut buf = [0; 4096];
    let many = 200_000;
    let start = Instant::now();
    for _ in 0..many {
        let at = rng.random_range(0..SIZE as u64 / 4096 - 1) * 4096 + shift;
        from.read_at(&mut buf, at).unwrap();
        black_box(&buf);
    }
    start.elapsed() / many
}
