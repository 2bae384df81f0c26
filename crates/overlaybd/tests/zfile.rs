//! ZFile against bytes made by hand, against itself, and against damage.

mod common;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aenv_overlaybd::{
    Algorithm, BlockCache, Layer, ReadAt, ZFileOptions, ZFileReader, ZFileWriter, compress_to_zfile,
};
use common::{TempFiles, all_of, plain_bytes};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Bytes in memory that count how often they were read.
#[derive(Default)]
struct Counted {
    bytes: Vec<u8>,
    reads: AtomicU64,
}

impl ReadAt for Counted {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let at = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let end = at.checked_add(buf.len()).filter(|&end| end <= self.bytes.len());
        buf.copy_from_slice(&self.bytes[at..end.ok_or(io::ErrorKind::UnexpectedEof)?]);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(u64::try_from(self.bytes.len()).unwrap())
    }
}

fn counted(bytes: &[u8]) -> Arc<Counted> {
    Arc::new(Counted { bytes: bytes.to_vec(), reads: AtomicU64::new(0) })
}

/// CRC-32C's polynomial, bit by bit, neither end inverted: written here again so that it is no mirror of ours.
fn register(mut crc: u32, bytes: &[u8]) -> u32 {
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    crc
}

/// A header or trailer, field by field as the specification has them.
fn ending(flags: u64, numbers: [u64; 3], index_crc: u32, algorithm: u8, verify: bool) -> Vec<u8> {
    let mut out = b"ZFile\0\x01\0tuji.yyf@Alibaba".to_vec();
    out.extend(96u32.to_le_bytes());
    out.extend([0; 4]);
    out.extend(flags.to_le_bytes());
    numbers.iter().for_each(|n| out.extend(n.to_le_bytes()));
    out.extend(index_crc.to_le_bytes());
    out.extend([0; 4]);
    out.extend(4096u32.to_le_bytes());
    out.push(algorithm);
    out.resize(88, 0);
    out.push(u8::from(verify));
    out.resize(512, 0);
    if flags & 16 != 0 {
        let digest = register(0, &out);
        out[28..32].copy_from_slice(&digest.to_le_bytes());
    }
    out
}

/// 4096 times `a`, then ten digits, compressed by hand.
fn blocks(algorithm: u8) -> [Vec<u8>; 2] {
    if algorithm == 1 {
        // One literal, a match of 4090 at distance 1, five literals; then ten literals.
        let mut first = vec![0x1f, b'a', 1, 0];
        first.extend([0xff; 15]);
        first.extend(b"\xf6\x50aaaaa");
        [first, b"\xa00123456789".to_vec()]
    } else {
        // Frames of one segment with their size: a run of one byte, and ten raw bytes.
        [
            b"\x28\xb5\x2f\xfd\x60\x00\x0f\x03\x80\x00a".to_vec(),
            b"\x28\xb5\x2f\xfd\x20\x0a\x51\x00\x000123456789".to_vec(),
        ]
    }
}

/// A whole file by hand. `digests` off is how old writers left it, `filled` describes it in the header too.
fn by_hand(algorithm: u8, verify: bool, digests: bool, filled: bool) -> Vec<u8> {
    holding(&blocks(algorithm), 4106, algorithm, verify, digests, filled)
}

fn holding(
    blocks: &[Vec<u8>],
    size: u64,
    algorithm: u8,
    verify: bool,
    digests: bool,
    filled: bool,
) -> Vec<u8> {
    let (mut data, mut table) = (Vec::new(), Vec::new());
    for block in blocks {
        let crc = register(100_007, block).to_le_bytes();
        let length = block.len() + if verify { 4 } else { 0 };
        data.extend(block);
        if verify {
            data.extend(crc);
        }
        table.extend(u32::try_from(length).unwrap().to_le_bytes());
    }
    let numbers = [512 + u64::try_from(data.len()).unwrap(), u64::try_from(blocks.len()).unwrap(), size];
    let digest = if digests { 16 } else { 0 };
    let crc = if digests { register(0, &table) } else { 0 };
    let mut out = if filled {
        ending(1 | 2 | 8 | digest, numbers, crc, algorithm, verify)
    } else {
        ending(1 | 2 | digest, [0; 3], 0, algorithm, verify)
    };
    out.extend(data);
    out.extend(table);
    out.extend(ending(2 | 4 | digest, numbers, crc, algorithm, verify));
    out
}

fn expected() -> Vec<u8> {
    [&[b'a'; 4096][..], b"0123456789"].concat()
}

#[test]
fn files_made_by_hand_read_as_the_specification_says() {
    for algorithm in [1, 2] {
        for bits in 0..8 {
            let (verify, digests, filled) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            let file = ZFileReader::open(counted(&by_hand(algorithm, verify, digests, filled)));
            assert!(all_of(&file.unwrap()) == expected(), "algorithm {algorithm}, variant {bits:03b}");
        }
    }
}

#[test]
fn a_file_too_short_to_compress_is_written_byte_for_byte_as_by_hand() {
    // LZ4 finds no match in under 13 bytes, so the whole file is golden: header, block, checksum, table, trailer.
    let block = [blocks(1)[1].clone()];
    for fill_header in [false, true] {
        let files = TempFiles::new();
        let out = files.file();
        let options = ZFileOptions { fill_header, ..Default::default() };
        compress_to_zfile(&*counted(b"0123456789"), &*out, options, false).unwrap();
        let golden = holding(&block, 10, 1, true, true, fill_header);
        assert_eq!(hex::encode(all_of(&*out)), hex::encode(golden));
    }
}

#[test]
fn every_size_reads_back_at_any_position_from_one_thread_or_many() {
    let mut rng = StdRng::seed_from_u64(1);
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        for (block_size, len) in
            [(4096, 0), (4096, 1), (4096, 4096), (8192, 8193), (65536, 300_001), (4096, 2_000_000)]
        {
            for workers in [1, 3] {
                let plain = plain_bytes(&mut rng, len);
                let files = TempFiles::new();
                let out = files.file();
                let options = ZFileOptions {
                    algorithm,
                    block_size,
                    workers,
                    checksums: rng.random(),
                    fill_header: rng.random(),
                };
                let mut writer = ZFileWriter::new(&*out, options).unwrap();
                let mut rest = &plain[..];
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(rng.random_range(1..=rest.len()));
                    writer.write(now).unwrap();
                    rest = later;
                }
                let (_, summary) = writer.finish(true).unwrap();
                assert_eq!(summary.file_bytes, out.size().unwrap());
                let reader = ZFileReader::open(out).unwrap();
                assert!(all_of(&reader) == plain);
                std::thread::scope(|scope| {
                    for seed in 0..4 {
                        let (reader, plain) = (&reader, &plain);
                        scope.spawn(move || random_reads(reader, plain, seed));
                    }
                });
            }
        }
    }
}

fn random_reads(reader: &ZFileReader, plain: &[u8], seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..200 {
        let at = rng.random_range(0..=plain.len());
        let longest = if rng.random_bool(0.8) { 10_000 } else { 400_000 };
        let len = rng.random_range(0..=longest.min(plain.len() - at));
        let mut got = vec![0xee; len];
        reader.read_at(&mut got, u64::try_from(at).unwrap()).unwrap();
        assert!(got == plain[at..at + len], "{len} bytes at {at}");
    }
    let past = reader.read_at(&mut [0; 2], reader.original_size().saturating_sub(1)).unwrap_err();
    assert_eq!(past.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn small_reads_of_one_block_fetch_and_decode_it_once() {
    let plain = plain_bytes(&mut StdRng::seed_from_u64(2), 1 << 20);
    let files = TempFiles::new();
    let out = files.file();
    let options = ZFileOptions { block_size: 65536, ..Default::default() };
    compress_to_zfile(&*counted(&plain), &*out, options, false).unwrap();
    let source = counted(&all_of(&*out));
    let cache = Arc::new(BlockCache::new(256 << 10));
    let reader = ZFileReader::open_with(source.clone(), cache).unwrap();
    let before = source.reads.load(Ordering::Relaxed);
    for i in 0..16u64 {
        let mut got = [0; 4096];
        reader.read_at(&mut got, i * 4096).unwrap();
        assert!(got[..] == plain[usize::try_from(i * 4096).unwrap()..][..4096]);
    }
    assert_eq!(source.reads.load(Ordering::Relaxed) - before, 1);
}

#[test]
fn a_flipped_bit_anywhere_is_told_and_never_read_as_data() {
    let whole = by_hand(1, true, true, false);
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        let told = match ZFileReader::open(counted(&damaged)) {
            Err(error) => error.to_string(),
            Ok(reader) => {
                let mut got = vec![0; 4106];
                let error = reader.read_at(&mut got, 0).expect_err("damage was read as data");
                assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                error.to_string()
            }
        };
        assert!(told.contains("ZFile"), "byte {at}: {told}");
    }
    for len in 0..whole.len() {
        assert!(ZFileReader::open(counted(&whole[..len])).is_err(), "cut to {len} bytes");
    }
}

/// A cache whose copy has a flipped bit until it is told to fetch anew.
struct Spoilt {
    good: Vec<u8>,
    at: usize,
    spoilt: AtomicBool,
    curable: bool,
}

impl ReadAt for Spoilt {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap();
        buf.copy_from_slice(&self.good[start..start + buf.len()]);
        if self.spoilt.load(Ordering::Relaxed) && (start..start + buf.len()).contains(&self.at) {
            buf[self.at - start] ^= 1;
        }
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(u64::try_from(self.good.len()).unwrap())
    }

    fn distrust(&self, offset: u64, len: u64) {
        let at = u64::try_from(self.at).unwrap();
        if self.curable && at >= offset && at - offset < len {
            self.spoilt.store(false, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_cache_with_a_spoilt_copy_is_made_to_fetch_it_again() {
    let good = by_hand(1, true, true, false);
    for at in 0..good.len() {
        for read in [100, 4106] {
            for curable in [true, false] {
                let cache = Spoilt { good: good.clone(), at, spoilt: AtomicBool::new(true), curable };
                let got = ZFileReader::open(Arc::new(cache)).map_err(io::Error::from).and_then(|reader| {
                    let mut got = vec![0; read];
                    reader.read_at(&mut got, 0)?;
                    Ok(got)
                });
                match got {
                    Ok(got) => assert!(got == expected()[..read]),
                    Err(error) => assert!(!curable, "byte {at}: {error}"),
                }
            }
        }
    }
}

#[test]
fn what_is_no_layer_inside_is_refused_as_such() {
    let error = Layer::open(counted(&by_hand(1, true, true, false))).err().unwrap().to_string();
    assert!(error.contains("4106 bytes are too few"), "{error}");
}
