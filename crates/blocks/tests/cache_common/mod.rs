//! A source that does what a test tells it, and bytes that are known everywhere.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use aenv_blocks::cache::{BLOCK, Cache, Options};
use aenv_blocks::remote::{Digest, FetchError, RangeSource};
use bytes::Bytes;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::runtime::Runtime;

/// What a source does when asked.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    Fail(FetchError),
    Truncate,
    Stall,
    WrongBytes,
    Slow(Duration),
    Panic,
}

pub(crate) struct Faulty {
    pub(crate) bytes: Bytes,
    pub(crate) id: Digest,
    pub(crate) script: Mutex<VecDeque<Act>>,
    pub(crate) always: Mutex<Option<Act>>,
    pub(crate) reads: AtomicUsize,
    /// Times each block was asked for.
    pub(crate) asked: Mutex<BTreeMap<u64, usize>>,
    pub(crate) running: AtomicUsize,
    pub(crate) most_running: AtomicUsize,
}

pub(crate) fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

impl Faulty {
    pub(crate) fn new(seed: u64, len: usize) -> Arc<Self> {
        let bytes = Bytes::from(random(seed, len));
        let id = Digest::of(&bytes);
        Arc::new(Self {
            bytes,
            id,
            script: Mutex::default(),
            always: Mutex::default(),
            reads: AtomicUsize::new(0),
            asked: Mutex::default(),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
        })
    }

    pub(crate) fn first(self: Arc<Self>, acts: impl IntoIterator<Item = Act>) -> Arc<Self> {
        self.script.lock().extend(acts);
        self
    }

    pub(crate) fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }
}

#[async_trait::async_trait]
impl RangeSource for Faulty {
    fn id(&self) -> Digest {
        self.id
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn place(&self) -> String {
        "registry.example".into()
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Bytes, FetchError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
        for block in offset / BLOCK as u64..(offset + len as u64).div_ceil(BLOCK as u64) {
            *self.asked.lock().entry(block).or_default() += 1;
        }
        let start = usize::try_from(offset).unwrap();
        let bytes = self.bytes.slice(start..start + len);
        let act = self.script.lock().pop_front().or_else(|| self.always.lock().clone());
        let answer = match act {
            None => Ok(bytes),
            Some(Act::Fail(error)) => Err(error),
            Some(Act::Truncate) => Ok(bytes.slice(..len / 2)),
            Some(Act::Stall) => std::future::pending().await,
            Some(Act::WrongBytes) => Ok(bytes.iter().map(|b| !b).collect()),
            Some(Act::Slow(pause)) => {
                tokio::time::sleep(pause).await;
                Ok(bytes)
            }
            Some(Act::Panic) => panic!("as told"),
        };
        self.running.fetch_sub(1, Ordering::SeqCst);
        answer
    }
}

/// A cache in a directory that vanishes with it.
pub(crate) struct Rig {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) runtime: Runtime,
    pub(crate) cache: Cache,
}

pub(crate) fn rig(capacity: u64, change: impl FnOnce(&mut Options)) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let mut options = Options::new(dir.path().join("cache"), capacity);
    change(&mut options);
    let cache = Cache::open(options, runtime.handle().clone()).unwrap();
    Rig { dir, runtime, cache }
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Waits for what a background task brings about.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(std::time::Instant::now() < end, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes that a directory occupies.
pub(crate) fn du(dir: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
}
