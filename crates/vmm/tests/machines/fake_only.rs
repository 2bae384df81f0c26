//! The faults of the fake.

use crate::{
    fake_ground::FakeGround,
    ground::{Ground, MOMENT},
};
use aenv_vmm::{
    Error, ExitCause, Vm, Vmm,
    fake::{Fault, Operation},
};
use std::{sync::Arc, time::Duration};
use tokio::time::timeout;

async fn machine() -> (FakeGround, Arc<dyn Vm>) {
    let ground = FakeGround::prepare().await.unwrap();
    let (vm, _) = ground.boot("m").await;
    (ground, vm)
}

#[tokio::test]
async fn the_nth_restore_fails_and_no_other() {
    let (ground, vm) = machine().await;
    let from = ground.snapshot(&*vm, "m").await;
    ground.fake.inject(Operation::Restore, 2, Fault::Fail("disk on fire".into()));
    let mut outcomes = Vec::new();
    for name in ["one", "two", "three"] {
        outcomes.push(
            ground
                .fake
                .restore(&ground.spec(name), &from)
                .await
                .map(|_| ())
                .map_err(|error| error.to_string()),
        );
    }
    let reason = "the monitor refused `restore`: disk on fire".to_owned();
    assert_eq!(outcomes, [Ok(()), Err(reason), Ok(())]);
    assert_eq!(ground.fake.living(), ["m", "one", "three"]);
    assert_eq!(ground.fake.count(Operation::Restore), 3);
}

#[tokio::test]
async fn a_hanging_save_leaves_the_deadline_to_its_caller_and_the_machine_killable() {
    let (ground, vm) = machine().await;
    vm.pause().await.unwrap();
    ground.fake.inject(Operation::SaveState, 1, Fault::Hang);
    assert!(timeout(MOMENT, vm.save_state(&ground.path("state"))).await.is_err());
    vm.save_state(&ground.path("state")).await.unwrap();
    assert_eq!(vm.kill().await.unwrap().cause, ExitCause::Killed);
}

#[tokio::test]
async fn a_machine_ends_in_the_middle_of_an_operation_with_the_planned_cause() {
    let (ground, vm) = machine().await;
    ground.fake.inject(Operation::Pause, 1, Fault::Exit(ExitCause::HostOom));
    let error = vm.pause().await.unwrap_err();
    assert!(matches!(&error, Error::Exited(exit) if exit.cause == ExitCause::HostOom), "{error}");
    assert!(vm.exit().borrow().is_some());
    assert_eq!(ground.fake.living(), Vec::<String>::new());
}

#[tokio::test]
async fn a_delay_delays_and_then_works() {
    let (ground, vm) = machine().await;
    let delay = Duration::from_millis(50);
    ground.fake.inject(Operation::Resume, 1, Fault::Delay(delay));
    let begin = std::time::Instant::now();
    vm.resume().await.unwrap();
    assert!(begin.elapsed() >= delay);
}

#[tokio::test]
async fn a_machine_cannot_be_started_twice_under_one_id() {
    let (ground, _vm) = machine().await;
    let mut boot = ground.boot_source("again");
    boot.memory_file = ground.path("again.memory");
    let error = ground.fake.boot(&ground.spec("m"), &boot).await.err().unwrap();
    assert!(error.to_string().contains("lives already"), "{error}");
}
