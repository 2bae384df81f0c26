//! The checks CI runs before the tests. All run, however many fail, so that one pass shows everything.

use crate::run;
use anyhow::{Result, bail};
use std::process::Command;

/// Runs every check and fails when one did.
pub(crate) fn all() -> Result<()> {
    let root = run::workspace()?;
    let mut checks: Vec<(&str, &[&str])> = vec![
        ("format", &["fmt", "--all", "--check"]),
        ("lints", &["clippy", "--workspace", "--all-targets", "--locked", "--quiet"]),
    ];
    if run::exists("cargo-deny") {
        // Advisories need a network and a clone of their database: CI asks for them on its own schedule.
        checks.push(("dependencies", &["deny", "--all-features", "check", "bans", "licenses", "sources"]));
    } else {
        run::say("dependencies  Skipped: cargo-deny is not installed (`cargo install cargo-deny --locked`)");
    }
    let mut failed = Vec::new();
    for (name, words) in checks {
        run::say(&format!("{name}: cargo {}", words.join(" ")));
        match run::visibly(Command::new("cargo").args(words).current_dir(&root)) {
            Ok(()) => run::say(&format!("{name}  ok")),
            Err(error) => {
                run::say(&format!("{name}  FAILED: {error:#}"));
                failed.push(name);
            }
        }
    }
    if !failed.is_empty() {
        bail!("{} of the checks failed: {}", failed.len(), failed.join(", "));
    }
    Ok(())
}
