//! The fake: the test plays the guest.

use crate::ground::Ground;
use aenv_vmm::{
    BootSource, Drive, ExitCause, MachineSpec, VmRecord, Vmm,
    fake::{Fake, Guest},
};
use async_trait::async_trait;
use std::{fs, path::PathBuf, time::Duration};
use tempfile::TempDir;

const LENGTH: usize = 64;

pub(crate) struct FakeGround {
    pub(crate) fake: Fake,
    dir: TempDir,
}

impl FakeGround {
    fn guest(&self, spec: &MachineSpec) -> Guest {
        self.fake.guest(&spec.id).expect("the machine lives")
    }
}

#[async_trait]
impl Ground for FakeGround {
    async fn prepare() -> Result<Self, String> {
        Ok(Self { fake: Fake::new(), dir: tempfile::tempdir().map_err(|error| error.to_string())? })
    }

    fn vmm(&self) -> &dyn Vmm {
        &self.fake
    }

    fn spec(&self, name: &str) -> MachineSpec {
        let dir = self.dir.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        let disk = self.path(&format!("{name}.disk"));
        fs::write(&disk, "").unwrap();
        let drives = vec![Drive { path: disk, read_only: false }];
        MachineSpec { id: name.into(), vcpus: 1, memory_mib: 64, drives, net: None, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn boot_source(&self, name: &str) -> BootSource {
        BootSource {
            kernel: self.path("kernel"),
            initramfs: self.path("initramfs"),
            cmdline: vec![],
            memory_file: self.path(&format!("{name}.memory")),
        }
    }

    async fn remember(&self, spec: &MachineSpec, text: &str) {
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(LENGTH, 0);
        self.guest(spec).write(4096, &bytes).unwrap();
    }

    async fn recall(&self, spec: &MachineSpec, _limit: Duration) -> Option<String> {
        let guest = self.guest(spec);
        if guest.is_paused() {
            return None;
        }
        let bytes = guest.read(4096, LENGTH).ok()?;
        let text = String::from_utf8(bytes).unwrap();
        let text = text.trim_end_matches('\0');
        Some(if text.is_empty() { "nothing".into() } else { text.into() })
    }

    async fn print(&self, spec: &MachineSpec, line: &str) {
        self.guest(spec).print(line).unwrap();
    }

    async fn power_off(&self, spec: &MachineSpec) {
        self.guest(spec).end(ExitCause::GuestShutdown, "guest-shutdown");
    }

    async fn panic(&self, spec: &MachineSpec) {
        self.guest(spec).end(ExitCause::GuestPanic, "Kernel panic");
    }

    async fn crash(&self, record: &VmRecord) {
        self.fake.guest(&record.id).unwrap().end(ExitCause::VmmCrash, "signal 9");
    }

    fn left_behind(&self, record: &VmRecord) -> Vec<String> {
        self.fake.living().into_iter().filter(|id| *id == record.id).collect()
    }
}
