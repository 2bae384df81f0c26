//! What the behaviours need of a backend besides the trait: files to start from and a way to drive the guest.

use aenv_vmm::{BootSource, MachineSpec, RestoreSource, Vm, VmRecord, Vmm};
use async_trait::async_trait;
use std::{io::Write, path::PathBuf, sync::Arc, time::Duration};

/// Longer than any step on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Long enough to see that nothing happens.
pub(crate) const MOMENT: Duration = Duration::from_millis(300);

/// A backend with a scratch directory.
#[async_trait]
pub(crate) trait Ground: Sized + Send + Sync {
    /// Makes it, or says what is missing.
    async fn prepare() -> Result<Self, String>;

    /// The backend.
    fn vmm(&self) -> &dyn Vmm;

    /// A machine of this name with its directory and its drive.
    fn spec(&self, name: &str) -> MachineSpec;

    /// A directory for files that outlive a machine.
    fn path(&self, name: &str) -> PathBuf;

    /// What a machine of this name boots from.
    fn boot_source(&self, name: &str) -> BootSource;

    /// Has the guest keep `text` in its memory.
    async fn remember(&self, spec: &MachineSpec, text: &str);

    /// What the guest keeps; `None` when it doesn't answer within `limit`.
    async fn recall(&self, spec: &MachineSpec, limit: Duration) -> Option<String>;

    /// Has the guest write a line on its console.
    async fn print(&self, spec: &MachineSpec, line: &str);

    /// Has the guest power off.
    async fn power_off(&self, spec: &MachineSpec);

    /// Has the guest's kernel panic.
    async fn panic(&self, spec: &MachineSpec);

    /// Ends the monitor from outside.
    async fn crash(&self, record: &VmRecord);

    /// What should be gone after a machine's end but isn't.
    fn left_behind(&self, record: &VmRecord) -> Vec<String>;

    /// Boots a machine and waits for its guest.
    async fn boot(&self, name: &str) -> (Arc<dyn Vm>, MachineSpec) {
        let spec = self.spec(name);
        let vm = self.vmm().boot(&spec, &self.boot_source(name)).await.expect("the machine boots");
        assert_eq!(self.recall(&spec, PATIENCE).await.as_deref(), Some("nothing"));
        (vm, spec)
    }

    /// Pauses and saves a machine booted under this name, and returns what its clones start from.
    async fn snapshot(&self, vm: &dyn Vm, name: &str) -> RestoreSource {
        vm.pause().await.expect("it pauses");
        let state = self.path(&format!("{name}.state"));
        vm.save_state(&state).await.expect("its state is saved");
        RestoreSource {
            state,
            memory_image: self.boot_source(name).memory_file,
            made_by: self.vmm().compatibility(),
        }
    }
}

/// Says that a test did not run.
pub(crate) fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "Skipped: {why}");
}
