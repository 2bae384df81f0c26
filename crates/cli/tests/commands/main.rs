//! The commands as a person runs them: this very binary, started again as `aenv`, against a server of our own whose
//! sandboxes are processes of this machine.
//!
//! Not the standard harness, because the child must be the client and nothing else: no harness output on its
//! standard output, no threads of a harness between it and its terminal.
#![forbid(unsafe_code)]
#![allow(missing_docs, unreachable_pub)]

mod client;
mod copying;
mod executing;
mod fake;
mod listing;
mod terminals;

use clap::{CommandFactory as _, Parser};
use libtest_mimic::{Arguments, Failed, Trial};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "aenv", version)]
struct Cli {
    #[command(flatten)]
    global: aenv_cli::Global,
    #[command(subcommand)]
    command: aenv_cli::Command,
}

fn main() -> ExitCode {
    if std::env::var_os(client::UNDER_TEST).is_some() {
        let cli = Cli::parse();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        return runtime.expect("a runtime").block_on(aenv_cli::run(cli.command, cli.global, Cli::command));
    }
    let arguments = Arguments::from_args();
    let tests: Vec<(&'static str, fn())> =
        [executing::TESTS, listing::TESTS, copying::TESTS, terminals::TESTS].concat();
    let trials = tests.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            std::panic::catch_unwind(test).map_err(|panic| {
                let words = panic.downcast_ref::<String>().cloned();
                let words = words.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                Failed::from(words.unwrap_or_else(|| "panicked".to_owned()))
            })
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
