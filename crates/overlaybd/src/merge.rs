//! Several layers made one, so that long stacks stay short.
//!
//! States and failures: the merge only reads its layers and only writes `out`. Until it returns `Ok`, `out` has no
//! trailer and no reader accepts it; whoever called gives it a name afterwards (temporary file, sync, rename). So a
//! crash, an error or a stop at any step leaves the stack as it was, and starting anew is the way to resume.
//! Memory: the layers' indexes twice, one MiB of data, and what a ZFile's workers hold.

use std::io;
use std::ops::ControlFlow;

use uuid::Uuid;

use crate::Error;
use crate::builder::{BuildOptions, BuiltLayer, LayerBuilder};
use crate::index::Index;
use crate::io::WriteAt;
use crate::layer::Layer;
use crate::mapping::{Mapping, SECTOR};
use crate::stack::check_entries;
use crate::zfile::{ZFileOptions, ZFileSink};

/// Bytes read and written between two looks at whether to go on.
const CHUNK: u64 = 1 << 20;

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
    /// Write it compressed, as a ZFile; by default plain.
    pub compress: Option<ZFileOptions>,
}

/// How far a merge is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MergeProgress {
    /// Bytes of the device copied so far.
    pub done: u64,
    /// All that will be copied.
    pub total: u64,
}

/// Writes `layers` (bottom first, neighbours in some stack) into the empty file `out` as one layer that can stand in
/// their place. What they overwrote or never mapped is left behind; zeroes that hide something below are kept unless
/// nothing is below. `Err` when `layers` is empty or more than a stack holds.
pub fn merge_layers<W: WriteAt>(layers: &[Layer], out: W, how: MergeOptions) -> Result<BuiltLayer, Error> {
    merge_layers_with(layers, out, how, |_| ControlFlow::Continue(()))
}

/// Like [`merge_layers`], and calls `watch` before each MiB: `Break` ends it with [`Error::Cancelled`].
pub fn merge_layers_with<W: WriteAt>(
    layers: &[Layer],
    out: W,
    how: MergeOptions,
    watch: impl FnMut(MergeProgress) -> ControlFlow<()>,
) -> Result<BuiltLayer, Error> {
    let options = describe(layers, how)?;
    let Some(compress) = how.compress else {
        let mut builder = LayerBuilder::new(out, options)?;
        copy(layers, &mut builder, watch)?;
        return builder.finish(how.sync);
    };
    let mut builder = LayerBuilder::new(ZFileSink::new(out, compress)?, options)?;
    copy(layers, &mut builder, watch)?;
    let (sink, built) = builder.finish_with(false)?;
    let (_, file) = sink.finish(how.sync)?;
    Ok(BuiltLayer { file_bytes: file.file_bytes, ..built })
}

/// What the result's header says.
fn describe(layers: &[Layer], how: MergeOptions) -> Result<BuildOptions, Error> {
    let (Some(lowest), Some(top)) = (layers.first(), layers.last()) else {
        return Err(Error::BadRange("there are no layers to merge".into()));
    };
    if layers.len() > crate::MAX_LAYERS {
        return Err(Error::TooManyLayers { got: layers.len(), max: crate::MAX_LAYERS });
    }
    check_entries(layers)?;
    let own = if top.info.uuid.is_nil() { Uuid::new_v4() } else { top.info.uuid };
    Ok(BuildOptions {
        virtual_size: layers.iter().map(|l| l.info.virtual_size).max().unwrap_or_default(),
        uuid: how.uuid.unwrap_or(own),
        parent: how.parent.unwrap_or(lowest.info.parent),
        tag: top.info.tag.clone(),
        keep_zeroes: !how.bottom,
    })
}

fn copy<W: WriteAt>(
    layers: &[Layer],
    builder: &mut LayerBuilder<W>,
    mut watch: impl FnMut(MergeProgress) -> ControlFlow<()>,
) -> Result<(), Error> {
    let levels = (0u8..)
        .zip(layers)
        .map(|(tag, layer)| layer.index.entries().iter().map(|m| m.with_tag(tag)).collect())
        .collect();
    let merged: Vec<Mapping> = Index::merge_all(levels);
    let total = merged.iter().filter(|m| !m.is_zero()).map(|m| m.sectors()).sum::<u64>() * SECTOR;
    let mut progress = MergeProgress { done: 0, total };
    let mut next_look = 0;
    let mut chunk = vec![0; usize::try_from(CHUNK).expect("one MiB")];
    for mapping in merged {
        if mapping.is_zero() {
            builder.append_zeroes(mapping.start() * SECTOR, mapping.sectors() * SECTOR)?;
            continue;
        }
        let source = &layers[usize::from(mapping.tag())].source;
        let len = mapping.sectors() * SECTOR;
        let mut done = 0;
        while done < len {
            if progress.done >= next_look {
                if watch(progress).is_break() {
                    return Err(Error::Cancelled);
                }
                next_look = progress.done + CHUNK;
            }
            let part = &mut chunk[..usize::try_from(CHUNK.min(len - done)).expect("at most one MiB")];
            source
                .read_at(part, mapping.place() * SECTOR + done)
                .map_err(|e| io::Error::new(e.kind(), format!("layer {}: {e}", mapping.tag())))
                .map_err(Error::io("reading a layer to merge"))?;
            builder.append(mapping.start() * SECTOR + done, part)?;
            let copied = CHUNK.min(len - done);
            (done, progress.done) = (done + copied, progress.done + copied);
        }
    }
    Ok(())
}
