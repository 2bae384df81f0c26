//! `ListDir`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aenv_envd_proto::filesystem::EntryInfo;
use connectrpc::ConnectError;

use super::{entry, failed};
use crate::users::Names;

/// Entries one listing may hold.
const MAX_LISTED: usize = 100_000;

/// Everything below `path`, `depth` levels deep, parents before their children, in the order of names. Links are
/// listed, not followed, except `path` itself.
pub(super) fn list(path: &Path, depth: u32) -> Result<Vec<EntryInfo>, ConnectError> {
    let real = fs::canonicalize(path).map_err(|err| failed("cannot list", path, &err))?;
    if !real.is_dir() {
        return Err(ConnectError::invalid_argument(format!("path is not a directory: {}", path.display())));
    }
    let names = Names::read();
    let mut entries = Vec::new();
    // Paths still to be described, last one first.
    let mut left = children(&real, 1).map_err(|err| failed("cannot list", path, &err))?;
    while let Some((child, level)) = left.pop() {
        // What vanished meanwhile was not there.
        let Ok(mut entry) = entry::describe(&child, &names) else { continue };
        if entries.len() == MAX_LISTED {
            return Err(ConnectError::resource_exhausted(format!(
                "{} holds more than {MAX_LISTED} entries: list a smaller tree or with less depth",
                path.display()
            )));
        }
        let is_dir = entry.symlink_target.is_none() && entry.permissions.starts_with('d');
        if is_dir && level < depth {
            left.extend(children(&child, level + 1).unwrap_or_default());
        }
        if let Ok(relative) = child.strip_prefix(&real) {
            entry.path = path.join(relative).to_string_lossy().into_owned();
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn children(dir: &Path, level: u32) -> io::Result<Vec<(PathBuf, u32)>> {
    let mut found: Vec<_> =
        fs::read_dir(dir)?.map(|entry| entry.map(|entry| (entry.path(), level))).collect::<Result<_, _>>()?;
    found.sort_by(|a, b| b.cmp(a));
    Ok(found)
}
