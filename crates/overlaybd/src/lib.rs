//! The layer format of disks and memory images: overlaybd's LSMT, byte-compatible with containerd/overlaybd.
//!
//! A *layer* is an immutable file: header, data, a sorted index of where each run of 512-byte sectors lies, trailer.
//! A *stack* is up to 255 layers, bottom first, seen as one block device through one merged index. A *writable stack*
//! has an append-only upper (a data file and an index log) that can be sealed into a layer without copying its data.
//!
//! ```text
//!   WritableStack ── upper: LogIndex + data file + index log      write, write_zeroes, flush, seal
//!        │
//!      Stack ─────── one merged Index over all layers             read
//!        │
//!      Layer … Layer (LSMT, plain or in a ZFile, or raw)          LayerBuilder, merge_layers make them
//!        │
//!      dyn ReadAt    a file here; a cache over a registry elsewhere
//! ```
//!
//! The crate knows the format only. Bytes come from [`ReadAt`] and go to [`WriteAt`]; both block, because their
//! callers are FUSE and ublk threads. Nothing here opens a path, knows a network or runs a task.
#![forbid(unsafe_code)]

mod builder;
mod error;
mod header;
mod index;
mod index_log;
mod io;
mod layer;
mod log_index;
mod mapping;
mod merge;
mod stack;
mod tar_wrap;
mod upper;
mod writable;
mod zfile;

pub use builder::{BuildOptions, BuiltLayer, LayerBuilder, build_from_file};
pub use error::Error;
pub use header::{HEADER_LEN, Header, Role};
pub use index::{Index, MAX_INDEX_ENTRIES, UPSTREAM_MAX_INDEX_ENTRIES};
pub use io::{ReadAt, WriteAt};
pub use layer::{Layer, LayerInfo};
pub use mapping::{MAX_MAPPING_SECTORS, Mapping, SECTOR};
pub use merge::{MergeOptions, MergeProgress, merge_layers, merge_layers_with};
pub use stack::{MAX_LAYERS, Stack};
pub use upper::{Upper, UpperOptions};
pub use writable::{Sealed, WritableStack};
pub use zfile::{
    Algorithm, BlockCache, MAX_BLOCK, MIN_BLOCK, ZFILE_HEADER_LEN, ZFileHeader, ZFileOptions, ZFilePart,
    ZFileReader, ZFileSink, ZFileSummary, ZFileWriter, compress_to_zfile,
};
