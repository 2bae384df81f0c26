//! What the lab is for: suites that need its kernel.

use super::inside::Command;
use super::root::Load;
use crate::run;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// A suite of tests, or of measurements.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Suite {
    /// Exports as ublk devices: behaviour, kill -9 and recovery.
    Ublk,
    /// Reads and writes through ublk against the raw file.
    UblkBench,
}

impl Suite {
    /// MiB of scratch disk that it wants.
    pub(super) fn disk(self) -> Option<u32> {
        (self == Self::UblkBench).then_some(512)
    }
}

/// Builds the suite, loads what it needs and says how it is run.
pub(super) fn prepare(suite: Suite, workspace: &Path, load: &mut Load) -> Result<Command> {
    // One at a time: a test that starts a process gives it, for a moment, the handles that another one counts.
    let (arguments, words): (&[&str], &[&str]) = match suite {
        Suite::Ublk => (&["--release", "--test", "exporters"], &["--nocapture", "--test-threads=1"]),
        Suite::UblkBench => (&["--release", "--bench", "ublk"], &["--bench"]),
    };
    let program = built(workspace, arguments)?;
    load.executable(&program, "/lab/suite")?;
    for tool in ["mkfs.ext4", "e2fsck"] {
        load.program(tool)?;
    }
    let mut argv = vec!["/lab/suite".to_owned()];
    argv.extend(words.iter().map(|word| (*word).to_owned()));
    // A test that finds no ublk here has found a fault: nothing may be skipped.
    Ok(Command {
        argv,
        env: vec![("AENV_LAB".into(), "1".into()), ("BENCH_DIR".into(), "/data".into())],
        terminal: false,
    })
}

/// The one test program that cargo makes of these arguments.
fn built(workspace: &Path, arguments: &[&str]) -> Result<PathBuf> {
    let mut cargo = std::process::Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    // The whole workspace's features, so that what its tests were built of is not built once more.
    cargo.current_dir(workspace).args([
        "test",
        "--workspace",
        "--locked",
        "--no-run",
        "--message-format=json",
    ]);
    let messages = run::output(cargo.args(arguments)).context("building the suite")?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .next_back()
        .context("cargo built no test program")
}
