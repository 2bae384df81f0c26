//! Waking paused sandboxes: one resume however many requests wait for it, and none that dies with its client.

use aenv_node::{
    control::{Control, Error, Result, Route},
    model::SandboxId,
};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};
use tokio::sync::watch;

type Outcome = Option<Result<Route>>;

/// Resumes under way.
#[derive(Default)]
pub(super) struct Wakes {
    waiting: Arc<Mutex<HashMap<SandboxId, watch::Receiver<Outcome>>>>,
}

impl Wakes {
    /// Joins the resume of this sandbox, beginning it if need be.
    pub(super) async fn wake(&self, control: &Arc<dyn Control>, id: &SandboxId) -> Result<Route> {
        let mut outcome = self.begin(control, id);
        let gone = || Error::Internal(format!("resuming sandbox {id} was interrupted"));
        // The guard must not be held across the clone's use; take the value out at once.
        let done = outcome.wait_for(Option::is_some).await.map_err(|_| gone())?.clone();
        done.unwrap_or_else(|| Err(gone()))
    }

    fn begin(&self, control: &Arc<dyn Control>, id: &SandboxId) -> watch::Receiver<Outcome> {
        let mut waiting = self.waiting.lock();
        if let Some(there) = waiting.get(id) {
            return there.clone();
        }
        let (tell, outcome) = watch::channel(None);
        waiting.insert(id.clone(), outcome.clone());
        // Its own task: a client that goes away must not take the others' resume with it.
        let (control, id, all) = (Arc::clone(control), id.clone(), Arc::clone(&self.waiting));
        tokio::spawn(async move {
            let _entry = Entry { all, id: id.clone() };
            let woken = control.wake(&id).await;
            tell.send_replace(Some(woken));
        });
        outcome
    }
}

/// Takes the entry away however the task ends, a panic of the node included.
struct Entry {
    all: Arc<Mutex<HashMap<SandboxId, watch::Receiver<Outcome>>>>,
    id: SandboxId,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.all.lock().remove(&self.id);
    }
}
