//! A server of ublk devices is killed with -9 while its devices are in use.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aenv_blocks::device::Device;
use aenv_blocks::export::Exporter;
use aenv_blocks::export::ublk::{Options, UblkExporter};

use super::file_device::FileDevice;
use super::{MIB, ublk_is_here};

const CHILD: &str = "AENV_TEST_UBLK_DIR";
const SIZE: u64 = 16 * MIB;
const ROUNDS: u32 = 8;

/// Not a test: the server that [`Server`] runs and kills.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(CHILD) else { return };
    let dir = Path::new(&dir);
    let exporter = UblkExporter::new(&dir.join("exports"), Options::default()).unwrap();
    let device = || Arc::new(FileDevice::make(&dir.join("bytes"), SIZE));
    let left = exporter.left_behind().unwrap();
    for (name, id) in &left {
        exporter.recover(name, *id, &as_device(device())).unwrap();
        assert_eq!(exporter.device_id(name), Some(*id));
    }
    if left.is_empty() {
        exporter.publish("disk", device()).unwrap();
    }
    writeln!(std::io::stderr(), "ready").unwrap();
    // Ends with the test that started it, if it is not killed.
    let _end = std::io::stdin().read_line(&mut String::new());
    exporter.withdraw("disk");
}

fn as_device(device: Arc<FileDevice>) -> Arc<dyn Device> {
    device
}

struct Server(Child);

impl Server {
    fn start(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "recovery::child", "--nocapture"])
            .env(CHILD, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines: Vec<String> = BufReader::new(child.stderr.as_mut().unwrap())
            .lines()
            .map_while(Result::ok)
            .take_while(|line| line != "ready")
            .collect();
        let running = child.try_wait().unwrap().is_none();
        assert!(running && !lines.iter().any(|line| line.contains("panicked")), "{lines:?}");
        Self(child)
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

/// Ends the load, after a failure too: the scope waits for its threads.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A block that says which one it is and how often it was written.
fn block(number: u64, version: u64) -> [u64; 512] {
    let mut words = [number; 512];
    words[0] = version;
    words
}

/// Memory as O_DIRECT wants it.
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Page {
    fn of(words: &[u64; 512]) -> Self {
        let mut page = Self([0; 4096]);
        for (at, word) in page.0.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        page
    }
}

#[test]
fn killed_under_load_it_is_recovered_without_an_error_or_a_lost_write() {
    if !ublk_is_here() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut server = Some(Server::start(dir.path()));
    let path = dir.path().join("exports/disk");
    let stop = AtomicBool::new(false);
    let done = [const { AtomicU64::new(0) }; 4];
    std::thread::scope(|scope| {
        let stopping = StopOnDrop(&stop);
        // Each has a quarter of the blocks, writes them over and over and reads back what it wrote before.
        for (part, done) in (0u64..).zip(&done) {
            let (path, stop) = (&path, &stop);
            scope.spawn(move || {
                let file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .custom_flags(libc::O_DIRECT)
                    .open(path)
                    .unwrap();
                let blocks = SIZE / 4096 / 4;
                let mut written = 0u64;
                while !stop.load(Ordering::SeqCst) {
                    let (number, version) = (part * blocks + written % blocks, written / blocks + 1);
                    file.write_all_at(&Page::of(&block(number, version)).0, number * 4096).unwrap();
                    let back = written.saturating_sub(written * 7 % 50);
                    let (number, version) = (part * blocks + back % blocks, back / blocks + 1);
                    let mut page = Page([0; 4096]);
                    file.read_exact_at(&mut page.0, number * 4096).unwrap();
                    assert!(
                        page.0 == Page::of(&block(number, version)).0,
                        "block {number} is not version {version}"
                    );
                    written += 1;
                    done.store(written, Ordering::SeqCst);
                }
            });
        }
        let total = || done.iter().map(|done| done.load(Ordering::SeqCst)).sum::<u64>();
        for round in 0..ROUNDS {
            let deadline = Instant::now() + Duration::from_secs(60);
            let before = total();
            while total() < before + 200 {
                assert!(Instant::now() < deadline, "round {round}: I/O stands still");
                std::thread::sleep(Duration::from_millis(5));
            }
            server.take().unwrap().kill();
            let killed = Instant::now();
            server = Some(Server::start(dir.path()));
            eprintln!("round {round}: {} writes so far, served again after {:?}", total(), killed.elapsed());
        }
        drop(stopping);
    });
    let blocks = SIZE / 4096 / 4;
    let bytes = File::open(dir.path().join("bytes")).unwrap();
    for (part, done) in (0u64..).zip(&done) {
        let written = done.load(Ordering::SeqCst);
        for number in 0..blocks.min(written) {
            let version = (written - number - 1) / blocks + 1;
            let mut got = [0; 4096];
            bytes.read_exact_at(&mut got, (part * blocks + number) * 4096).unwrap();
            assert!(got == Page::of(&block(part * blocks + number, version)).0, "a write was lost");
        }
    }
    server.unwrap().end();
}

#[test]
fn a_device_left_by_a_dead_server_is_found_and_deleted() {
    if !ublk_is_here() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    Server::start(dir.path()).kill();
    let link = dir.path().join("exports/disk");
    let node = std::fs::read_link(&link).unwrap();
    let exporter = UblkExporter::new(&dir.path().join("exports"), Options::default()).unwrap();
    assert_eq!(exporter.left_behind().unwrap().len(), 1);
    // An exporter of another directory leaves it alone.
    let elsewhere = UblkExporter::new(&dir.path().join("elsewhere"), Options::default()).unwrap();
    assert!(elsewhere.delete_stale().unwrap().is_empty());
    assert_eq!(exporter.delete_stale().unwrap().len(), 1);
    assert!(!node.exists() && !link.is_symlink());
    assert!(exporter.delete_stale().unwrap().is_empty());
}

#[test]
fn a_device_of_another_size_is_not_recovered() {
    if !ublk_is_here() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    Server::start(dir.path()).kill();
    let exporter = UblkExporter::new(&dir.path().join("exports"), Options::default()).unwrap();
    let (name, id) = exporter.left_behind().unwrap().remove(0);
    let other = Arc::new(FileDevice::make(&dir.path().join("other"), SIZE / 2));
    let refused = exporter.recover(&name, id, &as_device(other)).unwrap_err();
    assert!(refused.to_string().contains("sectors"), "{refused}");
    exporter.delete_stale().unwrap();
}
