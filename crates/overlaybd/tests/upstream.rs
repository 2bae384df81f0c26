//! Byte compatibility with containerd/overlaybd, both ways: files its own code wrote, and its own code reading ours.

mod common;

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use aenv_overlaybd::{
    BuildOptions, Layer, LayerBuilder, MergeOptions, Stack, Upper, UpperOptions, WritableStack, merge_layers,
};
use uuid::Uuid;

const SIZE: u64 = 1 << 20;
const LOWER_ID: Uuid = Uuid::from_u128(0x1111_1111_2222_3333_4444_5555_5555_5555);
const COMMIT_ID: Uuid = Uuid::from_u128(0x9999_9999_8888_7777_6666_5555_5555_5555);

enum Op {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
}

/// The operations of a file that the driver was given, with the bytes that it makes from each seed.
fn operations(name: &str) -> Vec<Op> {
    let text = std::fs::read_to_string(golden(name)).unwrap();
    text.lines()
        .map(|line| {
            let fields: Vec<_> = line.split(' ').collect();
            let [offset, len, seed] = [1, 2, 3].map(|i: usize| fields[i].parse::<u64>().unwrap());
            if fields[0] == "z" { Op::Zero(offset, len) } else { Op::Write(offset, seeded(seed, len)) }
        })
        .collect()
}

fn seeded(seed: u64, len: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let words = (0..len / 8).flat_map(|_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    });
    words.collect()
}

fn apply(model: &mut [u8], ops: &[Op]) {
    for op in ops {
        let (offset, bytes) = match op {
            Op::Write(offset, bytes) => (*offset, bytes.clone()),
            Op::Zero(offset, len) => (*offset, vec![0; usize::try_from(*len).unwrap()]),
        };
        let at = usize::try_from(offset).unwrap();
        model[at..at + bytes.len()].copy_from_slice(&bytes);
    }
}

fn write(stack: &WritableStack, ops: &[Op]) {
    for op in ops {
        match op {
            Op::Write(offset, bytes) => stack.write_at(bytes, *offset).unwrap(),
            Op::Zero(offset, len) => stack.write_zeroes(*offset, *len).unwrap(),
        }
    }
}

/// The device after the first, or after both operation files.
fn expected(both: bool) -> Vec<u8> {
    let mut model = vec![0; usize::try_from(SIZE).unwrap()];
    apply(&mut model, &operations("lower.ops"));
    if both {
        apply(&mut model, &operations("upper.ops"));
    }
    model
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn layer(name: &str) -> Layer {
    Layer::open(Arc::new(File::open(golden(name)).unwrap())).unwrap()
}

fn content(layers: &[Layer]) -> Vec<u8> {
    let mut bytes = vec![0xee; usize::try_from(SIZE).unwrap()];
    Stack::new(layers.to_vec(), SIZE).unwrap().read_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn layers_sealed_committed_and_merged_by_upstream_read_as_what_was_written() {
    assert!(content(&[layer("lower.sealed")]) == expected(false), "sealed");
    assert!(content(&[layer("lower.commit")]) == expected(false), "committed");
    assert!(content(&[layer("lower.sealed"), layer("upper.sealed")]) == expected(true), "stacked");
    assert!(content(&[layer("both.merged")]) == expected(true), "merged");
    assert_eq!(layer("lower.sealed").info().uuid, LOWER_ID);
    assert_eq!(layer("lower.commit").info().parent, LOWER_ID);
}

#[test]
fn an_upper_that_upstream_left_open_is_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let to = dir.path().join(name);
        std::fs::copy(golden(name), &to).unwrap();
        Arc::new(OpenOptions::new().read(true).write(true).open(to).unwrap())
    };
    let upper = Upper::open(copy("rw.data"), copy("rw.index")).unwrap();
    let stack = WritableStack::new(Stack::new(vec![], SIZE).unwrap(), upper).unwrap();
    write(&stack, &operations("upper.ops"));
    let mut bytes = vec![0xee; usize::try_from(SIZE).unwrap()];
    stack.read_at(&mut bytes, 0).unwrap();
    assert!(bytes == expected(true));
}

#[test]
fn committing_and_merging_give_the_same_bytes_as_upstream() {
    let dir = tempfile::tempdir().unwrap();
    let made = |layers: &[Layer], uuid, parent| {
        let path = dir.path().join("made");
        let how = MergeOptions { uuid: Some(uuid), parent, ..Default::default() };
        merge_layers(layers, File::create(&path).unwrap(), how).unwrap();
        std::fs::read(path).unwrap()
    };
    let committed = made(&[layer("lower.sealed")], COMMIT_ID, Some(LOWER_ID));
    assert!(committed == std::fs::read(golden("lower.commit")).unwrap());

    // Upstream's merge leaves its run-time tags in the index, which its own format says should be zero: the rest is
    // the same.
    let merged = made(&[layer("lower.sealed"), layer("upper.sealed")], Uuid::nil(), None);
    let theirs = std::fs::read(golden("both.merged")).unwrap();
    assert_eq!(merged.len(), theirs.len());
    let index = merged.len() - 2 * 4096;
    assert!(merged[..index] == theirs[..index] && merged[index + 4096..] == theirs[index + 4096..]);
}

#[test]
fn upstreams_own_code_reads_what_we_write() {
    let Some(driver) = std::env::var_os("LSMT_ORACLE") else {
        common::skipped("LSMT_ORACLE does not name the driver of tests/oracle");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = dir.path().join(name);
        Arc::new(OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap())
    };
    let read = |how: &str, names: &[&str]| {
        let paths = names.iter().map(|name| dir.path().join(name));
        let output = Command::new(&driver).arg(how).args(paths).output().unwrap();
        assert!(output.status.success(), "{how} {names:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let options = |parent| UpperOptions { virtual_size: SIZE, uuid: Uuid::new_v4(), parent };
    let upper = Upper::create(file("one"), file("one.index"), options(Uuid::nil())).unwrap();
    let stack = WritableStack::new(Stack::new(vec![], SIZE).unwrap(), upper).unwrap();
    write(&stack, &operations("lower.ops"));
    stack.flush().unwrap();
    assert!(read("readrw", &["one", "one.index"]) == expected(false), "open upper");

    let next = Upper::create(file("two"), file("two.index"), options(stack.upper_info().uuid)).unwrap();
    stack.seal(next, false, || Ok(())).unwrap();
    write(&stack, &operations("upper.ops"));
    let next = Upper::create(file("three"), file("three.index"), options(stack.upper_info().uuid)).unwrap();
    stack.seal(next, false, || Ok(())).unwrap();
    assert!(read("read", &["one"]) == expected(false), "sealed");
    assert!(read("read", &["one", "two"]) == expected(true), "stack of sealed layers");

    let reopen = |name: &str| Layer::open(Arc::new(File::open(dir.path().join(name)).unwrap())).unwrap();
    merge_layers(&[reopen("one"), reopen("two")], file("merged"), MergeOptions::default()).unwrap();
    assert!(read("read", &["merged"]) == expected(true), "merged");

    let mut builder = LayerBuilder::new(file("built"), BuildOptions::new(SIZE)).unwrap();
    builder.append(0, &expected(true)).unwrap();
    builder.finish(false).unwrap();
    assert!(read("read", &["built"]) == expected(true), "built");
}
