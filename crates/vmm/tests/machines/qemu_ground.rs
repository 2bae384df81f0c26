//! QEMU with the kit's kernel and a guest that obeys a mailbox on its drive (`init.rs`).

use crate::ground::Ground;
use aenv_vmm::{
    BootSource, Drive, MachineSpec, VmRecord, Vmm,
    qemu::{Options, Qemu},
};
use async_trait::async_trait;
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};
use tempfile::TempDir;

const BLOCK: usize = 4096;
const MAILBOX_BYTES: u64 = 1 << 20;

pub(crate) struct QemuGround {
    pub(crate) qemu: Qemu,
    kit: PathBuf,
    dir: TempDir,
    commands: AtomicU64,
}

/// Where the guest kit is, or why there is none.
pub(crate) fn kit() -> Result<PathBuf, String> {
    let dir = std::env::var_os("AENV_GUEST_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest"), PathBuf::from);
    for name in ["vmlinux", "initramfs.cpio"] {
        if !dir.join(name).is_file() {
            return Err(format!("no guest kit: {} has no {name}; run `cargo xtask guest`", dir.display()));
        }
    }
    Ok(dir)
}

impl QemuGround {
    /// A ground in a directory that stays when it is dropped: for a starter in another process.
    pub(crate) async fn within(dir: &Path, options: Options) -> Result<Self, String> {
        let kit = kit()?;
        let qemu = Qemu::probe(options).await.map_err(|error| error.to_string())?;
        let dir = tempfile::Builder::new().prefix("m").tempdir_in(dir).map_err(|error| error.to_string())?;
        let ground = Self { qemu, kit, dir, commands: AtomicU64::new(1) };
        ground.make_initramfs()?;
        Ok(ground)
    }

    /// Keeps the directory on drop, and returns it.
    pub(crate) fn keep(&mut self) -> PathBuf {
        self.dir.disable_cleanup(true);
        self.dir.path().to_owned()
    }

    /// The kit's archive and one more over it, whose /init is ours: the kernel unpacks both.
    fn make_initramfs(&self) -> Result<(), String> {
        let init = self.path("init");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/machines/init.rs");
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let compiled = Command::new(rustc)
            .args(["--edition", "2024", "-O", "-C", "target-feature=+crt-static", "-C", "panic=abort"])
            .args(["-C", "strip=symbols", "--target", "x86_64-unknown-linux-gnu", "-o"])
            .args([&init, &source])
            .output()
            .map_err(|error| format!("rustc can't be started: {error}"))?;
        if !compiled.status.success() {
            return Err(format!(
                "the test guest can't be compiled: {}",
                String::from_utf8_lossy(&compiled.stderr)
            ));
        }
        let mut archive = fs::read(self.kit.join("initramfs.cpio")).map_err(|error| error.to_string())?;
        let program = fs::read(&init).map_err(|error| error.to_string())?;
        let entry = |name: &str, mode: u32, content: &[u8], archive: &mut Vec<u8>| {
            let header = format!(
                "070701{:08x}{mode:08x}{:032x}{:08x}{:032x}{:08x}{:08x}",
                1,
                1_u128 << 32,
                content.len(),
                0,
                name.len() + 1,
                0
            );
            archive.extend_from_slice(header.as_bytes());
            archive.extend_from_slice(name.as_bytes());
            archive.push(0);
            archive.resize(archive.len().next_multiple_of(4), 0);
            archive.extend_from_slice(content);
            archive.resize(archive.len().next_multiple_of(4), 0);
        };
        entry("init", 0o100_755, &program, &mut archive);
        entry("TRAILER!!!", 0, b"", &mut archive);
        fs::write(self.path("initramfs"), archive).map_err(|error| error.to_string())
    }

    pub(crate) fn console(&self, spec: &MachineSpec) -> String {
        String::from_utf8_lossy(&fs::read(spec.dir.join("console.log")).unwrap_or_default()).into_owned()
    }

    /// Counts on without sending.
    pub(crate) fn next_number(&self) -> u64 {
        self.commands.fetch_add(1, Ordering::Relaxed)
    }

    /// Leaves a command in the mailbox.
    pub(crate) fn send(&self, spec: &MachineSpec, command: &str) -> u64 {
        let number = self.next_number();
        let mut block = format!("{number} {command}\n").into_bytes();
        block.resize(BLOCK, 0);
        let mailbox = File::options().write(true).open(&spec.drives[0].path).unwrap();
        mailbox.write_all_at(&block, 0).unwrap();
        number
    }

    /// Waits for the answer to a command.
    pub(crate) async fn answer(&self, spec: &MachineSpec, number: u64, limit: Duration) -> Option<String> {
        let mailbox = File::open(&spec.drives[0].path).unwrap();
        let begin = Instant::now();
        loop {
            let mut block = [0; BLOCK];
            mailbox.read_exact_at(&mut block, BLOCK as u64).unwrap();
            let text = String::from_utf8_lossy(&block);
            if let Some((told, answer)) = text.lines().next().unwrap_or("").split_once(' ')
                && told == number.to_string()
            {
                return Some(answer.to_owned());
            }
            if begin.elapsed() > limit {
                return None;
            }
            // The guest polls its drive, so there is no event to wait for.
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }

    pub(crate) async fn ask(&self, spec: &MachineSpec, command: &str) -> String {
        let number = self.send(spec, command);
        let answer = self.answer(spec, number, crate::ground::PATIENCE).await;
        answer.unwrap_or_else(|| panic!("no answer to `{command}`; console:\n{}", self.console(spec)))
    }
}

#[async_trait]
impl Ground for QemuGround {
    async fn prepare() -> Result<Self, String> {
        Self::within(&std::env::temp_dir(), Options::default()).await
    }

    fn vmm(&self) -> &dyn Vmm {
        &self.qemu
    }

    fn spec(&self, name: &str) -> MachineSpec {
        let dir = self.dir.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        let mailbox = self.path(&format!("{name}.disk"));
        File::create(&mailbox).unwrap().set_len(MAILBOX_BYTES).unwrap();
        // Processes of several tests run at once on one host: cgroups are named by the id.
        let id = format!("{name}-{}", std::process::id());
        let drives = vec![Drive { path: mailbox, read_only: false }];
        MachineSpec { id, vcpus: 1, memory_mib: 256, drives, net: None, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn boot_source(&self, name: &str) -> BootSource {
        BootSource {
            kernel: self.kit.join("vmlinux"),
            initramfs: self.path("initramfs"),
            cmdline: vec!["aenv.test=1".into()],
            memory_file: self.path(&format!("{name}.memory")),
        }
    }

    async fn remember(&self, spec: &MachineSpec, text: &str) {
        assert_eq!(self.ask(spec, &format!("remember {text}")).await, "ok");
    }

    async fn recall(&self, spec: &MachineSpec, limit: Duration) -> Option<String> {
        let number = self.send(spec, "recall");
        self.answer(spec, number, limit).await
    }

    async fn print(&self, spec: &MachineSpec, line: &str) {
        assert_eq!(self.ask(spec, &format!("print {line}")).await, "ok");
    }

    async fn power_off(&self, spec: &MachineSpec) {
        self.send(spec, "poweroff");
    }

    async fn panic(&self, spec: &MachineSpec) {
        self.send(spec, "panic");
    }

    async fn crash(&self, record: &VmRecord) {
        let pid = rustix::process::Pid::from_raw(record.pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }

    fn left_behind(&self, record: &VmRecord) -> Vec<String> {
        let mut left = Vec::new();
        let stat = fs::read_to_string(format!("/proc/{}/stat", record.pid)).unwrap_or_default();
        // An orphan's zombie is init's to reap, which may take its time.
        if stat.contains("(qemu") && !stat.contains(") Z ") {
            left.push(format!("process {stat}"));
        }
        for name in ["qmp.sock", "qemu.json", "qemu.json.part"] {
            if record.dir.join(name).exists() {
                left.push(name.to_owned());
            }
        }
        for tree in ["", "memory", "pids"] {
            let cgroup = Path::new("/sys/fs/cgroup").join(tree).join("aenv").join(&record.id);
            if cgroup.exists() {
                left.push(cgroup.display().to_string());
            }
        }
        left
    }
}

impl Drop for QemuGround {
    /// A failed test leaves no machine behind.
    fn drop(&mut self) {
        for record in self.qemu.survivors(self.dir.path()).unwrap_or_default() {
            if let Some(pid) = rustix::process::Pid::from_raw(record.pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            for tree in ["", "memory", "pids"] {
                let _ = fs::remove_dir(Path::new("/sys/fs/cgroup").join(tree).join("aenv").join(&record.id));
            }
        }
    }
}
