//! Which pages of a process's mapping are its own: copied or made since the mapping, not the mapped file's.
//!
//! Of a machine restored over a private mapping of a memory image these are exactly the pages its guest changed.
//! Asked of the kernel by `PAGEMAP_SCAN` (Linux 6.7), else read from `/proc/<pid>/pagemap` entry by entry.
//! Sources: `Documentation/admin-guide/mm/pagemap.rst`, `include/uapi/linux/fs.h` of Linux 6.12.

use crate::PAGE;
use std::{
    fs::File,
    io,
    ops::Range,
    os::{fd::AsRawFd, unix::fs::FileExt},
};

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;

const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_FILE: u64 = 1 << 61;

/// Address ranges within `range` (both page-aligned) that are anonymous in process `pid`, in order.
pub fn anonymous(pid: i32, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let pagemap = open(pid)?;
    match scan(&pagemap, &range) {
        // ENOTTY: no such ioctl before Linux 6.7. EINVAL: a kernel with another idea of the structure.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
            read(&pagemap, &range)
        }
        found => found,
    }
}

fn open(pid: i32) -> io::Result<File> {
    let path = format!("/proc/{pid}/pagemap");
    File::open(&path).map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
}

fn scan(pagemap: &File, range: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut regions = vec![PageRegion::default(); 4096];
    let mut found = Vec::new();
    let mut start = range.start;
    while start < range.end {
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start,
            end: range.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_inverted: IS_FILE,
            category_mask: IS_FILE,
            category_anyof_mask: IS_PRESENT | IS_SWAPPED,
            return_mask: IS_PRESENT,
            ..ScanArg::default()
        };
        let count = ioctl_scan(pagemap, &mut arg, &mut regions)?;
        for region in &regions[..count] {
            push(&mut found, region.start..region.end);
        }
        // The kernel says how far it came; an unmoved end would loop for ever.
        if arg.walk_end <= start {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        start = arg.walk_end;
    }
    Ok(found)
}

fn ioctl_scan(pagemap: &File, arg: &mut ScanArg, regions: &mut [PageRegion]) -> io::Result<usize> {
    debug_assert_eq!(arg.vec, regions.as_mut_ptr() as u64);
    // SAFETY: `arg` is laid out as the kernel's structure and says its size; `vec` and `vec_len` describe `regions`,
    // which outlives the call.
    let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, std::ptr::from_mut(arg)) };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    Ok(count.min(regions.len()))
}

fn read(pagemap: &File, range: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
    const BATCH: u64 = 32_768;
    let mut buffer = vec![0u8; 8 * 32_768];
    let mut found = Vec::new();
    let mut page = range.start / PAGE;
    let end = range.end / PAGE;
    while page < end {
        let pages = (end - page).min(BATCH);
        let bytes = &mut buffer[..usize::try_from(pages * 8).unwrap_or(0)];
        pagemap.read_exact_at(bytes, page * 8)?;
        for (index, entry) in (page..).zip(bytes.as_chunks::<8>().0) {
            let entry = u64::from_ne_bytes(*entry);
            if entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0 && entry & ENTRY_FILE == 0 {
                push(&mut found, index * PAGE..(index + 1) * PAGE);
            }
        }
        page += pages;
    }
    Ok(found)
}

/// Appends a range, joined to the last one when it continues it.
fn push(found: &mut Vec<Range<u64>>, range: Range<u64>) {
    match found.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => found.push(range),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::io::Write;

    /// A private mapping of a file of which some pages were written.
    pub(crate) struct Mapping {
        pub(crate) file: File,
        pub(crate) addr: u64,
        pub(crate) len: usize,
    }

    impl Mapping {
        pub(crate) fn new(content: &[u8]) -> Self {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(content).unwrap();
            let len = content.len();
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            let addr = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE,
                    &file,
                    0,
                )
            }
            .unwrap();
            Self { file, addr: addr as u64, len }
        }

        pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
            assert!(usize::try_from(offset).unwrap() + bytes.len() <= self.len);
            // SAFETY: inside the mapping, as asserted; nobody holds a reference into it.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), (self.addr + offset) as *mut u8, bytes.len())
            }
        }

        pub(crate) fn read_byte(&self, offset: u64) -> u8 {
            assert!(usize::try_from(offset).unwrap() < self.len);
            // SAFETY: inside the mapping, as asserted.
            unsafe { std::ptr::read_volatile((self.addr + offset) as *const u8) }
        }

        pub(crate) fn range(&self) -> Range<u64> {
            self.addr..self.addr + self.len as u64
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: the mapping made in `new`, used by nobody any more.
            unsafe { munmap(self.addr as *mut _, self.len) }.unwrap();
        }
    }

    pub(crate) fn own_pid() -> i32 {
        rustix::process::getpid().as_raw_nonzero().get()
    }

    #[test]
    fn pages_written_through_a_private_mapping_are_found_and_read_ones_are_not() {
        let mapping = Mapping::new(&vec![7; 64 * 4096]);
        mapping.write(3 * PAGE + 5, &[1]);
        mapping.write(4 * PAGE, &[1]);
        mapping.write(63 * PAGE, &[1]);
        mapping.read_byte(10 * PAGE);
        let base = mapping.addr;
        let expected = vec![base + 3 * PAGE..base + 5 * PAGE, base + 63 * PAGE..base + 64 * PAGE];
        assert_eq!(anonymous(own_pid(), mapping.range()).unwrap(), expected);
    }

    #[test]
    fn the_fallback_finds_what_the_ioctl_finds() {
        let mapping = Mapping::new(&vec![7; 9000 * 4096]);
        // Every other page, so that neighbours can't be joined and the ioctl needs more than one round.
        for page in (0..8998).step_by(2) {
            mapping.write(page * PAGE, &[1]);
        }
        let pagemap = open(own_pid()).unwrap();
        let slow = read(&pagemap, &mapping.range()).unwrap();
        assert_eq!(slow.len(), 4499);
        match scan(&pagemap, &mapping.range()) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                eprintln_skipped("PAGEMAP_SCAN needs Linux 6.7");
            }
            fast => assert_eq!(fast.unwrap(), slow),
        }
    }

    #[allow(clippy::print_stderr)]
    fn eprintln_skipped(why: &str) {
        eprintln!("Skipped: {why}");
    }

    #[test]
    fn a_process_that_is_gone_is_an_error_that_names_it() {
        let error = anonymous(i32::MAX, 0..PAGE).unwrap_err();
        assert!(error.to_string().contains("/proc/2147483647/pagemap"), "{error}");
    }
}
