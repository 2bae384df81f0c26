//! Guest image, packaging, checks: what the repository needs done that is no part of the product.

mod check;
mod guest;
mod lab;
mod run;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

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
    /// Boot the KVM lab and run something in it: it has ublk and /dev/kvm, whatever this host has.
    Lab(lab::Options),
}

fn main() -> Result<ExitCode> {
    if std::process::id() == 1 {
        lab::run_as_init();
    }
    match Arguments::parse().task {
        Task::Guest(options) => guest::make(&options)?,
        Task::Check => check::all()?,
        Task::Lab(options) => return lab::run(&options).map(ExitCode::from),
    }
    Ok(ExitCode::SUCCESS)
}
