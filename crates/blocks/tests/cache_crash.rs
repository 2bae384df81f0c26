//! The cache's process is killed at random moments, and its disk runs full.
#![allow(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a skipped test says so, a child that it is ready"
)]

mod cache_common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use aenv_blocks::cache::{BLOCK, Cache, Options};
use aenv_overlaybd::ReadAt;
use cache_common::{Faulty, du, eventually, random, runtime};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const CHILD: &str = "AENV_TEST_CACHE_DIR";
const CAPACITY: u64 = 4 << 20;

fn sources() -> Vec<std::sync::Arc<Faulty>> {
    (0..4).map(|n| Faulty::new(900 + n, 12 * BLOCK + 999)).collect()
}

fn open(dir: &Path, capacity: u64, runtime: &tokio::runtime::Runtime) -> Cache {
    let mut cache = None;
    eventually("the directory is free", || {
        cache = Cache::open(Options::new(dir, capacity), runtime.handle().clone()).ok();
        cache.is_some()
    });
    cache.unwrap()
}

/// Not a test by itself: what the killed process does, for ever. It ends at once when nobody kills it.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let runtime = runtime();
    let cache = open(Path::new(&dir), CAPACITY, &runtime);
    let sources = sources();
    let layers: Vec<_> = sources.iter().map(|source| cache.layer(source.clone()).unwrap()).collect();
    println!("serving");
    let mut rng = StdRng::seed_from_u64(u64::from(std::process::id()));
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while std::time::Instant::now() < end {
        let which = rng.random_range(0..layers.len());
        let from = rng.random_range(0..sources[which].bytes.len() - 5000);
        let mut got = vec![0; 5000];
        layers[which].read_at(&mut got, from as u64).unwrap();
        assert!(got == sources[which].bytes[from..from + 5000]);
    }
}

#[test]
fn killed_sixty_times_it_never_serves_a_wrong_byte_and_keeps_what_it_had() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let mut rng = StdRng::seed_from_u64(3);
    let mut kept = 0;
    for round in 0..60 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        assert!(lines.any(|line| line.unwrap().contains("serving")), "round {round}");
        std::thread::sleep(Duration::from_micros(rng.random_range(0..40_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let cache = open(dir.path(), CAPACITY, &runtime);
        kept += cache.stat().bytes;
        for source in sources() {
            let layer = cache.layer(source.clone()).unwrap();
            let mut got = vec![0; source.bytes.len()];
            layer.read_at(&mut got, 0).unwrap();
            assert!(got == source.bytes[..], "round {round}");
        }
        assert_eq!(cache.stat().damaged, 0, "round {round}: a kill alone leaves no damaged block");
        assert!(du(dir.path()) <= CAPACITY, "round {round}");
    }
    assert!(kept > 60 * CAPACITY / 4, "only {kept} bytes were found again in 60 rounds");
}

struct Mount(tempfile::TempDir);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ended = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn on_a_full_disk_it_serves_without_caching_gives_space_back_and_goes_on() {
    let mount = Mount(tempfile::tempdir().unwrap());
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=6m", "tmpfs"])
        .arg(mount.0.path())
        .stderr(Stdio::null())
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("Skipped: mounting a small tmpfs needs root");
        return;
    }
    // The cache may have more than the disk, and someone else has a third of that.
    std::fs::write(mount.0.path().join("other"), random(1, 2 << 20)).unwrap();
    let runtime = runtime();
    let dir = mount.0.path().join("cache");
    let cache = open(&dir, 64 << 20, &runtime);
    for round in 0..2 {
        for seed in 0..8 {
            let source = Faulty::new(seed, 16 * BLOCK);
            let layer = cache.layer(source.clone()).unwrap();
            let mut got = vec![0; source.bytes.len()];
            layer.read_at(&mut got, 0).unwrap();
            assert!(got == source.bytes[..], "round {round}, image {seed}");
        }
    }
    let stat = cache.stat();
    assert!(stat.not_stored > 0, "the disk was never full");
    assert!(stat.bytes > 1 << 20, "it caches no more: {stat:?}");
    // What is left is enough for others to write.
    eventually("the last blocks are stored", || {
        std::fs::write(mount.0.path().join("more"), vec![1; 64 << 10]).is_ok()
    });
    drop(cache);
    let cache = open(&dir, 64 << 20, &runtime);
    assert!(cache.stat().bytes > 1 << 20);
}
