//! Running other programs: each failure names the program and shows its own words.

use anyhow::{Context, Result, bail};
use std::{
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Tells the person at the terminal what is going on; data never goes this way.
pub(crate) fn say(text: &str) {
    // A closed stderr is no reason to stop working.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Runs to the end and returns stdout, or an error with the program's last words.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let done = run(command)?;
    if !done.status.success() {
        let words = String::from_utf8_lossy(&done.stderr);
        bail!("`{}` failed ({}): {}", line(command), done.status, words.trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Runs to the end with the terminal as its output.
pub(crate) fn visibly(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("starting `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", line(command));
    }
    Ok(())
}

/// Whether a program of this name can be started at all.
pub(crate) fn exists(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// The root of the workspace this program was built from.
pub(crate) fn workspace() -> Result<PathBuf> {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .context("CARGO_MANIFEST_DIR is not set; start this through `cargo xtask`")?;
    Ok(Path::new(&manifest).parent().context("xtask lies outside of a workspace")?.to_owned())
}

fn run(command: &mut Command) -> Result<Output> {
    command.output().map_err(|error| match error.kind() {
        ErrorKind::NotFound => anyhow::anyhow!(
            "`{}` is not installed; on Debian and Ubuntu it comes with the packages apt and dpkg",
            command.get_program().to_string_lossy()
        ),
        _ => anyhow::Error::new(error).context(format!("starting `{}`", line(command))),
    })
}

fn line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
    words.join(" ")
}
