//! Templates and their builds.

use super::{Setup, assert_true, create_request, dirs, pull, pull_request, setup, team, world::World};
use crate::{
    Node,
    control::{Control, Error},
    model::{BuildStatus, Principal, PullTemplate},
};
use std::time::Duration;

#[tokio::test]
async fn a_build_tells_its_steps_and_leaves_no_machine() {
    let Setup { world, node, dir } = setup().await;
    let build = pull(&node).await;
    let lines: Vec<_> = build.log.iter().map(|entry| entry.message.as_str()).collect();
    assert!(lines.iter().any(|line| line.contains("fetching registry/base:1")), "{lines:?}");
    assert_eq!(lines.last(), Some(&"ready"));
    let template = node.template(&team(), "base").await.unwrap();
    assert_eq!((template.build, template.status), (Some(build.id), BuildStatus::Ready));
    assert_eq!(template.names, ["base"]);
    let page = node.build(&team(), &build.template, &build.id, 1, 2).await.unwrap();
    assert_eq!(page.log.len(), 2);
    assert_true(&world, &node, dir.path(), "built").await;
}

#[tokio::test]
async fn pulling_the_same_again_changes_nothing_unless_forced() {
    let Setup { node, dir, .. } = setup().await;
    let first = node.template(&team(), "base").await.unwrap();
    assert_eq!(pull(&node).await.id, first.build.unwrap());
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    let forced = node.pull(&team(), PullTemplate { force: true, ..pull_request() }).await.unwrap();
    assert_eq!(forced.template, first.id);
    // While it is made, sandboxes come from the one before.
    let made = wait(&node, &forced).await;
    assert_eq!(made, BuildStatus::Ready);
    let second = node.template(&team(), "base").await.unwrap();
    assert_eq!(second.build, Some(forced.id));
    assert_eq!(node.template(&team(), second.id.as_str()).await.unwrap().id, first.id);
    // The old build stays as long as a sandbox uses it.
    let builds = dir.path().join("data/templates").join(first.id.as_str());
    assert_eq!(dirs(&builds).len(), 2);
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    node.connect(&team(), &sandbox.id, Duration::from_secs(9)).await.unwrap();
    node.kill(&team(), &sandbox.id).await.unwrap();
    settle(|| dirs(&builds).len() == 1).await;
}

async fn wait(node: &Node, build: &crate::model::Build) -> BuildStatus {
    loop {
        let found = node.build(&team(), &build.template, &build.id, 0, 1).await.unwrap();
        if matches!(found.status, BuildStatus::Ready | BuildStatus::Error) {
            return found.status;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn settle(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it never settled");
}

#[tokio::test]
async fn a_build_that_fails_says_why_and_leaves_its_log_alone() {
    for step in ["images.prepare", "vmm.boot", "guest.init", "vm.save_state", "storage.seal"] {
        let (world, dir) = (World::new(), tempfile::tempdir().unwrap());
        let node = Node::start(world.options(dir.path())).await.unwrap();
        world.break_(step);
        let build = pull(&node).await;
        assert_eq!(build.status, BuildStatus::Error, "{step}");
        assert!(build.reason.unwrap().contains("injected"), "{step}");
        assert!(!build.log.is_empty());
        assert_true(&world, &node, dir.path(), step).await;
        let template = build.template;
        assert!(dirs(&dir.path().join("data/templates").join(template.as_str())).is_empty(), "{step}");
        assert!(matches!(node.create(&team(), create_request()).await, Err(Error::TemplateNotFound(_))));
    }
}

#[tokio::test]
async fn two_pulls_of_one_name_at_once_are_one_too_many() {
    let (world, dir) = (World::new(), tempfile::tempdir().unwrap());
    let node = Node::start(world.options(dir.path())).await.unwrap();
    world.hold("images.prepare");
    let first = node.pull(&team(), pull_request()).await.unwrap();
    let error = node.pull(&team(), pull_request()).await.unwrap_err();
    assert!(matches!(&error, Error::Conflict(text) if text.contains(&first.id.to_string())), "{error}");
    world.release_all();
    assert_eq!(wait(&node, &first).await, BuildStatus::Ready);
}

#[tokio::test]
async fn deleting_a_template_stops_its_build_and_spares_its_sandboxes() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    let id = sandbox.template.clone();
    world.hold("guest.init");
    node.pull(&team(), PullTemplate { force: true, ..pull_request() }).await.unwrap();
    node.delete_template(&team(), "base").await.unwrap();
    assert!(matches!(node.template(&team(), "base").await, Err(Error::TemplateNotFound(_))));
    assert!(matches!(node.create(&team(), create_request()).await, Err(Error::TemplateNotFound(_))));
    world.release_all();
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    node.connect(&team(), &sandbox.id, Duration::from_secs(9)).await.unwrap();
    node.kill(&team(), &sandbox.id).await.unwrap();
    let home = dir.path().join("data/templates").join(id.as_str());
    settle(|| !home.exists()).await;
    settle(|| dirs(&dir.path().join("data/images")).is_empty()).await;
    // The name is free again.
    assert_eq!(pull(&node).await.status, BuildStatus::Ready);
    node.shutdown().await;
    assert_true(&world, &node, dir.path(), "deleted").await;
}

#[tokio::test]
async fn a_template_is_found_by_id_name_tag_and_space_and_only_by_its_team() {
    let Setup { node, dir: _dir, .. } = setup().await;
    let template = node.template(&team(), "base").await.unwrap();
    let build = template.build.unwrap();
    for reference in [
        template.id.as_str(),
        "base",
        "base:default",
        "base:latest",
        "a/base",
        &format!("base:{build}"),
        &format!("{}:{build}", template.id),
    ] {
        assert_eq!(node.template(&team(), reference).await.unwrap().id, template.id, "{reference}");
    }
    let stranger = Principal { team: "b".into() };
    assert!(matches!(node.template(&stranger, "base").await, Err(Error::TemplateForbidden(_))));
    assert!(matches!(node.delete_template(&stranger, "base").await, Err(Error::TemplateForbidden(_))));
}

#[tokio::test]
async fn impossible_pulls_are_refused_by_name() {
    let Setup { node, dir: _dir, .. } = setup().await;
    let bad = [
        PullTemplate { name: "../x".into(), ..pull_request() },
        PullTemplate { name: "A".into(), ..pull_request() },
        PullTemplate { name: "x".repeat(64), ..pull_request() },
        PullTemplate { image: String::new(), ..pull_request() },
        PullTemplate { image: "a\nb".into(), ..pull_request() },
        PullTemplate { vcpus: 0, ..pull_request() },
        PullTemplate { memory_mib: 100, ..pull_request() },
        PullTemplate { memory_mib: 129, ..pull_request() },
        PullTemplate { disk_mib: 1, ..pull_request() },
    ];
    for request in bad {
        let error = node.pull(&team(), request).await.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    }
}
