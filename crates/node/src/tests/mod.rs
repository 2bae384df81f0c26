//! The node over a world in memory.

mod adoption;
mod faults;
mod image_start;
mod life;
mod pool;
mod templates;
mod world;

use crate::{
    Node,
    control::Control,
    model::{BuildStatus, CreateSandbox, OnTimeout, Principal, PullTemplate, Sandbox, SandboxQuery, State},
};
use std::{path::Path, sync::Arc, time::Duration};
use world::World;

pub(crate) fn team() -> Principal {
    Principal { team: "a".into() }
}

pub(crate) fn pull_request() -> PullTemplate {
    PullTemplate {
        image: "registry/base:1".into(),
        name: "base".into(),
        vcpus: 1,
        memory_mib: 512,
        disk_mib: 1024,
        force: false,
        credentials: None,
    }
}

pub(crate) fn create_request() -> CreateSandbox {
    CreateSandbox {
        template: "base".into(),
        vcpus: None,
        memory_mib: None,
        disk_mib: None,
        ttl: Duration::from_secs(300),
        on_timeout: OnTimeout::Pause,
        auto_resume: false,
        secure: true,
        allow_internet_access: true,
        cold: false,
        allow_public_traffic: true,
        mask_request_host: None,
        metadata: [("run".to_owned(), "1".to_owned())].into(),
        env_vars: [("BOTH".to_owned(), "request".to_owned())].into(),
        idempotency_key: None,
    }
}

/// Pulls the template and waits for it.
pub(crate) async fn pull(node: &Node) -> crate::model::Build {
    let begun = node.pull(&team(), pull_request()).await.unwrap();
    loop {
        let build = node.build(&team(), &begun.template, &begun.id, 0, 100).await.unwrap();
        if matches!(build.status, BuildStatus::Ready | BuildStatus::Error) {
            return build;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A node with a template.
pub(crate) struct Setup {
    pub(crate) world: World,
    pub(crate) node: Arc<Node>,
    pub(crate) dir: tempfile::TempDir,
}

pub(crate) async fn setup() -> Setup {
    setup_with(|_| ()).await
}

pub(crate) async fn setup_with(change: impl FnOnce(&mut crate::Options)) -> Setup {
    let (world, dir) = (World::new(), tempfile::tempdir().unwrap());
    let mut options = world.options(dir.path());
    change(&mut options);
    let node = Node::start(options).await.unwrap();
    assert_eq!(pull(&node).await.status, BuildStatus::Ready);
    Setup { world, node, dir }
}

/// All sandboxes of the team in any state.
pub(crate) async fn all(node: &Node) -> Vec<Sandbox> {
    let states = [
        State::Creating,
        State::Running,
        State::Pausing,
        State::Paused,
        State::Resuming,
        State::Killing,
        State::Dead,
    ];
    let query = SandboxQuery { states: states.to_vec(), limit: 100, ..SandboxQuery::default() };
    node.list(&team(), query).await.unwrap().items
}

/// Waits until a sandbox is in a state.
pub(crate) async fn reach(node: &Node, id: &crate::model::SandboxId, state: State) -> Sandbox {
    let wait = async {
        loop {
            let sandbox = node.get(&team(), id).await.unwrap();
            if sandbox.state == state {
                return sandbox;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("never {state:?}"))
}

/// Names of the directories in a directory.
pub(crate) fn dirs(path: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(path) else { return Vec::new() };
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Compares what the node says with what the world holds: every sandbox is what it is said to be, and nothing exists
/// that no sandbox owns.
pub(crate) async fn assert_true(world: &World, node: &Node, dir: &Path, context: &str) {
    let sandboxes = all(node).await;
    let mut running = 0;
    for sandbox in &sandboxes {
        let home = dir.join("data/sandboxes").join(sandbox.id.as_str());
        match sandbox.state {
            State::Running => {
                running += 1;
                assert!(
                    world.machines().iter().any(|id| id.starts_with(sandbox.id.as_str())),
                    "{context}: {} runs without a machine",
                    sandbox.id
                );
                assert!(home.exists(), "{context}: a running sandbox without files");
            }
            State::Paused => {
                assert!(home.join("snapshot.json").exists(), "{context}: paused without a snapshot")
            }
            State::Dead => {
                assert!(sandbox.tombstone.is_some(), "{context}: dead without a tombstone");
                assert!(!home.exists(), "{context}: a dead sandbox has files");
            }
            other => panic!("{context}: a sandbox rests in {other:?}"),
        }
    }
    assert_eq!(world.machines().len(), running, "{context}: machines {:?}", world.machines());
    assert_eq!(world.paused_machines(), 0, "{context}: a running sandbox stands still");
    assert_eq!(world.slots(), running, "{context}: slots");
    let memory = world.exports().iter().filter(|name| name.starts_with("mem-")).count();
    assert_eq!(world.exports().len() - memory, running, "{context}: exports {:?}", world.exports());
    assert!(memory <= running, "{context}: exports {:?}", world.exports());
    let living = sandboxes.iter().filter(|sandbox| sandbox.state != State::Dead).count();
    assert_eq!(dirs(&dir.join("data/sandboxes")).len(), living, "{context}: directories of sandboxes");
    assert_eq!(dirs(&dir.join("run/machines")).len(), running, "{context}: directories of machines");
    // A node that was stopped promises nothing any more.
    if !node.inner.stop.is_cancelled() {
        let promised: u64 = sandboxes
            .iter()
            .filter(|sandbox| sandbox.state == State::Running)
            .map(|sandbox| u64::from(sandbox.memory_mib))
            .sum();
        assert_eq!(node.stats().memory_promised_mib, promised, "{context}: memory promised");
    }
}
