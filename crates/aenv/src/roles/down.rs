//! `aenv down`: pauses (or ends) what runs through the public API, then ends the server and the storage daemon.
//!
//! Nothing is stopped while a sandbox that should be kept couldn't be paused: the command fails and says which.

use super::{
    Settings, client_env,
    process::Background,
    settings::{Flags, reachable},
};
use aenv_cli::{
    control::{Control, ListFilter},
    output::say,
};
use anyhow::{Result, bail};
use clap::Args;
use futures_util::{StreamExt as _, stream};
use std::{process::ExitCode, time::Duration};

const SERVER_END: Duration = Duration::from_secs(60);
const STORAGED_END: Duration = Duration::from_secs(40);
/// Sandboxes quiesced at once: pausing is bound by the disk.
const AT_ONCE: usize = 4;

/// Arguments of `aenv down`.
#[derive(Args)]
pub(crate) struct Down {
    #[command(flatten)]
    flags: Flags,
    /// End the running sandboxes instead of pausing them; paused ones stay
    #[arg(long, conflicts_with = "keep")]
    kill: bool,
    /// Leave the running sandboxes alone: the next `aenv up` takes them over (the storage daemon stays, too)
    #[arg(long)]
    keep: bool,
}

/// Stops what runs on this machine.
pub(crate) fn run(down: &Down, mut global: aenv_cli::Global) -> Result<ExitCode> {
    let settings = Settings::load(&down.flags)?;
    if let Some(server) = Background::find(&settings.server_pid_file(), "server")? {
        if !down.keep {
            // The server that is about to be stopped, wherever this person's commands go otherwise.
            let listen =
                server.argument("--listen").and_then(|word| word.parse().ok()).unwrap_or(settings.listen);
            global.api_url = Some(format!("http://{}", reachable(listen)));
            global.api_key = global.api_key.or_else(|| client_env::local_key(&settings));
            let failures = super::runtime(1)?.block_on(quiesce(&global, down.kill))?;
            if !failures.is_empty() {
                bail!(
                    "nothing was stopped, because these sandboxes could not be {}:\n  {}\n\
                     `aenv down --kill` ends them, `aenv down --keep` leaves them running",
                    if down.kill { "ended" } else { "paused" },
                    failures.join("\n  ")
                );
            }
        }
        if !server.end(SERVER_END)? {
            say("the server did not end when asked and was killed; its records are kept");
        }
        say(&format!("server: stopped (pid {})", server.pid()));
    } else {
        say("server: not running");
    }
    if down.keep {
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(storaged) = Background::find(&settings.storaged_pid_file(), "storaged")? {
        storaged.end(STORAGED_END)?;
        say(&format!("storage daemon: stopped (pid {})", storaged.pid()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Pauses or ends every running sandbox; returns a line for each that could not be.
async fn quiesce(global: &aenv_cli::Global, kill: bool) -> Result<Vec<String>> {
    let control = Control::new(&aenv_cli::settings::Settings::resolve(global)?)?;
    let running = ListFilter { states: vec!["running".to_owned()], ..ListFilter::default() };
    let running = control.sandboxes(&running, usize::MAX).await?;
    let ids = running.iter().filter_map(|sandbox| sandbox["sandboxID"].as_str());
    let outcomes = stream::iter(ids).map(|id| {
        let control = control.clone();
        async move {
            let outcome = if kill { control.kill(id).await } else { control.pause(id, true).await };
            match outcome {
                // It may have ended or been paused by its own clock meanwhile.
                Ok(()) | Err(aenv_cli::error::Error::NotFound(_)) => None,
                Err(error) => Some(format!("{id}: {error}")),
            }
        }
    });
    Ok(outcomes.buffer_unordered(AT_ONCE).filter_map(|failure| async { failure }).collect().await)
}
