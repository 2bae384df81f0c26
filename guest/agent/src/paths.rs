//! How a path in a request becomes an absolute one. There is no boundary to enforce here: the caller may act as root
//! in its own guest, so `..` means what the kernel makes of it.

use std::path::{Component, Path, PathBuf};

use crate::users::User;

/// Linux's PATH_MAX.
const MAX: usize = 4096;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PathError {
    #[error("the path contains a NUL byte")]
    Nul,
    #[error("the path is {0} bytes long, the limit is {MAX}")]
    TooLong(usize),
    #[error("cannot expand the home directory of another user in '{0}': give an absolute path")]
    ForeignHome(String),
}

/// Absolute form of `path`: empty means the default directory (or home), `~` is the user's home, relative paths start
/// at home. Repeated and trailing slashes and `.` disappear.
pub(crate) fn resolve(path: &str, user: &User, default_dir: Option<&str>) -> Result<PathBuf, PathError> {
    let path = if path.is_empty() { default_dir.unwrap_or_default() } else { path };
    if path.contains('\0') {
        return Err(PathError::Nul);
    }
    if path.len() > MAX {
        return Err(PathError::TooLong(path.len()));
    }
    let expanded = match path.strip_prefix('~') {
        None => PathBuf::from(path),
        Some("") => user.home.clone(),
        Some(rest) if rest.starts_with('/') => user.home.join(rest.trim_start_matches('/')),
        Some(_) => return Err(PathError::ForeignHome(path.to_owned())),
    };
    if expanded.is_absolute() {
        // `components` drops what is redundant but keeps `..`, which the kernel resolves past links.
        return Ok(expanded.components().collect());
    }
    Ok(lexically_clean(&user.home.join(expanded)))
}

fn lexically_clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(path: &str) -> Result<String, PathError> {
        let user =
            User { name: "user".into(), uid: 1000, gid: 1000, home: "/home/user".into(), groups: vec![1000] };
        resolve(path, &user, Some("~/work")).map(|path| path.display().to_string())
    }

    #[test]
    fn relative_paths_start_at_home() {
        assert_eq!(resolved("a/b.txt").as_deref(), Ok("/home/user/a/b.txt"));
        assert_eq!(resolved("../x").as_deref(), Ok("/home/x"));
        assert_eq!(resolved("./../../../../x").as_deref(), Ok("/x"));
        assert_eq!(resolved("~").as_deref(), Ok("/home/user"));
        assert_eq!(resolved("~/a//b/").as_deref(), Ok("/home/user/a/b"));
    }

    #[test]
    fn the_empty_path_is_the_default_directory() {
        assert_eq!(resolved("").as_deref(), Ok("/home/user/work"));
    }

    #[test]
    fn absolute_paths_only_lose_what_is_redundant() {
        assert_eq!(resolved("/etc//./passwd/").as_deref(), Ok("/etc/passwd"));
        assert_eq!(resolved("/a/../b").as_deref(), Ok("/a/../b"));
    }

    #[test]
    fn tricks_are_named() {
        assert_eq!(resolved("a\0b"), Err(PathError::Nul));
        assert_eq!(resolved(&"x".repeat(5000)), Err(PathError::TooLong(5000)));
        assert_eq!(resolved("~root/x"), Err(PathError::ForeignHome("~root/x".into())));
    }
}
