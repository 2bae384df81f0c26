//! Where things lie. A pure function of the number of groups.

/// Bytes of a block.
pub(crate) const BLOCK: usize = 4096;
pub(super) const BLOCKS_PER_GROUP: u32 = 32768;
pub(super) const INODES_PER_GROUP: u32 = 8192;
pub(super) const INODE: usize = 256;
pub(super) const INODES_PER_BLOCK: u32 = 16;
pub(super) const TABLE_BLOCKS: u32 = INODES_PER_GROUP / INODES_PER_BLOCK;
pub(super) const DESCRIPTOR: usize = 32;
pub(super) const DESCRIPTORS_PER_BLOCK: u32 = 128;
/// Blocks of descriptors in use and reserved together: 8192 groups, 1 TiB.
pub(super) const DESCRIPTOR_BLOCKS: u32 = 64;
pub(super) const MAX_GROUPS: u32 = DESCRIPTOR_BLOCKS * DESCRIPTORS_PER_BLOCK;
pub(super) const JOURNAL_BLOCKS: u32 = 4096;
pub(super) const FIRST_INODE: u32 = 11;

/// Groups with copies of superblock and descriptors: 0, 1 and powers of 3, 5 and 7.
pub(super) fn has_super(group: u32) -> bool {
    let power_of = |base: u32| {
        let mut value = base;
        while value < group {
            value = value.saturating_mul(base);
        }
        value == group
    };
    group <= 1 || power_of(3) || power_of(5) || power_of(7)
}

pub(super) fn first_block(group: u32) -> u32 {
    group * BLOCKS_PER_GROUP
}

pub(super) fn block_bitmap(group: u32) -> u32 {
    first_block(group) + if has_super(group) { 1 + DESCRIPTOR_BLOCKS } else { 0 }
}

pub(super) fn inode_bitmap(group: u32) -> u32 {
    block_bitmap(group) + 1
}

pub(super) fn inode_table(group: u32) -> u32 {
    block_bitmap(group) + 2
}

/// Blocks at the group's start that hold the file system's own structures.
pub(super) fn overhead(group: u32) -> u32 {
    inode_table(group) + TABLE_BLOCKS - first_block(group)
}

pub(super) fn descriptor_blocks(groups: u32) -> u32 {
    groups.div_ceil(DESCRIPTORS_PER_BLOCK)
}

/// The CRC of group descriptors: polynomial 0x8005 reflected.
pub(super) fn crc16(mut crc: u16, bytes: &[u8]) -> u16 {
    for byte in bytes {
        crc ^= u16::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xa001 } else { crc >> 1 };
        }
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_lie_in_group_one_and_in_powers_of_three_five_and_seven() {
        let with: Vec<u32> = (0..130).filter(|&group| has_super(group)).collect();
        assert_eq!(with, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125]);
    }

    #[test]
    fn the_crc_is_the_one_of_the_catalogue() {
        // CRC-16/MODBUS: this polynomial and start value over "123456789".
        assert_eq!(crc16(0xffff, b"123456789"), 0x4b37);
    }
}
