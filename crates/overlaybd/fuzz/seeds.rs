//! Inputs to start from, written by the crate itself.

use std::sync::OnceLock;

use aenv_overlaybd::{
    Algorithm, BuildOptions, LayerBuilder, ReadAt, Stack, Upper, UpperOptions, WritableStack, ZFileOptions,
    compress_to_zfile,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

use super::Memory;

const SIZE: u64 = 256 << 10;

fn layer(seed: u64) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed);
    let out = Memory::holding(&[]);
    let options = BuildOptions { uuid: Uuid::from_u128(7), ..BuildOptions::new(SIZE) };
    let mut builder = LayerBuilder::new(&*out, options).unwrap();
    for i in 0..6 {
        let mut bytes = [0u8; 1024];
        rng.fill(&mut bytes[..400]);
        builder.append(i * 16384 + rng.random_range(0..8) * 512, &bytes).unwrap();
        builder.append_zeroes(i * 16384 + 8192, 4096).unwrap();
    }
    builder.finish(false).unwrap();
    out.bytes()
}

/// Whole layers.
pub fn layers() -> Vec<Vec<u8>> {
    vec![layer(1), layer(2)]
}

/// A header, a trailer and an index log's header.
pub fn headers() -> Vec<Vec<u8>> {
    let whole = layer(1);
    vec![whole[..4096].to_vec(), whole[whole.len() - 4096..].to_vec(), uppers()[0][..4096].to_vec()]
}

fn compressed(
    plain: &[u8],
    algorithm: Algorithm,
    block_size: u32,
    checksums: bool,
    fill_header: bool,
) -> Vec<u8> {
    let out = Memory::holding(&[]);
    let options = ZFileOptions { algorithm, block_size, checksums, fill_header, workers: 1 };
    compress_to_zfile(&*Memory::holding(plain), &*out, options, false).unwrap();
    out.bytes()
}

/// ZFiles of either kind; without block checksums what is damaged reaches the decoders.
pub fn zfiles() -> Vec<Vec<u8>> {
    let plain = &layer(3)[..9000];
    vec![
        compressed(plain, Algorithm::Lz4, 4096, true, false),
        compressed(plain, Algorithm::Lz4, 4096, false, true),
        compressed(plain, Algorithm::Zstd, 8192, true, true),
        compressed(plain, Algorithm::Zstd, 4096, false, false),
    ]
}

/// Their headers and trailers.
pub fn zfile_headers() -> Vec<Vec<u8>> {
    zfiles().iter().flat_map(|file| [file[..512].to_vec(), file[file.len() - 512..].to_vec()]).collect()
}

/// Layers inside of ZFiles.
pub fn zfile_layers() -> Vec<Vec<u8>> {
    let plain = layer(1);
    vec![
        compressed(&plain, Algorithm::Lz4, 4096, false, false),
        compressed(&plain, Algorithm::Zstd, 16384, false, true),
    ]
}

/// Layers in tar archives, as upstream writes them: a pax header with the size, the file's header, the file.
pub fn tars() -> Vec<Vec<u8>> {
    let header = |kind: u8, size: usize| {
        let mut block = vec![0u8; 512];
        block[124..136].copy_from_slice(format!("{size:012o}").as_bytes());
        block[156] = kind;
        block[257..265].copy_from_slice(b"ustar\x0000");
        block
    };
    [layer(1), compressed(&layer(1), Algorithm::Lz4, 4096, true, false)]
        .iter()
        .map(|layer| {
            let record = format!("{} size={}\n", 9 + layer.len().to_string().len(), layer.len());
            let mut out = header(b'x', record.len());
            out.extend(record.as_bytes());
            out.resize(1024, 0);
            out.extend(header(b'0', 0));
            out.extend(layer);
            super::mutate::repair_tar(&mut out);
            out
        })
        .collect()
}

fn upper() -> &'static (Vec<u8>, Vec<u8>) {
    static UPPER: OnceLock<(Vec<u8>, Vec<u8>)> = OnceLock::new();
    UPPER.get_or_init(make_upper)
}

fn make_upper() -> (Vec<u8>, Vec<u8>) {
    let (data, index) = (Memory::holding(&[]), Memory::holding(&[]));
    let options = UpperOptions { virtual_size: SIZE, uuid: Uuid::from_u128(9), parent: Uuid::nil() };
    let upper = Upper::create(data.clone(), index.clone(), options).unwrap();
    let stack = WritableStack::new(Stack::new(vec![], SIZE).unwrap(), upper).unwrap();
    for i in 0..20 {
        stack.write_at(&[1; 2048], i * 5120).unwrap();
        stack.write_zeroes(i * 4096, 1024).unwrap();
        if i % 6 == 5 {
            stack.flush().unwrap();
        }
    }
    assert!(data.size().unwrap() > 0);
    (data.bytes(), index.bytes())
}

/// Index logs.
pub fn uppers() -> Vec<Vec<u8>> {
    vec![upper().1.clone()]
}

/// The data file that they belong to.
pub fn upper_data() -> &'static [u8] {
    &upper().0
}
