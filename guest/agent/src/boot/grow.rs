//! The root file system fills its device.
//!
//! An image's disk is made as large as its content; how large a machine's is, is its template's choice. The kernel grows
//! a mounted ext4 up to what its reserved descriptors allow. Done once, at a template's cold boot; a file system that
//! fills its device already isn't touched.

use std::{fs::File, io, os::unix::fs::FileExt};

use rustix::{
    fd::AsFd,
    fs::{SeekFrom, seek},
    ioctl::{Setter, ioctl, opcode},
};

/// `EXT4_IOC_RESIZE_FS`: blocks wanted, of the kernel's `fs/ext4/ext4.h`.
const RESIZE: rustix::ioctl::Opcode = opcode::write::<u64>(b'f', 16);
const SUPERBLOCK: u64 = 1024;
const MAGIC: [u8; 2] = [0x53, 0xef];

/// Grows the file system mounted as `/` to the size of `device`. `Ok(None)`: it fills it.
pub(super) fn grow_root(device: &str) -> io::Result<Option<u64>> {
    let device = File::open(device)?;
    let bytes = seek(&device, SeekFrom::End(0))?;
    let mut superblock = [0; 1024];
    device.read_exact_at(&mut superblock, SUPERBLOCK)?;
    let Some(wanted) = wanted_blocks(&superblock, bytes) else { return Ok(None) };
    let root = File::open("/")?;
    // SAFETY: the kernel reads one u64 and keeps no pointer.
    unsafe { ioctl(root.as_fd(), Setter::<RESIZE, u64>::new(wanted)) }?;
    Ok(Some(wanted))
}

/// Blocks of a file system that fills a device of `bytes`, when it has fewer. A last group that is too small for its own
/// tables stays out, which the kernel sees to.
fn wanted_blocks(superblock: &[u8; 1024], bytes: u64) -> Option<u64> {
    let word = |at: usize| superblock.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    if superblock.get(56..58)? != MAGIC {
        return None;
    }
    let block = 1024_u64.checked_shl(word(24)?).filter(|size| (1024..=65_536).contains(size))?;
    const WIDE: u32 = 0x80;
    let high = if word(96)? & WIDE == 0 { 0 } else { word(0x150)? };
    let has = u64::from(high) << 32 | u64::from(word(4)?);
    let fits = bytes / block;
    // Less than a mebibyte is not worth a change of the disk.
    (fits > has + (1 << 20) / block).then_some(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(blocks: u64, log_size: u32, wide: bool) -> [u8; 1024] {
        let mut bytes = [0; 1024];
        let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        put(4, u32::try_from(blocks & 0xffff_ffff).unwrap());
        put(24, log_size);
        put(96, if wide { 0x80 } else { 0 });
        put(0x150, u32::try_from(blocks >> 32).unwrap());
        bytes[56..58].copy_from_slice(&MAGIC);
        bytes
    }

    #[test]
    fn a_file_system_smaller_than_its_device_is_grown_and_no_other() {
        let gib = 1 << 30;
        assert_eq!(wanted_blocks(&superblock(1 << 18, 2, true), 4 * gib), Some(1 << 20));
        assert_eq!(wanted_blocks(&superblock(1 << 20, 2, true), 4 * gib), None);
        assert_eq!(wanted_blocks(&superblock(1 << 20, 2, true), 4 * gib + 4096), None);
        assert_eq!(wanted_blocks(&superblock(1 << 20, 2, true), 2 * gib), None, "never shrunk");
        let large = (1 << 32) + 5;
        assert_eq!(wanted_blocks(&superblock(large, 2, true), (large + 1000) * 4096), Some(large + 1000));
        assert_eq!(wanted_blocks(&superblock(1 << 10, 0, false), gib), Some(1 << 20));
    }

    #[test]
    fn what_is_no_ext4_is_left_alone() {
        assert_eq!(wanted_blocks(&[0; 1024], 1 << 30), None);
        assert_eq!(wanted_blocks(&superblock(1, 77, true), 1 << 30), None);
    }
}
