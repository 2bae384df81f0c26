//! Guest image, packaging, checks: what the repository needs done that is no part of the product.

mod check;
mod guest;
mod run;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Tasks of this repository")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Make the guest kit: kernel, initramfs with the agent, manifest.
    Guest(guest::Options),
    /// What CI checks before it tests: formatting, lints, licences and duplicate versions.
    Check,
}

fn main() -> Result<()> {
    match Arguments::parse().task {
        Task::Guest(options) => guest::make(&options),
        Task::Check => check::all(),
    }
}
