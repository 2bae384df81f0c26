//! The RPCs of `filesystem.Filesystem`, and what `/files` shares with them.
//!
//! As in E2B's agent everything is done as root and then given to the user: a client may write where its user could
//! not. This is no boundary: whoever may call the agent may also start processes as root.

pub(crate) mod entry;
mod listing;
pub(crate) mod metadata;
mod polled;
mod remove;
mod service;
mod watch;

use std::{
    io,
    os::unix::fs::lchown,
    path::{Path, PathBuf},
};

use connectrpc::ConnectError;

use crate::users::User;

pub(crate) use service::Service;

/// Makes `path` and its missing parents; what is made belongs to `user`.
pub(crate) fn ensure_dirs(path: &Path, user: &User) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let missing: Vec<PathBuf> = path
        .ancestors()
        .take_while(|dir| std::fs::symlink_metadata(dir).is_err())
        .map(PathBuf::from)
        .collect();
    for dir in missing.iter().rev() {
        match std::fs::create_dir(dir) {
            Ok(()) => lchown(dir, Some(user.uid), Some(user.gid))?,
            // Made by somebody else meanwhile.
            Err(err) if err.kind() == io::ErrorKind::AlreadyExists => {}
            Err(err) => return Err(err),
        }
    }
    if path.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) }
}

/// The answer to a failed call on `path`.
fn failed(what: &str, path: &Path, err: &io::Error) -> ConnectError {
    let message = format!("{what} {}: {err}", path.display());
    match err.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => ConnectError::not_found(message),
        Some(libc::EACCES | libc::EPERM) => ConnectError::permission_denied(message),
        Some(libc::ENAMETOOLONG | libc::EINVAL) => ConnectError::invalid_argument(message),
        Some(libc::ENOSPC | libc::EDQUOT | libc::EMFILE | libc::ENFILE) => {
            ConnectError::resource_exhausted(message)
        }
        Some(libc::EEXIST) => ConnectError::already_exists(message),
        Some(
            libc::ELOOP
            | libc::EROFS
            | libc::EBUSY
            | libc::ENOTEMPTY
            | libc::EXDEV
            | libc::EISDIR
            | libc::ETXTBSY
            | libc::EOPNOTSUPP,
        ) => ConnectError::failed_precondition(message),
        _ if err.kind() == io::ErrorKind::NotADirectory => ConnectError::invalid_argument(message),
        _ => ConnectError::internal(message),
    }
}
