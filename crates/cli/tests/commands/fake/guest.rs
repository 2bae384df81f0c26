//! The guest agent: processes and files of this machine.

use super::{BOX, Process, State};
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Query, Request, State as Shared},
    http::{HeaderMap, StatusCode},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{get, post},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    os::unix::{fs::PermissionsExt as _, process::ExitStatusExt as _},
    process::Stdio,
    sync::{Arc, Mutex, atomic::Ordering},
};
use tokio::{io::AsyncReadExt as _, io::AsyncWriteExt as _, sync::Notify};

type App = Shared<Arc<State>>;

pub fn routes(state: Arc<State>) -> Router {
    Router::new()
        .route("/process.Process/Start", post(start))
        .route("/process.Process/Connect", post(connect))
        .route("/process.Process/SendInput", post(send_input))
        .route("/process.Process/CloseStdin", post(close_stdin))
        .route("/process.Process/SendSignal", post(send_signal))
        .route("/process.Process/Update", post(update))
        .route("/filesystem.Filesystem/Stat", post(stat))
        .route("/filesystem.Filesystem/ListDir", post(list))
        .route("/filesystem.Filesystem/MakeDir", post(make_dir))
        .route("/filesystem.Filesystem/Remove", post(remove))
        .route("/files", get(download).post(upload))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(state.clone(), door))
        .with_state(state)
}

async fn door(Shared(state): App, request: Request, next: Next) -> Response {
    state.seen.lock().expect("lock").push(format!("{} {}", request.method(), request.uri()));
    let headers = request.headers().clone();
    let header = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or("").to_owned();
    let id = header("e2b-sandbox-id");
    if header("e2b-sandbox-port") != "49983" || !state.sandboxes.lock().expect("lock").contains_key(&id) {
        let body = json!({ "sandboxId": id, "message": "The sandbox was not found", "code": 502 });
        return (StatusCode::BAD_GATEWAY, Json(body)).into_response();
    }
    if header("x-access-token") != format!("token-{id}") {
        return failure(StatusCode::UNAUTHORIZED, "unauthenticated", "wrong token");
    }
    next.run(request).await
}

fn failure(status: StatusCode, code: &str, message: &str) -> Response {
    (status, Json(json!({ "code": code, "message": message }))).into_response()
}

fn framed(flags: u8, value: &Value) -> Bytes {
    let body = value.to_string();
    let mut out = vec![flags];
    out.extend_from_slice(&u32::try_from(body.len()).expect("short").to_be_bytes());
    out.extend_from_slice(body.as_bytes());
    out.into()
}

fn ends_with(code: &str, message: &str) -> Response {
    Body::from(framed(2, &json!({ "error": { "code": code, "message": message } }))).into_response()
}

async fn start(Shared(state): App, headers: HeaderMap, body: Bytes) -> Response {
    let request: Value = serde_json::from_slice(&body[5..]).expect("JSON");
    let spec = &request["process"];
    let cmd = spec["cmd"].as_str().expect("a command").to_owned();
    if cmd == "tar" && state.no_tar.load(Ordering::Relaxed) {
        return ends_with("invalid_argument", "tar: no such program");
    }
    if spec["cwd"].as_str().is_some_and(|cwd| !std::path::Path::new(cwd).is_dir()) {
        return ends_with("invalid_argument", "cwd '/no/such' does not exist");
    }
    if headers.get("authorization").is_some_and(|value| value == "Basic Z2hvc3Q6") {
        return ends_with("unauthenticated", "invalid username: 'ghost'");
    }
    let pid = u32::try_from(state.next_pid.fetch_add(1, Ordering::Relaxed)).expect("small");
    let tag = request["tag"].as_str().unwrap_or_default().to_owned();
    let process =
        if request.get("pty").is_some() { terminal(pid, tag) } else { run(pid, tag, spec, &request) };
    let process = match process {
        Ok(process) => process,
        Err(words) => return ends_with("invalid_argument", &words),
    };
    state.processes.lock().expect("lock").insert(pid, process.clone());
    stream(&state, process, 0)
}

/// A terminal whose shell knows two words: `exit`, and anything else, which it repeats.
fn terminal(pid: u32, tag: String) -> Result<Arc<Process>, String> {
    let process = Arc::new(Process {
        pid,
        tag,
        os_pid: None,
        output: Mutex::default(),
        end: Mutex::default(),
        changed: Notify::new(),
        stdin: tokio::sync::Mutex::new(None),
        pty: true,
    });
    process.say("pty", b"ready$ ");
    Ok(process)
}

fn run(pid: u32, tag: String, spec: &Value, request: &Value) -> Result<Arc<Process>, String> {
    let words = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|w| w.as_str().map(str::to_owned)).collect()
    };
    let stdin = if request["stdin"] == true { Stdio::piped() } else { Stdio::null() };
    let mut command = tokio::process::Command::new(spec["cmd"].as_str().unwrap_or_default());
    command
        .args(words(&spec["args"]))
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command.env_remove(crate::client::UNDER_TEST);
    for (key, value) in spec["envs"].as_object().into_iter().flatten() {
        command.env(key, value.as_str().unwrap_or_default());
    }
    if let Some(cwd) = spec["cwd"].as_str() {
        command.current_dir(cwd);
    }
    let mut child = command.spawn().map_err(|e| e.to_string())?;
    let process = Arc::new(Process {
        pid,
        tag,
        os_pid: child.id(),
        output: Mutex::default(),
        end: Mutex::default(),
        changed: Notify::new(),
        stdin: tokio::sync::Mutex::new(child.stdin.take()),
        pty: false,
    });
    let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let watched = process.clone();
    tokio::spawn(async move {
        let (mut a, mut b) = ([0; 8192], [0; 8192]);
        let (mut out_open, mut err_open) = (true, true);
        while out_open || err_open {
            tokio::select! {
                n = out.read(&mut a), if out_open => match n.unwrap_or(0) {
                    0 => out_open = false,
                    n => watched.say("stdout", &a[..n]),
                },
                n = err.read(&mut b), if err_open => match n.unwrap_or(0) {
                    0 => err_open = false,
                    n => watched.say("stderr", &b[..n]),
                },
            }
        }
        let status = child.wait().await.expect("waited");
        watched.finish(match status.signal() {
            Some(9) => json!({ "exitCode": -1, "status": "signal: killed", "error": "signal: killed" }),
            Some(15) => json!({ "exitCode": -1, "status": "signal: terminated" }),
            Some(n) => json!({ "exitCode": -1, "status": format!("signal {n}") }),
            None if status.success() => json!({ "exited": true, "status": "exit status 0" }),
            None => {
                let words = format!("exit status {}", status.code().unwrap_or_default());
                json!({ "exitCode": status.code(), "exited": true, "status": words, "error": words })
            }
        });
    });
    Ok(process)
}

impl Process {
    fn say(&self, kind: &'static str, bytes: &[u8]) {
        let mut output = self.output.lock().expect("lock");
        let at = output.last().map_or(0, |(at, _, bytes)| at + u64::try_from(bytes.len()).expect("small"));
        output.push((at, kind, bytes.to_vec()));
        drop(output);
        self.changed.notify_waiters();
    }

    fn finish(&self, end: Value) {
        *self.end.lock().expect("lock") = Some(end);
        self.changed.notify_waiters();
    }
}

/// Start, then everything from `from` on, then the end; or less, when a cut is due.
fn stream(state: &State, process: Arc<Process>, from: u64) -> Response {
    let cut = {
        let mut cuts = state.cuts.lock().expect("lock");
        if cuts.is_empty() { None } else { Some(cuts.remove(0)) }
    };
    let first = json!({ "event": { "start": { "pid": process.pid, "offset": from.to_string() } } });
    let events = futures_util::stream::unfold((0, from, false), move |(index, from, over)| {
        let process = process.clone();
        async move {
            if over {
                return None;
            }
            loop {
                let changed = process.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                let next = process.output.lock().expect("lock").get(index).cloned();
                let end = process.end.lock().expect("lock").clone();
                match (next, end) {
                    (Some((at, _, bytes)), _) if at + u64::try_from(bytes.len()).expect("small") <= from => {
                        return Some((None, (index + 1, from, false)));
                    }
                    (Some((at, kind, bytes)), _) => {
                        let skip = usize::try_from(from.saturating_sub(at)).expect("small");
                        let text = STANDARD.encode(&bytes[skip..]);
                        let offset = (at + u64::try_from(skip).expect("small")).to_string();
                        let event = json!({ "event": { "data": { kind: text, "offset": offset } } });
                        return Some((Some(event), (index + 1, from, false)));
                    }
                    (None, Some(end)) => {
                        return Some((Some(json!({ "event": { "end": end } })), (index, from, true)));
                    }
                    (None, None) => changed.await,
                }
            }
        }
    });
    let messages = futures_util::stream::once(async move { Some(first) }).chain(events);
    let frames = messages.filter_map(|message| async move { message.map(|message| framed(0, &message)) });
    let body = match cut {
        // The connection breaks: no end of stream, no end of the chunked body.
        Some(count) => Body::from_stream(
            frames
                .take(count)
                .map(Ok)
                .chain(futures_util::stream::once(async { Err(std::io::Error::other("cut")) })),
        ),
        None => Body::from_stream(
            frames
                .chain(futures_util::stream::once(async { framed(2, &json!({})) }))
                .map(Ok::<_, std::io::Error>),
        ),
    };
    body.into_response()
}

fn find(state: &State, selector: &Value) -> Option<Arc<Process>> {
    let processes = state.processes.lock().expect("lock");
    let pid = selector["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    let tag = selector["tag"].as_str();
    processes.values().find(|p| Some(p.pid) == pid || Some(p.tag.as_str()) == tag).cloned()
}

async fn connect(Shared(state): App, headers: HeaderMap, body: Bytes) -> Response {
    let request: Value = serde_json::from_slice(&body[5..]).expect("JSON");
    let from =
        headers.get("x-aenv-offset").and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok()).unwrap_or(0);
    match find(&state, &request["process"]) {
        Some(process) if !state.forgetful.load(Ordering::Relaxed) => stream(&state, process, from),
        _ => ends_with("not_found", "process not found"),
    }
}

async fn send_input(Shared(state): App, Json(request): Json<Value>) -> Response {
    let Some(process) = find(&state, &request["process"]) else {
        return failure(StatusCode::NOT_FOUND, "not_found", "process not found");
    };
    let text = request["input"]["stdin"].as_str().or(request["input"]["pty"].as_str()).unwrap_or_default();
    let bytes = STANDARD.decode(text).expect("base64");
    if process.pty {
        process.say("pty", &bytes);
        if bytes.ends_with(b"exit\r") {
            process.finish(json!({ "exitCode": 5, "exited": true, "status": "exit status 5" }));
        }
    } else if let Some(stdin) = process.stdin.lock().await.as_mut() {
        drop(stdin.write_all(&bytes).await);
    }
    Json(json!({})).into_response()
}

async fn close_stdin(Shared(state): App, Json(request): Json<Value>) -> Response {
    if let Some(process) = find(&state, &request["process"]) {
        process.stdin.lock().await.take();
    }
    Json(json!({})).into_response()
}

async fn send_signal(Shared(state): App, Json(request): Json<Value>) -> Response {
    let os_pid = find(&state, &request["process"]).and_then(|process| process.os_pid);
    let signal = if request["signal"] == "SIGNAL_SIGKILL" {
        rustix::process::Signal::KILL
    } else {
        rustix::process::Signal::TERM
    };
    let pid = os_pid.and_then(|pid| rustix::process::Pid::from_raw(i32::try_from(pid).ok()?));
    if let Some(pid) = pid {
        // It may have ended by itself meanwhile.
        let _ = rustix::process::kill_process(pid, signal);
    }
    Json(json!({})).into_response()
}

async fn update(Shared(state): App, Json(request): Json<Value>) -> Json<Value> {
    state.sizes.lock().expect("lock").push(request["pty"]["size"].clone());
    Json(json!({}))
}

fn entry(path: &std::path::Path) -> Option<Value> {
    let found = std::fs::metadata(path).ok()?;
    let kind = if found.is_dir() { "FILE_TYPE_DIRECTORY" } else { "FILE_TYPE_FILE" };
    let mut entry = json!({ "name": path.file_name()?.to_str()?, "type": kind, "path": path.to_str()?,
        "mode": found.permissions().mode() & 0o777, "size": found.len().to_string() });
    if let Ok(target) = std::fs::read_link(path) {
        entry["symlinkTarget"] = json!(target.to_str()?);
    }
    Some(entry)
}

fn path_of(request: &Value) -> std::path::PathBuf {
    request["path"].as_str().unwrap_or_default().into()
}

async fn stat(Json(request): Json<Value>) -> Response {
    match entry(&path_of(&request)) {
        Some(entry) => Json(json!({ "entry": entry })).into_response(),
        None => failure(StatusCode::NOT_FOUND, "not_found", "no such file"),
    }
}

async fn list(Json(request): Json<Value>) -> Response {
    let Ok(found) = std::fs::read_dir(path_of(&request)) else {
        return failure(StatusCode::NOT_FOUND, "not_found", "no such directory");
    };
    let entries: Vec<Value> = found.filter_map(|e| entry(&e.ok()?.path())).collect();
    Json(json!({ "entries": entries })).into_response()
}

async fn make_dir(Json(request): Json<Value>) -> Response {
    let path = path_of(&request);
    if path.is_dir() {
        return failure(StatusCode::CONFLICT, "already_exists", "it is there");
    }
    match std::fs::create_dir_all(&path) {
        Ok(()) => Json(json!({})).into_response(),
        Err(e) => failure(StatusCode::BAD_REQUEST, "invalid_argument", &e.to_string()),
    }
}

async fn remove(Json(request): Json<Value>) -> Json<Value> {
    drop(std::fs::remove_file(path_of(&request)));
    Json(json!({}))
}

async fn download(Query(query): Query<HashMap<String, String>>) -> Response {
    match std::fs::read(&query["path"]) {
        Ok(bytes) => bytes.into_response(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let body = json!({ "code": 404, "message": format!("path '{}' does not exist", query["path"]) });
            (StatusCode::NOT_FOUND, Json(body)).into_response()
        }
        Err(e) => {
            (StatusCode::BAD_REQUEST, Json(json!({ "code": 400, "message": e.to_string() }))).into_response()
        }
    }
}

async fn upload(Query(query): Query<HashMap<String, String>>, body: Bytes) -> Response {
    match std::fs::write(&query["path"], &body) {
        Ok(()) => Json(json!([{ "path": query["path"], "name": BOX, "type": "file" }])).into_response(),
        Err(e) => {
            (StatusCode::BAD_REQUEST, Json(json!({ "code": 400, "message": e.to_string() }))).into_response()
        }
    }
}
