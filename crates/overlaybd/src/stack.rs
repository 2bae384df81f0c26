//! A read-only stack: many layers seen as one device through one merged index.

use std::io;
use std::sync::Arc;

use crate::Error;
use crate::index::{Index, MAX_INDEX_ENTRIES};
use crate::io::ReadAt;
use crate::layer::{Layer, LayerInfo};
use crate::mapping::{Mapping, SECTOR};

/// Most layers of one stack: a layer's place is one byte, and one value is the upper's.
pub const MAX_LAYERS: usize = 255;

/// Layers, bottom first, read as one device of `virtual_size` bytes. Unmapped sectors are zeroes.
pub struct Stack {
    sources: Vec<Arc<dyn ReadAt>>,
    infos: Vec<LayerInfo>,
    index: Index,
    virtual_size: u64,
}

impl Stack {
    /// Puts `layers` (bottom first; none is an empty device) on each other. Refuses a layer that names another
    /// parent than the one below it, where both are known.
    pub fn new(layers: Vec<Layer>, virtual_size: u64) -> Result<Self, Error> {
        check_size(virtual_size)?;
        check_count(layers.len())?;
        check_entries(&layers)?;
        for pair in layers.windows(2) {
            check_parent(&pair[0].info, &pair[1].info)?;
        }
        let levels = (0u8..)
            .zip(&layers)
            .map(|(tag, layer)| layer.index.entries().iter().map(|m| m.with_tag(tag)).collect())
            .collect();
        let mut merged = Index::merge_all(levels);
        merged.retain(|m| !m.is_zero());
        let (sources, infos) = layers.into_iter().map(|layer| (layer.source, layer.info)).unzip();
        Ok(Self { sources, infos, index: Index::trusted(merged), virtual_size })
    }

    /// This stack with one more layer, in one pass over the two indexes.
    pub(crate) fn with_layer(&self, layer: Layer) -> Result<Self, Error> {
        check_count(self.sources.len() + 1)?;
        let tag = u8::try_from(self.sources.len()).expect("at most 254 layers below");
        let above = layer.index.entries().iter().map(|m| m.with_tag(tag));
        let mut merged = Index::merge(above, self.index.entries());
        merged.retain(|m| !m.is_zero());
        let mut sources = self.sources.clone();
        let mut infos = self.infos.clone();
        sources.push(layer.source);
        infos.push(layer.info);
        Ok(Self { sources, infos, index: Index::trusted(merged), virtual_size: self.virtual_size })
    }

    /// Bytes of the device.
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// What the layers say of themselves, bottom first.
    pub fn layers(&self) -> &[LayerInfo] {
        &self.infos
    }

    /// The merged index; tags are places in [`layers`](Self::layers).
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Fills `buf` from byte `offset` of the device. Beyond its end is `UnexpectedEof`.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let (start, end) = sector_range(buf.len(), offset, self.virtual_size)?;
        let mut filler = Filler::new(buf, offset);
        let mut result = Ok(());
        self.index.visit(start, end, |m| {
            if result.is_ok() {
                result = filler.put(m, &*self.sources[usize::from(m.tag())]);
            }
        });
        result?;
        filler.finish();
        Ok(())
    }

    pub(crate) fn source(&self, tag: u8) -> &dyn ReadAt {
        &*self.sources[usize::from(tag)]
    }

    /// The first byte at or after `offset` that some layer stores; `None` when only zeroes follow.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        let mapping = self.index.entries_from(offset / SECTOR).first()?;
        Some((mapping.start() * SECTOR).max(offset)).filter(|&at| at < self.virtual_size)
    }

    /// The first byte at or after `offset` that no layer stores; the device's size when everything is.
    pub fn next_hole(&self, offset: u64) -> u64 {
        let mut at = offset / SECTOR;
        for mapping in self.index.entries_from(at) {
            if mapping.start() > at {
                break;
            }
            at = mapping.end();
        }
        (at * SECTOR).max(offset).min(self.virtual_size)
    }
}

impl ReadAt for Stack {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        Stack::read_at(self, buf, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.virtual_size)
    }
}

pub(crate) fn check_size(virtual_size: u64) -> Result<(), Error> {
    if virtual_size.is_multiple_of(SECTOR) && virtual_size < 1 << 59 {
        return Ok(());
    }
    Err(Error::BadRange(format!(
        "a device of {virtual_size} bytes is not possible: give a multiple of {SECTOR} below 2^59"
    )))
}

fn check_count(got: usize) -> Result<(), Error> {
    if got > MAX_LAYERS { Err(Error::TooManyLayers { got, max: MAX_LAYERS }) } else { Ok(()) }
}

/// A merge holds all entries in memory twice: 2 GiB at most.
pub(crate) fn check_entries(layers: &[Layer]) -> Result<(), Error> {
    const MAX: u64 = 4 * MAX_INDEX_ENTRIES;
    let got = layers.iter().map(|layer| layer.index.entries().len()).sum::<usize>();
    let got = u64::try_from(got).unwrap_or(u64::MAX);
    if got > MAX { Err(Error::IndexTooLarge { got, max: MAX }) } else { Ok(()) }
}

fn check_parent(below: &LayerInfo, above: &LayerInfo) -> Result<(), Error> {
    if below.uuid.is_nil() || above.parent.is_nil() || above.parent == below.uuid {
        return Ok(());
    }
    Err(Error::OutOfOrder(format!(
        "layer {} was written on {}, but lies on {}",
        above.uuid, above.parent, below.uuid
    )))
}

/// The sectors that `len` bytes from `offset` touch, when they lie inside the device.
pub(crate) fn sector_range(len: usize, offset: u64, virtual_size: u64) -> io::Result<(u64, u64)> {
    let end = u64::try_from(len).ok().and_then(|len| offset.checked_add(len));
    match end {
        Some(end) if end <= virtual_size => Ok((offset / SECTOR, end.div_ceil(SECTOR))),
        _ => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("{len} bytes at {offset} reach past the end of a device of {virtual_size} bytes"),
        )),
    }
}

/// Fills a buffer from mappings that come in order, zeroes in between.
pub(crate) struct Filler<'a> {
    buf: &'a mut [u8],
    offset: u64,
    done: usize,
}

impl<'a> Filler<'a> {
    pub(crate) fn new(buf: &'a mut [u8], offset: u64) -> Self {
        Self { buf, offset, done: 0 }
    }

    /// Reads the bytes of `mapping` that the buffer covers.
    pub(crate) fn put(&mut self, mapping: Mapping, source: &dyn ReadAt) -> io::Result<()> {
        let first = self.index_of(mapping.start() * SECTOR);
        let last = self.index_of(mapping.end() * SECTOR);
        self.buf[self.done..first].fill(0);
        if mapping.is_zero() {
            self.buf[first..last].fill(0);
        } else {
            let skipped = self.offset.saturating_sub(mapping.start() * SECTOR);
            source.read_at(&mut self.buf[first..last], mapping.place() * SECTOR + skipped)?;
        }
        self.done = last;
        Ok(())
    }

    pub(crate) fn finish(self) {
        self.buf[self.done..].fill(0);
    }

    /// Where device byte `at` lies in the buffer, cut to it.
    fn index_of(&self, at: u64) -> usize {
        usize::try_from(at.saturating_sub(self.offset)).unwrap_or(usize::MAX).min(self.buf.len())
    }
}
