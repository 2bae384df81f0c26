//! Several layers made one, so that long stacks stay short.

use std::io;

use uuid::Uuid;

use crate::Error;
use crate::builder::{BuildOptions, BuiltLayer, LayerBuilder};
use crate::index::Index;
use crate::io::WriteAt;
use crate::layer::Layer;
use crate::mapping::SECTOR;

/// How layers are merged.
#[derive(Debug, Clone, Copy, Default)]
pub struct MergeOptions {
    /// Nothing lies below them, so zeroes need not be recorded.
    pub bottom: bool,
    /// Return only when the result is on stable storage.
    pub sync: bool,
    /// Id of the result; by default the top layer's, so that whatever was written on that still fits.
    pub uuid: Option<Uuid>,
    /// What the result lies on; by default what the bottom layer does.
    pub parent: Option<Uuid>,
}

/// Writes `layers` (bottom first, neighbours in some stack) as one layer that can stand in their place. What they
/// overwrote or never mapped is left behind. `Err` when `layers` is empty.
pub fn merge_layers<W: WriteAt>(layers: &[Layer], out: W, how: MergeOptions) -> Result<BuiltLayer, Error> {
    const CHUNK: u64 = 1 << 20;
    let (Some(lowest), Some(top)) = (layers.first(), layers.last()) else {
        return Err(Error::BadRange("there are no layers to merge".into()));
    };
    let own = if top.info.uuid.is_nil() { Uuid::new_v4() } else { top.info.uuid };
    let options = BuildOptions {
        virtual_size: layers.iter().map(|l| l.info.virtual_size).max().unwrap_or_default(),
        uuid: how.uuid.unwrap_or(own),
        parent: how.parent.unwrap_or(lowest.info.parent),
        tag: top.info.tag.clone(),
        keep_zeroes: !how.bottom,
    };
    if layers.len() > crate::MAX_LAYERS {
        return Err(Error::TooManyLayers { got: layers.len(), max: crate::MAX_LAYERS });
    }
    let levels = (0u8..)
        .zip(layers)
        .map(|(tag, layer)| layer.index.entries().iter().map(|m| m.with_tag(tag)).collect())
        .collect();
    let mut builder = LayerBuilder::new(out, options)?;
    let mut chunk = vec![0; usize::try_from(CHUNK).expect("one MiB")];
    for mapping in Index::merge_all(levels) {
        if mapping.is_zero() {
            builder.append_zeroes(mapping.start() * SECTOR, mapping.sectors() * SECTOR)?;
            continue;
        }
        let source = &layers[usize::from(mapping.tag())].source;
        let len = mapping.sectors() * SECTOR;
        let mut done = 0;
        while done < len {
            let part = &mut chunk[..usize::try_from(CHUNK.min(len - done)).expect("at most one MiB")];
            source
                .read_at(part, mapping.place() * SECTOR + done)
                .map_err(|e| io::Error::new(e.kind(), format!("layer {}: {e}", mapping.tag())))
                .map_err(Error::io("reading a layer to merge"))?;
            builder.append(mapping.start() * SECTOR + done, part)?;
            done += CHUNK.min(len - done);
        }
    }
    builder.finish(how.sync)
}
