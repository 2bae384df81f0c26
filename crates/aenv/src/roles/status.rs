//! `aenv status`: what runs here. Exit code 0 when the server does, 1 when it doesn't.

use super::{Settings, process::Background};
use aenv_cli::output::line;
use anyhow::Result;
use std::process::ExitCode;

/// Says which roles run.
pub(crate) fn run(settings: &Settings) -> Result<ExitCode> {
    let roles = [("storaged", settings.storaged_pid_file()), ("server", settings.server_pid_file())];
    let mut serving = false;
    for (role, pid_file) in roles {
        match Background::find(&pid_file, role)? {
            Some(process) => {
                serving = role == "server";
                line(&format!("{role}: running, pid {}", process.pid()))?;
            }
            None => line(&format!("{role}: not running; start it with `aenv up`"))?,
        }
    }
    Ok(if serving { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
