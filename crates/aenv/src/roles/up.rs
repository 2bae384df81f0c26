//! `aenv up`: the single-machine mode. Can be repeated: what runs already is left alone.

use super::{Settings, client_env, process::Background, ready::start_detached, server, settings::Flags};
use aenv_cli::output::say;
use anyhow::{Context, Result};
use clap::Args;
use std::{ffi::OsString, process::ExitCode, time::Duration};

/// Adopting many machines and reaping what is left of others takes its time; hanging is noticed after this.
const SERVER_START: Duration = Duration::from_secs(120);
const STORAGED_START: Duration = Duration::from_secs(30);

/// Arguments of `aenv up`.
#[derive(Args)]
pub(crate) struct Up {
    #[command(flatten)]
    flags: Flags,
    /// Return once the server serves, leaving it in the background
    #[arg(long, short)]
    detach: bool,
}

/// Starts what doesn't run yet.
pub(crate) fn run(up: &Up) -> Result<ExitCode> {
    let settings = Settings::load(&up.flags)?;
    for dir in [&settings.data_dir, &settings.run_dir, &settings.log_dir()] {
        std::fs::create_dir_all(dir)
            .with_context(|| format!("can't make {} (are you root?)", dir.display()))?;
    }
    if let Some(server) = Background::find(&settings.server_pid_file(), "server")? {
        let listen = server.argument("--listen").map_or_else(|| settings.listen.to_string(), str::to_owned);
        say(&format!("already running (pid {}) on {listen}", server.pid()));
        // The clients' file may have been lost, or name another server by now.
        let running = Settings { listen: listen.parse().unwrap_or(settings.listen), ..settings };
        super::runtime(1)?.block_on(client_env::renew(&running))?;
        return Ok(ExitCode::SUCCESS);
    }
    super::runtime(1)?.block_on(start_daemons(&settings, up.detach))?;
    if up.detach {
        return Ok(ExitCode::SUCCESS);
    }
    super::log_to_stderr();
    server::run(&settings, true)
}

async fn start_daemons(settings: &Settings, detach: bool) -> Result<()> {
    let storaged_runs = Background::find(&settings.storaged_pid_file(), "storaged")?.is_some();
    if !storaged_runs {
        let pid = start(settings, "storaged", &[], STORAGED_START).await?;
        say(&format!("storage daemon: pid {pid}"));
    }
    if detach {
        match start(settings, "server", &["--client-env"], SERVER_START).await {
            Ok(pid) => say(&format!("server: pid {pid}, on http://{}", settings.listen)),
            Err(error) => {
                // What this call began it takes back. Nobody has a disk open at a storage daemon that has just started.
                if !storaged_runs
                    && let Some(storaged) = Background::find(&settings.storaged_pid_file(), "storaged")?
                {
                    storaged.end(STORAGED_START)?;
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

async fn start(settings: &Settings, role: &str, flags: &[&str], deadline: Duration) -> Result<u32> {
    let mut arguments: Vec<OsString> = vec![role.into()];
    arguments.extend(settings.as_arguments());
    arguments.extend(flags.iter().map(Into::into));
    let log = settings.log_dir().join(format!("{role}.log"));
    start_detached(&arguments, &log, &settings.run_dir, deadline).await
}
