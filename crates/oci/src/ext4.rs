//! An ext4 file system that is written once, layer upon layer, and then mounted by guests.
//!
//! It reads what it needs of the file system below through [`Below`], keeps changed metadata in memory, streams file
//! data straight into [`Out`], and gives the changed metadata out at the end: what came out is the difference over
//! what lay below. There is no host file system in it anywhere.
//!
//! ```text
//! volume   superblock, groups, bitmaps, the cache of metadata blocks; grows by whole groups of 128 MiB
//! extents  where a file's blocks lie         file   data in order, holes, symbolic links
//! dir      names, loaded when touched, packed when the layer is finished
//! attributes  extended attributes, in the inode or in one block
//! ```
//!
//! What was decided:
//! - 4 KiB blocks, 256-byte inodes, extents, 32-byte group descriptors (no `64bit`: 16 TiB are enough for a root).
//! - `resize_inode` with room for the descriptors of 1 TiB, `sparse_super`: the guest's kernel grows it while mounted.
//! - `uninit_bg` (one CRC a group) so that growing needs no zeroing, but not `metadata_csum`: layers are addressed by
//!   sha256 and the cache checks blocks, so it would only slow the guest.
//! - A journal of 16 MiB made in the base layer, so that a guest's root survives the guest's death. It is all zeroes
//!   but for one block and takes no room in the layer.
//! - Blocks and inodes are taken in ascending order and never taken again within a layer; ids and times derive from what the
//!   caller gives. Same input, same bytes.
//!
//! Source: the kernel's Documentation/filesystems/ext4. What lies below may come from a shared bucket, so it is
//! checked while read: damage is [`Error::Damaged`], never a panic.

mod attributes;
mod dir;
mod extents;
mod file;
mod geometry;
mod inode;
mod volume;

pub(crate) use file::FileWriter;
pub(crate) use geometry::BLOCK;
pub(crate) use inode::{Kind, Meta};
pub(crate) use volume::{Volume, VolumeOptions};

use std::io;

/// The root directory's inode.
pub(crate) const ROOT: u32 = 2;

/// Why the file system can't be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the layers below hold a damaged file system: {0}; convert the image anew")]
    Damaged(String),
    #[error("{0}")]
    Limit(String),
    #[error("reading the layers below: {0}")]
    Read(#[from] io::Error),
    #[error("writing the layer: {0}")]
    Write(#[from] aenv_overlaybd::Error),
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// The device below this layer; bytes that nobody wrote are zero.
pub(crate) trait Below: Send {
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()>;
}

/// Where this layer's blocks go.
pub(crate) trait Out: Send {
    /// `bytes` are whole blocks.
    fn write(&mut self, block: u64, bytes: &[u8]) -> std::result::Result<(), aenv_overlaybd::Error>;
}

fn damaged(what: impl Into<String>) -> Error {
    Error::Damaged(what.into())
}

fn get16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn get32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// The low 32 bits.
fn low32(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).expect("masked")
}

/// The low 16 bits.
fn low16(value: u32) -> u16 {
    u16::try_from(value & 0xffff).expect("masked")
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("at most a block's or buffer's length")
}

fn to_u64(value: usize) -> u64 {
    u64::try_from(value).expect("64-bit machines")
}
