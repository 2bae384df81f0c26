//! A storaged in the test's own process, on directories that vanish with it.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::print_stderr, reason = "a skipped test says so in its output")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use aenv_blocks::control::Client;
use aenv_blocks::exports::{OpenRequest, Opened};
use aenv_blocks::spec::{LayerSpec, Mode, StackSpec};
use aenv_blocks::storaged::{self, Options};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) struct Daemon {
    pub(crate) dir: TempDir,
    pub(crate) client: Client,
    pub(crate) runtime: Runtime,
    signal: Option<oneshot::Sender<()>>,
    running: Option<JoinHandle<Result<(), storaged::Error>>>,
}

/// `None`, after saying why, where FUSE can't be used.
pub(crate) fn daemon() -> Option<Daemon> {
    let usable = rustix::process::geteuid().is_root()
        && File::options().read(true).write(true).open("/dev/fuse").is_ok();
    if !usable {
        eprintln!("Skipped: mounting FUSE needs root and /dev/fuse");
        return None;
    }
    Some(Daemon::start(tempfile::tempdir().unwrap()))
}

impl Daemon {
    pub(crate) fn start(dir: TempDir) -> Self {
        let runtime = Runtime::new().unwrap();
        let mut options = Options::in_run_dir(dir.path().join("run"));
        options.drain = Duration::from_millis(300);
        let client = Client::new(options.socket.clone());
        let (signal, signalled) = oneshot::channel();
        let running = runtime.spawn(storaged::run(options, async {
            let _sender_dropped = signalled.await;
        }));
        runtime.block_on(answers(&client));
        Self { dir, client, runtime, signal: Some(signal), running: Some(running) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn open(&self, name: &str, stack: StackSpec, mode: Mode) -> Opened {
        let request = OpenRequest { name: name.into(), stack, mode, holder: "test".into() };
        self.runtime.block_on(self.client.open(request)).unwrap()
    }

    pub(crate) fn open_writable(&self, name: &str, stack: StackSpec) -> Opened {
        self.open(name, stack, Mode::Writable { dir: self.path(&format!("{name}.upper")) })
    }

    pub(crate) fn close(&self, name: &str) {
        self.runtime.block_on(self.client.close(name, "test")).unwrap();
    }

    pub(crate) fn seal(&self, name: &str, to: &str, durable: bool) -> LayerSpec {
        let layer = self.runtime.block_on(self.client.seal(name, self.path(to), durable)).unwrap();
        assert_eq!(std::fs::metadata(&layer.path).unwrap().len(), layer.bytes);
        LayerSpec::lsmt(layer.path)
    }

    /// Ends it as a signal would.
    pub(crate) fn stop(mut self) -> (TempDir, Result<(), storaged::Error>) {
        let _gone = self.signal.take().unwrap().send(());
        let result = self.runtime.block_on(self.running.take().unwrap()).unwrap();
        (std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap()), result)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let (Some(signal), Some(running)) = (self.signal.take(), self.running.take()) {
            let _gone = signal.send(());
            let _result = self.runtime.block_on(running);
        }
    }
}

/// Waits until someone serves `client`'s socket.
pub(crate) async fn answers(client: &Client) {
    for _ in 0..1200 {
        if client.hello().await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("storaged did not come up");
}

pub(crate) fn stack(virtual_size: u64, layers: &[LayerSpec]) -> StackSpec {
    StackSpec { virtual_size, layers: layers.to_vec() }
}

/// A raw file of `len` bytes that are different everywhere.
pub(crate) fn patterned(path: &Path, len: u64) -> LayerSpec {
    let file = File::create(path).unwrap();
    for block in 0..len / 4096 {
        file.write_all_at(&pattern(block), block * 4096).unwrap();
    }
    LayerSpec::raw(path)
}

/// What [`patterned`] has in its `block`th 4 KiB.
pub(crate) fn pattern(block: u64) -> Vec<u8> {
    (0..512u64).flat_map(|word| (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word).to_le_bytes()).collect()
}

pub(crate) fn run(program: &str, args: &[&str]) -> (bool, String) {
    let output = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

/// An exporter for tests that look at devices directly.
pub(crate) struct NoExporter;

impl aenv_blocks::export::Exporter for NoExporter {
    fn publish(
        &self,
        name: &str,
        _: std::sync::Arc<dyn aenv_blocks::device::Device>,
    ) -> Result<PathBuf, aenv_blocks::export::ExportError> {
        Ok(Path::new("/nowhere").join(name))
    }

    fn drain(&self, _: &str, _: Duration) -> Result<(), aenv_blocks::export::ExportError> {
        Ok(())
    }

    fn withdraw(&self, _: &str) {}

    fn handles(&self, _: &str) -> u32 {
        0
    }

    fn all_handles(&self) -> u32 {
        0
    }
}
