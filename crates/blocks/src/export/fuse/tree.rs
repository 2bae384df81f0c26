//! Names, inodes and open handles.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::BackingId;
use parking_lot::{Condvar, Mutex, RwLock};

use crate::device::Device;
use crate::export::ExportError;

/// One export as the kernel knows it.
pub(super) struct Node {
    pub(super) ino: u64,
    pub(super) device: Arc<dyn Device>,
    /// Who may open it: root, until someone is given it with `chown`.
    pub(super) owner: Mutex<Owner>,
    handles: Mutex<Handles>,
    idle: Condvar,
}

/// Owner and permissions of a file.
#[derive(Clone, Copy)]
pub(super) struct Owner {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u16,
}

#[derive(Default)]
struct Handles {
    open: u32,
    closed_to_new: bool,
    /// The kernel's name for the local file behind this node: one for all handles, while there are any.
    backing: Option<Arc<BackingId>>,
}

impl Node {
    /// Counts a handle; `None` when the export takes no new ones. `make_backing` is asked for the first handle only:
    /// the kernel refuses to mix handles that pass through with others that don't.
    pub(super) fn open(
        &self,
        make_backing: impl FnOnce() -> Option<BackingId>,
    ) -> Option<Option<Arc<BackingId>>> {
        let mut handles = self.handles.lock();
        if handles.closed_to_new {
            return None;
        }
        if handles.open == 0 {
            handles.backing = make_backing().map(Arc::new);
        }
        handles.open += 1;
        Some(handles.backing.clone())
    }

    /// Whether this was the last handle of a withdrawn node.
    fn close(&self) -> bool {
        let mut handles = self.handles.lock();
        handles.open = handles.open.saturating_sub(1);
        if handles.open > 0 {
            return false;
        }
        handles.backing = None;
        self.idle.notify_all();
        handles.closed_to_new
    }

    pub(super) fn handles(&self) -> u32 {
        self.handles.lock().open
    }

    /// `Err` with the number of open handles when they don't go away in time.
    pub(super) fn drain(&self, patience: Duration) -> Result<(), u32> {
        let deadline = Instant::now() + patience;
        let mut handles = self.handles.lock();
        handles.closed_to_new = true;
        while handles.open > 0 {
            if self.idle.wait_until(&mut handles, deadline).timed_out() && handles.open > 0 {
                handles.closed_to_new = false;
                return Err(handles.open);
            }
        }
        Ok(())
    }
}

/// All nodes. A node stays until it is withdrawn *and* closed.
#[derive(Default)]
pub(super) struct Tree {
    nodes: RwLock<Nodes>,
}

#[derive(Default)]
struct Nodes {
    by_name: HashMap<String, Arc<Node>>,
    by_ino: HashMap<u64, Arc<Node>>,
    last_ino: u64,
}

const ROOT_INO: u64 = 1;

impl Tree {
    pub(super) fn publish(&self, name: &str, device: Arc<dyn Device>) -> Result<(), ExportError> {
        let mut nodes = self.nodes.write();
        if nodes.by_name.contains_key(name) {
            return Err(ExportError::Exists(name.into()));
        }
        nodes.last_ino = nodes.last_ino.max(ROOT_INO) + 1;
        let node = Arc::new(Node {
            ino: nodes.last_ino,
            owner: Mutex::new(Owner { uid: 0, gid: 0, mode: 0o600 }),
            device,
            handles: Mutex::new(Handles::default()),
            idle: Condvar::new(),
        });
        nodes.by_ino.insert(node.ino, node.clone());
        nodes.by_name.insert(name.into(), node);
        Ok(())
    }

    pub(super) fn withdraw(&self, name: &str) {
        let mut nodes = self.nodes.write();
        let Some(node) = nodes.by_name.remove(name) else { return };
        let mut handles = node.handles.lock();
        handles.closed_to_new = true;
        if handles.open == 0 {
            nodes.by_ino.remove(&node.ino);
        }
    }

    pub(super) fn close(&self, ino: u64) {
        let Some(node) = self.inode(ino) else { return };
        if node.close() {
            let mut nodes = self.nodes.write();
            // A draining node is closed to new handles too, but keeps its name until it is withdrawn.
            if !nodes.by_name.values().any(|named| named.ino == ino) {
                nodes.by_ino.remove(&ino);
            }
        }
    }

    pub(super) fn named(&self, name: &str) -> Option<Arc<Node>> {
        self.nodes.read().by_name.get(name).cloned()
    }

    pub(super) fn inode(&self, ino: u64) -> Option<Arc<Node>> {
        self.nodes.read().by_ino.get(&ino).cloned()
    }

    pub(super) fn all_handles(&self) -> u32 {
        self.nodes.read().by_ino.values().map(|node| node.handles()).sum()
    }

    /// Names and inodes, in inode order.
    pub(super) fn list(&self) -> Vec<(String, u64)> {
        let nodes = self.nodes.read();
        let mut names: Vec<_> = nodes.by_name.iter().map(|(name, node)| (name.clone(), node.ino)).collect();
        names.sort_by_key(|&(_, ino)| ino);
        names
    }
}
