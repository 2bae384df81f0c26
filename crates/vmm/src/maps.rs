//! Finds guest memory in a monitor's address space by reading `/proc/<pid>/maps` (proc_pid_maps(5)).

use crate::MemoryRegion;
use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::Path,
};

/// One file-backed line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapping {
    region: MemoryRegion,
    /// Device and inode as the kernel prints them: enough to tell files apart, and stays when the file is deleted.
    file: String,
    path: String,
}

/// The regions that map `file`, which holds `bytes` of guest memory, in image order.
///
/// The kernel splits a mapping when parts of it are advised or protected differently, so there may be many. A file may
/// have been deleted or its mount may be shown under another path since: a set of mappings of one other file that
/// covers exactly the guest's memory is taken too, because nothing else in a monitor looks like that.
///
/// # Errors
/// `NotFound` when no mapping covers the memory; else what reading the table gave.
pub(crate) fn find(pid: i32, file: &Path, bytes: u64) -> io::Result<Vec<MemoryRegion>> {
    choose(&read(pid)?, &file.to_string_lossy(), bytes).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("process {pid} maps no {bytes} bytes of {}", file.display()),
        )
    })
}

fn read(pid: i32) -> io::Result<Vec<Mapping>> {
    let mut mappings = Vec::new();
    for line in BufReader::new(File::open(format!("/proc/{pid}/maps"))?).lines() {
        mappings.extend(parse(pid, &line?));
    }
    Ok(mappings)
}

/// `start-end perms offset dev inode   path`, numbers hexadecimal but for the inode. `None` for anonymous memory.
fn parse(pid: i32, line: &str) -> Option<Mapping> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let _permissions = words.next()?;
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (device, inode) = (words.next()?, words.next()?);
    if inode == "0" {
        return None;
    }
    let start = u64::from_str_radix(start, 16).ok()?;
    let len = u64::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    Some(Mapping {
        region: MemoryRegion { pid, host_addr: start, image_offset: offset, len },
        file: format!("{device} {inode}"),
        path: words.next().unwrap_or("").trim_start().to_owned(),
    })
}

fn choose(mappings: &[Mapping], path: &str, bytes: u64) -> Option<Vec<MemoryRegion>> {
    let named = |mapping: &&Mapping| {
        mapping.path == path || mapping.path.strip_suffix(" (deleted)").is_some_and(|before| before == path)
    };
    let by_path = mappings.iter().filter(named).map(|mapping| &mapping.file);
    by_path.chain(mappings.iter().map(|mapping| &mapping.file)).find_map(|file| {
        let mut regions: Vec<_> =
            mappings.iter().filter(|mapping| mapping.file == *file).map(|mapping| mapping.region).collect();
        regions.sort_unstable_by_key(|region| region.image_offset);
        covers(&regions, bytes).then_some(regions)
    })
}

/// Whether the regions, in order, are exactly the range from 0 to `bytes`.
fn covers(regions: &[MemoryRegion], bytes: u64) -> bool {
    let mut end = 0;
    for region in regions {
        if region.image_offset != end {
            return false;
        }
        end += region.len;
    }
    end == bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
55d0c0a00000-55d0c0b00000 r-xp 00000000 fe:00 1234                       /usr/bin/qemu-system-x86_64
7f0000000000-7f0000200000 rw-p 00000000 fe:00 77                         /v/a dir/mem
7f0000200000-7f0001000000 rw-p 00200000 fe:00 77                         /v/a dir/mem
7f0002000000-7f0002010000 rw-p 00000000 00:00 0
7f0003000000-7f0003001000 rw-s 00000000 fe:00 78                         /v/other
7ffc0000-7ffd0000 rw-p 00000000 00:00 0                                  [stack]";

    fn table(text: &str) -> Vec<Mapping> {
        text.lines().filter_map(|line| parse(7, line)).collect()
    }

    #[test]
    fn split_mappings_are_put_together_in_image_order() {
        let found = choose(&table(TABLE), "/v/a dir/mem", 16 << 20).unwrap();
        assert_eq!(
            found,
            [
                MemoryRegion { pid: 7, host_addr: 0x7f00_0000_0000, image_offset: 0, len: 2 << 20 },
                MemoryRegion { pid: 7, host_addr: 0x7f00_0020_0000, image_offset: 2 << 20, len: 14 << 20 }
            ]
        );
    }

    #[test]
    fn a_deleted_or_renamed_image_is_still_found() {
        let deleted = TABLE.replace("/v/a dir/mem", "/v/a dir/mem (deleted)");
        assert!(choose(&table(&deleted), "/v/a dir/mem", 16 << 20).is_some());
        let renamed = TABLE.replace("/v/a dir/mem", "/w/elsewhere");
        assert!(choose(&table(&renamed), "/v/a dir/mem", 16 << 20).is_some());
    }

    #[test]
    fn memory_that_is_not_wholly_mapped_is_not_found() {
        assert_eq!(choose(&table(TABLE), "/v/a dir/mem", 32 << 20), None);
        assert_eq!(choose(&table(TABLE), "/v/other", 32 << 20), None);
        assert_eq!(
            choose(&table(&TABLE.replace("00200000 fe", "00300000 fe")), "/v/a dir/mem", 16 << 20),
            None
        );
    }
}
