//! Extended attributes: those that fit lie behind the inode's fields, the others in one block.

use super::{
    BLOCK, Error, Result,
    geometry::INODE,
    inode::{EXTRA, Inode},
    put16, put32,
    volume::Volume,
};

const MAGIC: u32 = 0xea02_0000;
const IN_INODE: usize = 128 + EXTRA as usize;
const BLOCK_HEADER: usize = 32;
const ENTRY: usize = 16;
const ACL_VERSION: u32 = 2;
const ACL_DISK_VERSION: u32 = 1;
const ACL_NAMED: [u16; 2] = [0x02, 0x08];

/// Name spaces and their numbers on disk; the two whole names first.
const SPACES: [(&[u8], u8); 6] = [
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"user.", 1),
    (b"trusted.", 4),
    (b"security.", 6),
    (b"system.", 7),
];

struct Attribute {
    space: u8,
    name: Vec<u8>,
    value: Vec<u8>,
}

impl Attribute {
    fn entry_size(&self) -> usize {
        (ENTRY + self.name.len()).next_multiple_of(4)
    }

    fn value_size(&self) -> usize {
        self.value.len().next_multiple_of(4)
    }

    fn hash(&self) -> u32 {
        let mut hash = self.name.iter().fold(0u32, |hash, byte| hash.rotate_left(5) ^ u32::from(*byte));
        for chunk in self.value.chunks(4) {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            hash = hash.rotate_left(16) ^ u32::from_le_bytes(word);
        }
        hash
    }
}

impl Volume {
    /// Replaces all attributes of `inode`. Names outside the name spaces of ext4 are left out.
    pub(super) fn write_attributes(&mut self, inode: &mut Inode, given: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut attributes =
            given.iter().filter_map(|(name, value)| attribute(name, value)).collect::<Vec<_>>();
        // The order that the kernel searches blocks in.
        attributes.sort_by(|a, b| (a.space, a.name.len(), &a.name).cmp(&(b.space, b.name.len(), &b.name)));
        let had = inode.attribute_block();
        inode.0[IN_INODE..].fill(0);
        let mut room = INODE - IN_INODE - 8;
        let (inside, outside): (Vec<_>, Vec<_>) = attributes.into_iter().partition(|attribute| {
            let size = attribute.entry_size() + attribute.value_size();
            let fits = size <= room;
            room -= if fits { size } else { 0 };
            fits
        });
        if !inside.is_empty() {
            put32(&mut inode.0, IN_INODE, MAGIC);
            put_all(&mut inode.0[IN_INODE + 4..], 0, &inside);
        }
        let block = if outside.is_empty() {
            if had != 0 {
                self.free_blocks(had, 1)?;
            }
            0
        } else {
            let size: usize = outside.iter().map(|a| a.entry_size() + a.value_size()).sum();
            if size > BLOCK - BLOCK_HEADER - 4 {
                return Err(Error::Limit(format!(
                    "a file has {size} bytes of extended attributes; ext4 holds about {BLOCK}"
                )));
            }
            let at = if had == 0 { self.allocate_one()? } else { had };
            let block = self.fresh(at);
            put32(block, 0, MAGIC);
            put32(block, 4, 1);
            put32(block, 8, 1);
            put32(block, 12, outside.iter().fold(0u32, |hash, a| hash.rotate_left(16) ^ a.hash()));
            put_all(block, BLOCK_HEADER, &outside);
            at
        };
        inode.set_attribute_block(block);
        inode.set_blocks((inode.blocks() + u64::from(block != 0)).saturating_sub(u64::from(had != 0)));
        Ok(())
    }
}

/// Entries from `at` on, values from the end back; offsets count from the beginning of `area`.
fn put_all(area: &mut [u8], mut at: usize, attributes: &[Attribute]) {
    let mut end = area.len();
    for attribute in attributes {
        let place = if attribute.value.is_empty() { 0 } else { end - attribute.value_size() };
        area[at] = u8::try_from(attribute.name.len()).expect("checked when made");
        area[at + 1] = attribute.space;
        put16(area, at + 2, u16::try_from(place).expect("at most a block"));
        put32(area, at + 8, u32::try_from(attribute.value.len()).expect("at most a block"));
        put32(area, at + 12, attribute.hash());
        area[at + ENTRY..at + ENTRY + attribute.name.len()].copy_from_slice(&attribute.name);
        if !attribute.value.is_empty() {
            area[place..place + attribute.value.len()].copy_from_slice(&attribute.value);
            end = place;
        }
        at += attribute.entry_size();
    }
}

fn attribute(name: &[u8], value: &[u8]) -> Option<Attribute> {
    let (space, rest) =
        SPACES.iter().find_map(|(prefix, space)| Some((*space, name.strip_prefix(*prefix)?)))?;
    let whole = matches!(space, 2 | 3);
    if whole != rest.is_empty() || rest.len() > 255 || rest.contains(&0) {
        return None;
    }
    let value = if whole { acl_on_disk(value)? } else { value.to_vec() };
    Some(Attribute { space, name: rest.to_vec(), value })
}

/// An access control list as ext4 keeps it: ids only with entries that name somebody.
fn acl_on_disk(value: &[u8]) -> Option<Vec<u8>> {
    let (version, entries) = value.split_at_checked(4)?;
    if version != ACL_VERSION.to_le_bytes() || !entries.len().is_multiple_of(8) {
        return None;
    }
    let mut out = ACL_DISK_VERSION.to_le_bytes().to_vec();
    for entry in entries.chunks(8) {
        let named = ACL_NAMED.contains(&u16::from_le_bytes([entry[0], entry[1]]));
        out.extend_from_slice(if named { entry } else { &entry[..4] });
    }
    Some(out)
}
