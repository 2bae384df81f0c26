//! The whole crate against a plain `Vec<u8>`: random writes, zeroes, flushes, seals, merges, compressions and
//! reopenings.
//! A run prints its seed; `MODEL_SEED=n` replays it, `MODEL_STEPS=n` makes it longer.

mod common;

use std::fs::File;
use std::sync::Arc;

use aenv_overlaybd::{
    Algorithm, Layer, MergeOptions, Stack, Upper, UpperOptions, WritableStack, ZFileOptions,
    compress_to_zfile, merge_layers,
};
use common::{TempFiles, seed_and_steps};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

const SIZE: u64 = 3 << 20;

struct World {
    files: TempFiles,
    layers: Vec<Layer>,
    /// The plain file of each layer that can be compressed.
    plain: Vec<Option<Arc<File>>>,
    data: Arc<File>,
    index: Arc<File>,
    stack: WritableStack,
    model: Vec<u8>,
}

impl World {
    fn new() -> Self {
        let files = TempFiles::new();
        let base = vec![7u8; 1 << 20];
        let raw = files.file();
        std::os::unix::fs::FileExt::write_all_at(&*raw, &base, 0).unwrap();
        let layers = vec![Layer::raw(raw).unwrap()];
        let (data, index) = (files.file(), files.file());
        let upper = new_upper(&data, &index, Uuid::nil());
        let stack = WritableStack::new(Stack::new(layers.clone(), SIZE).unwrap(), upper).unwrap();
        let mut model = vec![0; usize::try_from(SIZE).unwrap()];
        model[..base.len()].copy_from_slice(&base);
        Self { files, layers, plain: vec![None], data, index, stack, model }
    }

    fn seal(&mut self, sync: bool) {
        let (data, index) = (self.files.file(), self.files.file());
        let next = new_upper(&data, &index, self.stack.upper_info().uuid);
        let sealed = self.stack.seal(next, sync, || Ok(())).unwrap();
        let layer = Layer::open(self.data.clone()).unwrap();
        self.plain.push(Some(std::mem::replace(&mut self.data, data)));
        assert_eq!(layer.info(), &sealed.info);
        assert_eq!(layer.index().stored_sectors(), sealed.stored_sectors);
        self.layers.push(layer);
        self.index = index;
    }

    fn reopen(&mut self) {
        let upper = Upper::open(self.data.clone(), self.index.clone()).unwrap();
        self.stack = WritableStack::new(Stack::new(self.layers.clone(), SIZE).unwrap(), upper).unwrap();
    }

    fn merge(&mut self, rng: &mut StdRng) {
        let from = rng.random_range(0..self.layers.len());
        let to = rng.random_range(from..self.layers.len()) + 1;
        let out = self.files.file();
        let compress = rng.random_bool(0.3).then(|| zfile(rng));
        let how = MergeOptions { bottom: from == 0, compress, ..Default::default() };
        merge_layers(&self.layers[from..to], &out, how).unwrap();
        // The one raw layer at the bottom has no id; alone it stays what it is.
        if self.layers[to - 1].info().uuid.is_nil() {
            return;
        }
        self.plain.splice(from..to, [compress.is_none().then(|| out.clone())]);
        self.layers.splice(from..to, [Layer::open(out).unwrap()]);
        self.reopen();
    }

    fn compress(&mut self, rng: &mut StdRng) {
        let place = rng.random_range(0..self.layers.len());
        let Some(plain) = self.plain[place].take() else { return };
        let out = self.files.file();
        compress_to_zfile(&*plain, &*out, zfile(rng), false).unwrap();
        let layer = Layer::open(out).unwrap();
        assert_eq!(layer.info(), self.layers[place].info());
        self.layers[place] = layer;
        self.reopen();
    }

    fn check(&self, offset: u64, len: usize) {
        let mut got = vec![0xee; len];
        self.stack.read_at(&mut got, offset).unwrap();
        let at = usize::try_from(offset).unwrap();
        assert!(got == self.model[at..at + len], "wrong bytes in {len} at {offset}");
    }
}

fn zfile(rng: &mut StdRng) -> ZFileOptions {
    ZFileOptions {
        algorithm: if rng.random() { Algorithm::Lz4 } else { Algorithm::Zstd },
        block_size: 4096 << rng.random_range(0..5),
        checksums: rng.random(),
        fill_header: rng.random(),
        workers: rng.random_range(1..3),
    }
}

fn new_upper(data: &Arc<File>, index: &Arc<File>, parent: Uuid) -> Upper {
    let options = UpperOptions { virtual_size: SIZE, uuid: Uuid::new_v4(), parent };
    Upper::create(data.clone(), index.clone(), options).unwrap()
}

fn range(rng: &mut StdRng) -> (u64, usize) {
    let unit = [1u64, 512, 512, 4096, 4096][rng.random_range(0..5)];
    let longest = if rng.random_bool(0.1) { 400_000 } else { 20_000 };
    let offset = rng.random_range(0..SIZE / unit) * unit;
    let len = (rng.random_range(1..=longest / unit) * unit).min(SIZE - offset);
    (offset, usize::try_from(len).unwrap())
}

#[test]
fn a_stack_behaves_like_a_plain_array_whatever_is_done_to_it() {
    let (seed, steps) = seed_and_steps(100_000);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new();
    for _ in 0..steps {
        let (offset, len) = range(&mut rng);
        let at = usize::try_from(offset).unwrap();
        match rng.random_range(0..100) {
            0..45 => {
                let mut bytes = vec![0u8; len];
                rng.fill(&mut bytes[..]);
                for block in bytes.chunks_mut(4096).filter(|_| rng.random_bool(0.3)) {
                    block.fill(0);
                }
                world.stack.write_at(&bytes, offset).unwrap();
                world.model[at..at + len].copy_from_slice(&bytes);
            }
            45..60 => {
                world.stack.write_zeroes(offset, u64::try_from(len).unwrap()).unwrap();
                world.model[at..at + len].fill(0);
            }
            60..92 => world.check(offset, len),
            92..94 => world.stack.flush().unwrap(),
            94..96 => {
                let data = world.stack.next_data(offset).map(|d| usize::try_from(d).unwrap());
                let skipped = &world.model[at..data.unwrap_or(world.model.len())];
                assert!(skipped.iter().all(|&b| b == 0), "data was skipped");
                assert!(world.stack.next_hole(offset) >= offset);
            }
            96..98 => world.seal(rng.random()),
            98 if rng.random_bool(0.7) => world.merge(&mut rng),
            98 => world.compress(&mut rng),
            _ => world.reopen(),
        }
    }
    world.check(0, usize::try_from(SIZE).unwrap());
    world.reopen();
    world.check(0, usize::try_from(SIZE).unwrap());
    world.seal(true);
    let whole = Stack::new(world.layers.clone(), SIZE).unwrap();
    let mut got = vec![0xee; world.model.len()];
    whole.read_at(&mut got, 0).unwrap();
    assert!(got == world.model, "the read-only stack of the sealed layers differs");
}
