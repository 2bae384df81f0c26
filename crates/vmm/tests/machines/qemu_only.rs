//! What only QEMU has to do.

use crate::{
    ground::{Ground, PATIENCE, skipped},
    qemu_ground::QemuGround,
};
use aenv_vmm::{
    Drive, Error, ExitCause, VmRecord, Vmm,
    qemu::{Options, Qemu},
};
use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

async fn ground() -> Option<QemuGround> {
    match QemuGround::prepare().await {
        Ok(ground) => Some(ground),
        Err(why) => {
            skipped(&why);
            None
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drives_keep_their_order_and_their_protection() {
    let Some(ground) = ground().await else { return };
    let mut spec = ground.spec("m");
    for (index, read_only) in [(1_u64, true), (2, false)] {
        let path = ground.path(&format!("more{index}"));
        File::create(&path).unwrap().set_len((index + 1) << 20).unwrap();
        spec.drives.push(Drive { path, read_only });
    }
    let vm = ground.vmm().boot(&spec, &ground.boot_source("m")).await.unwrap();
    assert_eq!(ground.ask(&spec, "drives").await, "2048:0,4096:1,6144:0");
    vm.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_guest_sees_the_callers_words_and_several_processors() {
    let Some(ground) = ground().await else { return };
    let spec = aenv_vmm::MachineSpec { vcpus: 2, ..ground.spec("m") };
    let vm = ground.vmm().boot(&spec, &ground.boot_source("m")).await.unwrap();
    assert!(ground.ask(&spec, "cmdline").await.ends_with(" aenv.test=1"));
    assert!(ground.ask(&spec, "random").await.parse::<usize>().unwrap() > 0);
    vm.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_console_flood_is_cut_while_the_guest_goes_on() {
    let Some(ground) = ground().await else { return };
    let (vm, spec) = ground.boot("m").await;
    assert_eq!(ground.ask(&spec, "flood 2048").await, "ok");
    ground.print(&spec, "after the flood").await;
    let console = spec.dir.join("console.log");
    assert!(console.metadata().unwrap().len() > 2 << 20);
    let begin = std::time::Instant::now();
    // A cut in the middle of the flood leaves what came after it, up to the bound at which the next one is due.
    while console.metadata().unwrap().blocks() * 512 > 1 << 20 {
        assert!(begin.elapsed() < PATIENCE, "the console was never cut");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(ground.console(&spec).contains("after the flood"));
    vm.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_without_a_record_is_found_by_its_directory() {
    let Some(ground) = ground().await else { return };
    let (vm, spec) = ground.boot("m").await;
    let record = vm.record();
    drop(vm);
    let root = spec.dir.parent().unwrap();
    assert_eq!(ground.qemu.survivors(root).unwrap(), std::slice::from_ref(&record));
    assert_eq!(ground.qemu.survivors(Path::new("/nonexistent")).unwrap(), []);
    let vm = ground.qemu.adopt(&record).await.unwrap().unwrap();
    vm.kill().await.unwrap();
    assert_eq!(ground.qemu.survivors(root).unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_that_nobody_watched_is_explained_afterwards() {
    let Some(ground) = ground().await else { return };
    for (command, cause) in [("poweroff", ExitCause::GuestShutdown), ("panic", ExitCause::GuestPanic)] {
        let (vm, spec) = ground.boot(command).await;
        let record = vm.record();
        drop(vm);
        ground.send(&spec, command);
        let begin = std::time::Instant::now();
        while !ground.qemu.survivors(&spec.dir).unwrap().is_empty() {
            assert!(begin.elapsed() < PATIENCE, "it never ended");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(ground.qemu.adopt(&record).await.unwrap().is_none());
        assert_eq!(ground.left_behind(&record), Vec::<String>::new());
        assert_eq!(Qemu::post_mortem(&record).cause, cause);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cgroup_that_is_none_and_a_program_that_is_missing_are_refused_by_name() {
    let missing = Options { qemu_binary: Some("/nonexistent/qemu".into()), ..Options::default() };
    let error = Qemu::probe(missing).await.unwrap_err();
    assert!(
        matches!(&error, Error::Unavailable { reason, .. } if reason.contains("/nonexistent/qemu")),
        "{error}"
    );
    let Some(_) = ground().await else { return };
    let dir = tempfile::tempdir().unwrap();
    let no_cgroup = Options { cgroup: Some(dir.path().join("x")), ..Options::default() };
    assert!(Qemu::probe(no_cgroup).await.unwrap_err().to_string().contains("is no cgroup"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_machine_is_refused_by_what_is_wrong_with_it() {
    let Some(ground) = ground().await else { return };
    let spec = ground.spec("m");
    let boot = ground.boot_source("m");
    let mut cases = vec![
        (aenv_vmm::MachineSpec { vcpus: 0, ..spec.clone() }, "0 virtual CPUs"),
        (aenv_vmm::MachineSpec { memory_mib: 1, ..spec.clone() }, "1 MiB"),
        (aenv_vmm::MachineSpec { id: "../up".into(), ..spec.clone() }, "\"../up\""),
    ];
    let relative = Drive { path: "disk".into(), read_only: false };
    cases.push((aenv_vmm::MachineSpec { drives: vec![relative], ..spec.clone() }, "absolute"));
    let missing = Drive { path: ground.path("missing"), read_only: false };
    cases.push((aenv_vmm::MachineSpec { drives: vec![missing], ..spec.clone() }, "missing"));
    for (spec, word) in cases {
        let error = ground.vmm().boot(&spec, &boot).await.err().expect("it is refused");
        assert!(error.to_string().contains(word), "{error}");
        assert!(!boot.memory_file.exists());
    }
    let no_kernel = aenv_vmm::BootSource { kernel: ground.path("no-kernel"), ..boot.clone() };
    assert!(ground.vmm().boot(&spec, &no_kernel).await.err().unwrap().to_string().contains("no-kernel"));
    let long = aenv_vmm::BootSource { cmdline: vec!["x".repeat(2000)], ..boot };
    assert!(ground.vmm().boot(&spec, &long).await.err().unwrap().to_string().contains("command line"));
}

const STARTER: &str = "AENV_TEST_STARTER_DIR";

/// Not a test by itself: the other process of the next one. It starts a machine and is killed with it running.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starter_in_another_process() {
    let Some(dir) = std::env::var_os(STARTER) else { return };
    let dir = Path::new(&dir);
    let mut ground = QemuGround::within(dir, Options::default()).await.unwrap();
    ground.keep();
    let (vm, spec) = ground.boot("m").await;
    ground.remember(&spec, "my server died").await;
    let told = serde_json::to_string(&(vm.record(), &spec)).unwrap();
    fs::write(dir.join("told.part"), told).unwrap();
    fs::rename(dir.join("told.part"), dir.join("told")).unwrap();
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_outlives_the_process_that_started_it_and_is_adopted_by_another() {
    let Some(ground) = ground().await else { return };
    let dir = tempfile::tempdir().unwrap();
    let mut starter = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "qemu_only::starter_in_another_process", "--nocapture"])
        .env(STARTER, dir.path())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let begin = std::time::Instant::now();
    while !dir.path().join("told").exists() {
        assert!(begin.elapsed() < PATIENCE, "the starter never got its machine up");
        assert!(starter.try_wait().unwrap().is_none(), "the starter ended");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    starter.kill().unwrap(); // SIGKILL
    starter.wait().unwrap();
    let told = fs::read_to_string(dir.path().join("told")).unwrap();
    let (record, spec): (VmRecord, aenv_vmm::MachineSpec) = serde_json::from_str(&told).unwrap();

    let vm = ground.qemu.adopt(&record).await.unwrap().expect("it outlived its server");
    // The mailbox counts on from the other process's commands.
    for _ in 0..100 {
        ground.next_number();
    }
    assert_eq!(ground.ask(&spec, "recall").await, "my server died");
    vm.pause().await.unwrap();
    vm.save_state(&dir.path().join("state")).await.unwrap();
    assert!(!vm.memory().await.unwrap().is_empty());
    vm.resume().await.unwrap();
    assert_eq!(ground.ask(&spec, "recall").await, "my server died");
    assert_eq!(vm.kill().await.unwrap().cause, ExitCause::Killed);
    assert_eq!(ground.left_behind(&record), Vec::<String>::new());
}
