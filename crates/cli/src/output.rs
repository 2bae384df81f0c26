//! Writing for people and for scripts: data on standard output, words on standard error.

use crate::error::{Error, Result};
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::io::{IsTerminal as _, Write as _};

/// How data is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For scripts: one JSON document.
    Json,
}

impl Format {
    /// Table on a terminal, JSON into a pipe.
    #[must_use]
    pub fn of_stdout() -> Self {
        if std::io::stdout().is_terminal() { Self::Table } else { Self::Json }
    }
}

/// Words for the person: one line on standard error. A closed standard error is nobody's problem.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// One line of data.
///
/// # Errors
/// Standard output can't be written. A reader that left early (`| head`) is not an error.
pub fn line(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    settle(out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()))
}

/// A document for scripts.
///
/// # Errors
/// As [`line`].
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::Failed(e.to_string()))?;
    line(&text)
}

/// One JSON value on one line, for commands that follow something.
///
/// # Errors
/// As [`line`].
pub fn json_line(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|e| Error::Failed(e.to_string()))?;
    line(&text)
}

/// A table for people. Control characters in cells are shown, never sent to the terminal: names and metadata
/// come from others.
///
/// # Errors
/// As [`line`].
pub fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for row in rows {
        table.add_row(row.map(|cell| printable(&cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let text = table.to_string();
    let trimmed: Vec<&str> = text.lines().map(str::trim_end).collect();
    line(&trimmed.join("\n"))
}

/// The text with control characters spelled out.
#[must_use]
pub fn printable(text: &str) -> String {
    if text.chars().any(char::is_control) {
        text.chars()
            .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
            .collect()
    } else {
        text.to_owned()
    }
}

/// A count of bytes as a person reads it.
#[must_use]
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut rest = count;
    let mut tenths = 0;
    while rest >= 1024 && unit + 1 < UNITS.len() {
        tenths = (rest % 1024) * 10 / 1024;
        rest /= 1024;
        unit += 1;
    }
    if unit == 0 { format!("{rest} B") } else { format!("{rest}.{tenths} {}", UNITS[unit]) }
}

fn settle(result: std::io::Result<()>) -> Result<()> {
    match result {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(Error::Failed(format!("can't write to standard output: {e}"))),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777215.9 TiB");
    }

    #[test]
    fn a_hostile_name_cant_drive_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
        assert_eq!(printable("Zoë 漢字"), "Zoë 漢字");
    }
}
