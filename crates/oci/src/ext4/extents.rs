//! Extent trees: read whole, written whole.

use super::{
    BLOCK, Result, damaged, get16, get32, inode::Inode, put16, put32, to_u64, to_usize, volume::Volume,
};

const MAGIC: u16 = 0xf30a;
const IN_INODE: usize = 4;
const PER_BLOCK: usize = (BLOCK - 12) / 12;
/// A leaf's length field says more for extents that are not written yet; we make none.
pub(super) const MAX_EXTENT: u32 = 32768;
const MAX_DEPTH: u16 = 5;

/// `len` blocks of a file from its block `logical` on, lying at `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) logical: u32,
    pub(super) start: u32,
    pub(super) len: u32,
}

/// Adds to a list in order, joining neighbours.
pub(super) fn push(extents: &mut Vec<Extent>, next: Extent) {
    if let Some(last) = extents.last_mut()
        && last.logical + last.len == next.logical
        && last.start + last.len == next.start
        && last.len + next.len <= MAX_EXTENT
    {
        last.len += next.len;
    } else {
        extents.push(next);
    }
}

/// A file's extents and the blocks of the tree that holds them.
#[derive(Default)]
pub(super) struct Tree {
    pub(super) extents: Vec<Extent>,
    pub(super) nodes: Vec<u32>,
}

impl Volume {
    pub(super) fn read_extents(&mut self, inode: &Inode) -> Result<Tree> {
        let mut tree = Tree::default();
        if !inode.has_extents() {
            return Ok(tree);
        }
        let root = inode.body().to_vec();
        self.walk(&root, None, &mut tree)?;
        Ok(tree)
    }

    fn walk(&mut self, node: &[u8], expected: Option<u16>, tree: &mut Tree) -> Result<()> {
        let (entries, depth) = (usize::from(get16(node, 2)), get16(node, 6));
        let fits = 12 + entries * 12 <= node.len();
        if get16(node, 0) != MAGIC || !fits || depth > MAX_DEPTH || expected.is_some_and(|e| e != depth) {
            return Err(damaged("an extent tree's node makes no sense"));
        }
        for n in 0..entries {
            let entry = &node[12 + n * 12..][..12];
            if depth == 0 {
                let (logical, len, start) = (get32(entry, 0), u32::from(get16(entry, 4)), get32(entry, 8));
                let inside = u64::from(start) + u64::from(len) <= self.block_count();
                let ordered = tree.extents.last().is_none_or(|last| last.logical + last.len <= logical);
                if len == 0
                    || len > MAX_EXTENT
                    || get16(entry, 6) != 0
                    || !inside
                    || !ordered
                    || start == 0
                    || logical.checked_add(len).is_none()
                {
                    return Err(damaged("an extent lies outside the file system or out of order"));
                }
                tree.extents.push(Extent { logical, start, len });
            } else {
                let block = get32(entry, 4);
                if u64::from(block) >= self.block_count() || block == 0 || get16(entry, 8) != 0 {
                    return Err(damaged("an extent tree leads outside the file system"));
                }
                let child = *self.block(block)?;
                tree.nodes.push(block);
                self.walk(&child, Some(depth - 1), tree)?;
            }
        }
        Ok(())
    }

    /// Puts `tree.extents` into `inode`, on the blocks of `tree.nodes` first, and sets its count of blocks, that of
    /// its attributes left as it is in `others`.
    pub(super) fn write_extents(&mut self, inode: &mut Inode, tree: Tree, others: u64) -> Result<()> {
        let mut spare = tree.nodes;
        spare.reverse();
        let data: u64 = tree.extents.iter().map(|extent| u64::from(extent.len)).sum();
        let mut level: Vec<(u32, [u8; 12])> = tree.extents.iter().map(leaf_entry).collect();
        let mut depth = 0;
        let mut nodes = 0;
        while level.len() > IN_INODE {
            let mut above = Vec::with_capacity(level.len().div_ceil(PER_BLOCK));
            for chunk in level.chunks(PER_BLOCK) {
                let block = match spare.pop() {
                    Some(block) => block,
                    None => self.allocate_one()?,
                };
                nodes += 1;
                write_node(&mut self.fresh(block)[..], chunk, depth, PER_BLOCK);
                let mut entry = [0; 12];
                put32(&mut entry, 0, chunk[0].0);
                put32(&mut entry, 4, block);
                above.push((chunk[0].0, entry));
            }
            level = above;
            depth += 1;
        }
        for block in spare {
            self.free_blocks(block, 1)?;
        }
        inode.body_mut().fill(0);
        write_node(inode.body_mut(), &level, depth, IN_INODE);
        inode.mark_extents();
        inode.set_blocks(data + nodes + others);
        Ok(())
    }

    /// Every block of a file, in order, holes left out.
    pub(super) fn blocks_of(extents: &[Extent]) -> Vec<u32> {
        extents.iter().flat_map(|extent| extent.start..extent.start + extent.len).collect()
    }
}

fn leaf_entry(extent: &Extent) -> (u32, [u8; 12]) {
    let mut entry = [0; 12];
    put32(&mut entry, 0, extent.logical);
    put16(&mut entry, 4, u16::try_from(extent.len).expect("at most 32768"));
    put32(&mut entry, 8, extent.start);
    (extent.logical, entry)
}

fn write_node(node: &mut [u8], entries: &[(u32, [u8; 12])], depth: u16, max: usize) {
    put16(node, 0, MAGIC);
    put16(node, 2, u16::try_from(entries.len()).expect("at most 340"));
    put16(node, 4, u16::try_from(max).expect("at most 340"));
    put16(node, 6, depth);
    for (n, (_, entry)) in entries.iter().enumerate() {
        node[12 + n * 12..][..12].copy_from_slice(entry);
    }
}

/// Extents over `blocks`, in order and without holes.
pub(super) fn of_blocks(blocks: &[u32]) -> Vec<Extent> {
    let mut extents = Vec::new();
    for (logical, start) in blocks.iter().enumerate() {
        let logical = u32::try_from(to_u64(logical)).expect("directories are small");
        push(&mut extents, Extent { logical, start: *start, len: 1 });
    }
    extents
}

/// Blocks that `bytes` take.
pub(super) fn blocks_for(bytes: u64) -> usize {
    to_usize(bytes.div_ceil(to_u64(BLOCK)))
}
