//! What an upper survives: torn tails, lost writes, full disks, and seals that fail.

mod common;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aenv_overlaybd::{Error, Layer, ReadAt, Stack, Upper, UpperOptions, WritableStack, WriteAt};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;
use uuid::Uuid;

const SIZE: u64 = 1 << 20;
const HEADER: u64 = 4096;

fn open_rw(path: &Path) -> Arc<File> {
    Arc::new(OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap())
}

fn on_nothing(upper: Upper) -> WritableStack {
    WritableStack::new(Stack::new(vec![], SIZE).unwrap(), upper).unwrap()
}

fn options() -> UpperOptions {
    UpperOptions { virtual_size: SIZE, uuid: Uuid::new_v4(), parent: Uuid::nil() }
}

/// Files of an upper to which 20 blocks were written, the first 10 of them flushed.
fn written() -> (TempDir, Arc<File>, Arc<File>) {
    let dir = tempfile::tempdir().unwrap();
    let (data, index) = (open_rw(&dir.path().join("data")), open_rw(&dir.path().join("index")));
    let stack = on_nothing(Upper::create(data.clone(), index.clone(), options()).unwrap());
    for block in 0..20u8 {
        // Every second block, so that no two entries join and each one can be lost by itself.
        stack.write_at(&[block + 1; 4096], u64::from(block) * 8192).unwrap();
        if block == 9 {
            stack.flush().unwrap();
        }
    }
    (dir, data, index)
}

fn reopened(data: &Arc<File>, index: &Arc<File>) -> Result<WritableStack, Error> {
    Upper::open(data.clone(), index.clone()).map(on_nothing)
}

/// How many of the blocks that [`written`] wrote are there, from the first one on.
fn blocks(stack: &WritableStack) -> u8 {
    let there = |block: &u8| {
        let mut got = [0xee; 4096];
        stack.read_at(&mut got, u64::from(*block) * 8192).unwrap();
        got == [block + 1; 4096]
    };
    u8::try_from((0..20).take_while(there).count()).unwrap()
}

#[test]
fn whatever_was_written_is_there_when_no_power_was_lost() {
    let (_dir, data, index) = written();
    assert_eq!(blocks(&reopened(&data, &index).unwrap()), 20);
}

#[test]
fn a_log_cut_anywhere_behind_the_last_flush_keeps_what_was_flushed() {
    let (_dir, data, index) = written();
    let full = index.metadata().unwrap().len();
    let flushed = HEADER + 11 * 16;
    for len in (flushed..=full).rev() {
        index.set_len(len).unwrap();
        let stack = reopened(&data, &index).unwrap();
        let whole = u8::try_from((len - flushed) / 16).unwrap() + 10;
        assert_eq!(blocks(&stack), whole, "log of {len} bytes");
        drop(stack);
        assert_eq!(index.metadata().unwrap().len(), len - (len - HEADER) % 16, "the torn entry stays");
    }
}

#[test]
fn a_tail_of_zeroes_or_of_entries_without_their_data_is_cut_off() {
    let (_dir, data, index) = written();
    let full = index.metadata().unwrap().len();
    index.write_all_at(&[0; 48], full - 48).unwrap();
    let stack = reopened(&data, &index).unwrap();
    assert_eq!(blocks(&stack), 17);
    // Writing goes on where the tail was cut.
    stack.write_at(&[18; 4096], 17 * 8192).unwrap();
    drop(stack);
    assert_eq!(blocks(&reopened(&data, &index).unwrap()), 18);

    let (_dir, data, index) = written();
    data.set_len(HEADER + 15 * 4096).unwrap();
    assert_eq!(blocks(&reopened(&data, &index).unwrap()), 15);
}

#[test]
fn damage_to_what_was_flushed_is_told_never_passed_over() {
    let damaged = |harm: &dyn Fn(&File, &File)| {
        let (_dir, data, index) = written();
        harm(&data, &index);
        reopened(&data, &index).err().expect("damage was passed over").to_string()
    };
    assert!(damaged(&|_, index| index.write_all_at(&[0; 16], HEADER + 3 * 16).unwrap()).contains("damaged"));
    assert!(damaged(&|data, _| data.set_len(HEADER + 5 * 4096).unwrap()).contains("damaged"));
    assert!(damaged(&|_, index| index.write_all_at(&[9; 8], 56).unwrap()).contains("belongs to"));
    assert!(damaged(&|data, _| data.set_len(100).unwrap()).contains("header"));
    assert!(damaged(&|_, index| index.write_all_at(b"junk", 0).unwrap()).contains("magic"));
}

#[test]
fn random_damage_to_a_flushed_log_is_always_told() {
    let (seed, steps) = common::seed_and_steps(300);
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..steps {
        let (_dir, data, index) = written();
        reopened(&data, &index).unwrap().flush().unwrap();
        let len = index.metadata().unwrap().len();
        for _ in 0..rng.random_range(1..4) {
            // All but the last marker, which vouches for the rest.
            index.write_all_at(&[rng.random()], rng.random_range(HEADER..len - 16)).unwrap();
        }
        if let Ok(stack) = reopened(&data, &index) {
            assert_eq!(blocks(&stack), 20, "damage changed flushed blocks and was passed over");
        }
    }
}

#[test]
fn a_journal_written_over_and_over_does_not_grow_the_upper() {
    let dir = tempfile::tempdir().unwrap();
    let (data, index) = (open_rw(&dir.path().join("data")), open_rw(&dir.path().join("index")));
    let stack = on_nothing(Upper::create(data.clone(), index.clone(), options()).unwrap());
    for round in 0..500u32 {
        for block in 0..16 {
            stack.write_at(&[u8::try_from(round % 250).unwrap() + 1; 4096], block * 4096).unwrap();
        }
    }
    assert_eq!(data.metadata().unwrap().len(), HEADER + 16 * 4096);
    assert_eq!(index.metadata().unwrap().len(), HEADER + 16 * 16);
}

#[test]
fn zeroes_take_no_space_and_hide_what_lies_below() {
    let dir = tempfile::tempdir().unwrap();
    let raw = open_rw(&dir.path().join("raw"));
    raw.write_all_at(&vec![5; usize::try_from(SIZE).unwrap()], 0).unwrap();
    let (data, index) = (open_rw(&dir.path().join("data")), open_rw(&dir.path().join("index")));
    let lower = Stack::new(vec![Layer::raw(raw).unwrap()], SIZE).unwrap();
    let upper = Upper::create(data.clone(), index, options()).unwrap();
    let stack = WritableStack::new(lower, upper).unwrap();
    stack.write_at(&vec![0; 65536], 4096).unwrap();
    stack.write_zeroes(100_000, 5000).unwrap();
    let mut got = vec![1; 4096 + 65536];
    stack.read_at(&mut got, 0).unwrap();
    assert!(got[..4096].iter().all(|&b| b == 5) && got[4096..].iter().all(|&b| b == 0));
    let mut edges = vec![1; 5002];
    stack.read_at(&mut edges, 99_999).unwrap();
    assert!(edges[0] == 5 && edges[5001] == 5 && edges[1..5001].iter().all(|&b| b == 0));
    assert!(data.metadata().unwrap().len() <= HEADER + 2 * 512, "zeroes were stored");
}

/// A file that can be told to fail.
struct Failing {
    file: File,
    full: AtomicBool,
    syncs_fail: AtomicBool,
}

impl Failing {
    fn new() -> Arc<Self> {
        let file = tempfile::tempfile().unwrap();
        Arc::new(Self { file, full: AtomicBool::new(false), syncs_fail: AtomicBool::new(false) })
    }
}

impl ReadAt for Failing {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }
}

impl WriteAt for Failing {
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        if self.full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.write_all_at(buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        // Reported once, as the kernel does.
        if self.syncs_fail.swap(false, Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        Ok(())
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.file.set_size(size)
    }
}

#[test]
fn a_full_disk_fails_the_write_and_nothing_else() {
    for broken in [true, false] {
        let (data, index) = (Failing::new(), Failing::new());
        let stack = on_nothing(Upper::create(data.clone(), index.clone(), options()).unwrap());
        stack.write_at(&[1; 4096], 0).unwrap();
        let full = if broken { &data } else { &index };
        full.full.store(true, Ordering::Relaxed);
        assert_eq!(stack.write_at(&[2; 8192], 0).unwrap_err().kind(), io::ErrorKind::StorageFull);
        let mut got = [0; 8192];
        stack.read_at(&mut got, 0).unwrap();
        assert!(got[..4096] == [1; 4096] && got[4096..] == [0; 4096], "the failed write shows");
        full.full.store(false, Ordering::Relaxed);
        stack.write_at(&[3; 8192], 0).unwrap();
        stack.flush().unwrap();
        drop(stack);
        let stack = on_nothing(Upper::open(data, index).unwrap());
        stack.read_at(&mut got, 0).unwrap();
        assert!(got == [3; 8192]);
    }
}

#[test]
fn after_a_failed_sync_no_flush_claims_success() {
    let (data, index) = (Failing::new(), Failing::new());
    let stack = on_nothing(Upper::create(data.clone(), index, options()).unwrap());
    stack.write_at(&[1; 4096], 0).unwrap();
    data.syncs_fail.store(true, Ordering::Relaxed);
    stack.flush().unwrap_err();
    stack.flush().unwrap_err();
    stack.write_at(&[1; 4096], 8192).unwrap();
    stack.flush().unwrap_err();
}

#[test]
fn a_seal_that_cannot_be_put_in_place_leaves_the_upper_in_use() {
    let (data, index) = (Failing::new(), Failing::new());
    let stack = on_nothing(Upper::create(data.clone(), index.clone(), options()).unwrap());
    stack.write_at(&[1; 4096], 0).unwrap();
    let next = |stack: &WritableStack| {
        let options = UpperOptions { parent: stack.upper_info().uuid, ..options() };
        Upper::create(Failing::new(), Failing::new(), options).unwrap()
    };
    let refuse = || Err(io::ErrorKind::CrossesDevices.into());
    assert!(matches!(stack.seal(next(&stack), false, refuse), Err(Error::Commit(_))));
    data.full.store(true, Ordering::Relaxed);
    assert!(matches!(stack.seal(next(&stack), false, || Ok(())), Err(Error::Io { .. })));
    data.full.store(false, Ordering::Relaxed);
    stack.write_at(&[2; 4096], 8192).unwrap();
    drop(stack);

    let stack = on_nothing(Upper::open(data.clone(), index).unwrap());
    let sealed = stack.seal(next(&stack), true, || Ok(())).unwrap();
    let layer = Layer::open(data).unwrap();
    assert_eq!(layer.info(), &sealed.info);
    let mut got = [0; 12288];
    Stack::new(vec![layer], SIZE).unwrap().read_at(&mut got, 0).unwrap();
    assert!(got[..4096] == [1; 4096] && got[8192..] == [2; 4096]);
    let wrong_parent = Upper::create(Failing::new(), Failing::new(), options()).unwrap();
    assert!(matches!(stack.seal(wrong_parent, false, || Ok(())), Err(Error::OutOfOrder(_))));
}

#[test]
fn an_upper_of_another_disk_is_refused() {
    let (_dir, data, index) = written();
    let raw = Arc::new(tempfile::tempfile().unwrap());
    raw.set_len(SIZE).unwrap();
    let layer = Layer::raw(raw).unwrap();
    let out = Arc::new(tempfile::tempfile().unwrap());
    aenv_overlaybd::merge_layers(&[layer], out.clone(), Default::default()).unwrap();
    let lower = Stack::new(vec![Layer::open(out).unwrap()], SIZE).unwrap();
    let refused = WritableStack::new(lower, Upper::open(data, index).unwrap()).err().unwrap();
    assert!(matches!(refused, Error::OutOfOrder(_)), "{refused}");
}
