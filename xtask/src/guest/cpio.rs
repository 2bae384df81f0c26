//! The `newc` archive of Documentation/driver-api/early-userspace/buffer-format.rst, as the kernel unpacks it.
//!
//! ```text
//!   "070701" ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
//!            (13 numbers of 8 hex digits) name NUL, padded to 4 │ data, padded to 4 │ …  "TRAILER!!!"
//! ```
//!
//! Everything belongs to root and dates from 1970: the same input gives the same bytes.

use anyhow::{Result, ensure};

const DIRECTORY: u32 = 0o040_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const REGULAR: u32 = 0o100_000;

/// An archive being written.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds a directory; parents must come before their children.
    pub(crate) fn directory(&mut self, path: &str) {
        self.header(path, DIRECTORY | 0o755, 2, 0, (0, 0));
    }

    /// Adds a character device.
    pub(crate) fn character_device(&mut self, path: &str, permissions: u32, major: u32, minor: u32) {
        self.header(path, CHARACTER_DEVICE | permissions, 1, 0, (major, minor));
    }

    /// Adds a regular file.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) -> Result<()> {
        let size = u32::try_from(content.len());
        ensure!(size.is_ok(), "{path} is larger than the 4 GiB a cpio entry can hold");
        self.header(path, REGULAR | permissions, 1, size?, (0, 0));
        self.bytes.extend_from_slice(content);
        self.pad();
        Ok(())
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entries = u32::MAX; // the next inode number is 0, as the trailer has it
        self.header("TRAILER!!!", 0, 1, 0, (0, 0));
        // Loaders round initrd sizes up to sectors; zeros between archives are skipped by the kernel.
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }

    fn header(&mut self, path: &str, mode: u32, links: u32, size: u32, device: (u32, u32)) {
        self.entries = self.entries.wrapping_add(1);
        let name_size = path.len() + 1;
        let header = format!(
            "070701{:08x}{mode:08x}{:08x}{:08x}{links:08x}{:08x}{size:08x}{:08x}{:08x}{:08x}{:08x}{name_size:08x}{:08x}",
            self.entries, 0, 0, 0, 0, 0, device.0, device.1, 0
        );
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    #[test]
    fn cpio_lists_what_was_put_in() {
        let mut archive = Archive::default();
        archive.directory("dev");
        archive.character_device("dev/console", 0o600, 5, 1);
        archive.file("init", 0o755, b"12345").unwrap();
        archive.file("empty", 0o644, b"").unwrap();
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 512, 0);

        let mut cpio = match Command::new("cpio")
            .args(["--list", "--verbose", "--numeric-uid-gid", "--quiet"])
            .env("TZ", "UTC")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
        {
            Ok(child) => child,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "Skipped: cpio can't be started: {error}");
                return;
            }
        };
        cpio.stdin.take().unwrap().write_all(&bytes).unwrap();
        let listed = String::from_utf8(cpio.wait_with_output().unwrap().stdout).unwrap();
        let lines: Vec<Vec<&str>> =
            listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(lines.len(), 4, "{listed}");
        assert_eq!((lines[0][0], lines[0].last()), ("drwxr-xr-x", Some(&"dev")));
        assert_eq!((lines[1][0], lines[1][4], lines[1][5]), ("crw-------", "5,", "1"));
        assert_eq!((lines[2][0], lines[2][4], lines[2].last()), ("-rwxr-xr-x", "5", Some(&"init")));
        assert_eq!((lines[3][0], lines[3][4]), ("-rw-r--r--", "0"));
    }

    #[test]
    fn the_header_is_byte_for_byte_newc() {
        let mut archive = Archive::default();
        archive.file("a", 0o644, b"x").unwrap();
        let expected = b"070701000000010000\
81a400000000000000000000000100000000000000010000000000000000000000000000000000000002\
00000000a\0x\0\0\0";
        assert_eq!(&archive.bytes[..], &expected[..]);
    }
}
