//! Layers as registries hold them: compressed, in a tar archive, or both.

mod common;

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use aenv_overlaybd::{Algorithm, Layer, ReadAt, Stack, ZFileOptions, compress_to_zfile};
use common::{TempFiles, all_of};

const SIZE: u64 = 1 << 20;

fn golden(name: &str) -> Arc<File> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    Arc::new(File::open(path).unwrap())
}

fn content(layer: Layer) -> Vec<u8> {
    all_of(&Stack::new(vec![layer], SIZE).unwrap())
}

fn plain() -> Vec<u8> {
    content(Layer::open(golden("lower.commit")).unwrap())
}

fn file_of(bytes: &[u8]) -> Arc<File> {
    let file = TempFiles::new().file();
    aenv_overlaybd::WriteAt::write_at(&*file, bytes, 0).unwrap();
    file
}

/// A header as POSIX has it.
fn tar_header(name: &str, kind: u8, size: u64) -> Vec<u8> {
    let mut block = vec![0u8; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..136].copy_from_slice(format!("{size:012o}").as_bytes());
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// As upstream's tools write it: the size is in a pax record alone, and not always the blocks' padding behind.
fn upstream_tar(layer: &[u8]) -> Vec<u8> {
    let digits = layer.len().to_string();
    let record = format!("{} size={digits}\n", digits.len() + 9);
    assert_eq!(record.len(), digits.len() + 9, "the record's own length");
    let mut out = tar_header("overlaybd.pax", b'x', u64::try_from(record.len()).unwrap());
    out.extend(record.as_bytes());
    out.resize(1024, 0);
    out.extend(tar_header("overlaybd.commit", b'0', 0));
    out.extend(layer);
    out.extend([0; 1024]);
    out
}

#[test]
fn zfiles_written_by_upstream_open_as_the_layer_inside() {
    for name in ["lower.lz4.zfile", "lower.zstd.zfile"] {
        assert!(content(Layer::open(golden(name)).unwrap()) == plain(), "{name}");
    }
}

#[test]
fn a_layer_opens_the_same_from_a_tar_archive_plain_or_compressed() {
    for name in ["lower.commit", "lower.lz4.zfile"] {
        let layer = all_of(&*golden(name));
        assert!(content(Layer::open(file_of(&upstream_tar(&layer))).unwrap()) == plain(), "{name} in pax");

        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_size(u64::try_from(layer.len()).unwrap());
        archive.append_data(&mut header, "overlaybd.commit", &layer[..]).unwrap();
        let archive = archive.into_inner().unwrap();
        assert!(content(Layer::open(file_of(&archive)).unwrap()) == plain(), "{name} in ustar");
    }
}

#[test]
fn hostile_tar_headers_are_refused_with_place_and_reason() {
    let layer = all_of(&*golden("lower.commit"));
    let whole = upstream_tar(&layer);
    let refused = |bytes: &[u8]| Layer::open(file_of(bytes)).err().expect("refused").to_string();
    assert!(refused(&whole[..1024]).contains("at byte 1024 is missing"));
    assert!(refused(&whole[..9000]).contains("announces a file"));
    let mut damaged = whole.clone();
    damaged[1030] ^= 1;
    assert!(refused(&damaged).contains("at byte 1024 is damaged"));
    damaged[1024 + 148] = 0x80;
    assert!(refused(&damaged).contains("at byte 1024 is damaged"), "a checksum in base 256");
    let directory = [tar_header("directory", b'5', 0), layer.clone()].concat();
    assert!(refused(&directory).contains("something else than a file"));
    let greedy = [tar_header("x", b'x', 0o77_777_777_777), layer].concat();
    assert!(refused(&greedy).contains("more records"));
    let endless: Vec<u8> = (0..10).flat_map(|_| tar_header("g", b'g', 0)).collect();
    assert!(refused(&endless).contains("too many"));
}

#[test]
fn compressing_a_layer_keeps_what_it_is() {
    for (name, block_size) in [("upper.sealed", 4096), ("both.merged", 16384)] {
        let out = TempFiles::new().file();
        let options = ZFileOptions { block_size, ..Default::default() };
        compress_to_zfile(&*golden(name), &*out, options, false).unwrap();
        assert!(ReadAt::size(&*out).unwrap() < golden(name).size().unwrap() + 2048);
        let (before, after) = (Layer::open(golden(name)).unwrap(), Layer::open(out).unwrap());
        assert_eq!(before.info(), after.info());
        assert!(content(before) == content(after), "{name}");
    }
}

#[test]
fn upstreams_own_code_reads_the_zfiles_we_write() {
    let Some(driver) = std::env::var_os("ZFILE_ORACLE") else {
        common::skipped("ZFILE_ORACLE does not name the ZFile driver of tests/oracle");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let read = |path: &Path, how: &str| {
        let output = Command::new(&driver).arg(how).arg(path).output().unwrap();
        assert!(output.status.success(), "{how}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    for (i, name) in ["lower.commit", "lower.sealed", "both.merged"].into_iter().enumerate() {
        for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
            for block_size in [4096, 16384, 32768] {
                let path = dir.path().join(format!("{i}{algorithm:?}{block_size}"));
                let out = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
                let options = ZFileOptions {
                    algorithm,
                    block_size,
                    fill_header: block_size == 4096,
                    ..Default::default()
                };
                compress_to_zfile(&*golden(name), out, options, false).unwrap();
                assert!(read(&path, "zread") == all_of(&*golden(name)), "{name} {options:?}");
                read(&path, "zcheck");
                let stack = Stack::new(vec![Layer::open(golden(name)).unwrap()], SIZE).unwrap();
                assert!(read(&path, "zstack") == all_of(&stack), "{name} {options:?} as a layer");
            }
        }
    }
}
