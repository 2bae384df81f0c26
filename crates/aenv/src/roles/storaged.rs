//! `aenv storaged`: the storage daemon's process.

use super::{Settings, process::PidFile, ready};
use aenv_blocks::storaged::{Options, run_announced};
use anyhow::{Context, Result};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// Serves until told to end.
pub(crate) fn run(settings: &Settings) -> Result<ExitCode> {
    std::fs::create_dir_all(&settings.run_dir)
        .with_context(|| format!("can't make {}", settings.run_dir.display()))?;
    super::runtime(2)?.block_on(async {
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let stop = async move {
            tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        };
        let options =
            Options { socket: settings.storaged_socket(), ..Options::in_run_dir(&settings.run_dir) };
        // The pid file is ours only while storaged's own lock is: written once it serves.
        let mut pid_file = None;
        let announce = || {
            pid_file = Some(PidFile::write(&settings.storaged_pid_file()).and_then(|file| {
                ready::announce()?;
                Ok(file)
            }));
        };
        run_announced(options, announce, stop).await?;
        pid_file.transpose()?;
        Ok(ExitCode::SUCCESS)
    })
}
