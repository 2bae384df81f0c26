//! Fuzzing of every parser: seeds that the crate writes itself, mutated without end. What is opened is also read, so
//! that whatever a damaged file claims is acted on. A target returns when its input is refused or was read; a panic,
//! an overflow (checked arithmetic is on) or a huge allocation is a finding.
//!
//! Half of the mutated files get their checksums made right again: otherwise nothing behind a checksum is ever tried.

mod file;
mod mutate;
mod seeds;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_overlaybd::{Header, Layer, ReadAt, Role, Stack, Upper, WritableStack, ZFileHeader, ZFileReader};
pub use file::Memory;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Largest device that a target reads: larger claims are read in places.
const READ: u64 = 1 << 20;

/// One parser under test.
pub struct Target {
    /// Its name on the command line.
    pub name: &'static str,
    seeds: fn() -> Vec<Vec<u8>>,
    /// Makes the checksums in a mutated input right again.
    repair: fn(&mut [u8]),
    run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 7] = [
    Target { name: "lsmt-header", seeds: seeds::headers, repair: nothing, run: header },
    Target { name: "layer", seeds: seeds::layers, repair: nothing, run: layer },
    Target { name: "tar-layer", seeds: seeds::tars, repair: mutate::repair_tar, run: layer },
    Target { name: "index-log", seeds: seeds::uppers, repair: nothing, run: upper },
    Target {
        name: "zfile-header",
        seeds: seeds::zfile_headers,
        repair: mutate::repair_zfile,
        run: zfile_header,
    },
    Target { name: "zfile", seeds: seeds::zfiles, repair: mutate::repair_zfile, run: zfile },
    Target { name: "zfile-layer", seeds: seeds::zfile_layers, repair: mutate::repair_zfile, run: layer },
];

/// What a run found.
pub struct Outcome {
    /// Inputs tried.
    pub inputs: u64,
    /// The first input that made the target panic.
    pub finding: Option<Vec<u8>>,
}

/// Mutates for `time`, starting from `seed`.
pub fn fuzz(target: &Target, seed: u64, time: Duration) -> Outcome {
    let mut rng = StdRng::seed_from_u64(seed);
    let corpus = (target.seeds)();
    // What it is run on unchanged has to be read whole: else the target tests nothing.
    corpus.iter().for_each(|input| (target.run)(input));
    let until = Instant::now() + time;
    let mut inputs = 0;
    while Instant::now() < until {
        let mut input = corpus[rng.random_range(0..corpus.len())].clone();
        let other = &corpus[rng.random_range(0..corpus.len())];
        mutate::mutate(&mut input, other, &mut rng);
        if rng.random() {
            (target.repair)(&mut input);
        }
        inputs += 1;
        if catch_unwind(AssertUnwindSafe(|| (target.run)(&input))).is_err() {
            return Outcome { inputs, finding: Some(input) };
        }
    }
    Outcome { inputs, finding: None }
}

fn nothing(_: &mut [u8]) {}

fn header(input: &[u8]) {
    for role in [Role::DataHeader { sealed: true }, Role::DataTrailer, Role::IndexHeader] {
        if let Ok(header) = Header::decode(input, role) {
            // The tag may have held bytes that are no text, so only what was understood comes back.
            assert_eq!(Header::decode(&header.encode(), role).unwrap().virtual_size, header.virtual_size);
        }
    }
}

fn zfile_header(input: &[u8]) {
    let Some(bytes) = input.first_chunk() else { return };
    for trailer in [false, true] {
        if let Ok(header) = ZFileHeader::decode(bytes, 0, trailer) {
            let again = ZFileHeader::decode(&header.encode(), 0, trailer).unwrap();
            assert_eq!((again.blocks, again.original_size), (header.blocks, header.original_size));
        }
    }
}

fn zfile(input: &[u8]) {
    if let Ok(file) = ZFileReader::open(Memory::holding(input)) {
        read_around(&file, file.original_size());
    }
}

fn layer(input: &[u8]) {
    let Ok(layer) = Layer::open(Memory::holding(input)) else { return };
    let size = layer.info().virtual_size;
    let Ok(stack) = Stack::new(vec![layer.clone(), layer], size) else { return };
    read_around(&stack, size);
    let mut at = 0;
    for _ in 0..64 {
        let Some(data) = stack.next_data(at) else { break };
        assert!(data >= at);
        at = stack.next_hole(data);
        assert!(at > data);
    }
}

/// The input is the index log; the data file is the one that belongs to the seeds.
fn upper(input: &[u8]) {
    let Ok(upper) = Upper::open(Memory::holding(seeds::upper_data()), Memory::holding(input)) else { return };
    let size = upper.info().virtual_size;
    let (Ok(lower), true) = (Stack::new(vec![], size), upper.info().parent.is_nil()) else { return };
    let Ok(stack) = WritableStack::new(lower, upper) else { return };
    let mut bytes = vec![0; usize::try_from(READ.min(size)).unwrap()];
    let _refused = stack.read_at(&mut bytes, 0);
    let _full = stack.write_at(&[1; 4096], 0);
}

/// The first and the last MiB, and a few odd places.
fn read_around(source: &dyn ReadAt, size: u64) {
    let len = READ.min(size);
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    for at in [0, size - len] {
        let _damaged = source.read_at(&mut bytes, at);
    }
    for at in [1, size / 2, size.saturating_sub(7), u64::MAX] {
        let _damaged = source.read_at(&mut [0; 1000], at);
    }
}

/// Whether an input that a run kept is still a finding.
pub fn replay(target: &Target, input: &[u8]) -> bool {
    let input: Arc<[u8]> = input.into();
    catch_unwind(AssertUnwindSafe(|| (target.run)(&input))).is_err()
}
