//! What a sandbox logged, with the end of its machine's console.

use crate::{
    control::{Error, Result},
    model::{LogEntry, LogPage, LogQuery},
    node::{Inner, View},
};
use std::{collections::BTreeMap, path::Path};

/// Console lines shown with the log.
pub(super) const MAX_CONSOLE_LINES: usize = 200;
/// Bytes of the console that are looked at.
const CONSOLE_TAIL: u64 = 64 << 10;

/// The last lines of a machine's console. Blocks.
pub(crate) fn console_tail(dir: &Path, lines: usize) -> Vec<String> {
    use std::io::{Read, Seek, SeekFrom};
    let Ok(mut file) = std::fs::File::open(dir.join("console.log")) else { return Vec::new() };
    let len = file.metadata().map(|meta| meta.len()).unwrap_or(0);
    if file.seek(SeekFrom::Start(len.saturating_sub(CONSOLE_TAIL))).is_err() {
        return Vec::new();
    }
    let mut bytes = Vec::new();
    if file.take(CONSOLE_TAIL).read_to_end(&mut bytes).is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&bytes);
    let printable = |line: &str| -> String { line.chars().filter(|c| !c.is_control()).take(500).collect() };
    let all: Vec<String> = text.lines().map(printable).filter(|line| !line.trim().is_empty()).collect();
    all[all.len().saturating_sub(lines)..].to_vec()
}

fn rank(level: &str) -> Option<usize> {
    ["debug", "info", "warn", "error"].into_iter().position(|known| known == level)
}

pub(super) fn logs(inner: &Inner, view: &View, console: Vec<String>, query: &LogQuery) -> Result<LogPage> {
    let least = match &query.level {
        Some(level) => rank(level)
            .ok_or_else(|| Error::Invalid("the level must be debug, info, warn or error".to_owned()))?,
        None => 0,
    };
    // The console tells no times: its lines stand at the time the sandbox started.
    let console = console.into_iter().map(|message| LogEntry {
        at: view.sandbox.started_at,
        level: "info".to_owned(),
        message,
        fields: BTreeMap::from([("source".to_owned(), "console".to_owned())]),
    });
    let mut all: Vec<LogEntry> = console.chain(inner.journal.lines(&view.sandbox.id)).collect();
    all.sort_by_key(|entry| entry.at);
    let wanted = |entry: &LogEntry| {
        query.from.is_none_or(|from| entry.at >= from)
            && rank(&entry.level).unwrap_or(0) >= least
            && query.search.as_ref().is_none_or(|search| entry.message.contains(search.as_str()))
    };
    all.retain(wanted);
    if query.descending {
        all.reverse();
    }
    let skip: usize = match &query.cursor {
        Some(cursor) => cursor
            .parse()
            .map_err(|_| Error::Invalid("the cursor is not one that a log read returned".to_owned()))?,
        None => 0,
    };
    let limit = query.limit.clamp(1, 1000);
    let entries: Vec<_> = all.iter().skip(skip).take(limit).cloned().collect();
    let next = (skip + entries.len() < all.len()).then(|| (skip + entries.len()).to_string());
    Ok(LogPage { entries, next })
}
