//! The RPC methods. Each does its work on a blocking thread.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aenv_envd_proto::filesystem::{
    CreateWatcherRequest, CreateWatcherResponse, EntryInfo, Filesystem, GetWatcherEventsRequest,
    GetWatcherEventsResponse, ListDirRequest, ListDirResponse, MakeDirRequest, MakeDirResponse, MoveRequest,
    MoveResponse, RemoveRequest, RemoveResponse, RemoveWatcherRequest, RemoveWatcherResponse, StatRequest,
    StatResponse, WatchDirRequest, WatchDirResponse,
    watch_dir_response::{KeepAlive, StartEvent},
};
use aenv_envd_proto::oneof::WatchEvent;
use connectrpc::{
    ConnectError, Encodable, RequestContext, Response, ServiceRequest, ServiceResult, ServiceStream,
};
use futures_util::stream;
use http::HeaderMap;

use super::{
    ensure_dirs, entry, failed,
    listing::list,
    polled::Polled,
    remove::remove_tree,
    watch::{Watch, is_remote},
};
use crate::{
    credentials,
    guest::Guest,
    process::listen::{keepalive, restored},
    users::{Names, User},
};

/// Polled watchers that may exist at once.
const MAX_WATCHERS: usize = 64;

pub(crate) struct Service {
    guest: Arc<Guest>,
    watchers: Mutex<HashMap<String, Polled>>,
    next_watcher: std::sync::atomic::AtomicU64,
}

impl Service {
    pub(crate) fn new(guest: Arc<Guest>) -> Self {
        Self { guest, watchers: Mutex::default(), next_watcher: std::sync::atomic::AtomicU64::new(1) }
    }

    /// Runs `work` where it may block, on the absolute forms of `paths` for the user that `headers` name.
    async fn on<const N: usize, T: Send + 'static>(
        &self,
        headers: &HeaderMap,
        paths: [&str; N],
        work: impl FnOnce([PathBuf; N], User) -> Result<T, ConnectError> + Send + 'static,
    ) -> Result<T, ConnectError> {
        let user = credentials::user(headers, &self.guest)?;
        let mut resolved = [const { PathBuf::new() }; N];
        for (path, place) in paths.into_iter().zip(&mut resolved) {
            *place = self
                .guest
                .resolve(path, &user)
                .map_err(|err| ConnectError::invalid_argument(err.to_string()))?;
        }
        tokio::task::spawn_blocking(move || work(resolved, user))
            .await
            .map_err(|err| ConnectError::internal(err.to_string()))?
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
        self.on(headers, [path], move |[path], _| {
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
        let entry = self.on(ctx.headers(), [request.path], |[path], _| describe(&path)).await?;
        Response::ok(StatResponse { entry: Some(entry).into(), ..Default::default() })
    }

    async fn make_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MakeDirRequest>,
    ) -> ServiceResult<impl Encodable<MakeDirResponse> + Send + use<'a>> {
        let make = |[path]: [PathBuf; 1], user: User| {
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
        };
        let entry = self.on(ctx.headers(), [request.path], make).await?;
        Response::ok(MakeDirResponse { entry: Some(entry).into(), ..Default::default() })
    }

    async fn r#move<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, MoveRequest>,
    ) -> ServiceResult<impl Encodable<MoveResponse> + Send + use<'a>> {
        let rename = |[source, destination]: [PathBuf; 2], user: User| {
            fs::symlink_metadata(&source).map_err(|err| failed("source not found:", &source, &err))?;
            if let Some(parent) = destination.parent() {
                ensure_dirs(parent, &user).map_err(|err| failed("cannot make directory", parent, &err))?;
            }
            fs::rename(&source, &destination).map_err(|err| failed("cannot move to", &destination, &err))?;
            describe(&destination)
        };
        let entry = self.on(ctx.headers(), [request.source, request.destination], rename).await?;
        Response::ok(MoveResponse { entry: Some(entry).into(), ..Default::default() })
    }

    async fn list_dir<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, ListDirRequest>,
    ) -> ServiceResult<impl Encodable<ListDirResponse> + Send + use<'a>> {
        let depth = request.depth.max(1);
        let entries = self.on(ctx.headers(), [request.path], move |[path], _| list(&path, depth)).await?;
        Response::ok(ListDirResponse { entries, ..Default::default() })
    }

    async fn remove<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, RemoveRequest>,
    ) -> ServiceResult<impl Encodable<RemoveResponse> + Send + use<'a>> {
        let remove = |[path]: [PathBuf; 1], _: User| {
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
        };
        self.on(ctx.headers(), [request.path], remove).await?;
        Response::ok(RemoveResponse::default())
    }

    async fn watch_dir(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, WatchDirRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<WatchDirResponse> + Send + use<>>> {
        let ping = keepalive(ctx.headers())?;
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
        let number = self.next_watcher.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let watcher_id = format!("w{number:08x}");
        self.watchers().insert(watcher_id.clone(), Polled::start(watch));
        Response::ok(CreateWatcherResponse { watcher_id, ..Default::default() })
    }

    async fn get_watcher_events<'a>(
        &'a self,
        _: RequestContext,
        request: ServiceRequest<'_, GetWatcherEventsRequest>,
    ) -> ServiceResult<impl Encodable<GetWatcherEventsResponse> + Send + use<'a>> {
        let events = match self.watchers().get(request.watcher_id) {
            Some(polled) => polled.take()?,
            None => return Err(no_watcher(request.watcher_id)),
        };
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

fn describe(path: &Path) -> Result<EntryInfo, ConnectError> {
    entry::describe(path, &Names::read()).map_err(|err| failed("cannot look at", path, &err))
}
