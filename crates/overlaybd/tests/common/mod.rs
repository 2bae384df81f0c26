//! What the tests of this crate share.
#![allow(dead_code, reason = "each test file uses its part")]

use std::fs::File;
use std::sync::Arc;

use aenv_overlaybd::ReadAt;
use rand::RngExt;
use rand::rngs::StdRng;

/// Nameless files that vanish with the process.
pub(crate) struct TempFiles;

impl TempFiles {
    pub(crate) fn new() -> Self {
        Self
    }

    pub(crate) fn file(&self) -> Arc<File> {
        Arc::new(tempfile::tempfile().unwrap())
    }
}

/// The seed of this run, printed so that a failure can be replayed, and how many steps to do.
#[allow(clippy::print_stderr, reason = "a test's seed belongs in its output")]
pub(crate) fn seed_and_steps(default_steps: u64) -> (u64, u64) {
    let number = |name| std::env::var(name).ok().and_then(|v: String| v.parse().ok());
    let seed = number("MODEL_SEED").unwrap_or_else(rand::random);
    let steps = number("MODEL_STEPS").unwrap_or(default_steps);
    eprintln!("MODEL_SEED={seed} MODEL_STEPS={steps}");
    (seed, steps)
}

/// Says why a test did nothing.
#[allow(clippy::print_stderr, reason = "a skipped test says so in its output")]
pub(crate) fn skipped(why: &str) {
    eprintln!("Skipped: {why}");
}

/// All bytes of a source.
pub(crate) fn all_of(source: &dyn ReadAt) -> Vec<u8> {
    let mut bytes = vec![0xee; usize::try_from(source.size().unwrap()).unwrap()];
    source.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Bytes as files have them: runs of text, zeroes and noise.
pub(crate) fn plain_bytes(rng: &mut StdRng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    for part in bytes.chunks_mut(1500) {
        match rng.random_range(0..3) {
            0 => {}
            1 => rng.fill(part),
            _ => part.iter_mut().enumerate().for_each(|(i, byte)| *byte = b"some text or other, "[i % 20]),
        }
    }
    bytes
}
