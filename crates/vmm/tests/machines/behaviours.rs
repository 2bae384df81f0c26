//! The behaviours. Each gets a fresh ground and leaves no machine behind.

use crate::ground::{Ground, MOMENT, PATIENCE};
use aenv_vmm::{Compatibility, Error, Exit, ExitCause, MemoryRegion, RestoreSource, Vm, VmRecord};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    sync::Arc,
};
use tokio::time::timeout;

async fn ended(vm: &Arc<dyn Vm>) -> Exit {
    let mut exit = vm.exit();
    let exit = timeout(PATIENCE, exit.wait_for(Option::is_some)).await.expect("it ends in time").unwrap();
    exit.clone().unwrap()
}

/// Kills the machines at the end of a behaviour and checks that nothing of them is left.
async fn end<G: Ground>(ground: &G, machines: &[&Arc<dyn Vm>]) {
    for vm in machines {
        vm.kill().await.expect("it can be killed");
        assert_eq!(ground.left_behind(&vm.record()), Vec::<String>::new());
    }
}

pub(crate) async fn a_booted_machine_runs_and_writes_its_console<G: Ground>(ground: &G) {
    let (vm, spec) = ground.boot("m").await;
    ground.print(&spec, "a line of the guest").await;
    let console = fs::read_to_string(spec.dir.join("console.log")).unwrap();
    assert!(console.contains("a line of the guest"), "{console}");
    assert_eq!(*vm.exit().borrow(), None);
    let record = vm.record();
    assert_eq!((record.id, record.memory_mib, record.restored), (spec.id, spec.memory_mib, false));
    end(ground, &[&vm]).await;
}

pub(crate) async fn a_paused_machine_stands_still_until_it_is_resumed<G: Ground>(ground: &G) {
    let (vm, spec) = ground.boot("m").await;
    ground.remember(&spec, "before").await;
    vm.pause().await.unwrap();
    assert_eq!(ground.recall(&spec, MOMENT).await, None);
    // Twice is as good as once, in both directions.
    vm.pause().await.unwrap();
    vm.resume().await.unwrap();
    vm.resume().await.unwrap();
    assert_eq!(ground.recall(&spec, PATIENCE).await.as_deref(), Some("before"));
    end(ground, &[&vm]).await;
}

pub(crate) async fn a_saved_machine_stays_resumable<G: Ground>(ground: &G) {
    let (vm, spec) = ground.boot("m").await;
    ground.remember(&spec, "kept").await;
    for _ in 0..3 {
        ground.snapshot(&*vm, "m").await;
        vm.resume().await.unwrap();
        assert_eq!(ground.recall(&spec, PATIENCE).await.as_deref(), Some("kept"));
    }
    end(ground, &[&vm]).await;
}

pub(crate) async fn a_running_machine_refuses_to_save_its_state<G: Ground>(ground: &G) {
    let (vm, spec) = ground.boot("m").await;
    let path = ground.path("refused.state");
    let error = vm.save_state(&path).await.unwrap_err();
    assert!(error.to_string().contains("pause it first"), "{error}");
    assert!(!path.exists());
    assert_eq!(ground.recall(&spec, PATIENCE).await.as_deref(), Some("nothing"));
    end(ground, &[&vm]).await;
}

pub(crate) async fn clones_of_one_image_have_independent_memory_and_leave_it_unchanged<G: Ground>(
    ground: &G,
) {
    let (parent, spec) = ground.boot("parent").await;
    ground.remember(&spec, "of the parent").await;
    let from = ground.snapshot(&*parent, "parent").await;
    end(ground, &[&parent]).await;
    let image = fs::read(&from.memory_image).unwrap();

    let mut clones = Vec::new();
    for name in ["one", "two", "three"] {
        let spec = ground.spec(name);
        let vm = ground.vmm().restore(&spec, &from).await.unwrap();
        assert!(vm.record().restored);
        assert_eq!(ground.recall(&spec, PATIENCE).await.as_deref(), Some("of the parent"));
        clones.push((vm, spec));
    }
    for (_, spec) in &clones {
        ground.remember(spec, &spec.id).await;
    }
    for (vm, spec) in &clones {
        assert_eq!(ground.recall(spec, PATIENCE).await.as_ref(), Some(&spec.id));
        let regions = vm.memory().await.unwrap();
        assert_eq!(regions.iter().map(|region| region.len).sum::<u64>(), u64::from(spec.memory_mib) << 20);
        let dirty = regions.iter().map(changed_pages).sum::<usize>();
        let all = image.len() / 4096;
        assert!(dirty > 0 && dirty < all / 2, "{dirty} of {all} pages are said to be changed");
    }
    assert!(fs::read(&from.memory_image).unwrap() == image, "a clone changed its image");
    let machines: Vec<_> = clones.iter().map(|(vm, _)| vm).collect();
    end(ground, &machines).await;
}

/// Pages that are present or swapped and not of a file: Documentation/admin-guide/mm/pagemap.rst, bits 63, 62 and 61.
fn changed_pages(region: &MemoryRegion) -> usize {
    let map = File::open(format!("/proc/{}/pagemap", region.pid)).unwrap();
    let mut entries = vec![0; usize::try_from(region.len / 4096 * 8).unwrap()];
    map.read_exact_at(&mut entries, region.host_addr / 4096 * 8).unwrap();
    let words = entries.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    words.filter(|word| word >> 62 != 0 && word >> 61 & 1 == 0).count()
}

pub(crate) async fn a_clone_of_a_clone_is_possible<G: Ground>(ground: &G) {
    let (parent, spec) = ground.boot("parent").await;
    ground.remember(&spec, "first").await;
    let from = ground.snapshot(&*parent, "parent").await;
    end(ground, &[&parent]).await;
    let spec = ground.spec("child");
    let child = ground.vmm().restore(&spec, &from).await.unwrap();
    ground.remember(&spec, "second").await;

    child.pause().await.unwrap();
    let state = ground.path("child.state");
    child.save_state(&state).await.unwrap();
    // What a capture does: the image with the changed pages laid over it.
    let memory_image = ground.path("child.memory");
    fs::copy(&from.memory_image, &memory_image).unwrap();
    let image = File::options().write(true).open(&memory_image).unwrap();
    for region in child.memory().await.unwrap() {
        let memory = File::open(format!("/proc/{}/mem", region.pid)).unwrap();
        let mut bytes = vec![0; usize::try_from(region.len).unwrap()];
        memory.read_exact_at(&mut bytes, region.host_addr).unwrap();
        image.write_all_at(&bytes, region.image_offset).unwrap();
    }
    end(ground, &[&child]).await;

    let spec = ground.spec("grandchild");
    let from = RestoreSource { state, memory_image, ..from };
    let grandchild = ground.vmm().restore(&spec, &from).await.unwrap();
    assert_eq!(ground.recall(&spec, PATIENCE).await.as_deref(), Some("second"));
    end(ground, &[&grandchild]).await;
}

pub(crate) async fn a_killed_machine_is_gone_and_says_so<G: Ground>(ground: &G) {
    let (vm, _) = ground.boot("m").await;
    let exit = vm.kill().await.unwrap();
    assert_eq!(exit.cause, ExitCause::Killed);
    assert_eq!(ground.left_behind(&vm.record()), Vec::<String>::new());
    assert_eq!(ended(&vm).await, exit);
    assert_eq!(vm.kill().await.unwrap(), exit, "a second kill finds the first's end");
}

pub(crate) async fn a_paused_machine_can_be_killed<G: Ground>(ground: &G) {
    let (vm, _) = ground.boot("m").await;
    vm.pause().await.unwrap();
    assert_eq!(vm.kill().await.unwrap().cause, ExitCause::Killed);
    assert_eq!(ground.left_behind(&vm.record()), Vec::<String>::new());
}

pub(crate) async fn a_guest_that_shuts_down_is_told_from_a_crash<G: Ground>(ground: &G) {
    let (vm, spec) = ground.boot("m").await;
    ground.power_off(&spec).await;
    let exit = ended(&vm).await;
    assert_eq!(exit.cause, ExitCause::GuestShutdown, "{exit}");
    assert_eq!(ground.left_behind(&vm.record()), Vec::<String>::new());
}

pub(crate) async fn a_guest_that_panics_ends_the_machine<G: Ground>(ground: &G) {
    let (vm, spec) = ground.boot("m").await;
    ground.panic(&spec).await;
    let exit = ended(&vm).await;
    assert_eq!(exit.cause, ExitCause::GuestPanic, "{exit}");
    assert!(exit.detail.contains("Kernel panic"), "{exit}");
    assert_eq!(ground.left_behind(&vm.record()), Vec::<String>::new());
}

pub(crate) async fn a_monitor_that_is_killed_from_outside_is_a_crash<G: Ground>(ground: &G) {
    let (vm, _) = ground.boot("m").await;
    ground.crash(&vm.record()).await;
    let exit = ended(&vm).await;
    assert_eq!(exit.cause, ExitCause::VmmCrash, "{exit}");
    assert!(exit.detail.contains("signal 9"), "{exit}");
    assert_eq!(ground.left_behind(&vm.record()), Vec::<String>::new());
}

pub(crate) async fn an_ended_machine_refuses_everything_with_its_cause<G: Ground>(ground: &G) {
    let (vm, _) = ground.boot("m").await;
    ground.crash(&vm.record()).await;
    // At once, without waiting for the notice: the race is part of the behaviour.
    let at_once = vm.pause().await.unwrap_err();
    assert!(matches!(&at_once, Error::Exited(exit) if exit.cause == ExitCause::VmmCrash), "{at_once}");
    ended(&vm).await;
    for error in [
        vm.pause().await.unwrap_err(),
        vm.resume().await.unwrap_err(),
        vm.save_state(&ground.path("never.state")).await.unwrap_err(),
        vm.memory().await.unwrap_err(),
    ] {
        assert!(matches!(&error, Error::Exited(exit) if exit.cause == ExitCause::VmmCrash), "{error}");
    }
    assert!(!ground.path("never.state").exists());
}

pub(crate) async fn a_machine_whose_handle_was_dropped_lives_and_is_adopted<G: Ground>(ground: &G) {
    let (vm, spec) = ground.boot("m").await;
    ground.remember(&spec, "through it all").await;
    let record = vm.record();
    drop(vm);
    assert_eq!(ground.recall(&spec, PATIENCE).await.as_deref(), Some("through it all"));
    // What is written down is what is read back.
    let record: VmRecord = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
    let vm = ground.vmm().adopt(&record).await.unwrap().expect("it lives");
    assert_eq!(vm.record(), record);
    vm.pause().await.unwrap();
    vm.save_state(&ground.path("adopted.state")).await.unwrap();
    assert!(!vm.memory().await.unwrap().is_empty());
    vm.resume().await.unwrap();
    assert_eq!(ground.recall(&spec, PATIENCE).await.as_deref(), Some("through it all"));
    end(ground, &[&vm]).await;
}

pub(crate) async fn an_adopted_machine_tells_how_it_ended<G: Ground>(ground: &G) {
    let (vm, spec) = ground.boot("m").await;
    let record = vm.record();
    drop(vm);
    let vm = ground.vmm().adopt(&record).await.unwrap().expect("it lives");
    ground.power_off(&spec).await;
    let exit = ended(&vm).await;
    assert_eq!(exit.cause, ExitCause::GuestShutdown, "{exit}");
    assert_eq!(ground.left_behind(&record), Vec::<String>::new());
}

pub(crate) async fn what_has_ended_or_is_another_is_not_adopted<G: Ground>(ground: &G) {
    let (vm, _) = ground.boot("m").await;
    let record = vm.record();
    let another = VmRecord { start_time: record.start_time + 1, ..record.clone() };
    assert!(ground.vmm().adopt(&another).await.unwrap().is_none());
    end(ground, &[&vm]).await;
    assert!(ground.vmm().adopt(&record).await.unwrap().is_none());
}

pub(crate) async fn a_snapshot_of_another_version_or_clock_is_refused_before_anything_starts<G: Ground>(
    ground: &G,
) {
    let (parent, _) = ground.boot("parent").await;
    let from = ground.snapshot(&*parent, "parent").await;
    let ours = from.made_by.clone();
    for (made_by, word) in [
        (Compatibility { version: "0.1.2".into(), ..ours.clone() }, "0.1.2"),
        (Compatibility { tsc_khz: ours.tsc_khz + 1 + ours.tsc_khz / 100, ..ours.clone() }, "TSC"),
    ] {
        let spec = ground.spec("clone");
        let other = RestoreSource { made_by, ..from.clone() };
        let error = ground.vmm().restore(&spec, &other).await.err().expect("it is refused");
        assert!(matches!(&error, Error::Incompatible(reason) if reason.contains(word)), "{error}");
        assert_eq!(fs::read_dir(&spec.dir).unwrap().count(), 0, "files were made");
    }
    end(ground, &[&parent]).await;
}

pub(crate) async fn a_start_that_fails_leaves_nothing_behind<G: Ground>(ground: &G) {
    let (parent, _) = ground.boot("parent").await;
    let from = ground.snapshot(&*parent, "parent").await;
    let spec = ground.spec("clone");
    let damaged = RestoreSource { state: ground.path("damaged.state"), ..from.clone() };
    fs::write(&damaged.state, vec![7; 4096]).unwrap();
    let error = ground.vmm().restore(&spec, &damaged).await.err().expect("it is refused");
    assert!(matches!(&error, Error::Refused { .. }), "{error}");
    for file in fs::read_dir(&spec.dir).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(name.ends_with(".log"), "{name} was left");
    }
    // The same directory serves the next attempt.
    let vm = ground.vmm().restore(&spec, &from).await.unwrap();
    assert_eq!(ground.recall(&spec, PATIENCE).await.as_deref(), Some("nothing"));
    end(ground, &[&vm, &parent]).await;
}

pub(crate) async fn an_image_of_the_wrong_size_is_refused<G: Ground>(ground: &G) {
    let (parent, _) = ground.boot("parent").await;
    let from = ground.snapshot(&*parent, "parent").await;
    end(ground, &[&parent]).await;
    let short = RestoreSource { memory_image: ground.path("short.memory"), ..from };
    File::create(&short.memory_image).unwrap().set_len(1 << 20).unwrap();
    let error = ground.vmm().restore(&ground.spec("clone"), &short).await.err().expect("it is refused");
    assert!(error.to_string().contains("1048576 bytes"), "{error}");
}
