//! Long stacks made short.

mod common;

use std::fs::File;
use std::ops::ControlFlow;
use std::sync::Arc;

use aenv_overlaybd::{
    BuildOptions, Error, Layer, LayerBuilder, MAX_LAYERS, MergeOptions, ReadAt, Stack, ZFileOptions,
    merge_layers, merge_layers_with,
};
use common::{TempFiles, all_of, plain_bytes, seed_and_steps};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

const SIZE: u64 = 2 << 20;

/// A chain of layers, each with a few writes and discards on the one below.
fn chain(count: usize, rng: &mut StdRng) -> Vec<Layer> {
    let mut parent = Uuid::nil();
    let files = TempFiles::new();
    (0..count)
        .map(|_| {
            let options = BuildOptions { parent, ..BuildOptions::new(SIZE) };
            parent = options.uuid;
            let out = files.file();
            let mut builder = LayerBuilder::new(&*out, options).unwrap();
            for _ in 0..rng.random_range(1..12) {
                let unit = if rng.random() { 512 } else { 4096 };
                let offset = rng.random_range(0..SIZE / unit) * unit;
                let len = (rng.random_range(1..=64) * unit).min(SIZE - offset);
                if rng.random_bool(0.3) {
                    builder.append_zeroes(offset, len).unwrap();
                } else {
                    builder.append(offset, &plain_bytes(rng, usize::try_from(len).unwrap())).unwrap();
                }
            }
            builder.finish(false).unwrap();
            Layer::open(out).unwrap()
        })
        .collect()
}

fn content(layers: Vec<Layer>) -> Vec<u8> {
    all_of(&Stack::new(layers, SIZE).unwrap())
}

fn merged(layers: &[Layer], how: MergeOptions) -> Layer {
    let out = TempFiles::new().file();
    let built = merge_layers(layers, &*out, how).unwrap();
    assert_eq!(built.file_bytes, out.size().unwrap());
    Layer::open(out).unwrap()
}

#[test]
fn any_range_of_a_stack_can_be_replaced_by_its_merge() {
    let (seed, rounds) = seed_and_steps(40);
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..rounds {
        let count = rng.random_range(1..60);
        let layers = chain(count, &mut rng);
        let whole = content(layers.clone());
        let from = rng.random_range(0..count);
        let to = rng.random_range(from..count) + 1;
        let compress = rng.random::<bool>().then(ZFileOptions::default);
        let how = MergeOptions { bottom: from == 0, compress, ..Default::default() };
        let mut shorter = layers.clone();
        shorter.splice(from..to, [merged(&layers[from..to], how)]);
        assert!(content(shorter) == whole, "layers {from}..{to} of {count}");
    }
}

#[test]
fn the_longest_stack_becomes_one_layer_without_its_zeroes_and_overwritten_bytes() {
    let layers = chain(MAX_LAYERS, &mut StdRng::seed_from_u64(7));
    let whole = content(layers.clone());
    let one = merged(&layers, MergeOptions { bottom: true, ..Default::default() });
    assert!(one.index().stored_sectors() * 512 <= SIZE);
    assert!(one.index().entries().iter().all(|m| !m.is_zero()), "nothing is below that zeroes could hide");
    assert_eq!(one.info().uuid, layers.last().unwrap().info().uuid);
    assert!(content(vec![one]) == whole);
}

#[test]
fn a_discard_still_hides_what_lies_below_the_merged_range() {
    let layers = chain(3, &mut StdRng::seed_from_u64(8));
    let files = TempFiles::new();
    let bottom = LayerBuilder::new(files.file(), BuildOptions::new(SIZE)).unwrap();
    let base = {
        let mut bottom = bottom;
        bottom.append(0, &vec![7; usize::try_from(SIZE).unwrap()]).unwrap();
        let (file, _) = bottom.finish_with(false).unwrap();
        Layer::open(file).unwrap()
    };
    let options = BuildOptions { parent: layers[2].info().uuid, ..BuildOptions::new(SIZE) };
    let mut discard = LayerBuilder::new(files.file(), options).unwrap();
    discard.append_zeroes(0, SIZE).unwrap();
    let discard: Arc<File> = discard.finish_with(false).unwrap().0;
    let mut above = layers;
    above.push(Layer::open(discard).unwrap());
    let one = merged(&above, MergeOptions::default());
    assert_eq!(one.index().stored_sectors(), 0, "everything was discarded");
    assert!(content(vec![base, one]).iter().all(|&byte| byte == 0));
}

#[test]
fn a_merge_that_is_told_to_stop_stops_and_leaves_nothing_that_opens() {
    let layers = chain(60, &mut StdRng::seed_from_u64(9));
    for compress in [None, Some(ZFileOptions::default())] {
        let out = TempFiles::new().file();
        let mut looks = 0;
        let how = MergeOptions { compress, ..Default::default() };
        let error = merge_layers_with(&layers, &*out, how, |progress| {
            assert!(progress.done <= progress.total);
            looks += 1;
            if looks == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap_err();
        assert!(matches!(error, Error::Cancelled), "{error}");
        assert_eq!(looks, 2);
        assert!(Layer::open(out).is_err());
    }
    let error = merge_layers(&[], &*TempFiles::new().file(), MergeOptions::default()).unwrap_err();
    assert!(error.to_string().contains("no layers"));
}
