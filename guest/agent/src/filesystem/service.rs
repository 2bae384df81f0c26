//! The RPC methods. Each does its work on a blocking thread.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aenv_envd_proto::filesystem::{
    CreateWatcherRequest, CreateWatcherResponse, EntryInfo, EventType, Filesystem, FilesystemEvent,
    GetWatcherEventsRequest, GetWatcherEventsResponse, ListDirRequest, ListDirResponse, MakeDirRequest,
    MakeDirResponse, MoveRequest, MoveResponse, RemoveRequest, RemoveResponse, RemoveWatcherRequest,
    RemoveWatcherResponse, StatRequest, StatResponse, WatchDirRequest, WatchDirResponse,
    watch_dir_response::{KeepAlive, StartEvent},
};
use aenv_envd_proto::oneof::WatchEvent;
use connectrpc::{
    ConnectError, Encodable, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream,
};
use futures_util::stream;
use http::HeaderMap;
use tokio::task::JoinHandle;

use super::{
    ensure_dirs, entry, failed,
    remove::remove_tree,
    watch::{Watch, WatchError, is_remote},
};
use crate::{
    credentials,
    guest::Guest,
    process::listen::{keepalive, restored},
    users::{Names, User},
};

/// Entries one listing may hold.
const MAX_LISTED: usize = 100_000;
/// Polled watchers that may exist at once, and events one may hold before somebody must have asked for them.
const MAX_WATCHERS: usize = 64;
const MAX_EVENTS: usize = 65_536;

pub(crate) struct Service {
    guest: Arc<Guest>,
    watchers: Mutex<HashMap<String, Polled>>,
    next_watcher: std::sync::atomic::AtomicU64,
}

/// A watcher that is polled. A task empties the kernel's queue so that it can't overflow while nobody asks.
struct Polled {
    state: Arc<Mutex<PolledState>>,
    task: JoinHandle<()>,
}

struct PolledState {
    watch: Watch,
    events: Vec<FilesystemEvent>,
    failed: Option<WatchError>,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PolledState {
    fn collect(&mut self) {
        if self.failed.is_some() {
            return;
        }
        match self.watch.take() {
            Ok(events) => {
                for event in events {
                    // A file that is written piece by piece is one change to who looks now and then.
                    let repeated = self.events.last().is_some_and(|last| {
                        last.r#type == EventType::Write
                            && last.r#type == event.r#type
                            && last.name == event.name
                    });
                    if repeated {
                        self.events.pop();
                    }
                    self.events.push(event);
                }
                if self.events.len() > MAX_EVENTS {
                    self.events.clear();
                    self.failed = Some(WatchError::Overflow);
                }
            }
            Err(err) => self.failed = Some(err),
        }
    }
}

/// Runs `work` where it may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ConnectError> + Send + 'static,
) -> Result<T, ConnectError> {
    tokio::task::spawn_blocking(work).await.map_err(|err| ConnectError::internal(err.to_string()))?
}

impl Service {
    pub(crate) fn new(guest: Arc<Guest>) -> Self {
        Self { guest, watchers: Mutex::default(), next_watcher: std::sync::atomic::AtomicU64::new(1) }
    }

    fn user(&self, ctx: &RequestContext) -> Result<User, ConnectError> {
        credentials::user(ctx.headers(), &self.guest)
    }

    fn path(&self, path: &str, user: &User) -> Result<PathBuf, ConnectError> {
        self.guest.resolve(path, user).map_err(|err| ConnectError::invalid_argument(err.to_string()))
    }

    fn watchers(&self) -> MutexGuard<'_, HashMap<String, Polled>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn watch(
        &self,
        headers: &HeaderMap,
        path: &str,
        recursive: bool,
        include_entry: bool,
        allow_network_mounts: bool,
    ) -> Result<Watch, ConnectError> {
        let user = credentials::user(headers, &self.guest)?;
        let path = self.path(path, &user)?;
        blocking(move || {
            let meta = fs::metadata(&path).map_err(|err| failed("cannot watch", &path, &err))?;
            if !meta.is_dir() {
                return Err(ConnectError::invalid_argument(format!(
                    "path {} is not a directory",
                    path.display()
                )));
            }
            if !allow_network_mounts && is_remote(&path) {
                return Err(ConnectError::invalid_argument(format!(
                    "{} is on a network filesystem, whose changes can't all be seen: set allow_network_mounts to \
                     watch it all the same",
                    path.display()
                )));
            }
            Ok(Watch::new(path, recursive, include_entry)?)
        })
        .await
    }
}

impl Filesystem for Service {
    async fn stat<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, StatRequest>,
    ) -> ServiceResult<impl Encodable<StatResponse> + Send + use<'a>> {
        let user = self.user(&ctx)?;
        let path = self.path(request.path, &user)?;
        let entry = blocking(move || describe(&path)).await?;
        Response::ok(StatResponse { entry: Some(entry).into(), ..Default::default() })
    }

    async fn make_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MakeDirRequest>,
    ) -> ServiceResult<impl Encodable<MakeDirResponse> + Send + use<'a>> {
        let user = self.user(&ctx)?;
        let path = self.path(request.path, &user)?;
        let entry = blocking(move || {
            match fs::metadata(&path) {
                Ok(meta) if meta.is_dir() => {
                    return Err(ConnectError::already_exists(format!(
                        "directory already exists: {}",
                        path.display()
                    )));
                }
                Ok(_) => {
                    return Err(ConnectError::invalid_argument(format!(
                        "path already exists but it is not a directory: {}",
                        path.display()
                    )));
                }
                Err(err) if err.kind() == io::ErrorKind::NotFound => {}
                // A file on the way there.
                Err(err) if err.kind() == io::ErrorKind::NotADirectory => {
                    return Err(ConnectError::invalid_argument(format!("{}: {err}", path.display())));
                }
                Err(err) => return Err(failed("cannot look at", &path, &err)),
            }
            ensure_dirs(&path, &user).map_err(|err| failed("cannot make directory", &path, &err))?;
            describe(&path)
        })
        .await?;
        Response::ok(MakeDirResponse { entry: Some(entry).into(), ..Default::default() })
    }

    async fn r#move<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MoveRequest>,
    ) -> ServiceResult<impl Encodable<MoveResponse> + Send + use<'a>> {
        let user = self.user(&ctx)?;
        let (source, destination) =
            (self.path(request.source, &user)?, self.path(request.destination, &user)?);
        let entry = blocking(move || {
            fs::symlink_metadata(&source).map_err(|err| failed("source not found:", &source, &err))?;
            if let Some(parent) = destination.parent() {
                ensure_dirs(parent, &user).map_err(|err| failed("cannot make directory", parent, &err))?;
            }
            fs::rename(&source, &destination).map_err(|err| failed("cannot move to", &destination, &err))?;
            describe(&destination)
        })
        .await?;
        Response::ok(MoveResponse { entry: Some(entry).into(), ..Default::default() })
    }

    async fn list_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ListDirRequest>,
    ) -> ServiceResult<impl Encodable<ListDirResponse> + Send + use<'a>> {
        let user = self.user(&ctx)?;
        let path = self.path(request.path, &user)?;
        let depth = request.depth.max(1);
        let entries = blocking(move || list(&path, depth)).await?;
        Response::ok(ListDirResponse { entries, ..Default::default() })
    }

    async fn remove<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, RemoveRequest>,
    ) -> ServiceResult<impl Encodable<RemoveResponse> + Send + use<'a>> {
        let user = self.user(&ctx)?;
        let path = self.path(request.path, &user)?;
        blocking(move || {
            let result = match fs::symlink_metadata(&path) {
                Ok(meta) if meta.is_dir() && path.parent().is_none() => {
                    return Err(ConnectError::invalid_argument("the root directory can't be removed"));
                }
                Ok(meta) if meta.is_dir() => remove_tree(&path),
                Ok(_) => fs::remove_file(&path),
                Err(err) => Err(err),
            };
            match result {
                Err(err) if matches!(err.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(()),
                other => other.map_err(|err| failed("cannot remove", &path, &err)),
            }
        })
        .await?;
        Response::ok(RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<WatchDirResponse> + Send + use<>>> {
        let watch = self
            .watch(
                ctx.headers(),
                request.path,
                request.recursive,
                request.include_entry,
                request.allow_network_mounts,
            )
            .await?;
        let start = WatchEvent::Start(Box::<StartEvent>::default());
        let ping = keepalive(ctx.headers());
        let generation = self.guest.generation();
        let first = std::collections::VecDeque::from([Ok(start)]);
        Response::stream_ok(stream::unfold(
            (watch, first, generation, false),
            move |(mut watch, mut queue, mut generation, mut done)| async move {
                while queue.is_empty() && !done {
                    tokio::select! {
                        ready = watch.ready() => match ready {
                            Ok(()) => {}
                            Err(err) => queue.push_back(Err(ConnectError::internal(err.to_string()))),
                        },
                        _ = generation.changed() => queue.push_back(Err(restored())),
                        () = tokio::time::sleep(ping) => {
                            queue.push_back(Ok(WatchEvent::Keepalive(Box::<KeepAlive>::default())));
                        }
                    }
                    match watch.take() {
                        Ok(events) => {
                            queue.extend(
                                events.into_iter().map(|event| Ok(WatchEvent::Filesystem(Box::new(event)))),
                            );
                        }
                        Err(err) => queue.push_back(Err(err.into())),
                    }
                }
                let event = queue.pop_front()?;
                done |= event.is_err();
                let event = event.map(|event| WatchDirResponse { event: Some(event), ..Default::default() });
                if done {
                    queue.clear();
                }
                Some((event, (watch, queue, generation, done)))
            },
        ))
    }

    async fn create_watcher<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, CreateWatcherRequest>,
    ) -> ServiceResult<impl Encodable<CreateWatcherResponse> + Send + use<'a>> {
        if self.watchers().len() >= MAX_WATCHERS {
            return Err(ConnectError::resource_exhausted(format!(
                "there are {MAX_WATCHERS} watchers already: remove some"
            )));
        }
        let watch = self
            .watch(
                ctx.headers(),
                request.path,
                request.recursive,
                request.include_entry,
                request.allow_network_mounts,
            )
            .await?;
        let state = Arc::new(Mutex::new(PolledState { watch, events: Vec::new(), failed: None }));
        let task = tokio::spawn(empty_when_ready(Arc::clone(&state)));
        let number = self.next_watcher.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let watcher_id = format!("w{number:08x}");
        self.watchers().insert(watcher_id.clone(), Polled { state, task });
        Response::ok(CreateWatcherResponse { watcher_id, ..Default::default() })
    }

    async fn get_watcher_events<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, GetWatcherEventsRequest>,
    ) -> ServiceResult<impl Encodable<GetWatcherEventsResponse> + Send + use<'a>> {
        let state = self
            .watchers()
            .get(request.watcher_id)
            .map(|polled| Arc::clone(&polled.state))
            .ok_or_else(|| no_watcher(request.watcher_id))?;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        // What happened before this call must be in its answer.
        state.collect();
        if let Some(err) = &state.failed {
            return Err(err.clone().into());
        }
        let events = std::mem::take(&mut state.events);
        Response::ok(GetWatcherEventsResponse { events, ..Default::default() })
    }

    async fn remove_watcher<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, RemoveWatcherRequest>,
    ) -> ServiceResult<impl Encodable<RemoveWatcherResponse> + Send + use<'a>> {
        let removed = self.watchers().remove(request.watcher_id);
        removed.ok_or_else(|| no_watcher(request.watcher_id))?;
        Response::ok(RemoveWatcherResponse::default())
    }
}

fn no_watcher(id: &str) -> ConnectError {
    ConnectError::not_found(format!("watcher with id {id} not found"))
}

async fn empty_when_ready(state: Arc<Mutex<PolledState>>) {
    loop {
        let ready = std::future::poll_fn(|cx| {
            let state = state.lock().unwrap_or_else(PoisonError::into_inner);
            state.watch.poll_ready(cx)
        });
        if ready.await.is_err() {
            return;
        }
        state.lock().unwrap_or_else(PoisonError::into_inner).collect();
    }
}

fn describe(path: &Path) -> Result<EntryInfo, ConnectError> {
    entry::describe(path, &Names::read()).map_err(|err| failed("cannot look at", path, &err))
}

/// Everything below `path`, `depth` levels deep, parents before their children, in the order of names. Links are
/// listed, not followed, except `path` itself.
fn list(path: &Path, depth: u32) -> Result<Vec<EntryInfo>, ConnectError> {
    let real = fs::canonicalize(path).map_err(|err| failed("cannot list", path, &err))?;
    if !real.is_dir() {
        return Err(ConnectError::invalid_argument(format!("path is not a directory: {}", path.display())));
    }
    let names = Names::read();
    let mut entries = Vec::new();
    // Paths still to be described, last one first.
    let mut left = children(&real, 1).map_err(|err| failed("cannot list", path, &err))?;
    while let Some((child, level)) = left.pop() {
        // What vanished meanwhile was not there.
        let Ok(mut entry) = entry::describe(&child, &names) else { continue };
        if entries.len() == MAX_LISTED {
            return Err(ConnectError::resource_exhausted(format!(
                "{} holds more than {MAX_LISTED} entries: list a smaller tree or with less depth",
                path.display()
            )));
        }
        let is_dir = entry.symlink_target.is_none() && entry.permissions.starts_with('d');
        if is_dir && level < depth {
            left.extend(children(&child, level + 1).unwrap_or_default());
        }
        if let Ok(relative) = child.strip_prefix(&real) {
            entry.path = path.join(relative).to_string_lossy().into_owned();
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn children(dir: &Path, level: u32) -> io::Result<Vec<(PathBuf, u32)>> {
    let mut found: Vec<_> =
        fs::read_dir(dir)?.map(|entry| entry.map(|entry| (entry.path(), level))).collect::<Result<_, _>>()?;
    found.sort_by(|a, b| b.cmp(a));
    Ok(found)
}
