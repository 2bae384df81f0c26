//! The 4096-byte header and trailer of layers and index logs.
//!
//! ```text
//!    0  magic        8   "LSMT\0\1\2\0"
//!    8  magic       16   657e63d2-9444-084c-a2d2-c8ec4fcfae8a (as bytes)
//!   24  size         4   390
//!   28  flags        4   bit 0 header, 1 data file, 2 sealed, 4 sparse
//!   32  index_offset 8   bytes
//!   40  index_size   8   entries
//!   48  virtual_size 8   bytes
//!   56  uuid        37   text, NUL-terminated
//!   93  parent uuid 37   text, NUL-terminated
//!  130  reserved     2
//!  132  version      1   1
//!  133  sub_version  1   1
//!  134  user tag   256
//!  390  zeroes to 4096
//! ```
//! Little-endian. Source: `format_spec.md` and `file.cpp` of containerd/overlaybd. The format has no checksum of its
//! own: layers are addressed by digest, so what can be checked here is shape, and every number is bounded by the file.

use uuid::Uuid;

use crate::Error;

/// Bytes taken by a header or trailer.
pub const HEADER_LEN: u64 = 4096;

const SPACE: usize = 4096;
const MAGIC: [u8; 24] = *b"LSMT\0\x01\x02\0\x65\x7e\x63\xd2\x94\x44\x08\x4c\xa2\xd2\xc8\xec\x4f\xcf\xae\x8a";
const STRUCT_SIZE: u32 = 390;
const VERSION: u8 = 1;
const TAG_LEN: usize = 256;
/// Larger virtual sizes can't be described by 50 bits of sectors.
const MAX_VIRTUAL_SIZE: u64 = 1 << 59;

const FLAG_HEADER: u32 = 1;
const FLAG_DATA: u32 = 1 << 1;
const FLAG_SEALED: u32 = 1 << 2;
const FLAG_SPARSE: u32 = 1 << 4;

/// What a header or trailer stands at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The start of a data file that is a layer or becomes one; `sealed` when it was written in one go.
    DataHeader {
        /// Whether the file was complete when the header was written.
        sealed: bool,
    },
    /// The end of a layer.
    DataTrailer,
    /// The start of the index log of a writable upper.
    IndexHeader,
}

impl Role {
    fn flags(self) -> u32 {
        match self {
            Role::DataHeader { sealed: false } => FLAG_HEADER | FLAG_DATA,
            Role::DataHeader { sealed: true } => FLAG_HEADER | FLAG_DATA | FLAG_SEALED,
            Role::DataTrailer => FLAG_DATA | FLAG_SEALED,
            Role::IndexHeader => FLAG_HEADER,
        }
    }
}

/// The meaning of a header or trailer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// What it stands at.
    pub role: Role,
    /// Where the index starts, in bytes; 0 where it is not known yet.
    pub index_offset: u64,
    /// Entries of the index; 0 where it is not known yet.
    pub index_size: u64,
    /// Bytes of the block device as its users see it.
    pub virtual_size: u64,
    /// This layer.
    pub uuid: Uuid,
    /// The layer it was written on; nil when none or unknown.
    pub parent: Uuid,
    /// Free text, at most 256 bytes.
    pub tag: String,
}

impl Header {
    /// The 4096 bytes on disk. A tag over 256 bytes is cut at a character.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0u8; SPACE];
        out[..24].copy_from_slice(&MAGIC);
        out[24..28].copy_from_slice(&STRUCT_SIZE.to_le_bytes());
        out[28..32].copy_from_slice(&self.role.flags().to_le_bytes());
        out[32..40].copy_from_slice(&self.index_offset.to_le_bytes());
        out[40..48].copy_from_slice(&self.index_size.to_le_bytes());
        out[48..56].copy_from_slice(&self.virtual_size.to_le_bytes());
        self.uuid.hyphenated().encode_lower(&mut out[56..92]);
        self.parent.hyphenated().encode_lower(&mut out[93..129]);
        out[132] = VERSION;
        out[133] = 1;
        let mut len = self.tag.len().min(TAG_LEN);
        while !self.tag.is_char_boundary(len) {
            len -= 1;
        }
        out[134..134 + len].copy_from_slice(&self.tag.as_bytes()[..len]);
        out
    }

    /// Reads and checks 4096 bytes that should play the part of `expected` (for a data header, sealed or not).
    pub fn decode(bytes: &[u8], expected: Role) -> Result<Self, Error> {
        let bad = |what: String| Err(Error::BadLayer(what));
        let place = match expected {
            Role::DataHeader { .. } => "header",
            Role::DataTrailer => "trailer",
            Role::IndexHeader => "index header",
        };
        if bytes.len() < SPACE {
            return bad(format!("the {place} is cut short"));
        }
        if bytes[..24] != MAGIC {
            return bad(format!("the {place} does not start with LSMT's magic bytes"));
        }
        let size = le32(bytes, 24);
        if size != STRUCT_SIZE {
            return bad(format!("the {place} says it is {size} bytes, {STRUCT_SIZE} is the only size known"));
        }
        let version = bytes[132];
        if version > VERSION {
            return bad(format!("the {place} is of version {version}, this code reads up to {VERSION}"));
        }
        let flags = le32(bytes, 28);
        if flags & FLAG_SPARSE != 0 {
            return bad(format!("the {place} belongs to a sparse writable file, which is not supported"));
        }
        let role = match expected {
            Role::DataHeader { .. } => Role::DataHeader { sealed: flags & FLAG_SEALED != 0 },
            other => other,
        };
        let known = FLAG_HEADER | FLAG_DATA | FLAG_SEALED;
        if flags & known != role.flags() {
            return bad(format!("the {place} has flags {flags:#x}, expected {:#x}", role.flags()));
        }
        let virtual_size = le64(bytes, 48);
        if virtual_size > MAX_VIRTUAL_SIZE {
            return bad(format!("the {place} claims a device of {virtual_size} bytes"));
        }
        Ok(Self {
            role,
            index_offset: le64(bytes, 32),
            index_size: le64(bytes, 40),
            virtual_size,
            uuid: text_uuid(&bytes[56..93]),
            parent: text_uuid(&bytes[93..130]),
            tag: text(&bytes[134..134 + TAG_LEN]),
        })
    }
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn text(bytes: &[u8]) -> String {
    let len = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

/// Layers of old tools carry an empty or unreadable parent: that means "unknown", as it does upstream.
fn text_uuid(bytes: &[u8]) -> Uuid {
    Uuid::try_parse(&text(bytes)).unwrap_or(Uuid::nil())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            role: Role::DataTrailer,
            index_offset: 0x1122_3344_5500,
            index_size: 3,
            virtual_size: 1 << 30,
            uuid: Uuid::from_u128(0x1234),
            parent: Uuid::nil(),
            tag: "note".into(),
        }
    }

    #[test]
    fn a_header_has_exactly_these_bytes() {
        let bytes = header().encode();
        assert_eq!(
            hex::encode(&bytes[..140]),
            concat!(
                "4c534d5400010200",                 // magic
                "657e63d29444084ca2d2c8ec4fcfae8a", // magic
                "86010000",
                "06000000",
                "0055443322110000",
                "0300000000000000",
                "0000004000000000",
                "30303030303030302d303030302d303030302d303030302d30303030303030303132333400", // uuid
                "30303030303030302d303030302d303030302d303030302d30303030303030303030303000", // parent
                "0000",
                "01",
                "01",
                "6e6f74650000",
            )
        );
        assert!(bytes[140..].iter().all(|&b| b == 0) && bytes.len() == 4096);
    }

    #[test]
    fn a_header_reads_back_as_written() {
        assert_eq!(Header::decode(&header().encode(), Role::DataTrailer).unwrap(), header());
    }

    #[test]
    fn hostile_headers_are_refused_with_the_reason() {
        let refused = |at: usize, value: &[u8], role| {
            let mut bytes = header().encode();
            bytes[at..at + value.len()].copy_from_slice(value);
            Header::decode(&bytes, role).unwrap_err().to_string()
        };
        assert!(refused(0, b"X", Role::DataTrailer).contains("magic"));
        assert!(refused(24, &[0xff], Role::DataTrailer).contains("390"));
        assert!(refused(132, &[9], Role::DataTrailer).contains("version 9"));
        assert!(refused(28, &[0x16], Role::DataTrailer).contains("sparse"));
        assert!(refused(28, &[0x02], Role::DataTrailer).contains("flags"));
        assert!(refused(48, &[0xff; 8], Role::DataTrailer).contains("device of"));
        assert!(refused(48, &[], Role::IndexHeader).contains("index header"));
        assert!(Header::decode(&[0; 100], Role::DataTrailer).unwrap_err().to_string().contains("cut short"));
    }
}
