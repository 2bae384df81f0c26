//! Sandboxes started from images that nobody made a template of.

use super::{Setup, assert_true, create_request, setup, team};
use crate::{
    control::{Control, Error},
    model::CreateSandbox,
};

const IMAGE: &str = "registry.example/org/task:1";

fn from_image() -> CreateSandbox {
    CreateSandbox { template: IMAGE.into(), ..create_request() }
}

#[tokio::test]
async fn the_first_start_makes_what_the_second_one_finds() {
    let Setup { world, node, dir } = setup().await;
    let boots = world.count("vmm.boot");
    let first = node.create(&team(), from_image()).await.unwrap();
    let second = node.create(&team(), from_image()).await.unwrap();
    assert_eq!(world.count("vmm.boot"), boots + 1);
    assert_eq!(first.template, second.template);
    assert_ne!(first.id, second.id);
    assert_eq!(node.template(&team(), first.template.as_str()).await.unwrap().image, IMAGE);
    assert_true(&world, &node, dir.path(), "started from an image").await;
}

#[tokio::test]
async fn starts_that_come_while_it_is_made_wait_for_the_same_build() {
    let Setup { world, node, dir } = setup().await;
    let boots = world.count("vmm.boot");
    let who = team();
    let starts = (0..8).map(|_| node.create(&who, from_image()));
    let made = futures_util::future::join_all(starts).await;
    let made: Vec<_> = made.into_iter().map(Result::unwrap).collect();
    assert!(made.iter().all(|sandbox| sandbox.template == made[0].template));
    assert_eq!(world.count("vmm.boot"), boots + 1);
    assert_true(&world, &node, dir.path(), "started together").await;
}

#[tokio::test]
async fn another_size_is_another_machine_of_the_same_image() {
    let Setup { world, node, dir } = setup().await;
    let base = node.create(&team(), create_request()).await.unwrap();
    let larger = CreateSandbox { memory_mib: Some(1024), vcpus: Some(1), ..create_request() };
    let larger = node.create(&team(), larger).await.unwrap();
    assert_eq!((larger.vcpus, larger.memory_mib, larger.disk_mib), (1, 1024, base.disk_mib));
    assert_ne!(larger.template, base.template);
    // The size the template has anyway needs no other.
    let same = CreateSandbox { memory_mib: Some(base.memory_mib), ..create_request() };
    assert_eq!(node.create(&team(), same).await.unwrap().template, base.template);
    assert_true(&world, &node, dir.path(), "sized").await;
}

#[tokio::test]
async fn an_image_that_cannot_be_had_is_told_to_all_and_tried_again() {
    let Setup { world, node, dir } = setup().await;
    world.break_("images.prepare");
    let who = team();
    let starts = (0..3).map(|_| node.create(&who, from_image()));
    for refused in futures_util::future::join_all(starts).await {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error:?}");
        assert!(error.to_string().contains(IMAGE) && error.to_string().contains("injected"), "{error}");
    }
    world.mend();
    world.break_("vmm.boot");
    let error = node.create(&who, from_image()).await.unwrap_err();
    assert!(matches!(error, Error::Internal(_)), "{error:?}");
    world.mend();
    node.create(&who, from_image()).await.unwrap();
    assert_true(&world, &node, dir.path(), "tried again").await;
}

#[tokio::test]
async fn a_name_without_a_registry_is_a_template_or_nothing() {
    let Setup { world, node, .. } = setup().await;
    let fetched = world.count("images.prepare");
    for name in ["nobody", "nobody:1", "team/nobody"] {
        let request = CreateSandbox { template: name.into(), ..create_request() };
        let error = node.create(&team(), request).await.unwrap_err();
        assert!(matches!(error, Error::TemplateNotFound(_)), "{error:?}");
    }
    assert_eq!(world.count("images.prepare"), fetched);
}
