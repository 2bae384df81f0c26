//! One immutable layer: an LSMT file, plain or compressed, alone or in a tar archive, or a flat file standing for
//! itself.

use std::sync::Arc;

use uuid::Uuid;
use zerocopy::IntoBytes;

use crate::Error;
use crate::header::{HEADER_LEN, Header, Role};
use crate::index::{Index, MAX_INDEX_ENTRIES};
use crate::io::ReadAt;
use crate::mapping::{Mapping, RUN_SECTORS, SECTOR};
use crate::tar_wrap;
use crate::zfile::{BlockCache, ZFILE_HEADER_LEN, ZFileHeader, ZFileReader};

/// What a layer says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    /// The layer; nil for a raw one.
    pub uuid: Uuid,
    /// The layer it was written on; nil when none or unknown.
    pub parent: Uuid,
    /// Bytes of the device it was written for.
    pub virtual_size: u64,
    /// Free text of its writer.
    pub tag: String,
}

/// A layer that can be put on a stack.
#[derive(Clone)]
pub struct Layer {
    pub(crate) source: Arc<dyn ReadAt>,
    pub(crate) index: Arc<Index>,
    pub(crate) info: LayerInfo,
}

impl Layer {
    /// Opens an LSMT file, which may be compressed as a ZFile, and either may be the one file of a tar archive: its
    /// first bytes say which. A compressed layer keeps up to 1 MiB of decoded blocks; see
    /// [`open_with`](Self::open_with) to share that. Nothing in it is trusted: magic, version, kind and every size are checked against the
    /// file's length and our bounds, the index for order and for staying inside the data section.
    pub fn open(source: Arc<dyn ReadAt>) -> Result<Self, Error> {
        Self::open_as(tar_wrap::unwrap(source)?, None)
    }

    /// Like [`open`](Self::open), with a cache of decoded blocks that other layers may share.
    pub fn open_with(source: Arc<dyn ReadAt>, cache: &Arc<BlockCache>) -> Result<Self, Error> {
        Self::open_as(tar_wrap::unwrap(source)?, Some(cache))
    }

    fn open_as(source: Arc<dyn ReadAt>, cache: Option<&Arc<BlockCache>>) -> Result<Self, Error> {
        let mut first = [0u8; 24];
        if source.size().map_err(Error::io("reading the layer's size"))? >= ZFILE_HEADER_LEN {
            source.read_at(&mut first, 0).map_err(Error::io("reading a layer's first bytes"))?;
        }
        let compressed = ZFileHeader::recognises(&first);
        match (compressed, cache) {
            (false, _) => Self::open_plain(source),
            (true, None) => Self::open_plain(Arc::new(ZFileReader::open(source)?)),
            (true, Some(cache)) => Self::open_plain(Arc::new(ZFileReader::open_with(source, cache.clone())?)),
        }
    }

    fn open_plain(source: Arc<dyn ReadAt>) -> Result<Self, Error> {
        let bad = |what: String| Error::BadLayer(what);
        let size = source.size().map_err(Error::io("reading the layer's size"))?;
        if size < 2 * HEADER_LEN {
            return Err(bad(format!("{size} bytes are too few for a header and a trailer")));
        }
        Self::read_header(&*source, 0, Role::DataHeader { sealed: true })?;
        let trailer_at = size - HEADER_LEN;
        let trailer = Self::read_header(&*source, trailer_at, Role::DataTrailer)?;

        if trailer.index_size > MAX_INDEX_ENTRIES {
            return Err(Error::IndexTooLarge { got: trailer.index_size, max: MAX_INDEX_ENTRIES });
        }
        let index_bytes = trailer.index_size * 16;
        let fits = trailer.index_offset >= HEADER_LEN
            && trailer.index_offset.is_multiple_of(SECTOR)
            && trailer.index_offset.checked_add(index_bytes).is_some_and(|end| end <= trailer_at);
        if !fits {
            return Err(bad(format!(
                "an index of {} entries at byte {} does not fit before the trailer at {trailer_at}",
                trailer.index_size, trailer.index_offset
            )));
        }
        let len = usize::try_from(trailer.index_size).map_err(|_| bad("index larger than memory".into()))?;
        let mut entries = vec![Mapping::padding(0); len];
        source
            .read_at(entries.as_mut_bytes(), trailer.index_offset)
            .map_err(Error::io("reading the layer's index"))?;
        entries.retain(|m| !m.is_padding());
        let data_end = trailer.index_offset / SECTOR;
        for entry in &mut entries {
            let starts_inside = (HEADER_LEN / SECTOR..=data_end).contains(&entry.place());
            if entry.sectors() == 0 || !starts_inside || entry.place_end() > data_end {
                return Err(bad(format!("index entry {entry:?} points outside the data section")));
            }
            *entry = entry.with_tag(0);
        }
        let index = Index::new(entries)
            .map_err(|(a, b)| bad(format!("index entries {a:?} and {b:?} overlap or are out of order")))?;
        Ok(Self {
            source,
            index: Arc::new(index),
            info: LayerInfo {
                uuid: trailer.uuid,
                parent: trailer.parent,
                virtual_size: trailer.virtual_size,
                tag: trailer.tag,
            },
        })
    }

    /// A flat file as a layer: it maps all of its length to itself and hides everything below.
    pub fn raw(source: Arc<dyn ReadAt>) -> Result<Self, Error> {
        let size = source.size().map_err(Error::io("reading the raw layer's size"))?;
        if !size.is_multiple_of(SECTOR) {
            return Err(Error::BadRange(format!(
                "a raw layer must be a whole number of {SECTOR}-byte sectors, this one has {size} bytes; pad it"
            )));
        }
        let sectors = size / SECTOR;
        if sectors.div_ceil(RUN_SECTORS) > MAX_INDEX_ENTRIES {
            return Err(Error::BadRange(format!("a raw layer of {size} bytes is too large")));
        }
        let step = usize::try_from(RUN_SECTORS).unwrap_or(usize::MAX);
        let entries = (0..sectors)
            .step_by(step)
            .map(|start| Mapping::data(start, RUN_SECTORS.min(sectors - start), start))
            .collect();
        let info =
            LayerInfo { uuid: Uuid::nil(), parent: Uuid::nil(), virtual_size: size, tag: String::new() };
        Ok(Self { source, index: Arc::new(Index::trusted(entries)), info })
    }

    /// A sealed upper, whose index is already known to be right.
    pub(crate) fn sealed(source: Arc<dyn ReadAt>, index: Index, info: LayerInfo) -> Self {
        Self { source, index: Arc::new(index), info }
    }

    /// What the layer says of itself.
    pub fn info(&self) -> &LayerInfo {
        &self.info
    }

    /// Its index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    fn read_header(source: &dyn ReadAt, at: u64, role: Role) -> Result<Header, Error> {
        let mut bytes = [0u8; 4096];
        source.read_at(&mut bytes, at).map_err(Error::io("reading a layer's header or trailer"))?;
        Header::decode(&bytes, role)
    }
}
