//! The `aenv` commands: everything a person or a script does with a running AgentENV, over its public HTTP API only.
//!
//! The binary flattens [`Command`] and [`Global`] into its own parser and hands both to [`run`]:
//!
//! ```no_run
//! use clap::{CommandFactory as _, Parser};
//!
//! #[derive(Parser)]
//! #[command(name = "aenv", version)]
//! struct Cli {
//!     #[command(flatten)]
//!     global: aenv_cli::Global,
//!     #[command(subcommand)]
//!     role: Role,
//! }
//!
//! #[derive(clap::Subcommand)]
//! enum Role {
//!     /// Start a node here.
//!     Up,
//!     #[command(flatten)]
//!     Client(aenv_cli::Command),
//! }
//!
//! #[tokio::main]
//! async fn main() -> std::process::ExitCode {
//!     let cli = Cli::parse();
//!     match cli.role {
//!         Role::Up => std::process::ExitCode::SUCCESS,
//!         Role::Client(command) => aenv_cli::run(command, cli.global, Cli::command).await,
//!     }
//! }
//! ```
//!
//! # Promises
//! - Data goes to standard output; progress and words go to standard error.
//! - A table on a terminal, JSON when piped; `--output` overrides.
//! - Exit codes: see [`error::Error::exit_code`]; `exec` and `connect` pass the remote command's own code through.
//! - Every call has a deadline. A dropped stream is taken up again where it broke.
//! - The terminal is put back as it was found, whichever way a command ends.
//!
//! # Layers
//! [`settings`] → [`control`] (control plane) and [`guest`] (the agent in a sandbox, on [`envelope`]) → [`command`],
//! which writes through [`output`]. Nothing here links a node: the CLI builds where a node can't run.
#![forbid(unsafe_code)]

pub mod command;
pub mod control;
pub mod envelope;
pub mod error;
pub mod guest;
pub mod output;
pub mod process;
pub mod settings;
pub mod terminal;
pub mod wire;

pub use command::Command;
pub use settings::Global;

use std::process::ExitCode;

/// Runs one command and says what became of it.
///
/// `root` makes the whole program's parser (`Cli::command`); `aenv completion` needs it. A failure is reported on
/// standard error in one or two lines. The `ring` TLS provider is installed if the process has none yet.
pub async fn run(command: Command, global: Global, root: fn() -> clap::Command) -> ExitCode {
    match Box::pin(command::dispatch(command, global, root)).await {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            output::say(&format!("error: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}
