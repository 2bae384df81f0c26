//! Metadata of files: extended attributes `user.e2b.*`, set by the `X-Metadata-*` headers of an upload.

use std::{collections::BTreeMap, fs::File, io, path::Path};

use http::HeaderMap;
use rustix::fs::{XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, getxattr, listxattr};

const PREFIX: &str = "user.e2b.";
const HEADER: &str = "x-metadata-";
/// Names end at 255 bytes in Linux, the prefix included.
const MAX_KEY: usize = 255 - PREFIX.len();
/// All metadata of a file, keys with their prefix: what fits into an ext4 inode's block.
const MAX_ALL: usize = 4096;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MetadataError {
    #[error("metadata key {0:?} is longer than {MAX_KEY} bytes")]
    LongKey(String),
    #[error("metadata {0:?} is not printable ASCII")]
    NotAscii(String),
    #[error("metadata takes {0} bytes, the limit is {MAX_ALL}")]
    TooMuch(usize),
}

/// The metadata that the headers of an upload carry.
pub(crate) fn of_headers(headers: &HeaderMap) -> Result<BTreeMap<String, String>, MetadataError> {
    let mut metadata = BTreeMap::new();
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix(HEADER).filter(|key| !key.is_empty()) else { continue };
        if key.len() > MAX_KEY {
            return Err(MetadataError::LongKey(key.to_owned()));
        }
        // The first of several counts.
        let value = headers.get(name).map(|value| value.as_bytes()).unwrap_or_default();
        let value = std::str::from_utf8(value)
            .ok()
            .filter(|value| value.bytes().all(|byte| (0x20..=0x7e).contains(&byte)))
            .ok_or_else(|| MetadataError::NotAscii(key.to_owned()))?;
        metadata.insert(key.to_owned(), value.to_owned());
    }
    let size = metadata.iter().map(|(key, value)| PREFIX.len() + key.len() + value.len()).sum();
    if size > MAX_ALL { Err(MetadataError::TooMuch(size)) } else { Ok(metadata) }
}

/// Makes `metadata` all that `file` has. Nothing is touched when nothing changes: each touch is an event for watchers.
pub(crate) fn replace(file: &File, metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let current = match keys(|buf| flistxattr(file, buf)) {
        Ok(current) => current,
        // No attributes on this filesystem: that is only an error for who wants some.
        Err(err) if unsupported(&err) => Vec::new(),
        Err(err) => return Err(err),
    };
    for key in current.iter().filter(|key| !metadata.contains_key(*key)) {
        fremovexattr(file, format!("{PREFIX}{key}"))?;
    }
    for (key, value) in metadata {
        match fsetxattr(file, format!("{PREFIX}{key}"), value.as_bytes(), XattrFlags::empty()) {
            Ok(()) => {}
            // The content is stored; the answer shows that the metadata is not.
            Err(err) if unsupported(&err.into()) => return Ok(()),
            Err(err) => return Err(err.into()),
        }
    }
    Ok(())
}

/// The metadata of an open file.
pub(crate) fn of_file(file: &File) -> BTreeMap<String, String> {
    collect(keys(|buf| flistxattr(file, buf)), |name, buf| fgetxattr(file, name, buf))
}

/// The metadata of what `path` leads to; none when it can't be read.
pub(crate) fn of_path(path: &Path) -> BTreeMap<String, String> {
    collect(keys(|buf| listxattr(path, buf)), |name, buf| getxattr(path, name, buf))
}

fn unsupported(err: &io::Error) -> bool {
    matches!(err.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM))
}

fn keys(list: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> io::Result<Vec<String>> {
    /// XATTR_LIST_MAX: the kernel never says more.
    const MOST: usize = 64 << 10;
    let mut buf = vec![0; 1024];
    let size = match list(&mut buf) {
        Err(rustix::io::Errno::RANGE) => {
            buf = vec![0; MOST];
            list(&mut buf)
        }
        other => other,
    }?;
    let names = buf.get(..size).unwrap_or_default().split(|byte| *byte == 0);
    Ok(names
        .filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix(PREFIX))
        .filter(|key| !key.is_empty())
        .map(str::to_owned)
        .collect())
}

fn collect(
    keys: io::Result<Vec<String>>,
    get: impl Fn(&str, &mut [u8]) -> rustix::io::Result<usize>,
) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::new();
    for key in keys.unwrap_or_default() {
        let mut buf = vec![0; MAX_ALL];
        if let Ok(size) = get(&format!("{PREFIX}{key}"), &mut buf) {
            let value = buf.get(..size).unwrap_or_default();
            metadata.insert(key, String::from_utf8_lossy(value).into_owned());
        }
    }
    metadata
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (http::HeaderName::from_static(name), http::HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn only_metadata_headers_count() {
        let metadata = of_headers(&headers(&[("x-metadata-kind", "report"), ("x-other", "1")]));
        assert_eq!(metadata, Ok(BTreeMap::from([("kind".into(), "report".into())])));
    }

    #[test]
    fn an_upload_replaces_all_metadata_and_leaves_other_attributes() {
        let file = tempfile::tempfile().expect("a file");
        if fsetxattr(&file, "user.mine", b"1", XattrFlags::empty()).is_err() {
            return; // A filesystem without user attributes.
        }
        let one = BTreeMap::from([("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())]);
        replace(&file, &one).expect("stored");
        assert_eq!(of_file(&file), one);
        let two = BTreeMap::from([("b".to_owned(), "3".to_owned())]);
        replace(&file, &two).expect("replaced");
        assert_eq!(of_file(&file), two);
        assert_eq!(fgetxattr(&file, "user.mine", &mut [0; 8][..]), Ok(1));
    }

    #[test]
    fn more_than_an_inode_holds_is_refused() {
        let long: &'static str = "x".repeat(5000).leak();
        assert!(matches!(of_headers(&headers(&[("x-metadata-a", long)])), Err(MetadataError::TooMuch(_))));
    }
}
