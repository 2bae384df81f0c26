//! Content of files and symbolic links.

use super::{
    BLOCK, Error, Kind, Meta, Result, damaged,
    extents::{Extent, Tree, push},
    inode::Inode,
    low32, to_u64, to_usize,
    volume::Volume,
};

/// Written at a time; a stretch of this many zeroes becomes a hole.
const BUFFER: usize = 256 * BLOCK;
/// The largest file with block numbers of 32 bits.
const MAX_SIZE: u64 = ((1 << 32) - 2) * 4096;
const MAX_EXTENTS: usize = 1 << 20;
const MAX_TARGET: usize = 4095;
const SHORT_TARGET: usize = 59;

/// A file whose content arrives in order.
pub(crate) struct FileWriter {
    number: u32,
    extents: Vec<Extent>,
    /// First block of `buffer` in the file.
    at: u64,
    buffer: Vec<u8>,
}

impl FileWriter {
    pub(super) fn new(number: u32) -> Self {
        Self { number, extents: Vec::new(), at: 0, buffer: Vec::new() }
    }

    /// Bytes so far.
    pub(crate) fn position(&self) -> u64 {
        self.at * to_u64(BLOCK) + to_u64(self.buffer.len())
    }

    pub(crate) fn write(&mut self, volume: &mut Volume, mut bytes: &[u8]) -> Result<()> {
        self.check(to_u64(bytes.len()))?;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BUFFER - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if self.buffer.len() == BUFFER {
                self.flush(volume)?;
            }
        }
        Ok(())
    }

    /// Leaves a hole up to byte `end`.
    pub(crate) fn skip_to(&mut self, volume: &mut Volume, end: u64) -> Result<()> {
        let Some(mut len) = end.checked_sub(self.position()) else {
            return Err(Error::Limit("a sparse file's pieces are out of order".into()));
        };
        self.check(len)?;
        let to_boundary = to_u64(self.buffer.len().next_multiple_of(BLOCK) - self.buffer.len()).min(len);
        self.buffer.resize(self.buffer.len() + to_usize(to_boundary), 0);
        len -= to_boundary;
        if len > 0 {
            self.flush(volume)?;
            self.at += len / to_u64(BLOCK);
            self.buffer.resize(to_usize(len % to_u64(BLOCK)), 0);
        }
        Ok(())
    }

    pub(crate) fn finish(mut self, volume: &mut Volume) -> Result<()> {
        let size = self.position();
        self.flush(volume)?;
        let mut inode = volume.inode(self.number)?;
        let others = u64::from(inode.attribute_block() != 0);
        let tree = Tree { extents: self.extents, nodes: Vec::new() };
        volume.write_extents(&mut inode, tree, others)?;
        inode.set_size(size);
        volume.put_inode(self.number, &inode)
    }

    fn check(&self, more: u64) -> Result<()> {
        match self.position().checked_add(more) {
            Some(end) if end <= MAX_SIZE => Ok(()),
            _ => Err(Error::Limit("a file is larger than 16 TiB; ext4 can't hold it".into())),
        }
    }

    fn flush(&mut self, volume: &mut Volume) -> Result<()> {
        let blocks = self.buffer.len().div_ceil(BLOCK);
        if blocks > 0 && self.buffer.iter().any(|byte| *byte != 0) {
            self.buffer.resize(blocks * BLOCK, 0);
            let mut done = 0;
            while done < blocks {
                let want = u32::try_from(blocks - done).expect("at most 256");
                let (start, len) = volume.allocate(want)?;
                let part = to_usize(u64::from(len));
                volume.write_data(start, &self.buffer[done * BLOCK..(done + part) * BLOCK])?;
                let logical = low32(self.at + to_u64(done));
                push(&mut self.extents, Extent { logical, start, len });
                done += part;
            }
            if self.extents.len() > MAX_EXTENTS {
                return Err(Error::Limit(format!("a sparse file has more than {MAX_EXTENTS} pieces")));
            }
        }
        self.at += to_u64(blocks);
        self.buffer.clear();
        Ok(())
    }
}

impl Volume {
    /// Makes a symbolic link; the name must be free.
    pub(crate) fn make_symlink(
        &mut self,
        parent: u32,
        name: &[u8],
        target: &[u8],
        meta: &Meta,
    ) -> Result<u32> {
        if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
            return Err(Error::Limit(format!(
                "the symbolic link {:?} leads to {} bytes; 1 to {MAX_TARGET} without NUL can be",
                String::from_utf8_lossy(name),
                target.len()
            )));
        }
        let number = self.make_node(parent, name, Kind::Symlink, (0, 0), meta)?;
        let mut inode = self.inode(number)?;
        if target.len() <= SHORT_TARGET {
            inode.body_mut()[..target.len()].copy_from_slice(target);
        } else {
            let others = u64::from(inode.attribute_block() != 0);
            let start = self.allocate_one()?;
            self.fresh(start)[..target.len()].copy_from_slice(target);
            let tree = Tree { extents: vec![Extent { logical: 0, start, len: 1 }], nodes: Vec::new() };
            self.write_extents(&mut inode, tree, others)?;
        }
        inode.set_size(to_u64(target.len()));
        self.put_inode(number, &inode)?;
        Ok(number)
    }

    /// Where a symbolic link leads.
    pub(crate) fn target(&mut self, number: u32) -> Result<Vec<u8>> {
        let inode: Inode = self.inode(number)?;
        let size = usize::try_from(inode.size()).unwrap_or(usize::MAX);
        if inode.kind() != Some(Kind::Symlink) || size > MAX_TARGET {
            return Err(damaged(format!("inode {number} is no symbolic link")));
        }
        if !inode.has_extents() {
            return match inode.body().get(..size) {
                Some(target) => Ok(target.to_vec()),
                None => Err(damaged(format!("the symbolic link {number} is too long"))),
            };
        }
        match self.read_extents(&inode)?.extents[..] {
            [extent] => Ok(self.read_data(extent.start)?[..size].to_vec()),
            _ => Err(damaged(format!("the symbolic link {number} has no content"))),
        }
    }
}
