//! Machines made ahead of need.

use super::{Setup, assert_true, create_request, setup_with, team, world::Plan};
use crate::{Node, control::Control, model::CreateSandbox};
use aenv_network::Egress;
use aenv_vmm::ExitCause;
use std::time::Duration;

async fn warm_setup() -> Setup {
    let setup = setup_with(|options| options.pool.size = 1).await;
    setup.world.until_true(|world| world.paused_machines() == 1).await;
    filled(&setup.node).await;
    setup
}

async fn filled(node: &Node) {
    while node.stats().warm != [("base".to_owned(), 1)] {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_start_takes_the_waiting_machine_and_another_one_is_made() {
    let Setup { world, node, dir } = warm_setup().await;
    let waiting = world.machines();
    world.plan(Plan::Nothing);
    world.hold("vmm.restore");
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    assert_eq!(world.machines(), waiting);
    assert!(waiting[0].starts_with(sandbox.id.as_str()));
    let names: Vec<_> = sandbox.phases.iter().map(|phase| phase.name.as_str()).collect();
    assert_eq!(names, ["continue", "agent", "total"]);
    let slot = node.route(&sandbox.id).unwrap().slot.unwrap();
    assert_eq!(world.identity(&slot).unwrap().sandbox, sandbox.id.as_str());
    world.release_all();
    filled(&node).await;
    assert_eq!(world.machines().len(), 2);
    // Stopping ends those that wait and leaves the one that is somebody's.
    node.shutdown().await;
    assert_true(&world, &node, dir.path(), "stopped").await;
}

#[tokio::test]
async fn a_warm_machine_obeys_the_rules_of_the_sandbox_it_becomes() {
    let Setup { world, node, dir: _dir } = warm_setup().await;
    world.plan(Plan::Nothing);
    let request = CreateSandbox { allow_internet_access: false, ..create_request() };
    let sandbox = node.create(&team(), request).await.unwrap();
    let slot = node.route(&sandbox.id).unwrap().slot.unwrap();
    assert_eq!(world.egress_of(&slot), Some(Egress::Nothing));
    let steps = world.steps();
    let at = |name: &str| steps.iter().position(|step| step == name).unwrap();
    assert!(at("network.set_egress") < at("vm.resume"), "closed before it runs: {steps:?}");
}

#[tokio::test]
async fn a_machine_that_died_while_it_waited_is_not_handed_out() {
    let Setup { world, node, dir } = warm_setup().await;
    world.hold("vmm.restore");
    world.end_machine(&world.machines()[0], ExitCause::HostOom);
    world.release_all();
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    assert!(sandbox.phases.iter().any(|phase| phase.name == "restore"), "a cold start");
    node.shutdown().await;
    assert_true(&world, &node, dir.path(), "dead while warm").await;
}

#[tokio::test]
async fn waiting_machines_give_way_when_memory_is_needed() {
    let setup = setup_with(|options| {
        options.pool.size = 1;
        options.limits.memory_limit_mib = Some(1024);
    });
    let Setup { world, node, dir } = setup.await;
    filled(&node).await;
    let first = node.create(&team(), create_request()).await.unwrap();
    node.create(&team(), create_request()).await.unwrap();
    // Both places are taken by sandboxes: nothing waits, and nothing is made in vain.
    assert_eq!(world.machines().len(), 2);
    node.kill(&team(), &first.id).await.unwrap();
    node.shutdown().await;
    assert_true(&world, &node, dir.path(), "shrunk").await;
}

#[tokio::test]
async fn machines_of_a_deleted_template_are_ended() {
    let Setup { world, node, dir } = warm_setup().await;
    node.delete_template(&team(), "base").await.unwrap();
    world.until_true(|world| world.machines().is_empty()).await;
    node.shutdown().await;
    assert_true(&world, &node, dir.path(), "template deleted").await;
}

#[tokio::test]
async fn a_template_in_use_before_a_restart_is_warm_after_it() {
    let Setup { world, node, dir } = warm_setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    node.kill(&team(), &sandbox.id).await.unwrap();
    node.shutdown().await;
    drop(node);
    assert!(world.machines().is_empty());
    world.restart();
    let mut options = world.options(dir.path());
    options.pool.size = 1;
    let node = Node::start(options).await.unwrap();
    filled(&node).await;
    node.shutdown().await;
}

#[tokio::test]
async fn machines_that_nobody_took_are_reaped_after_a_crash() {
    let Setup { world, node, dir } = warm_setup().await;
    // The process dies: its runtime's tasks never get to end what waits.
    node.inner.db.close().await;
    let other = world.clone();
    world.hold("vm.kill");
    node.inner.stop.cancel();
    drop(node);
    other.until_true(|world| world.machines().len() == 1).await;
    let copied = tempfile::tempdir().unwrap();
    copy(dir.path(), copied.path());
    world.release_all();
    world.restart();
    let node = Node::start(world.options(copied.path())).await.unwrap();
    assert_true(&world, &node, copied.path(), "reaped").await;
}

/// The directory as the next server finds it; the dying one still holds the lock of its own.
fn copy(from: &std::path::Path, to: &std::path::Path) {
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir_all(&target).unwrap();
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}
