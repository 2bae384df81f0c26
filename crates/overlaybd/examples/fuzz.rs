//! `cargo run --release -p aenv-overlaybd --example fuzz -- [--seconds N] [--seed N] [target …]`: fuzzes each target
//! for N seconds (default 60). A finding is written to the current directory and ends the run with code 1.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    missing_docs,
    unreachable_pub,
    reason = "a program, not a library"
)]

#[path = "../fuzz/mod.rs"]
mod fuzz;

use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let mut seconds = 60;
    let mut seed = rand::random();
    let mut names = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse::<u64>().ok());
        match argument.as_str() {
            "--seconds" => match number() {
                Some(given) => seconds = given,
                None => return usage("--seconds needs a number"),
            },
            "--seed" => match number() {
                Some(given) => seed = given,
                None => return usage("--seed needs a number"),
            },
            name if fuzz::TARGETS.iter().any(|target| target.name == name) => names.push(argument),
            other => return usage(&format!("{other} is no target")),
        }
    }
    for target in fuzz::TARGETS.iter().filter(|t| names.is_empty() || names.iter().any(|name| name == t.name))
    {
        let outcome = fuzz::fuzz(target, seed, Duration::from_secs(seconds));
        println!("{:<14} {:>10} inputs in {seconds} s, seed {seed}", target.name, outcome.inputs);
        if let Some(input) = outcome.finding {
            let path = format!("finding-{}-{seed}", target.name);
            let kept = std::fs::write(&path, &input).is_ok();
            eprintln!("finding: {path} (written: {kept}, still one: {})", fuzz::replay(target, &input));
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn usage(wrong: &str) -> ExitCode {
    let names: Vec<_> = fuzz::TARGETS.iter().map(|target| target.name).collect();
    eprintln!("{wrong}; usage: fuzz [--seconds N] [--seed N] [target …], targets: {}", names.join(", "));
    ExitCode::from(2)
}
