//! Layers as untrusted input, layers as built, and long stacks of them.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use aenv_overlaybd::{BuildOptions, Error, Layer, LayerBuilder, MAX_LAYERS, Stack, build_from_file};
use common::TempFiles;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

const SIZE: u64 = 1 << 20;

fn built(pieces: &[(u64, Vec<u8>)], options: BuildOptions) -> Arc<File> {
    let file = TempFiles::new().file();
    let mut builder = LayerBuilder::new(file.clone(), options).unwrap();
    for (offset, bytes) in pieces {
        builder.append(*offset, bytes).unwrap();
    }
    let layer = builder.finish(true).unwrap();
    assert_eq!(layer.file_bytes, file.metadata().unwrap().len());
    file
}

fn content(layers: Vec<Layer>, size: u64) -> Vec<u8> {
    let mut bytes = vec![0xee; usize::try_from(size).unwrap()];
    Stack::new(layers, size).unwrap().read_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn pieces_in_any_order_give_what_was_last_written() {
    let (seed, _) = common::seed_and_steps(0);
    let mut rng = StdRng::seed_from_u64(seed);
    for ordered in [true, false] {
        let mut model = vec![0u8; usize::try_from(SIZE).unwrap()];
        let mut pieces = Vec::new();
        for _ in 0..60 {
            let offset = rng.random_range(0..SIZE / 512 - 700) * 512;
            let mut bytes = vec![0; rng.random_range(1..700usize) * 512];
            rng.fill(&mut bytes[..]);
            bytes.chunks_mut(4096).filter(|_| rng.random_bool(0.4)).for_each(|c| c.fill(0));
            pieces.push((offset, bytes));
        }
        if ordered {
            pieces.sort_by_key(|&(offset, _)| offset);
            let mut end = 0;
            pieces.retain(|(offset, bytes)| {
                let keep = *offset >= end;
                if keep {
                    end = offset + u64::try_from(bytes.len()).unwrap();
                }
                keep
            });
        }
        for (offset, bytes) in &pieces {
            let at = usize::try_from(*offset).unwrap();
            model[at..at + bytes.len()].copy_from_slice(bytes);
        }
        for keep_zeroes in [true, false] {
            let options = BuildOptions { keep_zeroes, ..BuildOptions::new(SIZE) };
            let layer = Layer::open(built(&pieces, options)).unwrap();
            assert!(content(vec![layer], SIZE) == model, "ordered {ordered}, keep_zeroes {keep_zeroes}");
        }
    }
}

#[test]
fn zero_pages_of_a_difference_hide_the_base_and_take_no_space() {
    let base = built(&[(0, vec![7; 65536])], BuildOptions::new(SIZE));
    let difference = built(&[(4096, vec![0; 4096]), (8192, vec![8; 4096])], BuildOptions::new(SIZE));
    assert!(difference.metadata().unwrap().len() <= 4096 * 4);
    let seen = content(vec![Layer::open(base).unwrap(), Layer::open(difference).unwrap()], SIZE);
    assert!(seen[..4096] == [7; 4096] && seen[4096..8192] == [0; 4096] && seen[8192..12288] == [8; 4096]);
}

#[test]
fn a_sparse_image_is_read_only_where_it_has_data() {
    let image = tempfile::tempfile().unwrap();
    image.set_len(8 << 30).unwrap();
    image.write_all_at(&[1; 100], 5000).unwrap();
    image.write_all_at(&[2; 4096], 6 << 30).unwrap();
    image.write_all_at(&[0; 8192], 7 << 30).unwrap();
    let out = TempFiles::new().file();
    let layer = build_from_file(&image, out.clone(), BuildOptions::new(8 << 30), false).unwrap();
    assert_eq!(layer.stored_bytes, 2 * 4096);
    let stack = Stack::new(vec![Layer::open(out).unwrap()], 8 << 30).unwrap();
    let mut got = [0; 200];
    stack.read_at(&mut got, 4950).unwrap();
    assert!(got[50..150] == [1; 100] && got[..50] == [0; 50] && got[150..] == [0; 50]);
    assert_eq!(stack.next_data(0), Some(4096));
    assert_eq!(stack.next_hole(4096), 8192);
    assert_eq!(stack.next_data(8192), Some(6 << 30));
    assert_eq!(stack.next_data(7 << 30), None);
}

#[test]
fn an_image_whose_end_is_no_whole_sector_is_padded() {
    let image = tempfile::tempfile().unwrap();
    image.write_all_at(&[3; 5000], 0).unwrap();
    let out = TempFiles::new().file();
    build_from_file(&image, out.clone(), BuildOptions::new(5120), false).unwrap();
    let seen = content(vec![Layer::open(out).unwrap()], 5120);
    assert!(seen[..5000] == [3; 5000] && seen[5000..] == [0; 120]);
}

#[test]
fn the_longest_stack_reads_right_and_one_layer_more_is_refused() {
    let layers: Vec<_> = (0..MAX_LAYERS)
        .map(|i| {
            let i = u64::try_from(i).unwrap();
            let bytes = vec![u8::try_from(i % 255).unwrap() + 1; 8192];
            Layer::open(built(&[(i * 4096, bytes)], BuildOptions::new(2 * SIZE))).unwrap()
        })
        .collect();
    let seen = content(layers.clone(), 2 * SIZE);
    for (i, block) in seen.chunks(4096).take(MAX_LAYERS).enumerate() {
        assert!(block.iter().all(|&b| usize::from(b) == i % 255 + 1), "block {i}");
    }
    let one_more = [layers, vec![Layer::raw(TempFiles::new().file()).unwrap()]].concat();
    assert!(matches!(Stack::new(one_more, SIZE), Err(Error::TooManyLayers { got: 256, .. })));
}

#[test]
fn layers_in_the_wrong_order_are_refused() {
    let options = |uuid, parent| BuildOptions {
        uuid: Uuid::from_u128(uuid),
        parent: Uuid::from_u128(parent),
        ..BuildOptions::new(SIZE)
    };
    let layer = |uuid, parent| Layer::open(built(&[], options(uuid, parent))).unwrap();
    assert!(Stack::new(vec![layer(1, 0), layer(2, 1), layer(3, 2)], SIZE).is_ok());
    assert!(Stack::new(vec![layer(1, 0), layer(9, 0)], SIZE).is_ok(), "unknown parents are let pass");
    assert!(matches!(Stack::new(vec![layer(1, 0), layer(3, 2)], SIZE), Err(Error::OutOfOrder(_))));
}

#[test]
fn pieces_outside_the_device_or_off_the_sectors_are_refused() {
    let mut builder = LayerBuilder::new(TempFiles::new().file(), BuildOptions::new(SIZE)).unwrap();
    assert!(matches!(builder.append(SIZE, &[1; 512]), Err(Error::BadRange(_))));
    assert!(matches!(builder.append(u64::MAX - 511, &[1; 512]), Err(Error::BadRange(_))));
    assert!(matches!(builder.append(100, &[1; 512]), Err(Error::BadRange(_))));
    assert!(matches!(builder.append(0, &[1; 100]), Err(Error::BadRange(_))));
    assert!(LayerBuilder::new(TempFiles::new().file(), BuildOptions::new(1000)).is_err());
}

#[test]
fn hostile_layers_are_refused_without_trusting_a_size() {
    let good = built(&[(0, vec![1; 4096]), (8192, vec![2; 4096])], BuildOptions::new(SIZE));
    let len = good.metadata().unwrap().len();
    let trailer = len - 4096;
    let index = trailer - 4096;
    let refused = |what: &str, at: u64, bytes: &[u8]| {
        let mut copy = vec![0; usize::try_from(len).unwrap()];
        good.read_exact_at(&mut copy, 0).unwrap();
        let file = TempFiles::new().file();
        file.write_all_at(&copy, 0).unwrap();
        file.write_all_at(bytes, at).unwrap();
        match Layer::open(file) {
            Ok(_) => panic!("{what} was accepted"),
            Err(error) => error.to_string(),
        }
    };
    refused("a header of junk", 0, b"junk");
    refused("a trailer of junk", trailer, b"junk");
    refused("an unsealed trailer", trailer + 28, &[2]);
    let text = refused("a huge index", trailer + 40, &u64::MAX.to_le_bytes());
    assert!(text.contains("most allowed"), "{text}");
    refused("an index past the trailer", trailer + 40, &10_000u64.to_le_bytes());
    refused("an index at the end of time", trailer + 32, &u64::MAX.to_le_bytes());
    refused("an index inside the header", trailer + 32, &512u64.to_le_bytes());
    refused("an index off the sectors", trailer + 32, &(index + 1).to_le_bytes());
    refused("a mapping past the data", index + 8, &(1u64 << 54).to_le_bytes());
    refused("a mapping into the header", index + 8, &1u64.to_le_bytes());
    refused("an empty mapping", index, &0u64.to_le_bytes());
    refused("a mapping over its neighbour", index, &((1000u64 << 50) | 8).to_le_bytes());
    let tiny = TempFiles::new().file();
    tiny.set_len(8000).unwrap();
    assert!(Layer::open(tiny).is_err());
}

#[test]
fn random_bytes_in_a_layer_never_panic() {
    let (seed, steps) = common::seed_and_steps(2000);
    let mut rng = StdRng::seed_from_u64(seed);
    let pieces: Vec<_> = (0..20u64).map(|i| (i * 8192, vec![1; 4096])).collect();
    let good = built(&pieces, BuildOptions::new(SIZE));
    let len = good.metadata().unwrap().len();
    let mut clean = vec![0; usize::try_from(len).unwrap()];
    good.read_exact_at(&mut clean, 0).unwrap();
    let file = TempFiles::new().file();
    for _ in 0..steps {
        file.write_all_at(&clean, 0).unwrap();
        for _ in 0..rng.random_range(1..6) {
            // Where it hurts: header, index, trailer.
            let at = if rng.random() {
                rng.random_range(0..200)
            } else {
                rng.random_range(len - 8192..len - 3700)
            };
            file.write_all_at(&[rng.random()], at).unwrap();
        }
        if let Ok(layer) = Layer::open(file.clone())
            && let Ok(stack) = Stack::new(vec![layer], SIZE)
        {
            let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
            let _may_fail = stack.read_at(&mut bytes, 0);
        }
    }
}
