//! `cargo bench -p aenv-overlaybd`: look-up, building a memory difference, sealing, writing. Prints one line each.
//! Times are of this machine in this run: compare lines, not machines.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::fs::File;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_overlaybd::{BuildOptions, Layer, LayerBuilder, Stack, Upper, UpperOptions, WritableStack};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;

fn main() {
    look_ups();
    memory_differences();
    seals();
}

fn file() -> Arc<File> {
    Arc::new(
        tempfile::tempfile_in(std::env::var_os("BENCH_DIR").unwrap_or(std::env::temp_dir().into())).unwrap(),
    )
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn report(what: &str, time: Duration) {
    println!("{what:<64} {time:>12.1?}");
}

/// 200,000 mappings of 4 KiB in all, however many layers they are spread over.
fn look_ups() {
    const MAPPINGS: u64 = 200_000;
    let size = MAPPINGS * 2 * 4096;
    let bytes = [1u8; PAGE];
    for count in [1usize, 16, 100] {
        let mut rng = StdRng::seed_from_u64(1);
        let mut layers: Vec<_> =
            (0..count).map(|_| LayerBuilder::new(file(), BuildOptions::new(size)).unwrap()).collect();
        let mut files = Vec::new();
        for block in 0..MAPPINGS {
            layers[rng.random_range(0..count)].append(block * 8192, &bytes).unwrap();
        }
        for layer in layers.drain(..) {
            files.push(layer);
        }
        let opened = Instant::now();
        let layers: Vec<_> = files.into_iter().map(reopen).collect();
        let stack = Stack::new(layers, size).unwrap();
        report(&format!("open a stack of {count} layers, {MAPPINGS} mappings"), opened.elapsed());
        let mut times = Vec::new();
        for _ in 0..9 {
            let start = Instant::now();
            for _ in 0..100_000 {
                let sector = rng.random_range(0..size / 512 - 8);
                stack.index().visit(sector, sector + 8, |m| {
                    black_box(m);
                });
            }
            times.push(start.elapsed() / 100_000);
        }
        report(&format!("look up 4 KiB in {count} layers"), median(times));
    }
}

fn reopen(builder: LayerBuilder<Arc<File>>) -> Layer {
    let (out, _built) = builder.finish_with(false).unwrap();
    Layer::open(out).unwrap()
}

/// 20 MiB of pages: alone, in runs as a guest leaves them, and in one piece.
fn memory_differences() {
    let pages = 5120;
    let mut memory = vec![0u8; pages * PAGE];
    StdRng::seed_from_u64(2).fill(&mut memory[..]);
    for (what, run) in [("single pages", 1), ("runs of 8 pages", 8), ("runs of 256 pages", 256)] {
        for sync in [false, true] {
            let times = (0..7).map(|_| {
                let out = file();
                let start = Instant::now();
                let mut builder = LayerBuilder::new(out, BuildOptions::new(1 << 30)).unwrap();
                for (i, bytes) in memory.chunks(run * PAGE).enumerate() {
                    // A gap after each run, so that runs stay apart.
                    let offset = i * (run + 1) * PAGE;
                    builder.append(u64::try_from(offset).unwrap(), bytes).unwrap();
                }
                builder.finish(sync).unwrap();
                start.elapsed()
            });
            report(
                &format!("build a memory difference of 20 MiB, {what}, sync {sync}"),
                median(times.collect()),
            );
        }
    }
}

fn seals() {
    for (written, chunk, order) in [
        (256 * MIB, MIB, "1 MiB sequential"),
        (256 * MIB, 4096, "4 KiB random"),
        (1024 * MIB, MIB, "1 MiB sequential"),
        (1024 * MIB, 4096, "4 KiB random"),
    ] {
        let size = 4096 * MIB;
        let upper = |parent| {
            let options = UpperOptions { virtual_size: size, uuid: Uuid::new_v4(), parent };
            Upper::create(file(), file(), options).unwrap()
        };
        let stack = WritableStack::new(Stack::new(vec![], size).unwrap(), upper(Uuid::nil())).unwrap();
        let mut bytes = vec![0u8; usize::try_from(chunk).unwrap()];
        let mut rng = StdRng::seed_from_u64(3);
        rng.fill(&mut bytes[..]);
        let start = Instant::now();
        for i in 0..written / chunk {
            let at = if chunk == MIB { i } else { rng.random_range(0..size / chunk) };
            stack.write_at(&bytes, at * chunk).unwrap();
        }
        let wrote = start.elapsed();
        let next = upper(stack.upper_info().uuid);
        let start = Instant::now();
        let sealed = stack.seal(next, false, || Ok(())).unwrap();
        let took = start.elapsed();
        report(&format!("write {} MiB, {order}", written / MIB), wrote);
        report(&format!("  then seal ({} index entries)", sealed.entries), took);
    }
}
