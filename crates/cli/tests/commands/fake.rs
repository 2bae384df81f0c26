//! A server with one team and sandboxes that are processes and files of this machine.
//!
//! It speaks the published contract and can misbehave on demand: cut streams, refuse, forget processes, lack `tar`.

mod control;
mod guest;

use serde_json::Value;
use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize},
    },
};
use tokio::sync::Notify;

pub const KEY: &str = "e2b_0123456789abcdef0123456789abcdef01234567";
/// A sandbox that is there from the beginning.
pub const BOX: &str = "aaaaaaaaaaaaaaaaaaaa";

/// State and labels of a sandbox.
pub type Known = (String, BTreeMap<String, String>);

/// What the server knows; locks are held for moments only.
#[derive(Default)]
pub struct State {
    /// Sandboxes: state and labels.
    pub sandboxes: Mutex<BTreeMap<String, Known>>,
    /// Processes of all sandboxes.
    pub processes: Mutex<HashMap<u32, Arc<Process>>>,
    /// `METHOD path?query` of each request.
    pub seen: Mutex<Vec<String>>,
    /// Body of the last create.
    pub created: Mutex<Value>,
    /// Answers every control request with this instead.
    pub refuse: Mutex<Option<(u16, &'static str)>>,
    /// Streams to cut, and after how many messages each.
    pub cuts: Mutex<Vec<usize>>,
    /// Forgets processes as soon as nobody is attached.
    pub forgetful: AtomicBool,
    /// There is no `tar`.
    pub no_tar: AtomicBool,
    /// Lines of the build that `pull` begins, and why it fails if it does.
    pub build: Mutex<(Vec<&'static str>, Option<&'static str>)>,
    /// Sizes a terminal was given.
    pub sizes: Mutex<Vec<Value>>,
    next_pid: AtomicUsize,
}

/// A process and all it wrote.
pub struct Process {
    pub pid: u32,
    pub tag: String,
    pub os_pid: Option<u32>,
    /// `(offset, kind, bytes)`, then the end.
    pub output: Mutex<Vec<(u64, &'static str, Vec<u8>)>>,
    pub end: Mutex<Option<Value>>,
    pub changed: Notify,
    pub stdin: tokio::sync::Mutex<Option<tokio::process::ChildStdin>>,
    pub pty: bool,
}

pub struct Fake {
    pub state: Arc<State>,
    url: String,
    home: tempfile::TempDir,
    _runtime: tokio::runtime::Runtime,
}

impl Fake {
    pub fn start() -> Self {
        let state = Arc::new(State::default());
        state.next_pid.store(100, std::sync::atomic::Ordering::Relaxed);
        state.sandboxes.lock().expect("lock").insert(BOX.into(), ("running".into(), BTreeMap::new()));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let app = control::routes(state.clone()).merge(guest::routes(state.clone()));
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self { state, url, home: tempfile::tempdir().expect("a directory"), _runtime: runtime }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    pub fn seen(&self, part: &str) -> bool {
        self.state.seen.lock().expect("lock").iter().any(|line| line.contains(part))
    }

    pub fn add(&self, id: &str, state: &str, labels: &[(&str, &str)]) {
        let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.state.sandboxes.lock().expect("lock").insert(id.to_owned(), (state.to_owned(), labels));
    }
}
