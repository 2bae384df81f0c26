//! `aenv`: one program for the command line and for every role of the platform.
//!
//! The command line part ([`aenv_cli`]) speaks the public API only and builds on macOS too. The roles run on Linux:
//! `up` and `down` (a single machine), `server`, `storaged`, `doctor`.
#![forbid(unsafe_code)]

#[cfg(target_os = "linux")]
mod roles;

use clap::{CommandFactory as _, Parser, Subcommand};
use std::process::ExitCode;

/// Sandboxes for AI agents: microVMs that start from a snapshot in a moment.
#[derive(Parser)]
#[command(name = "aenv", version, propagate_version = true)]
struct Program {
    #[command(flatten)]
    global: aenv_cli::Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[cfg(target_os = "linux")]
    #[command(flatten)]
    Role(Box<roles::Role>),
    #[command(flatten)]
    Client(Box<aenv_cli::Command>),
}

fn main() -> ExitCode {
    let program = Program::parse();
    // Fails only when a provider is already installed, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match program.command {
        #[cfg(target_os = "linux")]
        Command::Role(role) => roles::run(*role, program.global),
        Command::Client(command) => {
            match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
                Ok(runtime) => runtime.block_on(aenv_cli::run(*command, program.global, Program::command)),
                Err(error) => {
                    aenv_cli::output::say(&format!("error: can't start: {error}"));
                    ExitCode::FAILURE
                }
            }
        }
    }
}
