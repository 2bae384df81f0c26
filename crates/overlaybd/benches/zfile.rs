//! `cargo bench -p aenv-overlaybd --bench zfile`: reading a ZFile against the plain file, writing, merging. Prints one
//! line each. Times are of this machine in this run: compare lines, not machines.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use aenv_overlaybd::{
    Algorithm, BuildOptions, Layer, LayerBuilder, MergeOptions, ReadAt, WriteAt, ZFileOptions, ZFileReader,
    compress_to_zfile, merge_layers,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const MIB: usize = 1 << 20;
const SIZE: usize = 128 * MIB;

fn file() -> Arc<File> {
    let dir = std::env::var_os("BENCH_DIR").unwrap_or(std::env::temp_dir().into());
    Arc::new(tempfile::tempfile_in(dir).unwrap())
}

/// Bytes of which half compress, in pieces as files of an image have them.
fn plain() -> Arc<File> {
    let mut rng = StdRng::seed_from_u64(1);
    let mut bytes = vec![0u8; SIZE];
    for piece in bytes.chunks_mut(1024) {
        if rng.random() {
            rng.fill(piece);
        } else {
            let start = rng.random_range(0..64u8);
            piece.iter_mut().zip(0u8..=255).for_each(|(byte, i)| *byte = start + i / 16);
        }
    }
    let out = file();
    out.write_at(&bytes, 0).unwrap();
    out
}

fn main() {
    let plain = plain();
    report_reads("plain file", &*plain);
    for (algorithm, block_size) in [
        (Algorithm::Lz4, 4096),
        (Algorithm::Lz4, 16384),
        (Algorithm::Lz4, 65536),
        (Algorithm::Zstd, 4096),
        (Algorithm::Zstd, 65536),
    ] {
        let out = file();
        let options = ZFileOptions { algorithm, block_size, ..Default::default() };
        let start = Instant::now();
        let summary = compress_to_zfile(&*plain, &*out, options, false).unwrap();
        let name = format!("{algorithm:?}, blocks of {block_size}");
        let share = summary.file_bytes * 100 / summary.original_bytes;
        println!("{name:<26} written at {:>6.0} MiB/s, {share} % of the size", rate(start, SIZE));
        report_reads(&name, &ZFileReader::open(out).unwrap());
    }
    merges();
}

fn rate(start: Instant, bytes: usize) -> f64 {
    f64::from(u32::try_from(bytes / MIB).unwrap()) / start.elapsed().as_secs_f64()
}

fn report_reads(name: &str, source: &dyn ReadAt) {
    let mut chunk = vec![0; MIB];
    let start = Instant::now();
    for at in (0..SIZE).step_by(MIB) {
        source.read_at(&mut chunk, u64::try_from(at).unwrap()).unwrap();
    }
    println!("{name:<26} read in order at  {:>6.0} MiB/s", rate(start, SIZE));
    for (what, range) in [("anywhere", SIZE), ("inside 512 KiB", MIB / 2)] {
        let mut rng = StdRng::seed_from_u64(2);
        let start = Instant::now();
        for _ in 0..20_000 {
            let at = rng.random_range(0..range / 4096) * 4096;
            source.read_at(&mut chunk[..4096], u64::try_from(at).unwrap()).unwrap();
        }
        println!("{name:<26} 4 KiB {what:<14} {:>10.2?} each", start.elapsed() / 20_000);
    }
}

/// 100 layers of 1 MiB in pieces of 4 KiB, as one.
fn merges() {
    let size = 512 * u64::try_from(MIB).unwrap();
    let mut rng = StdRng::seed_from_u64(3);
    let layers: Vec<_> = (0..100)
        .map(|_| {
            let mut builder = LayerBuilder::new(file(), BuildOptions::new(size)).unwrap();
            for _ in 0..256 {
                let mut page = [7u8; 4096];
                rng.fill(&mut page[..2048]);
                builder.append(rng.random_range(0..size / 4096) * 4096, &page).unwrap();
            }
            Layer::open(builder.finish_with(false).unwrap().0).unwrap()
        })
        .collect();
    for compress in [None, Some(ZFileOptions::default())] {
        let how = MergeOptions { bottom: true, compress, ..Default::default() };
        let start = Instant::now();
        let built = merge_layers(&layers, file(), how).unwrap();
        let kind = if compress.is_some() { "lz4" } else { "plain" };
        println!(
            "merge 100 layers of 1 MiB, {kind}: {:.1?}, {} MiB",
            start.elapsed(),
            built.file_bytes >> 20
        );
    }
}
