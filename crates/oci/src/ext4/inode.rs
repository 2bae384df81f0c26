//! The 256 bytes of an inode.

use super::{geometry::INODE, get16, get32, low16, low32, put16, put32};

/// What an inode is, as directories record it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    CharDevice,
    BlockDevice,
    Fifo,
    Socket,
    Symlink,
}

impl Kind {
    pub(super) fn code(self) -> u8 {
        match self {
            Self::File => 1,
            Self::Directory => 2,
            Self::CharDevice => 3,
            Self::BlockDevice => 4,
            Self::Fifo => 5,
            Self::Socket => 6,
            Self::Symlink => 7,
        }
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::File,
            2 => Self::Directory,
            3 => Self::CharDevice,
            4 => Self::BlockDevice,
            5 => Self::Fifo,
            6 => Self::Socket,
            7 => Self::Symlink,
            _ => return None,
        })
    }

    fn mode_bits(self) -> u16 {
        match self {
            Self::File => 0o100_000,
            Self::Directory => 0o040_000,
            Self::CharDevice => 0o020_000,
            Self::BlockDevice => 0o060_000,
            Self::Fifo => 0o010_000,
            Self::Socket => 0o140_000,
            Self::Symlink => 0o120_000,
        }
    }
}

/// What is said of a file besides its content.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meta {
    /// Permission bits with setuid, setgid and sticky.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Seconds since 1970 and nanoseconds.
    pub(crate) mtime: (i64, u32),
    /// By full name, `user.note`; values as `getxattr` gives them.
    pub(crate) attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Years 1901 to 2446 can be said.
const TIMES: std::ops::RangeInclusive<i64> = -(1 << 31)..=(1 << 34) - (1 << 31) - 1;
pub(super) const EXTRA: u16 = 32;
const EXTENTS_FLAG: u32 = 0x8_0000;
const INDEX_FLAG: u32 = 0x1000;

#[derive(Clone)]
pub(super) struct Inode(pub(super) [u8; INODE]);

impl Inode {
    pub(super) fn new(kind: Kind, meta: &Meta) -> Self {
        let mut inode = Self([0; INODE]);
        inode.set_meta(kind, meta);
        put16(&mut inode.0, 0x1a, 1);
        put16(&mut inode.0, 0x80, EXTRA);
        inode
    }

    pub(super) fn set_meta(&mut self, kind: Kind, meta: &Meta) {
        let b = &mut self.0;
        put16(b, 0x00, kind.mode_bits() | (meta.mode & 0o7777));
        put16(b, 0x02, low16(meta.uid));
        put16(b, 0x78, low16(meta.uid >> 16));
        put16(b, 0x18, low16(meta.gid));
        put16(b, 0x7a, low16(meta.gid >> 16));
        let seconds = meta.mtime.0.clamp(*TIMES.start(), *TIMES.end());
        let epoch = (seconds + (1 << 31)).cast_unsigned() >> 32;
        let extra = (meta.mtime.1.min(999_999_999) << 2) | low32(epoch);
        let low = low32(seconds.cast_unsigned());
        // Access, change, modification and birth: an archive knows one time.
        for (at, extra_at) in [(0x08, 0x8c), (0x0c, 0x84), (0x10, 0x88), (0x90, 0x94)] {
            put32(b, at, low);
            put32(b, extra_at, extra);
        }
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        let bits = get16(&self.0, 0) & 0o170_000;
        (1..=7).filter_map(Kind::from_code).find(|kind| kind.mode_bits() == bits)
    }

    pub(super) fn links(&self) -> u16 {
        get16(&self.0, 0x1a)
    }

    pub(super) fn set_links(&mut self, links: u16) {
        put16(&mut self.0, 0x1a, links);
    }

    pub(super) fn size(&self) -> u64 {
        u64::from(get32(&self.0, 0x04)) | u64::from(get32(&self.0, 0x6c)) << 32
    }

    pub(super) fn set_size(&mut self, size: u64) {
        put32(&mut self.0, 0x04, low32(size));
        put32(&mut self.0, 0x6c, low32(size >> 32));
    }

    /// Blocks of data, of its extent tree and of its attributes.
    pub(super) fn blocks(&self) -> u64 {
        (u64::from(get32(&self.0, 0x1c)) | u64::from(get16(&self.0, 0x74)) << 32) / 8
    }

    pub(super) fn set_blocks(&mut self, blocks: u64) {
        put32(&mut self.0, 0x1c, low32(blocks * 8));
        put16(&mut self.0, 0x74, low16(low32((blocks * 8) >> 32)));
    }

    pub(super) fn has_extents(&self) -> bool {
        get32(&self.0, 0x20) & EXTENTS_FLAG != 0
    }

    pub(super) fn mark_extents(&mut self) {
        let flags = get32(&self.0, 0x20) | EXTENTS_FLAG;
        put32(&mut self.0, 0x20, flags);
    }

    pub(super) fn mark_index(&mut self, indexed: bool) {
        let flags = get32(&self.0, 0x20) & !INDEX_FLAG | if indexed { INDEX_FLAG } else { 0 };
        put32(&mut self.0, 0x20, flags);
    }

    pub(super) fn attribute_block(&self) -> u32 {
        get32(&self.0, 0x68)
    }

    pub(super) fn set_attribute_block(&mut self, block: u32) {
        put32(&mut self.0, 0x68, block);
    }

    /// Sixty bytes of extents, short target or device number.
    pub(super) fn body(&self) -> &[u8] {
        &self.0[0x28..0x64]
    }

    pub(super) fn body_mut(&mut self) -> &mut [u8] {
        &mut self.0[0x28..0x64]
    }

    pub(super) fn set_device(&mut self, major: u32, minor: u32) {
        let body = self.body_mut();
        if major < 256 && minor < 256 {
            put32(body, 0, major << 8 | minor);
        } else {
            put32(body, 4, (minor & 0xff) | (major & 0xfff) << 8 | (minor & 0xf_ff00) << 12);
        }
    }
}
