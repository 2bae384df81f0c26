//! Long stacks are merged beside everything else; the driver puts the result in place.

use super::{Driver, Merged, Message};
use crate::{
    machine::remove_files,
    model::State,
    sandbox::{home, manifest_of, merge, write_manifest},
    steps::StepError,
};
use std::sync::Arc;

impl Driver {
    /// Starts a merge when a stack has grown too long.
    pub(super) fn tidy(&mut self) {
        if self.merging || self.running.is_some() {
            return;
        }
        let Some((kind, from)) = merge::wanted(&self.record) else { return };
        self.merging = true;
        let (inner, id, mailbox) =
            (Arc::clone(&self.inner), self.record.sandbox.id.clone(), self.mailbox.downgrade());
        self.inner.tasks.spawn(async move {
            let merged = merge::merge(Arc::clone(&inner), id, kind, from).await;
            let Some(mailbox) = mailbox.upgrade() else { return };
            let (Ok(()) | Err(_)) = mailbox.send(Message::Merged(merged)).await;
        });
    }

    pub(super) async fn merged(&mut self, merged: Option<Merged>) {
        if self.running.is_some() {
            self.merged = merged;
            return;
        }
        let Some(merged) = merged else {
            // Not tried again before the next operation, which calls `tidy`.
            self.merging = false;
            return;
        };
        self.merging = false;
        let before = self.record.clone();
        let Some(replaced) = merge::apply(&mut self.record, &merged) else {
            merge::discard(&self.inner, &merged).await;
            return;
        };
        let written = async {
            if self.record.sandbox.state == State::Paused {
                let manifest = manifest_of(&self.inner, &self.record).await?;
                let path = self.inner.at(&home(&self.record.sandbox.id)).join("snapshot.json");
                write_manifest(manifest, path).await?;
            }
            self.inner
                .db
                .save_durably(&self.record)
                .await
                .map_err(|error| StepError::failed("merging", error))
        };
        if let Err(error) = written.await {
            tracing::warn!(sandbox = %self.record.sandbox.id, %error, "merged layers are not used");
            self.record = before;
            merge::discard(&self.inner, &merged).await;
            return;
        }
        if let (Some(machine), Some(record)) = (&mut self.machine, &self.record.machine) {
            machine.record.memory_layers.clone_from(&record.memory_layers);
        }
        remove_files(replaced.into_iter().map(|path| self.inner.at(&path))).await;
        self.tidy();
    }
}
