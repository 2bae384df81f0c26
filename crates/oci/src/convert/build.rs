//! Makes one converted layer. Blocking; two threads: one checks and decompresses, one applies.

use super::{
    ConvertError, ConvertOptions, ConvertedLayer, LayerRef, Store,
    apply::{self, apply},
    spool::Spool,
    store::{FORMAT, LAYER, digest_of},
};
use crate::{
    CancellationToken,
    ext4::{BLOCK, Below, Out, Volume, VolumeOptions},
};
use aenv_overlaybd::{BuildOptions, HEADER_LEN, Header, Layer, LayerBuilder, Role, Stack};
use flate2::bufread::MultiGzDecoder;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Read},
    os::unix::fs::FileExt as _,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};
use uuid::Uuid;

/// Of the device while it is written: as far as the file system can grow.
const MAX_DEVICE: u64 = 1 << 40;
const PIECE: usize = 256 << 10;
const PIECES: usize = 8;

pub(super) struct Builder {
    pub(super) store: Store,
    pub(super) options: ConvertOptions,
    pub(super) stop: CancellationToken,
}

impl Builder {
    /// Converts the blob in `spool` on top of `below` (bottom first) and keeps it as `chain`.
    pub(super) fn build(
        &self,
        layer: &LayerRef,
        chain: &str,
        parent: Option<&str>,
        below: &[ConvertedLayer],
        spool: &Spool,
    ) -> Result<ConvertedLayer, ConvertError> {
        let digest = || layer.digest.clone();
        let io =
            |step: &'static str| move |source: io::Error| ConvertError::Io { step: step.to_owned(), source };
        let format = |e: aenv_overlaybd::Error| ConvertError::Io {
            step: "read or write converted layers".to_owned(),
            source: io::Error::other(e),
        };
        let directory = self.store.temporary()?;
        let path = directory.path().join(LAYER);
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(io("make a layer's file"))?;
        let build = BuildOptions {
            uuid: id_of(chain),
            parent: parent.map_or(Uuid::nil(), id_of),
            tag: String::new(),
            keep_zeroes: parent.is_some(),
            virtual_size: MAX_DEVICE,
        };
        let out = Arc::new(Mutex::new(LayerBuilder::new(file, build).map_err(format)?));
        let limits = VolumeOptions {
            max_bytes: self.options.max_fs_bytes,
            max_inodes: self.options.max_files,
            max_memory: self.options.max_memory,
        };
        let to = Box::new(ToLayer(Arc::clone(&out)));
        let bad = |reason: String| ConvertError::Layer { digest: digest(), reason };
        let mut volume = if parent.is_none() {
            Volume::create(id_of(chain).into_bytes(), Box::new(Nothing), to, limits)
        } else {
            let layers = below.iter().map(open).collect::<Result<Vec<_>, _>>()?;
            let stack = Stack::new(layers, MAX_DEVICE).map_err(format)?;
            Volume::open(Box::new(OnStack(stack)), to, limits)
        }
        .map_err(|e| bad(e.to_string()))?;

        self.apply_blob(layer, spool, &mut volume)?;

        let finished = volume.finish().map_err(|e| bad(e.to_string()))?;
        let out = Arc::into_inner(out).expect("the volume is gone").into_inner();
        let (file, built) = out.finish_with(false).map_err(format)?;
        set_virtual_size(&file, built.file_bytes, finished.size).map_err(format)?;
        file.sync_all().map_err(io("sync a layer's file"))?;
        let read = File::open(&path).map_err(io("open a layer's file"))?;
        let converted = ConvertedLayer {
            format: FORMAT,
            chain_id: chain.to_owned(),
            diff_id: layer.diff_id.clone(),
            digest: digest_of(read).map_err(io("hash a layer's file"))?,
            size: built.file_bytes,
            fs_size: finished.size,
            used: finished.used,
            path,
        };
        self.store.keep(directory, converted)
    }

    /// Streams the blob through digest, decompression and diff id into the file system.
    fn apply_blob(&self, layer: &LayerRef, spool: &Spool, volume: &mut Volume) -> Result<(), ConvertError> {
        let digest = || layer.digest.clone();
        let cancelled = || self.stop.is_cancelled();
        let max = self.options.max_layer_bytes;
        let (applied, unpacked) = std::thread::scope(|scope| {
            let (sender, receiver) = sync_channel(PIECES);
            let unpacking = scope.spawn(move || unpack(spool, max, &sender));
            let mut pieces = Pieces { receiver, piece: Vec::new(), at: 0 };
            let applied = apply(&mut pieces, volume, max, &cancelled);
            // What follows the archive's end counts for the digests.
            if applied.is_ok() {
                while pieces.receiver.recv().is_ok() {}
            }
            drop(pieces);
            let unpacked = unpacking.join();
            (applied, unpacked.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        if let Some(source) = spool.take_error() {
            return Err(ConvertError::Source { digest: digest(), source });
        }
        match (applied, unpacked) {
            (Err(apply::Error::Cancelled), _) => Err(ConvertError::Cancelled),
            // The archive ends early where its unpacking failed: that is the cause.
            (_, Err(Unpack::Failed(reason))) => Err(ConvertError::Layer { digest: digest(), reason }),
            (Err(e), _) => Err(ConvertError::Layer { digest: digest(), reason: e.to_string() }),
            (Ok(()), Err(Unpack::Unwanted)) => Err(ConvertError::Cancelled),
            (Ok(()), Ok(found)) => found.check(layer),
        }
    }
}

/// What a blob turned out to be.
struct Unpacked {
    digest: String,
    size: u64,
    diff_id: String,
}

impl Unpacked {
    fn check(&self, layer: &LayerRef) -> Result<(), ConvertError> {
        let reason = if self.size != layer.size {
            format!("it has {} bytes, not {}", self.size, layer.size)
        } else if self.digest != layer.digest {
            format!("its digest is {}", self.digest)
        } else if self.diff_id != layer.diff_id {
            format!("the digest of its content is {}, not {}", self.diff_id, layer.diff_id)
        } else {
            return Ok(());
        };
        Err(ConvertError::Digest { digest: layer.digest.clone(), reason })
    }
}

enum Unpack {
    Failed(String),
    /// The other thread wants no more.
    Unwanted,
}

fn unpack(spool: &Spool, max: u64, sender: &SyncSender<Vec<u8>>) -> Result<Unpacked, Unpack> {
    let failed = |e: io::Error| Unpack::Failed(format!("it can't be decompressed: {e}"));
    let mut blob = BufReader::with_capacity(PIECE, Hashed::new(spool.reader()));
    let mut diff = Sha256::new();
    let mut left = max;
    {
        let magic = blob.fill_buf().map_err(failed)?;
        let mut content: Box<dyn Read + '_> = match magic {
            [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(&mut blob)),
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                Box::new(zstd::stream::read::Decoder::with_buffer(&mut blob).map_err(failed)?)
            }
            _ => Box::new(&mut blob),
        };
        loop {
            let mut piece = vec![0; PIECE];
            let mut got = 0;
            while got < PIECE {
                match content.read(&mut piece[got..]).map_err(failed)? {
                    0 => break,
                    more => got += more,
                }
            }
            if got == 0 {
                break;
            }
            piece.truncate(got);
            diff.update(&piece);
            left = left.checked_sub(got as u64).ok_or_else(|| {
                Unpack::Failed(format!(
                    "it unpacks to more than {max} bytes; raise the limit if it is to be trusted"
                ))
            })?;
            sender.send(piece).map_err(|_| Unpack::Unwanted)?;
        }
    }
    io::copy(&mut blob, &mut io::sink()).map_err(failed)?;
    let hashed = blob.into_inner();
    Ok(Unpacked {
        digest: format!("sha256:{}", hex::encode(hashed.hash.finalize())),
        size: hashed.size,
        diff_id: format!("sha256:{}", hex::encode(diff.finalize())),
    })
}

struct Hashed<R> {
    input: R,
    hash: Sha256,
    size: u64,
}

impl<R> Hashed<R> {
    fn new(input: R) -> Self {
        Self { input, hash: Sha256::new(), size: 0 }
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buf)?;
        self.hash.update(&buf[..got]);
        self.size += got as u64;
        Ok(got)
    }
}

/// The other end of [`unpack`]. It ends where that ends, well or not.
struct Pieces {
    receiver: Receiver<Vec<u8>>,
    piece: Vec<u8>,
    at: usize,
}

impl Read for Pieces {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() {
            let Ok(piece) = self.receiver.recv() else { return Ok(0) };
            (self.piece, self.at) = (piece, 0);
        }
        let got = buf.len().min(self.piece.len() - self.at);
        buf[..got].copy_from_slice(&self.piece[self.at..self.at + got]);
        self.at += got;
        Ok(got)
    }
}

struct ToLayer(Arc<Mutex<LayerBuilder<File>>>);

impl Out for ToLayer {
    fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), aenv_overlaybd::Error> {
        self.0.lock().append(block * BLOCK as u64, bytes)
    }
}

/// Below the base layer.
struct Nothing;

impl Below for Nothing {
    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.fill(0);
        Ok(())
    }
}

struct OnStack(Stack);

impl Below for OnStack {
    fn read(&self, block: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(buf, block * BLOCK as u64)
    }
}

fn open(layer: &ConvertedLayer) -> Result<Layer, ConvertError> {
    let step = || format!("open the converted layer {}", layer.path.display());
    let file = File::open(&layer.path).map_err(|source| ConvertError::Io { step: step(), source })?;
    Layer::open(Arc::new(file)).map_err(|e| ConvertError::Io { step: step(), source: io::Error::other(e) })
}

/// The layer says how large the file system became, which nobody knew when it was begun.
fn set_virtual_size(file: &File, file_bytes: u64, size: u64) -> Result<(), aenv_overlaybd::Error> {
    let failed = |source| aenv_overlaybd::Error::Io { what: "setting a layer's size", source };
    for (at, role) in [(0, Role::DataHeader { sealed: true }), (file_bytes - HEADER_LEN, Role::DataTrailer)] {
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, at).map_err(failed)?;
        let header = Header { virtual_size: size, ..Header::decode(&bytes, role)? };
        file.write_all_at(&header.encode(), at).map_err(failed)?;
    }
    Ok(())
}

fn id_of(chain: &str) -> Uuid {
    let hash = Sha256::digest(chain);
    uuid::Builder::from_sha1_bytes(hash[..16].try_into().expect("16 of 32")).into_uuid()
}
