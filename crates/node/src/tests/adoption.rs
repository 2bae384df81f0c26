//! A server that stops or dies, and the one after it.

use super::{Setup, all, assert_true, create_request, reach, setup, team};
use crate::{
    Node, StartError,
    control::Control,
    model::{CreateSandbox, EndCause, State},
    telemetry::purge_once,
};
use aenv_vmm::ExitCause;
use jiff::Timestamp;
use std::{sync::Arc, time::Duration};

const TTL: Duration = Duration::from_secs(300);

#[tokio::test]
async fn a_second_server_on_the_same_directory_is_refused() {
    let Setup { world, node: _node, dir } = setup().await;
    let error = Node::start(world.options(dir.path())).await.err().unwrap();
    assert!(matches!(error, StartError::InUse(_)), "{error}");
    assert!(error.to_string().contains("--data-dir"), "{error}");
}

#[tokio::test]
async fn sandboxes_outlive_a_stop_of_the_server() {
    let Setup { world, node, dir } = setup().await;
    let key = Node::new_key();
    node.add_key(&key, "a", "first").await.unwrap();
    let running = node.create(&team(), create_request()).await.unwrap();
    let paused = node.create(&team(), create_request()).await.unwrap();
    node.pause(&team(), &paused.id, true).await.unwrap();
    let killed = node.create(&team(), create_request()).await.unwrap();
    node.kill(&team(), &killed.id).await.unwrap();
    let route = node.route(&running.id).unwrap();
    node.shutdown().await;
    drop(node);
    world.restart();

    let node = Node::start(world.options(dir.path())).await.unwrap();
    assert_true(&world, &node, dir.path(), "adopted").await;
    assert!(node.has_keys() && key.starts_with("e2b_") && key.len() == 44);
    let found = node.get(&team(), &running.id).await.unwrap();
    assert_eq!(
        (found.state, found.end_at, found.envd_token),
        (State::Running, running.end_at, running.envd_token)
    );
    let again = node.route(&running.id).unwrap();
    assert_eq!((again.generation, again.slot), (route.generation, route.slot));
    assert!(node.connect(&team(), &paused.id, TTL).await.unwrap().resumed);
    let dead = node.get(&team(), &killed.id).await.unwrap();
    assert_eq!(dead.tombstone.unwrap().cause, EndCause::Killed);
    // The exit of an adopted machine is noticed like any other.
    let machine = world.machines().into_iter().find(|id| id.starts_with(running.id.as_str())).unwrap();
    world.end_machine(&machine, ExitCause::GuestPanic);
    reach(&node, &running.id, State::Dead).await;
}

#[tokio::test]
async fn a_machine_that_ended_meanwhile_leaves_a_tombstone() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    node.shutdown().await;
    drop(node);
    world.end_machine(&world.machines()[0], ExitCause::VmmCrash);
    world.restart();
    let node = Node::start(world.options(dir.path())).await.unwrap();
    let dead = node.get(&team(), &sandbox.id).await.unwrap();
    assert_eq!(dead.tombstone.unwrap().cause, EndCause::VmmCrash);
    assert_true(&world, &node, dir.path(), "ended meanwhile").await;
}

#[tokio::test]
async fn a_life_that_ended_meanwhile_is_ended_at_once() {
    let Setup { world, node, dir } = setup().await;
    let request = CreateSandbox { ttl: Duration::from_secs(1), ..create_request() };
    let sandbox = node.create(&team(), request).await.unwrap();
    node.shutdown().await;
    drop(node);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    world.restart();
    let node = Node::start(world.options(dir.path())).await.unwrap();
    reach(&node, &sandbox.id, State::Paused).await;
}

#[tokio::test]
async fn a_paused_sandbox_whose_files_were_damaged_is_not_called_paused() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    node.shutdown().await;
    drop(node);
    let home = dir.path().join("data/sandboxes").join(sandbox.id.as_str());
    std::fs::write(home.join("memory-1.layer"), b"cut").unwrap();
    world.restart();
    let node = Node::start(world.options(dir.path())).await.unwrap();
    let dead = node.get(&team(), &sandbox.id).await.unwrap();
    let tombstone = dead.tombstone.unwrap();
    assert_eq!(tombstone.cause, EndCause::NodeLost);
    assert!(tombstone.detail.contains("memory-1.layer"), "{}", tombstone.detail);
    assert_true(&world, &node, dir.path(), "damaged").await;
}

#[tokio::test]
async fn strays_in_the_directories_are_removed() {
    let Setup { world, node, dir } = setup().await;
    node.shutdown().await;
    drop(node);
    for stray in
        ["data/sandboxes/aaaaaaaaaaaaaaaaaaaa", "data/templates/bbbbbbbbbbbbbbbbbbbb/x", "run/machines/xg1"]
    {
        std::fs::create_dir_all(dir.path().join(stray)).unwrap();
    }
    world.restart();
    let node = Node::start(world.options(dir.path())).await.unwrap();
    assert_true(&world, &node, dir.path(), "strays").await;
    assert_eq!(super::dirs(&dir.path().join("data/templates")).len(), 1);
    assert!(super::dirs(&dir.path().join("run/machines")).is_empty());
}

#[tokio::test]
async fn tombstones_are_forgotten_after_a_day_and_when_there_are_too_many() {
    let Setup { node, dir: _dir, .. } = super::setup_with(|options| options.limits.max_tombstones = 3).await;
    for _ in 0..5 {
        let sandbox = node.create(&team(), create_request()).await.unwrap();
        node.kill(&team(), &sandbox.id).await.unwrap();
    }
    assert_eq!(purge_once(&node.inner, Timestamp::now()).await.len(), 2);
    assert_eq!(all(&node).await.len(), 3);
    let tomorrow = Timestamp::now().checked_add(jiff::SignedDuration::from_hours(25)).unwrap();
    assert_eq!(purge_once(&node.inner, tomorrow).await.len(), 3);
    assert_eq!(all(&node).await.len(), 0);
}

#[tokio::test]
async fn a_key_is_known_by_its_hash_alone() {
    use sha2::{Digest, Sha256};
    let Setup { node, dir, .. } = setup().await;
    let key = Node::new_key();
    node.add_key(&key, "a", "ci").await.unwrap();
    let hash = |text: &str| -> [u8; 32] { Sha256::digest(text).into() };
    assert_eq!(node.authenticate(hash(&key)).await.unwrap().unwrap().team, "a");
    assert!(node.authenticate(hash("e2b_00")).await.unwrap().is_none());
    node.add_key(&key, "a", "again").await.unwrap();
    node.add_key(&key, "b", "stolen").await.unwrap_err();
    let node = Arc::clone(&node);
    node.shutdown().await;
    for file in super::dirs(&dir.path().join("data")) {
        let path = dir.path().join("data").join(file);
        if path.is_file() {
            let content = std::fs::read(&path).unwrap();
            assert!(!content.windows(key.len()).any(|window| window == key.as_bytes()), "{}", path.display());
        }
    }
}
