//! Directories: loaded whole when first touched, packed whole when the layer is finished.
//!
//! One block holds `.`, `..` and the names. More become a hashed tree, so that a directory of a hundred thousand names
//! is quick in the guest: block 0 is the root, the leaves follow, then the nodes between where there are many. Leaves
//! hold names by ascending hash.

use super::{
    BLOCK, Error, FileWriter, Kind, Meta, ROOT, Result, damaged,
    extents::{Tree, blocks_for, of_blocks},
    get16, get32,
    inode::Inode,
    put16, put32, to_u64,
    volume::{Block, Volume},
};
use std::collections::BTreeMap;

/// The hash's number.
pub(super) const TEA: u8 = 2;
const MAX_NAME: usize = 255;
const MAX_LINKS: u16 = 65000;
const MAX_BLOCKS: usize = 1 << 17;
const ROOT_ENTRIES: usize = (BLOCK - 32) / 8;
const NODE_ENTRIES: usize = (BLOCK - 8) / 8;
/// What a name costs in memory besides its bytes.
const NAME_COST: u64 = 64;

pub(super) struct Dir {
    entries: BTreeMap<Vec<u8>, (u32, Kind)>,
    parent: u32,
    dirty: bool,
}

impl Volume {
    pub(super) fn new_root(&mut self, meta: &Meta) -> Result<()> {
        self.put_inode(ROOT, &Inode::new(Kind::Directory, meta))?;
        self.count_root();
        self.dirs.insert(ROOT, Dir { entries: BTreeMap::new(), parent: ROOT, dirty: true });
        Ok(())
    }

    /// The inode called `name` in `dir`.
    pub(crate) fn lookup(&mut self, dir: u32, name: &[u8]) -> Result<Option<(u32, Kind)>> {
        Ok(self.dir(dir)?.entries.get(name).copied())
    }

    /// All names of a directory, sorted.
    pub(crate) fn names(&mut self, dir: u32) -> Result<Vec<Vec<u8>>> {
        Ok(self.dir(dir)?.entries.keys().cloned().collect())
    }

    /// Makes an empty directory; the name must be free.
    pub(crate) fn make_dir(&mut self, parent: u32, name: &[u8], meta: &Meta) -> Result<u32> {
        check_name(name)?;
        let number = self.allocate_inode(true)?;
        self.put_new(number, Inode::new(Kind::Directory, meta), meta)?;
        self.dirs.insert(number, Dir { entries: BTreeMap::new(), parent, dirty: true });
        self.add(parent, name, number, Kind::Directory)?;
        Ok(number)
    }

    /// Makes a device, FIFO or socket; the name must be free. `device` is major and minor.
    pub(crate) fn make_node(
        &mut self,
        parent: u32,
        name: &[u8],
        kind: Kind,
        device: (u32, u32),
        meta: &Meta,
    ) -> Result<u32> {
        check_name(name)?;
        let number = self.allocate_inode(false)?;
        let mut inode = Inode::new(kind, meta);
        if matches!(kind, Kind::CharDevice | Kind::BlockDevice) {
            inode.set_device(device.0, device.1);
        }
        self.put_new(number, inode, meta)?;
        self.add(parent, name, number, kind)?;
        Ok(number)
    }

    /// Begins a file; the name must be free. The caller finishes the writer.
    pub(crate) fn make_file(&mut self, parent: u32, name: &[u8], meta: &Meta) -> Result<FileWriter> {
        check_name(name)?;
        let number = self.allocate_inode(false)?;
        self.put_new(number, Inode::new(Kind::File, meta), meta)?;
        self.add(parent, name, number, Kind::File)?;
        Ok(FileWriter::new(number))
    }

    /// Counts one more name of a file that exists; [`name_held`](Self::name_held) gives it.
    pub(crate) fn hold(&mut self, number: u32) -> Result<()> {
        let mut inode = self.inode(number)?;
        if inode.links() >= MAX_LINKS {
            return Err(Error::Limit(format!(
                "a file has more than {MAX_LINKS} hard links; ext4 can't have more"
            )));
        }
        inode.set_links(inode.links() + 1);
        self.put_inode(number, &inode)
    }

    /// Gives a file the name that [`hold`](Self::hold) counted; the name must be free.
    pub(crate) fn name_held(&mut self, parent: u32, name: &[u8], number: u32, kind: Kind) -> Result<()> {
        check_name(name)?;
        self.add(parent, name, number, kind)
    }

    /// Removes a name and, where it is the last one, what it names, with everything in it.
    pub(crate) fn remove(&mut self, parent: u32, name: &[u8]) -> Result<()> {
        let Some((number, kind)) = self.dir_mut(parent)?.entries.remove(name) else { return Ok(()) };
        self.dir_bytes = self.dir_bytes.saturating_sub(to_u64(name.len()) + NAME_COST);
        let mut todo = vec![(number, kind)];
        while let Some((number, kind)) = todo.pop() {
            if kind == Kind::Directory {
                self.dir(number)?;
                let dir = self.dirs.remove(&number).expect("loaded above");
                for (name, child) in dir.entries {
                    self.dir_bytes = self.dir_bytes.saturating_sub(to_u64(name.len()) + NAME_COST);
                    todo.push(child);
                }
            }
            self.unlink(number, kind)?;
        }
        Ok(())
    }

    fn unlink(&mut self, number: u32, kind: Kind) -> Result<()> {
        let mut inode = self.inode(number)?;
        if kind != Kind::Directory && inode.links() > 1 {
            inode.set_links(inode.links() - 1);
            return self.put_inode(number, &inode);
        }
        let tree = self.read_extents(&inode)?;
        for extent in &tree.extents {
            self.free_blocks(extent.start, extent.len)?;
        }
        for node in tree.nodes {
            self.free_blocks(node, 1)?;
        }
        if inode.attribute_block() != 0 {
            self.free_blocks(inode.attribute_block(), 1)?;
        }
        self.free_inode(number, kind == Kind::Directory)
    }

    /// Gives an inode other metadata; its content, size and links stay.
    pub(crate) fn set_meta(&mut self, number: u32, kind: Kind, meta: &Meta) -> Result<()> {
        let mut inode = self.inode(number)?;
        inode.set_meta(kind, meta);
        self.put_new(number, inode, meta)
    }

    fn put_new(&mut self, number: u32, mut inode: Inode, meta: &Meta) -> Result<()> {
        self.write_attributes(&mut inode, &meta.attributes)?;
        self.put_inode(number, &inode)
    }

    fn add(&mut self, parent: u32, name: &[u8], number: u32, kind: Kind) -> Result<()> {
        self.dir_mut(parent)?.entries.insert(name.to_vec(), (number, kind));
        self.dir_bytes += to_u64(name.len()) + NAME_COST;
        self.check_memory()
    }

    fn dir_mut(&mut self, number: u32) -> Result<&mut Dir> {
        let dir = self.dir(number)?;
        dir.dirty = true;
        Ok(dir)
    }

    fn dir(&mut self, number: u32) -> Result<&mut Dir> {
        if !self.dirs.contains_key(&number) {
            let dir = self.read_dir(number)?;
            self.dirs.insert(number, dir);
        }
        Ok(self.dirs.get_mut(&number).expect("put in above"))
    }

    fn read_dir(&mut self, number: u32) -> Result<Dir> {
        let inode = self.inode(number)?;
        let bad = |what: &str| damaged(format!("directory {number} {what}"));
        if inode.kind() != Some(Kind::Directory) {
            return Err(bad("is none"));
        }
        let blocks = Self::blocks_of(&self.read_extents(&inode)?.extents);
        if blocks.len() != blocks_for(inode.size()) || blocks.len() > MAX_BLOCKS {
            return Err(bad("has another size than its blocks"));
        }
        let mut dir = Dir { entries: BTreeMap::new(), parent: ROOT, dirty: false };
        for block in blocks {
            let bytes = *self.block(block)?;
            let mut at = 0;
            while at < BLOCK {
                if at + 8 > BLOCK {
                    return Err(bad("has an entry across blocks"));
                }
                let (child, length) = (get32(&bytes, at), usize::from(get16(&bytes, at + 4)));
                let name_end = at + 8 + usize::from(bytes[at + 6]);
                if length < 8 || at + length > BLOCK || (child != 0 && name_end > at + length) {
                    return Err(bad("has an entry that makes no sense"));
                }
                if child != 0 {
                    let kind =
                        Kind::from_code(bytes[at + 7]).ok_or_else(|| bad("has an entry of no kind"))?;
                    match &bytes[at + 8..name_end] {
                        b"." => {}
                        b".." => dir.parent = child,
                        name => {
                            self.dir_bytes += to_u64(name.len()) + NAME_COST;
                            dir.entries.insert(name.to_vec(), (child, kind));
                        }
                    }
                }
                at += length;
            }
            self.check_memory()?;
        }
        Ok(dir)
    }

    pub(super) fn pack_directories(&mut self) -> Result<()> {
        let seed = self.hash_seed();
        for (number, dir) in std::mem::take(&mut self.dirs) {
            if !dir.dirty {
                continue;
            }
            let packed = pack(number, &dir, seed)?;
            let mut inode = self.inode(number)?;
            let Tree { extents, nodes } = self.read_extents(&inode)?;
            let mut blocks = Self::blocks_of(&extents);
            while blocks.len() > packed.len() {
                let block = blocks.pop().expect("longer than what is packed");
                self.free_blocks(block, 1)?;
            }
            while blocks.len() < packed.len() {
                let want = u32::try_from(packed.len() - blocks.len()).expect("bounded by memory");
                let (start, len) = self.allocate(want)?;
                blocks.extend(start..start + len);
            }
            let tree = Tree { extents: of_blocks(&blocks), nodes };
            let others = u64::from(inode.attribute_block() != 0);
            self.write_extents(&mut inode, tree, others)?;
            inode.set_size(to_u64(packed.len() * BLOCK));
            inode.mark_index(packed.len() > 1);
            let directories = dir.entries.values().filter(|(_, kind)| *kind == Kind::Directory).count();
            // One stands for "too many to count".
            let links = u16::try_from(directories + 2).ok().filter(|links| *links < MAX_LINKS).unwrap_or(1);
            inode.set_links(links);
            self.put_inode(number, &inode)?;
            for (block, bytes) in blocks.into_iter().zip(packed) {
                *self.fresh(block) = bytes;
            }
        }
        Ok(())
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    let bad = name.is_empty() || name.len() > MAX_NAME || name.contains(&0) || name.contains(&b'/');
    if bad || name == b"." || name == b".." {
        return Err(Error::Limit(format!(
            "a file is called {:?}, which can't be: names have 1 to {MAX_NAME} bytes without NUL and slash",
            String::from_utf8_lossy(&name[..name.len().min(300)])
        )));
    }
    Ok(())
}

fn entry_size(name: &[u8]) -> usize {
    (8 + name.len()).next_multiple_of(4)
}

fn put_entry(block: &mut Block, at: usize, number: u32, kind: Kind, name: &[u8], length: usize) {
    put32(block, at, number);
    put16(block, at + 4, u16::try_from(length).expect("at most a block"));
    block[at + 6] = u8::try_from(name.len()).expect("checked when it was added");
    block[at + 7] = kind.code();
    block[at + 8..at + 8 + name.len()].copy_from_slice(name);
}

/// Fills blocks with entries one behind the other; the last of a block reaches to its end.
struct Packer {
    blocks: Vec<Block>,
    last: usize,
    end: usize,
}

impl Packer {
    fn new() -> Self {
        Self { blocks: vec![[0; BLOCK]], last: 0, end: 0 }
    }

    /// Says whether a new block was begun.
    fn push(&mut self, number: u32, kind: Kind, name: &[u8]) -> bool {
        let size = entry_size(name);
        let full = self.end + size > BLOCK;
        if full {
            self.close();
            self.blocks.push([0; BLOCK]);
            (self.last, self.end) = (0, 0);
        }
        let block = self.blocks.last_mut().expect("never empty");
        put_entry(block, self.end, number, kind, name, size);
        self.last = self.end;
        self.end += size;
        full
    }

    fn close(&mut self) {
        let length = u16::try_from(BLOCK - self.last).expect("at most a block");
        put16(self.blocks.last_mut().expect("never empty"), self.last + 4, length);
    }
}

fn pack(number: u32, dir: &Dir, seed: [u32; 4]) -> Result<Vec<Block>> {
    let bytes = 24 + dir.entries.keys().map(|name| entry_size(name)).sum::<usize>();
    if bytes <= BLOCK {
        let mut packer = Packer::new();
        packer.push(number, Kind::Directory, b".");
        packer.push(dir.parent, Kind::Directory, b"..");
        for (name, (child, kind)) in &dir.entries {
            packer.push(*child, *kind, name);
        }
        packer.close();
        return Ok(packer.blocks);
    }
    let mut hashed: Vec<_> =
        dir.entries.iter().map(|(name, child)| (hash(name, seed), name, child)).collect();
    hashed.sort_unstable_by_key(|(hash, name, _)| (*hash, *name));
    let mut packer = Packer::new();
    // For each leaf the hash it begins with; the low bit says that the leaf before ends with the same.
    let mut starts = vec![0];
    let mut before = 0;
    for ((major, _), name, (child, kind)) in hashed {
        if packer.push(*child, *kind, name) {
            starts.push(major | u32::from(major == before));
        }
        before = major;
    }
    packer.close();
    index(number, dir.parent, packer.blocks, &starts)
}

fn index(number: u32, parent: u32, leaves: Vec<Block>, starts: &[u32]) -> Result<Vec<Block>> {
    let mut root = [0; BLOCK];
    put_entry(&mut root, 0, number, Kind::Directory, b".", 12);
    put_entry(&mut root, 12, parent, Kind::Directory, b"..", BLOCK - 12);
    root[28] = TEA;
    root[29] = 8;
    let numbered: Vec<(u32, u32)> = starts.iter().copied().zip(1u32..).collect();
    let mut blocks = vec![root];
    blocks.extend(leaves);
    let mut top = numbered;
    if top.len() > ROOT_ENTRIES {
        let mut above = Vec::new();
        for chunk in top.chunks(NODE_ENTRIES) {
            let mut node = [0; BLOCK];
            put16(&mut node, 4, u16::try_from(BLOCK).expect("4096"));
            put_index(&mut node, 8, NODE_ENTRIES, chunk);
            above.push((chunk[0].0, u32::try_from(blocks.len()).expect("bounded by memory")));
            blocks.push(node);
        }
        if above.len() > ROOT_ENTRIES {
            return Err(Error::Limit("a directory has more names than two levels of index can hold".into()));
        }
        top = above;
        blocks[0][30] = 1;
    }
    put_index(&mut blocks[0], 32, ROOT_ENTRIES, &top);
    Ok(blocks)
}

fn put_index(block: &mut Block, at: usize, limit: usize, entries: &[(u32, u32)]) {
    for (n, (hash, child)) in entries.iter().enumerate() {
        put32(block, at + n * 8, *hash);
        put32(block, at + n * 8 + 4, *child);
    }
    // The first entry stands for everything before the second: its hash's place holds the counts.
    put16(block, at, u16::try_from(limit).expect("at most 511"));
    put16(block, at + 2, u16::try_from(entries.len()).expect("at most 511"));
}

/// The directory hash "TEA" over unsigned bytes: major and minor.
fn hash(name: &[u8], seed: [u32; 4]) -> (u32, u32) {
    let mut state = [seed[0], seed[1]];
    let mut rest = name;
    while !rest.is_empty() {
        tea(&mut state, words(rest));
        rest = &rest[rest.len().min(16)..];
    }
    let major = state[0] & !1;
    (if major == 0xffff_fffe { 0xffff_fffc } else { major }, state[1])
}

/// Four words of a name, filled up with its length.
fn words(name: &[u8]) -> [u32; 4] {
    let length = u32::try_from(name.len()).expect("at most 255");
    let pad = length.wrapping_mul(0x0101_0101);
    let mut out = [pad; 4];
    for (word, chunk) in out.iter_mut().zip(name.chunks(4)) {
        *word = chunk.iter().fold(pad, |word, byte| (word << 8).wrapping_add(u32::from(*byte)));
    }
    out
}

fn tea(state: &mut [u32; 2], [a, b, c, d]: [u32; 4]) {
    let (mut sum, mut x, mut y) = (0u32, state[0], state[1]);
    for _ in 0..16 {
        sum = sum.wrapping_add(0x9e37_79b9);
        let mixed = (y << 4).wrapping_add(a) ^ y.wrapping_add(sum) ^ (y >> 5).wrapping_add(b);
        x = x.wrapping_add(mixed);
        let mixed = (x << 4).wrapping_add(c) ^ x.wrapping_add(sum) ^ (x >> 5).wrapping_add(d);
        y = y.wrapping_add(mixed);
    }
    state[0] = state[0].wrapping_add(x);
    state[1] = state[1].wrapping_add(y);
}
