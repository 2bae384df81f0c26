//! How one block is compressed: LZ4's block format or a zstd frame, each block by itself.

use std::io;

use parking_lot::Mutex;
use zstd::bulk::{Compressor, Decompressor};

/// Level of the zstd frames that we write: upstream's.
const ZSTD_LEVEL: i32 = 3;
/// Idle zstd contexts (some 150 KB each) that a reader keeps.
const IDLE_CONTEXTS: usize = 2;

/// How the blocks of a ZFile are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Algorithm {
    /// LZ4's block format: fastest to read, upstream's default.
    #[default]
    Lz4,
    /// One zstd frame a block: smaller, slower.
    Zstd,
}

impl Algorithm {
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Lz4 => 1,
            Self::Zstd => 2,
        }
    }

    pub(super) fn of_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Most bytes that a block of `block_size` can take when compressed; what is longer is no block of ours or
    /// upstream's, which compress into `block_size + 512` bytes.
    pub(super) fn longest(block_size: u32) -> u32 {
        block_size + 512
    }
}

/// Compresses blocks; one for each thread.
pub(super) enum Encoder {
    Lz4 { scratch: Vec<u8> },
    Zstd { context: Compressor<'static>, scratch: Vec<u8> },
}

impl Encoder {
    pub(super) fn new(algorithm: Algorithm, block_size: u32) -> io::Result<Self> {
        let len = usize::try_from(block_size).expect("at most 64 KiB");
        Ok(match algorithm {
            Algorithm::Lz4 => Self::Lz4 { scratch: vec![0; lz4_flex::block::get_maximum_output_size(len)] },
            Algorithm::Zstd => Self::Zstd {
                context: Compressor::new(ZSTD_LEVEL)?,
                scratch: vec![0; zstd::zstd_safe::compress_bound(len)],
            },
        })
    }

    /// The compressed form of one non-empty block.
    pub(super) fn encode(&mut self, block: &[u8]) -> io::Result<&[u8]> {
        match self {
            Self::Lz4 { scratch } => {
                let len = lz4_flex::block::compress_into(block, scratch).map_err(io::Error::other)?;
                Ok(&scratch[..len])
            }
            Self::Zstd { context, scratch } => {
                let len = context.compress_to_buffer(block, &mut scratch[..])?;
                Ok(&scratch[..len])
            }
        }
    }
}

/// Decompresses blocks; shared by all threads that read a file.
pub(super) struct Decoder {
    algorithm: Algorithm,
    idle: Mutex<Vec<Decompressor<'static>>>,
}

impl Decoder {
    pub(super) fn new(algorithm: Algorithm) -> Self {
        Self { algorithm, idle: Mutex::new(Vec::new()) }
    }

    /// Fills `out`, which is as long as the block was, or says why it can't.
    pub(super) fn decode(&self, compressed: &[u8], out: &mut [u8]) -> Result<(), String> {
        let len = match self.algorithm {
            Algorithm::Lz4 => lz4_flex::block::decompress_into(compressed, out).map_err(|e| e.to_string())?,
            Algorithm::Zstd => {
                let idle = self.idle.lock().pop();
                let mut context = match idle {
                    Some(context) => context,
                    None => Decompressor::new().map_err(|e| e.to_string())?,
                };
                let len = context.decompress_to_buffer(compressed, &mut out[..]).map_err(|e| e.to_string());
                let mut idle = self.idle.lock();
                if idle.len() < IDLE_CONTEXTS {
                    idle.push(context);
                }
                len?
            }
        };
        if len == out.len() { Ok(()) } else { Err(format!("it holds {len} bytes instead of {}", out.len())) }
    }
}
