//! What nothing uses any more goes.

use crate::{
    catalog::build_home,
    machine::remove_dirs,
    model::{BuildId, TemplateId},
    node::Inner,
};
use std::{path::PathBuf, sync::Arc};

/// Removes builds of a template that nothing uses any more.
pub(crate) async fn collect(inner: &Arc<Inner>, template: &TemplateId) {
    collect_unless(inner, template, |_| false).await;
}

/// [`collect`] for when the sandboxes aren't all shown yet.
pub(crate) async fn collect_unless(
    inner: &Arc<Inner>,
    template: &TemplateId,
    used: impl Fn(&BuildId) -> bool,
) {
    let (gone, empty) = inner.catalog.collect(template, |build| {
        let views = inner.views.read();
        used(build)
            || views.values().any(|view| view.sandbox.build == *build && view.sandbox.tombstone.is_none())
    });
    for build in &gone {
        remove_dirs(vec![inner.at(&build_home(template, &build.id))]).await;
        if let Err(error) = inner.db.forget_build(&build.id).await {
            tracing::warn!(build = %build.id, %error, "a build stays in the records until the next start");
        }
        tracing::info!(%template, build = %build.id, "removed a build that nothing uses");
    }
    if let Some(template) = &empty {
        remove_dirs(vec![inner.at(&PathBuf::from("templates").join(template.id.as_str()))]).await;
        if let Err(error) = inner.db.forget_template(&template.id).await {
            tracing::warn!(template = %template.id, %error, "a template stays in the records until the next start");
        }
    }
    if !gone.is_empty() && !inner.catalog.building() {
        remove_images(inner).await;
    }
}

/// Removes the disks of images that no build is made of.
pub(crate) async fn remove_images(inner: &Arc<Inner>) {
    let used = inner.catalog.layers_in_use();
    let images = PathBuf::from("images");
    let Ok(mut entries) = tokio::fs::read_dir(inner.at(&images)).await else { return };
    let mut unused = Vec::new();
    while let Ok(Some(entry)) = entries.next_entry().await {
        let dir = images.join(entry.file_name());
        if !used.iter().any(|path| path.starts_with(&dir)) {
            unused.push(entry.path());
        }
    }
    remove_dirs(unused).await;
}
