//! Keeping stacks short: many pauses make many layers, and every read looks through all of them.
//!
//! A sandbox's own layers above its template's are merged into one in the background once there are more than
//! [`MOST`]. The merged layer takes their place in what the next pause saves (a running sandbox) or in what is saved (a
//! paused one); the files it replaces go when nothing names them any more. A merge that comes too late, because the
//! stack has changed below it, is thrown away.

use super::home;
use crate::{
    machine::remove_files,
    model::{SandboxId, State},
    node::Inner,
    records::{MachineRecord, Record},
    seams::Layer,
    steps::{Named, within},
};
use std::{path::PathBuf, sync::Arc};

/// Own layers of a stack that are left alone.
const MOST: usize = 8;

/// Which stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Disk,
    Memory,
}

/// A merge that is done.
#[derive(Debug, Clone)]
pub(crate) struct Merged {
    kind: Kind,
    from: Vec<Layer>,
    to: PathBuf,
}

/// A stack of the sandbox that is too long: which, and the layers to merge.
pub(crate) fn wanted(record: &Record) -> Option<(Kind, Vec<Layer>)> {
    let home = home(&record.sandbox.id);
    [Kind::Memory, Kind::Disk].into_iter().find_map(|kind| {
        let own: Vec<Layer> = stack(record, kind)?
            .iter()
            .skip_while(|layer| !layer.path.starts_with(&home) || layer.kind == crate::seams::LayerKind::Raw)
            .cloned()
            .collect();
        (own.len() > MOST).then_some((kind, own))
    })
}

fn stack(record: &Record, kind: Kind) -> Option<&Vec<Layer>> {
    match (kind, record.sandbox.state) {
        (Kind::Disk, State::Running) => Some(&record.disk),
        (Kind::Disk, State::Paused) => record.saved.as_ref().map(|saved| &saved.disk),
        (Kind::Memory, State::Running) => record.machine.as_ref().map(|machine| &machine.memory_layers),
        (Kind::Memory, State::Paused) => {
            record.saved.as_ref().and_then(|saved| saved.memory.as_ref()).map(|memory| &memory.layers)
        }
        _ => None,
    }
}

/// Merges; the driver is told when it succeeded.
pub(crate) async fn merge(inner: Arc<Inner>, id: SandboxId, kind: Kind, from: Vec<Layer>) -> Option<Merged> {
    let name = match kind {
        Kind::Disk => "disk",
        Kind::Memory => "memory",
    };
    let to = home(&id).join(format!("{name}-merged-{}.layer", uuid::Uuid::now_v7().simple()));
    let (layers, target) = (Arc::clone(&inner.parts.layers), inner.at(&to));
    let paths: Vec<PathBuf> = from.iter().map(|layer| inner.at(&layer.path)).collect();
    let work = async move { layers.merge(&paths, &target).await.step("merging layers") };
    match within("merging layers", inner.deadlines.capture, work).await {
        Ok(()) => Some(Merged { kind, from, to }),
        Err(error) => {
            tracing::warn!(sandbox = %id, %error, "layers stay unmerged until the next pause");
            None
        }
    }
}

/// Puts a merged layer in the place of those it was made of. Returns whether the record changed and must be written,
/// and for a paused sandbox which files nothing names any more once its manifest is written anew.
pub(crate) fn apply(record: &mut Record, merged: &Merged) -> Option<Vec<PathBuf>> {
    let layers = stack(record, merged.kind)?.clone();
    let at = layers.windows(merged.from.len()).position(|window| window == merged.from)?;
    let replaced: Vec<PathBuf> = merged.from.iter().map(|layer| layer.path.clone()).collect();
    let mut layers = layers;
    layers.splice(at..at + merged.from.len(), [Layer::lsmt(merged.to.clone())]);
    let paused = record.sandbox.state == State::Paused;
    match merged.kind {
        Kind::Disk => {
            record.disk.clone_from(&layers);
            if let (true, Some(saved)) = (paused, &mut record.saved) {
                saved.disk = layers;
            }
        }
        Kind::Memory => {
            let memory = record.saved.as_mut().and_then(|saved| saved.memory.as_mut());
            match (paused, memory, &mut record.machine) {
                (true, Some(memory), _) => memory.layers = layers,
                (false, _, Some(MachineRecord { memory_layers, .. })) => *memory_layers = layers,
                _ => return None,
            }
        }
    }
    if paused {
        Some(replaced)
    } else {
        // The running machine's exports and the pause before still read them.
        record.garbage.extend(replaced);
        Some(Vec::new())
    }
}

/// A merge nobody wants any more.
pub(crate) async fn discard(inner: &Inner, merged: &Merged) {
    remove_files([inner.at(&merged.to)]).await;
}
