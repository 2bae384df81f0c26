//! Finds living QEMU processes of ours by the directory in their command line.

use super::files::Files;
use crate::{Backend, VmRecord, process};
use std::{
    ffi::OsStr,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// Every living machine whose directory lies under `root`.
pub(super) fn find(root: &Path) -> io::Result<Vec<VmRecord>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let Ok(pid) = name.parse::<i32>() else { continue };
        // A process may end while it is looked at: then it is none of the living.
        let Ok(command_line) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let Some(dir) = machine_dir(&command_line).filter(|dir| dir.starts_with(root)) else { continue };
        let Some(kept) = Files::new(&dir).read() else { continue };
        let Some(start_time) = process::start_time(pid) else { continue };
        found.push(VmRecord {
            backend: Backend::Qemu,
            id: kept.id,
            pid,
            start_time,
            dir,
            memory_mib: kept.memory_mib,
            restored: kept.restored,
        });
    }
    Ok(found)
}

/// The directory in `-name guest=<dir>`, given that the control socket is where we put it.
fn machine_dir(command_line: &[u8]) -> Option<PathBuf> {
    let words: Vec<_> = command_line.split(|byte| *byte == 0).collect();
    if !words.iter().any(|word| word.starts_with(b"socket,id=control,fd=")) {
        return None;
    }
    let name = words.iter().position(|word| *word == b"-name")?;
    let escaped = words.get(name + 1)?.strip_prefix(b"guest=")?;
    let mut dir = Vec::new();
    let mut bytes = escaped.iter().peekable();
    while let Some(byte) = bytes.next() {
        dir.push(*byte);
        if *byte == b',' {
            bytes.next_if_eq(&&b',');
        }
    }
    Some(Path::new(OsStr::from_bytes(&dir)).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_comes_back_from_a_command_line() {
        let line = b"/usr/bin/qemu\0-name\0guest=/run/a,,b\0-chardev\0socket,id=control,fd=3,server=on\0";
        assert_eq!(machine_dir(line), Some("/run/a,b".into()));
        assert_eq!(machine_dir(b"/usr/bin/qemu\0-name\0guest=/run/a\0"), None);
        assert_eq!(machine_dir(b"sleep\x001\0"), None);
    }
}
