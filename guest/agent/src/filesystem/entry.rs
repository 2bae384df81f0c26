//! What is said about one file: `EntryInfo`.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use aenv_envd_proto::filesystem::{EntryInfo, FileType};

use super::metadata;
use crate::users::Names;

/// Describes what is at `path`, without following a link there.
pub(crate) fn describe(path: &Path, names: &Names) -> io::Result<EntryInfo> {
    let meta = fs::symlink_metadata(path)?;
    let (kind, mode, symlink_target) = if meta.is_symlink() {
        // A link is described by what it leads to; one that leads nowhere still has a target.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let (kind, mode) =
            fs::metadata(path).map_or((FileType::Unspecified, 0), |meta| (kind(&meta), meta.mode()));
        (kind, mode, Some(target.to_string_lossy().into_owned()))
    } else {
        (kind(&meta), meta.mode(), None)
    };
    Ok(EntryInfo {
        name: path.file_name().map_or_else(|| "/".into(), |name| name.to_string_lossy().into_owned()),
        r#type: kind.into(),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(meta.len()).unwrap_or(i64::MAX),
        mode: mode & 0o777,
        permissions: permissions(&meta),
        owner: names.user(meta.uid()),
        group: names.group(meta.gid()),
        modified_time: Some(buffa_timestamp(&meta)).into(),
        symlink_target,
        metadata: metadata::of_path(path).into_iter().collect(),
        ..Default::default()
    })
}

fn buffa_timestamp(meta: &Metadata) -> aenv_envd_proto::Timestamp {
    aenv_envd_proto::Timestamp {
        seconds: meta.mtime(),
        nanos: i32::try_from(meta.mtime_nsec()).unwrap_or_default(),
        ..Default::default()
    }
}

fn kind(meta: &Metadata) -> FileType {
    if meta.is_dir() {
        FileType::Directory
    } else if meta.is_file() {
        FileType::File
    } else if meta.is_symlink() {
        FileType::Symlink
    } else {
        FileType::Unspecified
    }
}

/// The letters Go has for modes, as E2B's clients get them: like `ls`, but `L` for links, and special bits in front.
fn permissions(meta: &Metadata) -> String {
    let (kind, mode) = (meta.file_type(), meta.mode());
    let flags = [
        (kind.is_dir(), 'd'),
        (kind.is_symlink(), 'L'),
        (kind.is_block_device() || kind.is_char_device(), 'D'),
        (kind.is_fifo(), 'p'),
        (kind.is_socket(), 'S'),
        (mode & libc::S_ISUID != 0, 'u'),
        (mode & libc::S_ISGID != 0, 'g'),
        (kind.is_char_device(), 'c'),
        (mode & libc::S_ISVTX != 0, 't'),
    ];
    let mut text: String = flags.iter().filter(|(set, _)| *set).map(|(_, letter)| *letter).collect();
    if text.is_empty() {
        text.push('-');
    }
    let bits = "rwxrwxrwx".chars().enumerate();
    text.extend(bits.map(|(index, letter)| if mode & (0o400 >> index) == 0 { '-' } else { letter }));
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_link_is_described_by_what_it_leads_to() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        fs::write(&file, "12345").expect("written");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("changed");
        let link = dir.path().join("link");
        symlink(&file, &link).expect("linked");
        let names = Names::read();
        let (file, link) =
            (describe(&file, &names).expect("a file"), describe(&link, &names).expect("a link"));
        assert_eq!((file.size, file.mode, file.permissions.as_str()), (5, 0o640, "-rw-r-----"));
        assert_eq!(file.symlink_target, None);
        assert_eq!(link.r#type, FileType::File);
        assert_eq!(link.mode, 0o640);
        assert_eq!(link.permissions, "Lrwxrwxrwx");
        assert_eq!(link.symlink_target.map(|target| target.ends_with("/file")), Some(true));
    }

    #[test]
    fn a_link_that_leads_nowhere_is_still_there() {
        let dir = tempfile::tempdir().expect("a directory");
        let link = dir.path().join("link");
        symlink("nowhere", &link).expect("linked");
        let entry = describe(&link, &Names::read()).expect("a link");
        assert_eq!(entry.r#type, FileType::Unspecified);
        assert!(entry.symlink_target.is_some());
    }

    #[test]
    fn the_root_has_a_name() {
        let entry = describe(Path::new("/"), &Names::read()).expect("the root");
        assert_eq!((entry.name.as_str(), entry.path.as_str()), ("/", "/"));
        assert!(entry.permissions.starts_with('d'));
    }
}
