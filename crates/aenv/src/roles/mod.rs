//! The roles this program plays on a Linux machine.
//!
//! ```text
//!   aenv up ──starts──► aenv storaged   (own session: outlives the server)
//!           ──starts──► aenv server     (own session with --detach, else in the foreground)
//!   aenv down: pauses what runs, through the API; ends the server, then storaged
//! ```

mod base_image;
mod client_env;
mod doctor;
mod down;
mod process;
mod ready;
mod server;
mod settings;
mod status;
mod storaged;
mod up;

use clap::{Args, Subcommand};
use settings::{Flags, Settings};
use std::process::ExitCode;

/// Roles as commands.
#[derive(Subcommand)]
pub(crate) enum Role {
    /// Start everything on this machine: storage daemon and server
    Up(up::Up),
    /// Pause what runs, then stop everything on this machine
    Down(down::Down),
    /// Say what runs on this machine
    Status(Flags),
    /// Examine this machine: what works, what is missing, and what to do about it
    Doctor(Flags),
    /// Make the base image from Debian packages, as an OCI image layout
    BaseImage(base_image::BaseImage),
    /// Serve the API and run sandboxes (needs a storage daemon; `up` starts both)
    Server(Daemon),
    /// Serve layer stacks as block devices
    Storaged(Daemon),
}

/// Flags of the roles that run in the background.
#[derive(Args)]
pub(crate) struct Daemon {
    #[command(flatten)]
    flags: Flags,
    /// Leave the session of whoever started this process
    #[arg(long, hide = true)]
    own_session: bool,
    /// Write the settings of clients (URLs, API key) to their usual file
    #[arg(long, hide = true)]
    client_env: bool,
}

/// Plays a role to its end.
pub(crate) fn run(role: Role, global: aenv_cli::Global) -> ExitCode {
    let outcome = match role {
        Role::Up(up) => up::run(&up),
        Role::Down(down) => down::run(&down, global),
        Role::Status(flags) => Settings::load(&flags).and_then(|settings| status::run(&settings)),
        Role::Doctor(flags) => Settings::load(&flags).and_then(|settings| doctor::run(&settings, &global)),
        Role::BaseImage(arguments) => base_image::run(&arguments),
        Role::Server(daemon) => daemon.enter().and_then(|settings| server::run(&settings, daemon.client_env)),
        Role::Storaged(daemon) => daemon.enter().and_then(|settings| storaged::run(&settings)),
    };
    outcome.unwrap_or_else(|error| {
        aenv_cli::output::say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

impl Daemon {
    fn enter(&self) -> anyhow::Result<Settings> {
        if self.own_session {
            rustix::process::setsid()?;
        }
        log_to_stderr();
        Settings::load(&self.flags)
    }
}

/// Structured logs on standard error: JSON where a file or a collector reads them, text on a terminal.
/// `AENV_LOG` filters (default `info`).
fn log_to_stderr() {
    use std::io::IsTerminal as _;
    let filter = tracing_subscriber::EnvFilter::try_from_env("AENV_LOG").unwrap_or_else(|_| "info".into());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // It would be said on standard error, which fails as well when the disk is full, and that would panic.
        .log_internal_errors(false);
    if std::io::stderr().is_terminal() {
        builder.init();
    } else {
        builder.json().flatten_event(true).with_current_span(true).with_span_list(false).init();
    }
}

/// A runtime for a role.
fn runtime(workers: usize) -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build()?)
}
