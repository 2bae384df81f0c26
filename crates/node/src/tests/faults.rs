//! Each step fails once, and the server dies before and after each step: nothing may be lost that was promised, and
//! nothing may be left that nobody owns.

use super::{all, assert_true, create_request, dirs, pull, reach, team, world::Plan, world::World};
use crate::{
    Node,
    control::Control,
    model::{BuildStatus, State},
};
use std::{path::Path, sync::Arc, time::Duration};

const TTL: Duration = Duration::from_secs(300);

/// The life of a template and a sandbox, whatever fails on the way.
async fn live(node: &Node) {
    if pull(node).await.status != BuildStatus::Ready {
        // Tried again, as a person would.
        assert_eq!(pull(node).await.status, BuildStatus::Ready);
    }
    let made = match node.create(&team(), create_request()).await {
        Ok(made) => made,
        Err(_) => node.create(&team(), create_request()).await.unwrap(),
    };
    let id = &made.id;
    for memory in [true, false, true] {
        let _ = node.pause(&team(), id, memory).await;
        settled(node).await;
        let _ = node.connect(&team(), id, TTL).await;
        settled(node).await;
    }
    let _ = node.pause(&team(), id, true).await;
    settled(node).await;
    let other = node.create(&team(), create_request()).await;
    if let Ok(other) = other {
        node.kill(&team(), &other.id).await.unwrap();
    }
    node.kill(&team(), id).await.unwrap();
}

async fn settled(node: &Node) {
    for sandbox in all(node).await {
        if !matches!(sandbox.state, State::Running | State::Paused | State::Dead) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

async fn begin(world: &World, dir: &Path) -> Arc<Node> {
    Node::start(world.options(dir)).await.unwrap()
}

/// Steps of an undisturbed life, the start of the node not counted.
fn steps() -> Vec<String> {
    let (world, dir) = (World::new(), tempfile::tempdir().unwrap());
    runtime().block_on(async {
        let node = begin(&world, dir.path()).await;
        world.plan(Plan::Nothing);
        live(&node).await;
        assert_true(&world, &node, dir.path(), "undisturbed").await;
        let steps = world.steps();
        node.shutdown().await;
        steps
    })
}

#[test]
fn whichever_step_fails_it_is_undone_and_nothing_is_left() {
    let steps = steps();
    assert!(steps.len() > 50, "{steps:?}");
    for (index, name) in steps.iter().enumerate() {
        let context = format!("step {} ({name}) fails", index + 1);
        let (world, dir) = (World::new(), tempfile::tempdir().unwrap());
        runtime().block_on(async {
            let node = begin(&world, dir.path()).await;
            world.plan(Plan::Fail(index + 1));
            live(&node).await;
            for sandbox in all(&node).await {
                if sandbox.state != State::Dead {
                    let _ = node.kill(&team(), &sandbox.id).await;
                }
            }
            // What is done in the background is done when the tasks are.
            node.shutdown().await;
            assert_true(&world, &node, dir.path(), &context).await;
            assert_eq!(world.machines(), Vec::<String>::new(), "{context}");
        });
    }
}

#[test]
fn whenever_the_server_dies_the_next_one_finds_the_truth_and_leaves_nothing() {
    let steps = steps();
    for (index, name) in steps.iter().enumerate() {
        for plan in [Plan::CrashBefore(index + 1), Plan::CrashAfter(index + 1)] {
            let context = format!("{plan:?} ({name})");
            let (world, dir) = (World::new(), tempfile::tempdir().unwrap());
            let first = runtime();
            first.block_on(async {
                let node = begin(&world, dir.path()).await;
                world.plan(plan);
                tokio::select! {
                    () = live(&node) => {}
                    () = world.crash() => {}
                }
            });
            // The process is gone: every task with it.
            drop(first);
            world.restart();
            runtime().block_on(async {
                let node = begin(&world, dir.path()).await;
                assert_true(&world, &node, dir.path(), &context).await;
                after_a_crash(&world, &node, dir.path(), &context).await;
                node.shutdown().await;
            });
        }
    }
}

/// Whatever was found is usable and can be ended.
async fn after_a_crash(world: &World, node: &Node, dir: &Path, context: &str) {
    for sandbox in all(node).await {
        if matches!(sandbox.state, State::Paused | State::Running) {
            let connected = node.connect(&team(), &sandbox.id, TTL).await;
            let connected = connected.unwrap_or_else(|error| panic!("{context}: {error}"));
            assert_eq!(connected.resumed, sandbox.state == State::Paused, "{context}");
            node.pause(&team(), &sandbox.id, true).await.unwrap_or_else(|error| panic!("{context}: {error}"));
            node.connect(&team(), &sandbox.id, TTL)
                .await
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            assert_true(world, node, dir, context).await;
            node.kill(&team(), &sandbox.id).await.unwrap();
            reach(node, &sandbox.id, State::Dead).await;
        }
    }
    assert_true(world, node, dir, context).await;
    let templates = node.templates(&team(), 100, None).await.unwrap().items;
    for template in &templates {
        let builds = dirs(&dir.join("data/templates").join(template.id.as_str()));
        let ready = usize::from(template.build.is_some());
        assert_eq!(builds.len(), ready, "{context}: directories of builds {builds:?}");
    }
    // A half-made template can be pulled again.
    let build = pull(node).await;
    assert_eq!(build.status, BuildStatus::Ready, "{context}: {:?}", build.reason);
    let sandbox =
        node.create(&team(), create_request()).await.unwrap_or_else(|error| panic!("{context}: {error}"));
    node.kill(&team(), &sandbox.id).await.unwrap();
    assert_true(world, node, dir, context).await;
}
