//! The volume: superblock, groups, bitmaps and the cache of metadata blocks.
//!
//! States of a metadata block: not cached → clean (read) → dirty (changed), or → dirty at once (fresh). Clean ones are
//! dropped when there are many. Nothing is written before [`Volume::finish`] but file data, which goes to blocks that
//! nobody used: a layer that fails half-way is thrown away by whoever holds its file.

use super::{
    BLOCK, Below, Error, Kind, Meta, Out, ROOT, Result, damaged,
    dir::Dir,
    extents::{Extent, Tree},
    geometry::{
        BLOCKS_PER_GROUP, DESCRIPTOR, DESCRIPTOR_BLOCKS, DESCRIPTORS_PER_BLOCK, FIRST_INODE, INODE,
        INODES_PER_BLOCK, INODES_PER_GROUP, JOURNAL_BLOCKS, MAX_GROUPS, block_bitmap, crc16,
        descriptor_blocks, first_block, has_super, inode_bitmap, inode_table, overhead,
    },
    get16, get32,
    inode::Inode,
    low16, put16, put32, to_u64, to_usize,
};
use std::collections::BTreeMap;

pub(super) type Block = [u8; BLOCK];

/// Clean blocks kept: 64 MiB.
const CLEAN_MAX: usize = 16384;
const LABEL: &[u8] = b"aenv-root";
/// 2000-01-01: the times of what no archive speaks of.
pub(super) const EPOCH: i64 = 946_684_800;
const RESIZE_INODE: u32 = 7;
const JOURNAL_INODE: u32 = 8;
const ZEROED: u16 = 4;
const COMPAT: u32 = 0x4 | 0x8 | 0x10 | 0x20; // has_journal, ext_attr, resize_inode, dir_index
const INCOMPAT: u32 = 0x2 | 0x40; // filetype, extents
const RO_COMPAT: u32 = 0x1 | 0x2 | 0x8 | 0x10 | 0x20 | 0x40; // sparse_super … extra_isize, uninit_bg among them

/// What a volume may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VolumeOptions {
    /// Bytes of the file system, rounded down to whole groups.
    pub(crate) max_bytes: u64,
    pub(crate) max_inodes: u64,
    /// Bytes of metadata held in memory.
    pub(crate) max_memory: u64,
}

struct Cached {
    bytes: Box<Block>,
    dirty: bool,
}

#[derive(Clone, Copy)]
struct Group {
    free_blocks: u32,
    free_inodes: u32,
    directories: u32,
    /// Inodes at the end of its table that were never used.
    unused_inodes: u32,
}

/// What a volume became.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finished {
    /// Bytes of the file system.
    pub(crate) size: u64,
    /// Bytes that files and structures take.
    pub(crate) used: u64,
}

/// One ext4 file system being changed.
pub(crate) struct Volume {
    below: Box<dyn Below>,
    out: Box<dyn Out>,
    options: VolumeOptions,
    superblock: [u8; 1024],
    groups: Vec<Group>,
    /// As many as lie below; 0 for a new file system.
    groups_below: usize,
    cache: BTreeMap<u32, Cached>,
    clean: usize,
    pub(super) dirs: BTreeMap<u32, Dir>,
    /// Bytes that `dirs` takes, about.
    pub(super) dir_bytes: u64,
    next_block: u32,
    next_inode: u32,
    used_inodes: u64,
}

impl Volume {
    /// A new file system. `uuid` is its id and the seed of its directories' hashes.
    pub(crate) fn create(
        uuid: [u8; 16],
        below: Box<dyn Below>,
        out: Box<dyn Out>,
        options: VolumeOptions,
    ) -> Result<Self> {
        let mut volume = Self::empty(below, out, options);
        volume.superblock = new_superblock(uuid);
        volume.add_group()?;
        volume.next_block = overhead(0);
        let system = Meta { mode: 0o600, mtime: (EPOCH, 0), ..Meta::default() };

        let (start, _) = volume.allocate(JOURNAL_BLOCKS)?;
        let mut journal = Inode::new(Kind::File, &system);
        journal.set_size(u64::from(JOURNAL_BLOCKS) * to_u64(BLOCK));
        let extent = Extent { logical: 0, start, len: JOURNAL_BLOCKS };
        volume.write_extents(&mut journal, Tree { extents: vec![extent], nodes: Vec::new() }, 0)?;
        write_journal(volume.fresh(start), uuid);
        put32(&mut volume.superblock, 0xe0, JOURNAL_INODE);
        volume.superblock[0xfd] = 1;
        volume.superblock[0x10c..0x148].copy_from_slice(journal.body());
        put32(&mut volume.superblock, 0x14c, JOURNAL_BLOCKS * 4096);
        volume.put_inode(JOURNAL_INODE, &journal)?;

        let mut resize = Inode::new(Kind::File, &system);
        // As many bytes as a block map of this shape could hold.
        resize.set_size((1024 * 1024 + 1024 + 12) * to_u64(BLOCK));
        let indirect = volume.allocate_one()?;
        put32(resize.body_mut(), 13 * 4, indirect);
        volume.put_inode(RESIZE_INODE, &resize)?;

        let root = Meta { mode: 0o755, mtime: (EPOCH, 0), ..Meta::default() };
        volume.new_root(&root)?;
        let lost = Meta { mode: 0o700, ..root };
        let found = volume.make_dir(ROOT, b"lost+found", &lost)?;
        debug_assert_eq!(found, FIRST_INODE);
        Ok(volume)
    }

    /// The file system that lies below, as an earlier layer left it.
    pub(crate) fn open(below: Box<dyn Below>, out: Box<dyn Out>, options: VolumeOptions) -> Result<Self> {
        let mut volume = Self::empty(below, out, options);
        let mut first = [0; BLOCK];
        volume.below.read(0, &mut first)?;
        volume.superblock.copy_from_slice(&first[1024..2048]);
        let sb = &volume.superblock;
        let blocks = get32(sb, 4);
        let count = blocks / BLOCKS_PER_GROUP;
        let ours = get16(sb, 0x38) == 0xef53
            && [get32(sb, 0x5c), get32(sb, 0x60), get32(sb, 0x64)] == [COMPAT, INCOMPAT, RO_COMPAT]
            && [get32(sb, 0x18), get32(sb, 0x20), get32(sb, 0x28)] == [2, BLOCKS_PER_GROUP, INODES_PER_GROUP]
            && blocks.is_multiple_of(BLOCKS_PER_GROUP)
            && (1..=MAX_GROUPS).contains(&count);
        if !ours {
            return Err(damaged("its superblock is not one that this program writes"));
        }
        for group in 0..count {
            let table = *volume.block(1 + group / DESCRIPTORS_PER_BLOCK)?;
            let at = to_usize(u64::from(group % DESCRIPTORS_PER_BLOCK)) * DESCRIPTOR;
            let entry = &table[at..at + DESCRIPTOR];
            if get16(entry, 0x1e) != volume.descriptor_crc(group, &entry[..0x1e]) {
                return Err(damaged(format!("the descriptor of group {group} has a wrong checksum")));
            }
            let places = [get32(entry, 0), get32(entry, 4), get32(entry, 8)];
            if places != [block_bitmap(group), inode_bitmap(group), inode_table(group)] {
                return Err(damaged(format!("group {group} is not laid out as this program does")));
            }
            let group = Group {
                free_blocks: u32::from(get16(entry, 0x0c)),
                free_inodes: u32::from(get16(entry, 0x0e)),
                directories: u32::from(get16(entry, 0x10)),
                unused_inodes: u32::from(get16(entry, 0x1c)),
            };
            if group.free_inodes > INODES_PER_GROUP || group.unused_inodes > INODES_PER_GROUP {
                return Err(damaged("a group has more free inodes than inodes"));
            }
            volume.used_inodes += u64::from(INODES_PER_GROUP - group.free_inodes);
            volume.groups.push(group);
        }
        volume.groups_below = volume.groups.len();
        volume.next_block = volume.first_never_used()?;
        Ok(volume)
    }

    fn empty(below: Box<dyn Below>, out: Box<dyn Out>, options: VolumeOptions) -> Self {
        Self {
            below,
            out,
            options,
            superblock: [0; 1024],
            groups: Vec::new(),
            groups_below: 0,
            cache: BTreeMap::new(),
            clean: 0,
            dirs: BTreeMap::new(),
            dir_bytes: 0,
            next_block: 0,
            next_inode: FIRST_INODE - 1,
            used_inodes: 0,
        }
    }

    /// Bytes that files and structures take.
    fn used_bytes(&self) -> u64 {
        let free: u64 = self.groups.iter().map(|group| u64::from(group.free_blocks)).sum();
        (self.block_count() - free) * to_u64(BLOCK)
    }

    pub(super) fn block_count(&self) -> u64 {
        to_u64(self.groups.len()) * u64::from(BLOCKS_PER_GROUP)
    }

    /// A metadata block to read.
    pub(super) fn block(&mut self, at: u32) -> Result<&Block> {
        Ok(&self.load(at, false)?.bytes)
    }

    /// A metadata block to change.
    pub(super) fn block_mut(&mut self, at: u32) -> Result<&mut Block> {
        Ok(&mut self.load(at, true)?.bytes)
    }

    /// A metadata block that begins as zeroes whatever was there.
    pub(super) fn fresh(&mut self, at: u32) -> &mut Block {
        let cached = Cached { bytes: Box::new([0; BLOCK]), dirty: true };
        if self.cache.insert(at, cached).is_some_and(|old| !old.dirty) {
            self.clean -= 1;
        }
        &mut self.cache.get_mut(&at).expect("put in above").bytes
    }

    fn load(&mut self, at: u32, change: bool) -> Result<&mut Cached> {
        if !self.cache.contains_key(&at) {
            if self.clean >= CLEAN_MAX {
                self.cache.retain(|_, cached| cached.dirty);
                self.clean = 0;
            }
            let mut bytes = Box::new([0; BLOCK]);
            self.below.read(u64::from(at), &mut bytes[..])?;
            self.cache.insert(at, Cached { bytes, dirty: false });
            self.clean += 1;
        }
        let cached = self.cache.get_mut(&at).expect("put in above");
        if change && !cached.dirty {
            cached.dirty = true;
            self.clean -= 1;
        }
        Ok(cached)
    }

    /// Counts memory that the caller holds for the layer, so that one bound covers it.
    pub(crate) fn charge(&mut self, bytes: u64) -> Result<()> {
        self.dir_bytes += bytes;
        self.check_memory()
    }

    pub(super) fn check_memory(&self) -> Result<()> {
        let taken = to_u64(self.cache.len() - self.clean) * to_u64(BLOCK) + self.dir_bytes;
        if taken > self.options.max_memory {
            return Err(Error::Limit(format!(
                "the layer's directories and inodes take more than {} MiB of memory; raise the limit on metadata if the image is to be trusted",
                self.options.max_memory >> 20
            )));
        }
        Ok(())
    }

    /// Whole blocks of file data, straight out.
    pub(super) fn write_data(&mut self, at: u32, bytes: &[u8]) -> Result<()> {
        Ok(self.out.write(u64::from(at), bytes)?)
    }

    /// File data that must be read back: a long symbolic link's.
    pub(super) fn read_data(&mut self, at: u32) -> Result<Block> {
        Ok(*self.block(at)?)
    }

    /// Up to `want` blocks side by side: where and how many.
    pub(super) fn allocate(&mut self, want: u32) -> Result<(u32, u32)> {
        if self.next_block == first_block(self.next_block / BLOCKS_PER_GROUP) && self.next_block > 0 {
            let group = self.next_block / BLOCKS_PER_GROUP;
            if to_usize(u64::from(group)) == self.groups.len() {
                self.add_group()?;
            }
            self.next_block += overhead(group);
        }
        let group = self.next_block / BLOCKS_PER_GROUP;
        let start = self.next_block;
        let len = want.min(first_block(group) + BLOCKS_PER_GROUP - start);
        let bitmap = self.block_mut(block_bitmap(group))?;
        (start..start + len).for_each(|block| set_bit(bitmap, block % BLOCKS_PER_GROUP, true));
        let free = &mut self.group(group).free_blocks;
        *free = free.checked_sub(len).ok_or_else(|| damaged("a group has fewer free blocks than it says"))?;
        self.next_block += len;
        Ok((start, len))
    }

    pub(super) fn allocate_one(&mut self) -> Result<u32> {
        Ok(self.allocate(1)?.0)
    }

    pub(super) fn free_blocks(&mut self, start: u32, len: u32) -> Result<()> {
        if u64::from(start) + u64::from(len) > self.block_count() {
            return Err(damaged("a file lies outside the file system"));
        }
        for block in start..start + len {
            let group = block / BLOCKS_PER_GROUP;
            if block - first_block(group) < overhead(group) {
                return Err(damaged("a file lies where the file system's own structures are"));
            }
            let bitmap = self.block_mut(block_bitmap(group))?;
            if !get_bit(bitmap, block % BLOCKS_PER_GROUP) {
                return Err(damaged("two files share a block"));
            }
            set_bit(bitmap, block % BLOCKS_PER_GROUP, false);
            self.group(group).free_blocks += 1;
            if let Some(old) = self.cache.remove(&block)
                && !old.dirty
            {
                self.clean -= 1;
            }
        }
        Ok(())
    }

    pub(super) fn allocate_inode(&mut self, directory: bool) -> Result<u32> {
        if self.used_inodes >= self.options.max_inodes {
            return Err(Error::Limit(format!(
                "the image has more than {} files; raise the limit on files if it is to be trusted",
                self.options.max_inodes
            )));
        }
        self.check_memory()?;
        loop {
            let group = self.next_inode / INODES_PER_GROUP;
            if to_usize(u64::from(group)) == self.groups.len() {
                self.add_group()?;
            }
            let from = self.next_inode % INODES_PER_GROUP;
            let free = if self.group(group).free_inodes == 0 {
                None
            } else {
                let bitmap = self.block(inode_bitmap(group))?;
                (from..INODES_PER_GROUP).find(|&bit| !get_bit(bitmap, bit))
            };
            let Some(bit) = free else {
                self.next_inode = (group + 1) * INODES_PER_GROUP;
                continue;
            };
            set_bit(self.block_mut(inode_bitmap(group))?, bit, true);
            let counts = self.group(group);
            counts.free_inodes -= 1;
            counts.directories += u32::from(directory);
            counts.unused_inodes = counts.unused_inodes.min(INODES_PER_GROUP - bit - 1);
            self.used_inodes += 1;
            self.next_inode = group * INODES_PER_GROUP + bit + 1;
            return Ok(self.next_inode);
        }
    }

    pub(super) fn free_inode(&mut self, number: u32, directory: bool) -> Result<()> {
        let (group, bit) = self.inode_place(number)?;
        let bitmap = self.block_mut(inode_bitmap(group))?;
        if number < FIRST_INODE || !get_bit(bitmap, bit) {
            return Err(damaged(format!("inode {number} is in a directory, but not in use")));
        }
        set_bit(bitmap, bit, false);
        self.put_inode(number, &Inode([0; INODE]))?;
        let counts = self.group(group);
        counts.free_inodes += 1;
        counts.directories = counts.directories.saturating_sub(u32::from(directory));
        self.used_inodes = self.used_inodes.saturating_sub(1);
        Ok(())
    }

    pub(super) fn inode(&mut self, number: u32) -> Result<Inode> {
        let (block, at) = self.inode_slot(number)?;
        let mut inode = Inode([0; INODE]);
        inode.0.copy_from_slice(&self.block(block)?[at..at + INODE]);
        Ok(inode)
    }

    pub(super) fn put_inode(&mut self, number: u32, inode: &Inode) -> Result<()> {
        let (block, at) = self.inode_slot(number)?;
        self.block_mut(block)?[at..at + INODE].copy_from_slice(&inode.0);
        Ok(())
    }

    fn inode_place(&self, number: u32) -> Result<(u32, u32)> {
        match number.checked_sub(1).map(|n| (n / INODES_PER_GROUP, n % INODES_PER_GROUP)) {
            Some((group, bit)) if to_usize(u64::from(group)) < self.groups.len() => Ok((group, bit)),
            _ => Err(damaged(format!("inode {number} is in a directory, but does not exist"))),
        }
    }

    fn inode_slot(&self, number: u32) -> Result<(u32, usize)> {
        let (group, bit) = self.inode_place(number)?;
        let at = to_usize(u64::from(bit % INODES_PER_BLOCK)) * INODE;
        Ok((inode_table(group) + bit / INODES_PER_BLOCK, at))
    }

    fn group(&mut self, group: u32) -> &mut Group {
        &mut self.groups[to_usize(u64::from(group))]
    }

    fn group_count(&self) -> u32 {
        u32::try_from(self.groups.len()).expect("at most 8192")
    }

    fn add_group(&mut self) -> Result<()> {
        let group = self.group_count();
        let max = self.options.max_bytes / (u64::from(BLOCKS_PER_GROUP) * to_u64(BLOCK));
        if u64::from(group) >= max.min(u64::from(MAX_GROUPS)) {
            return Err(Error::Limit(format!(
                "the image unpacks to more than {} MiB; raise the limit on its size if it is to be trusted",
                self.options.max_bytes >> 20
            )));
        }
        let bitmap = self.fresh(block_bitmap(group));
        (0..overhead(group)).for_each(|bit| set_bit(bitmap, bit, true));
        let reserved = if group == 0 { FIRST_INODE - 1 } else { 0 };
        let bitmap = self.fresh(inode_bitmap(group));
        bitmap[to_usize(u64::from(INODES_PER_GROUP / 8))..].fill(0xff);
        (0..reserved).for_each(|bit| set_bit(bitmap, bit, true));
        self.used_inodes += u64::from(reserved);
        self.groups.push(Group {
            free_blocks: BLOCKS_PER_GROUP - overhead(group),
            free_inodes: INODES_PER_GROUP - reserved,
            directories: 0,
            unused_inodes: INODES_PER_GROUP - reserved,
        });
        Ok(())
    }

    /// Counts the root directory, whose inode was reserved from the beginning.
    pub(super) fn count_root(&mut self) {
        self.groups[0].directories += 1;
    }

    /// The block after the last one in use.
    fn first_never_used(&mut self) -> Result<u32> {
        for group in (0..self.group_count()).rev() {
            if self.group(group).free_blocks >= BLOCKS_PER_GROUP - overhead(group) && group > 0 {
                continue;
            }
            let bitmap = *self.block(block_bitmap(group))?;
            let last = (0..BLOCKS_PER_GROUP).rev().find(|&bit| get_bit(&bitmap, bit));
            return match last {
                Some(bit) if bit + 1 >= overhead(group) => Ok(first_block(group) + bit + 1),
                _ => Err(damaged("a group's bitmap says that its own structures are free")),
            };
        }
        Err(damaged("it has no groups"))
    }

    /// Gives out every changed metadata block, in ascending order.
    pub(crate) fn finish(mut self) -> Result<Finished> {
        self.pack_directories()?;
        if self.groups.len() != self.groups_below {
            self.write_resize_inode()?;
        }
        self.write_descriptors()?;
        let finished = Finished { size: self.block_count() * to_u64(BLOCK), used: self.used_bytes() };
        let Self { below, mut out, cache, .. } = self;
        let mut old = [0; BLOCK];
        let mut run: Vec<u8> = Vec::with_capacity(64 * BLOCK);
        let mut run_start = 0;
        for (at, cached) in cache {
            if !cached.dirty {
                continue;
            }
            below.read(u64::from(at), &mut old)?;
            if old == *cached.bytes {
                continue;
            }
            if run_start + to_u64(run.len() / BLOCK) != u64::from(at) || run.len() >= 64 * BLOCK {
                if !run.is_empty() {
                    out.write(run_start, &run)?;
                }
                run.clear();
                run_start = u64::from(at);
            }
            run.extend_from_slice(&cached.bytes[..]);
        }
        if !run.is_empty() {
            out.write(run_start, &run)?;
        }
        Ok(finished)
    }

    /// The resize inode: an indirect block whose entries are the reserved descriptor blocks, each of which lists its
    /// copies in other groups.
    fn write_resize_inode(&mut self) -> Result<()> {
        let groups = self.group_count();
        let used = descriptor_blocks(groups);
        let copies: Vec<u32> = (1..groups).filter(|&group| has_super(group)).collect();
        let mut resize = self.inode(RESIZE_INODE)?;
        let indirect = get32(resize.body(), 13 * 4);
        let reserved = DESCRIPTOR_BLOCKS - used;
        let top = self.fresh(indirect);
        for n in used..DESCRIPTOR_BLOCKS {
            put32(top, to_usize(u64::from(n)) * 4, 1 + n);
        }
        for n in used..DESCRIPTOR_BLOCKS {
            let list = self.fresh(1 + n);
            for (at, group) in copies.iter().enumerate() {
                put32(list, at * 4, first_block(*group) + 1 + n);
            }
        }
        let copies = u32::try_from(copies.len()).expect("at most 18");
        resize.set_blocks(u64::from(1 + reserved * (1 + copies)));
        self.put_inode(RESIZE_INODE, &resize)
    }

    fn write_descriptors(&mut self) -> Result<()> {
        let count = self.group_count();
        let mut table = vec![[0u8; BLOCK]; to_usize(u64::from(descriptor_blocks(count)))];
        for (number, group) in (0u32..).zip(&self.groups) {
            let at = to_usize(u64::from(number % DESCRIPTORS_PER_BLOCK)) * DESCRIPTOR;
            let entry = &mut table[to_usize(u64::from(number / DESCRIPTORS_PER_BLOCK))][at..at + DESCRIPTOR];
            put32(entry, 0x00, block_bitmap(number));
            put32(entry, 0x04, inode_bitmap(number));
            put32(entry, 0x08, inode_table(number));
            put16(entry, 0x0c, low16(group.free_blocks));
            put16(entry, 0x0e, low16(group.free_inodes));
            put16(entry, 0x10, low16(group.directories));
            put16(entry, 0x12, ZEROED);
            put16(entry, 0x1c, low16(group.unused_inodes));
            let crc = self.descriptor_crc(number, &entry[..0x1e]);
            put16(entry, 0x1e, crc);
        }
        let blocks = u32::try_from(self.block_count()).expect("at most 2^28");
        let free_blocks: u32 = self.groups.iter().map(|group| group.free_blocks).sum();
        let free_inodes: u32 = self.groups.iter().map(|group| group.free_inodes).sum();
        let mut sb = self.superblock;
        put32(&mut sb, 0x00, count * INODES_PER_GROUP);
        put32(&mut sb, 0x04, blocks);
        put32(&mut sb, 0x0c, free_blocks);
        put32(&mut sb, 0x10, free_inodes);
        put16(&mut sb, 0xce, low16(DESCRIPTOR_BLOCKS - descriptor_blocks(count)));
        // Copies only when the geometry changed: counts in them are of no use.
        let grown = self.groups.len() != self.groups_below;
        for group in (0..count).filter(|&group| has_super(group) && (group == 0 || grown)) {
            put16(&mut sb, 0x5a, low16(group));
            let at = if group == 0 { 1024 } else { 0 };
            let block = self.fresh(first_block(group));
            block[at..at + 1024].copy_from_slice(&sb);
            for (n, bytes) in (1u32..).zip(&table) {
                *self.fresh(first_block(group) + n) = *bytes;
            }
            if group > 0 {
                for n in descriptor_blocks(count)..DESCRIPTOR_BLOCKS {
                    self.fresh(first_block(group) + 1 + n);
                }
            }
        }
        Ok(())
    }

    fn descriptor_crc(&self, group: u32, entry: &[u8]) -> u16 {
        let crc = crc16(0xffff, &self.superblock[0x68..0x78]);
        crc16(crc16(crc, &group.to_le_bytes()), entry)
    }

    /// The seed of directory hashes.
    pub(super) fn hash_seed(&self) -> [u32; 4] {
        [0, 4, 8, 12].map(|at| get32(&self.superblock, 0xec + at))
    }
}

fn new_superblock(uuid: [u8; 16]) -> [u8; 1024] {
    let mut sb = [0; 1024];
    let epoch = u32::try_from(EPOCH).expect("before 2106");
    for (at, value) in [
        (0x18, 2), // blocks of 1024 << 2
        (0x1c, 2),
        (0x20, BLOCKS_PER_GROUP),
        (0x24, BLOCKS_PER_GROUP),
        (0x28, INODES_PER_GROUP),
        (0x30, epoch),
        (0x40, epoch),
        (0x4c, 1), // dynamic revision
        (0x54, FIRST_INODE),
        (0x5c, COMPAT),
        (0x60, INCOMPAT),
        (0x64, RO_COMPAT),
        (0x100, 0x0c), // mount with user_xattr and acl
        (0x108, epoch),
        (0x160, 2), // directory hashes take bytes as unsigned
    ] {
        put32(&mut sb, at, value);
    }
    for (at, value) in [
        (0x36, 0xffff), // never check because of the count of mounts
        (0x38, 0xef53),
        (0x3a, 1), // clean
        (0x3c, 1), // go on after errors
        (0x58, 256),
        (0x15c, super::inode::EXTRA),
        (0x15e, super::inode::EXTRA),
    ] {
        put16(&mut sb, at, value);
    }
    sb[0x68..0x78].copy_from_slice(&uuid);
    sb[0x78..0x78 + LABEL.len()].copy_from_slice(LABEL);
    sb[0xec..0xfc].copy_from_slice(&uuid);
    sb[0xfc] = super::dir::TEA;
    sb
}

/// An empty journal. Its numbers are big-endian (jbd2).
fn write_journal(block: &mut Block, uuid: [u8; 16]) {
    for (at, value) in [
        (0x00, 0xc03b_3998u32), // magic
        (0x04, 4),              // superblock, version 2
        (0x0c, 4096),
        (0x10, JOURNAL_BLOCKS),
        (0x14, 1), // first block of the log
        (0x18, 1), // first expected commit
        (0x40, 1), // users
    ] {
        block[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }
    block[0x30..0x40].copy_from_slice(&uuid);
}

fn get_bit(bitmap: &Block, bit: u32) -> bool {
    bitmap[to_usize(u64::from(bit / 8))] & (1 << (bit % 8)) != 0
}

fn set_bit(bitmap: &mut Block, bit: u32, value: bool) {
    let byte = &mut bitmap[to_usize(u64::from(bit / 8))];
    *byte = if value { *byte | 1 << (bit % 8) } else { *byte & !(1 << (bit % 8)) };
}
