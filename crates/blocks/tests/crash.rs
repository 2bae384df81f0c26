//! storaged killed with -9, and seals cut short at every step.

#![allow(clippy::print_stderr, reason = "seeds and skips belong in a test's output")]

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aenv_blocks::control::Client;
use aenv_blocks::exports::{Exports, OpenRequest, Opened};
use aenv_blocks::source::LocalFiles;
use aenv_blocks::spec::{LayerSpec, Mode, StackSpec};
use aenv_blocks::storaged::{self, Options};
use common::{MIB, answers, daemon, pattern, patterned, stack};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const CHILD: &str = "AENV_TEST_STORAGED_RUN_DIR";

/// Not a test: what [`Killable`] runs in a process of its own.
#[test]
fn child() {
    let Some(run_dir) = std::env::var_os(CHILD) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(storaged::run(Options::in_run_dir(run_dir), std::future::pending())).unwrap();
}

/// A storaged that can be killed.
struct Killable {
    run_dir: PathBuf,
    client: Client,
    runtime: tokio::runtime::Runtime,
    child: Child,
    leave_mount: bool,
}

impl Killable {
    fn start(run_dir: &Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, run_dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let client = Client::new(run_dir.join("storaged.sock"));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(answers(&client));
        Self { run_dir: run_dir.to_owned(), client, runtime, child, leave_mount: false }
    }

    fn open(&self, stack: StackSpec, dir: &Path) -> Opened {
        let mode = Mode::Writable { dir: dir.to_owned() };
        let request = OpenRequest { name: "disk".into(), stack, mode, holder: "test".into() };
        self.runtime.block_on(self.client.open(request)).unwrap()
    }

    fn kill(mut self) -> PathBuf {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.leave_mount = true;
        self.run_dir.clone()
    }

    fn end(mut self) {
        self.runtime.block_on(self.client.close("disk", "test")).unwrap();
        self.runtime.block_on(self.client.shutdown()).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Killable {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped_already = self.child.wait();
        if !self.leave_mount {
            let _not_mounted =
                rustix::mount::unmount(self.run_dir.join("fuse"), rustix::mount::UnmountFlags::DETACH);
        }
    }
}

#[test]
fn nothing_acknowledged_is_lost_when_storaged_is_killed_under_load() {
    if daemon().is_none() {
        return;
    }
    let rounds = std::env::var("KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(6u64);
    let seed: u64 = rand::random();
    eprintln!("seed {seed}, KILLS={rounds}");
    let mut rng = StdRng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let (run_dir, upper) = (dir.path().join("run"), dir.path().join("upper"));
    let mut layers = vec![patterned(&dir.path().join("base.raw"), 4 * MIB)];
    // What each block was last acknowledged to hold; the highest bit says that a write was under way.
    let blocks: Vec<AtomicU64> = (0..1024).map(AtomicU64::new).collect();
    const UNDER_WAY: u64 = 1 << 63;
    for round in 1..=rounds {
        let storaged = Killable::start(&run_dir);
        let opened = storaged.open(stack(4 * MIB, &layers), &upper);
        check(&opened.path, &blocks, UNDER_WAY);
        let patience = Duration::from_millis(rng.random_range(5..120));
        let seal = rng.random_bool(0.5);
        std::thread::scope(|scope| {
            for worker in 0..4u64 {
                let (path, blocks) = (&opened.path, &blocks);
                let mut rng = StdRng::seed_from_u64(seed ^ round << 8 ^ worker);
                scope.spawn(move || {
                    // The kill may come first.
                    let Ok(file) = OpenOptions::new().read(true).write(true).open(path) else { return };
                    for step in 0u64.. {
                        let block = worker * 256 + rng.random_range(0..256);
                        let cell = &blocks[usize::try_from(block).unwrap()];
                        let value = round << 40 | worker << 32 | step;
                        let before = cell.load(Ordering::Relaxed);
                        cell.store(before | UNDER_WAY, Ordering::Relaxed);
                        if file.write_all_at(&pattern(value), block * 4096).is_err() {
                            return;
                        }
                        cell.store(value, Ordering::Relaxed);
                        if step % 16 == 0 && file.sync_data().is_err() {
                            return;
                        }
                    }
                });
            }
            std::thread::sleep(patience);
            if seal {
                let to = dir.path().join(format!("layer-{round}"));
                let sealed = storaged.runtime.block_on(storaged.client.seal("disk", &to, round % 2 == 0));
                layers.push(LayerSpec::lsmt(sealed.unwrap().path));
                std::thread::sleep(patience / 4);
            }
            storaged.kill();
        });
    }
    let storaged = Killable::start(&run_dir);
    let opened = storaged.open(stack(4 * MIB, &layers), &upper);
    check(&opened.path, &blocks, UNDER_WAY);
    storaged.end();
}

/// Every block holds what was acknowledged last; one with a write under way holds anything, and is settled now.
fn check(path: &Path, blocks: &[AtomicU64], under_way: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut got = vec![0; 4096];
    for (block, cell) in (0u64..).zip(blocks) {
        let value = cell.load(Ordering::Relaxed);
        if value & under_way != 0 {
            file.write_all_at(&pattern(block), block * 4096).unwrap();
            cell.store(block, Ordering::Relaxed);
            continue;
        }
        file.read_exact_at(&mut got, block * 4096).unwrap();
        assert!(got == pattern(value), "block {block} lost its acknowledged content");
    }
}

#[test]
fn a_client_notices_that_storaged_died_and_finds_the_next_one() {
    if daemon().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let storaged = Killable::start(&dir.path().join("run"));
    let client = storaged.client.clone();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let first = runtime.block_on(client.hello()).unwrap();
    let watching = runtime.spawn({
        let client = client.clone();
        async move { client.gone().await }
    });
    let run_dir = storaged.kill();
    runtime.block_on(watching).unwrap();
    let error = runtime.block_on(client.list()).unwrap_err();
    assert!(matches!(error, aenv_blocks::control::ClientError::Gone { .. }), "{error}");
    // The dead one's mount is still there: the next one clears it away.
    let storaged = Killable::start(&run_dir);
    let second = runtime.block_on(client.hello()).unwrap();
    assert_ne!(first.instance, second.instance);
    assert!(runtime.block_on(client.list()).unwrap().is_empty());
    storaged.end();
}

/// The files of an upper in which block 3 was written and sealed into `layer`, with block 5 in the next upper,
/// taken back to how a crash after `steps` renames of the seal would have left them.
fn cut_short(steps: usize, dir: &Path) -> (PathBuf, LayerSpec) {
    let (upper, layer) = (dir.join("upper"), dir.join("layer"));
    let exports = exports();
    open(&exports, &upper, &[]).unwrap();
    let device = exports.device("disk").unwrap();
    device.write_at(&pattern(3), 3 * 4096).unwrap();
    exports.flush("disk").unwrap();
    exports.seal("disk", &layer, false).unwrap();
    drop(device);
    drop(exports);
    // As after the last step; now backwards.
    let sealed_log = std::fs::read_dir(&upper)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.file_name().unwrap().to_str().unwrap().starts_with("sealed-"))
        .unwrap();
    let renames = [
        (upper.join("upper.data"), layer.clone()),
        (upper.join("upper.index"), sealed_log),
        (upper.join("next.data"), upper.join("upper.data")),
        (upper.join("next.index"), upper.join("upper.index")),
    ];
    for (from, to) in renames.iter().skip(steps).rev() {
        std::fs::rename(to, from).unwrap();
    }
    (upper, LayerSpec::lsmt(layer))
}

fn exports() -> Exports {
    Exports::new(std::sync::Arc::new(LocalFiles), std::sync::Arc::new(common::NoExporter))
}

fn open(
    exports: &Exports,
    upper: &Path,
    layers: &[LayerSpec],
) -> Result<Opened, aenv_blocks::exports::Error> {
    let mode = Mode::Writable { dir: upper.to_owned() };
    let holder = "test".to_owned();
    exports.open(OpenRequest { name: "disk".into(), stack: stack(MIB, layers), mode, holder })
}

fn block(exports: &Exports, block: u64) -> Vec<u8> {
    let mut got = vec![0; 4096];
    exports.device("disk").unwrap().read_at(&mut got, block * 4096).unwrap();
    got
}

#[test]
fn a_seal_cut_short_at_any_step_is_undone_or_finished() {
    for steps in 0..=4 {
        let dir = tempfile::tempdir().unwrap();
        let (upper, layer) = cut_short(steps, dir.path());
        let sealed = steps > 0;
        if sealed {
            // A caller that never saw the answer asks for the stack it knows.
            let exports = exports();
            let refused = open(&exports, &upper, &[]).unwrap_err();
            assert!(refused.to_string().contains("sealed"), "after step {steps}: {refused}");
        }
        let exports = exports();
        let layers = if sealed { vec![layer.clone()] } else { vec![] };
        open(&exports, &upper, &layers).unwrap_or_else(|e| panic!("after step {steps}: {e}"));
        assert!(block(&exports, 3) == pattern(3), "after step {steps}");
        exports.device("disk").unwrap().write_at(&pattern(5), 5 * 4096).unwrap();
        exports.close("disk", "test").unwrap();
        let names: Vec<_> = std::fs::read_dir(&upper)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names.len(), 3, "after step {steps} these are left: {names:?}");
        open(&exports, &upper, &layers).unwrap();
        assert!(block(&exports, 5) == pattern(5) && block(&exports, 3) == pattern(3), "after step {steps}");
    }
}

#[test]
fn a_layer_whose_end_a_power_loss_took_is_mended_from_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let (upper, layer) = cut_short(4, dir.path());
    let file = File::options().write(true).open(&layer.path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len - 4096).unwrap();
    let exports = exports();
    open(&exports, &upper, std::slice::from_ref(&layer)).unwrap();
    assert!(block(&exports, 3) == pattern(3));
}

#[test]
fn an_upper_directory_serves_one_export_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (exports(), exports());
    open(&first, &dir.path().join("upper"), &[]).unwrap();
    let refused = open(&second, &dir.path().join("upper"), &[]).unwrap_err();
    assert!(refused.to_string().contains("in use"), "{refused}");
    first.close("disk", "test").unwrap();
    open(&second, &dir.path().join("upper"), &[]).unwrap();
}

#[test]
fn a_seal_asked_for_twice_answers_twice_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let exports = exports();
    open(&exports, &dir.path().join("upper"), &[]).unwrap();
    exports.device("disk").unwrap().write_at(&pattern(1), 0).unwrap();
    let first = exports.seal("disk", &dir.path().join("layer"), false).unwrap();
    assert_eq!(exports.seal("disk", &dir.path().join("layer"), true).unwrap(), first);
    assert_eq!(first.blocks, 8);
    std::fs::write(dir.path().join("taken"), b"x").unwrap();
    for (to, word) in [("taken", "exists"), ("missing/layer", "doesn't exist")] {
        let refused = exports.seal("disk", &dir.path().join(to), false).unwrap_err();
        assert!(refused.to_string().contains(word), "{refused}");
    }
    assert!(block(&exports, 0) == pattern(1));
    exports.device("disk").unwrap().write_at(&pattern(2), 0).unwrap();
    exports.close("disk", "test").unwrap();
    open(&exports, &dir.path().join("upper"), &[LayerSpec::lsmt(dir.path().join("layer"))]).unwrap();
    assert!(block(&exports, 0) == pattern(2));
}

#[test]
fn a_disk_can_be_opened_again_larger() {
    let dir = tempfile::tempdir().unwrap();
    let exports = exports();
    let upper = dir.path().join("upper");
    open(&exports, &upper, &[]).unwrap();
    exports.device("disk").unwrap().write_at(&pattern(1), MIB - 4096).unwrap();
    exports.close("disk", "test").unwrap();
    let mode = Mode::Writable { dir: upper };
    let request =
        OpenRequest { name: "disk".into(), stack: stack(2 * MIB, &[]), mode, holder: "test".into() };
    assert_eq!(exports.open(request).unwrap().size, 2 * MIB);
    assert!(block(&exports, 255) == pattern(1) && block(&exports, 256) == [0; 4096]);
    exports.device("disk").unwrap().write_at(&pattern(2), 2 * MIB - 4096).unwrap();
    let layer = exports.seal("disk", &dir.path().join("layer"), false).unwrap();
    assert_eq!(layer.blocks, 16);
    assert!(block(&exports, 511) == pattern(2));
}
