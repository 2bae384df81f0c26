//! Zero pages of flat images.

use crate::PAGE;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use std::{fs::File, io, os::unix::fs::FileExt};

const BATCH: usize = 1 << 20;

/// Whether all bytes are zero.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    // SAFETY: every bit pattern is a u64, and `align_to` yields only the aligned middle.
    let (head, middle, tail) = unsafe { bytes.align_to::<u64>() };
    // Folding sixteen words at a time lets the compiler use vectors and still stop early.
    head.iter().all(|byte| *byte == 0)
        && middle.chunks(16).all(|words| words.iter().fold(0, |all, word| all | word) == 0)
        && tail.iter().all(|byte| *byte == 0)
}

/// Turns the zero pages of a file into holes. Returns the bytes that stay allocated to data.
pub fn punch(file: &File) -> io::Result<u64> {
    let len = file.metadata()?.len();
    let mut buffer = vec![0; BATCH];
    let (mut at, mut kept) = (0, 0);
    while at < len {
        at = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data / PAGE * PAGE,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = seek(file, SeekFrom::Hole(at))?.min(len);
        while at < hole {
            let want =
                usize::try_from((hole - at).min(u64::try_from(BATCH).unwrap_or(u64::MAX))).unwrap_or(BATCH);
            file.read_exact_at(&mut buffer[..want], at)?;
            let page = usize::try_from(PAGE).unwrap_or(4096);
            let mut zero_from = None;
            for (index, bytes) in buffer[..want].chunks(page).enumerate() {
                let here = at + u64::try_from(index).unwrap_or(0) * PAGE;
                if is_zero(bytes) {
                    zero_from.get_or_insert(here);
                } else {
                    kept += u64::try_from(bytes.len()).unwrap_or(0);
                    if let Some(from) = zero_from.take() {
                        hole_punch(file, from, here - from)?;
                    }
                }
            }
            at += u64::try_from(want).unwrap_or(0);
            if let Some(from) = zero_from {
                hole_punch(file, from, at - from)?;
            }
        }
    }
    Ok(kept)
}

fn hole_punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn one_bit_anywhere_makes_a_page_non_zero() {
        let mut page = vec![0; 4099];
        assert!(is_zero(&page) && is_zero(&page[1..]) && is_zero(&[]));
        for at in [0, 1, 7, 8, 4095, 4096, 4098] {
            page[at] = 1;
            assert!(!is_zero(&page), "byte {at}");
            page[at] = 0;
        }
    }

    #[test]
    fn punching_changes_no_byte_and_frees_the_zeroes() {
        let file = tempfile::tempfile().unwrap();
        let mut content = vec![0u8; 8 << 20];
        content[5000] = 1;
        content[(3 << 20) + 17] = 2;
        content[(8 << 20) - 1] = 3;
        file.write_all_at(&content, 0).unwrap();
        assert_eq!(punch(&file).unwrap(), 3 * PAGE);
        let mut back = vec![1u8; 8 << 20];
        file.read_exact_at(&mut back, 0).unwrap();
        assert!(back == content, "content changed");
        assert!(file.metadata().unwrap().blocks() * 512 <= 64 << 10, "zeroes are still stored");
        assert_eq!(punch(&file).unwrap(), 3 * PAGE, "a second pass finds the same");
    }
}
