//! The filesystem RPCs, and watching a directory both ways.
#![allow(missing_docs)]

mod harness;

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use aenv_envd_proto::filesystem::{ListDirRequest, MakeDirRequest, StatRequest};
use harness::{Agent, Events, is_root, within};
use serde_json::{Value, json};
use tempfile::TempDir;

fn dir() -> (TempDir, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().display().to_string();
    (dir, path)
}

async fn call(agent: &Agent, method: &str, message: Value) -> harness::Answer {
    agent.call(&format!("filesystem.Filesystem/{method}"), &message).await
}

#[tokio::test]
async fn an_entry_says_all_that_clients_show() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    fs::write(format!("{path}/file"), "12345").expect("written");
    let entry = call(&agent, "Stat", json!({"path": format!("{path}/file")})).await.ok()["entry"].clone();
    assert_eq!(entry["name"], "file");
    assert_eq!(entry["type"], "FILE_TYPE_FILE");
    assert_eq!(entry["path"], format!("{path}/file"));
    assert_eq!(entry["size"], "5", "64-bit numbers are strings in protobuf's JSON");
    assert_eq!(entry["permissions"], "-rw-r--r--");
    assert_eq!(entry["mode"], 0o644);
    assert!(entry["owner"].is_string() && entry["group"].is_string());
    assert!(entry["modifiedTime"].as_str().is_some_and(|time| time.ends_with('Z')), "{entry}");
    assert!(entry["symlinkTarget"].is_null());
}

#[tokio::test]
async fn the_protobuf_client_sees_the_same() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let client = agent.files();
    let made = client.make_dir(MakeDirRequest { path: format!("{path}/a/b"), ..Default::default() }).await;
    assert!(made.is_ok());
    let list = client.list_dir(ListDirRequest { path: path.clone(), depth: 2, ..Default::default() }).await;
    let list = list.expect("a list").into_view();
    let paths: Vec<_> = list.reborrow().entries.iter().map(|entry| entry.path.to_owned()).collect();
    assert_eq!(paths, [format!("{path}/a"), format!("{path}/a/b")]);
    let missing = StatRequest { path: format!("{path}/missing"), ..Default::default() };
    let err = client.stat(missing).await.map(|_| ()).expect_err("it is not there");
    assert_eq!(err.code, connectrpc::ErrorCode::NotFound);
}

#[tokio::test]
async fn directories_are_made_once_and_with_their_parents() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let make = |name: &str| json!({"path": format!("{path}/{name}")});
    assert_eq!(call(&agent, "MakeDir", make("a/b/c")).await.ok()["entry"]["type"], "FILE_TYPE_DIRECTORY");
    call(&agent, "MakeDir", make("a/b")).await.refused(409, "already_exists");
    fs::write(format!("{path}/file"), "").expect("written");
    call(&agent, "MakeDir", make("file")).await.refused(400, "invalid_argument");
    call(&agent, "MakeDir", make("file/below")).await.refused(400, "invalid_argument");
}

#[tokio::test]
async fn what_is_made_belongs_to_who_asked() {
    if !is_root() {
        return;
    }
    let agent = Agent::start();
    let (_dir, path) = dir();
    let message = json!({"path": format!("{path}/a/b")});
    agent.call_as("nobody", "filesystem.Filesystem/MakeDir", &message).await.ok();
    for made in ["a", "a/b"] {
        assert_eq!(fs::metadata(format!("{path}/{made}")).map(|meta| meta.uid()).ok(), Some(65534), "{made}");
    }
    let unknown = agent.call_as("ghost", "filesystem.Filesystem/Stat", &message).await;
    assert_eq!(unknown.refused(401, "unauthenticated"), "invalid username: 'ghost'");
}

#[tokio::test]
async fn listings_go_as_deep_as_asked_and_do_not_follow_links() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    fs::create_dir_all(format!("{path}/b/deep/deeper")).expect("made");
    fs::write(format!("{path}/a"), "").expect("written");
    std::os::unix::fs::symlink("/", format!("{path}/link")).expect("linked");
    let names = |answer: Value| -> Vec<String> {
        let entries = answer["entries"].as_array().cloned().unwrap_or_default();
        entries
            .iter()
            .filter_map(|entry| entry["path"].as_str()?.strip_prefix(&path).map(str::to_owned))
            .collect()
    };
    let flat = call(&agent, "ListDir", json!({"path": path})).await.ok();
    assert_eq!(names(flat.clone()), ["/a", "/b", "/link"]);
    assert_eq!(flat["entries"][2]["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(flat["entries"][2]["symlinkTarget"], "/");
    let deep = call(&agent, "ListDir", json!({"path": path, "depth": 3})).await.ok();
    assert_eq!(names(deep), ["/a", "/b", "/b/deep", "/b/deep/deeper", "/link"]);
    call(&agent, "ListDir", json!({"path": format!("{path}/a")})).await.refused(400, "invalid_argument");
    call(&agent, "ListDir", json!({"path": format!("{path}/x")})).await.refused(404, "not_found");
}

#[tokio::test]
async fn moving_makes_parents_and_says_what_was_not_there() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    fs::write(format!("{path}/old"), "content").expect("written");
    let to = |source: &str, destination: &str| json!({"source": format!("{path}/{source}"), "destination": format!("{path}/{destination}")});
    assert_eq!(call(&agent, "Move", to("old", "x/y/new")).await.ok()["entry"]["name"], "new");
    assert_eq!(fs::read_to_string(format!("{path}/x/y/new")).ok().as_deref(), Some("content"));
    call(&agent, "Move", to("old", "again")).await.refused(404, "not_found");
}

#[tokio::test]
async fn removing_takes_everything_below_but_never_the_root() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    fs::create_dir_all(format!("{path}/tree/below")).expect("made");
    std::os::unix::fs::symlink(&path, format!("{path}/tree/link")).expect("linked");
    call(&agent, "Remove", json!({"path": format!("{path}/tree")})).await.ok();
    assert!(Path::new(&path).is_dir() && !Path::new(&format!("{path}/tree")).exists());
    call(&agent, "Remove", json!({"path": format!("{path}/tree")})).await.ok();
    call(&agent, "Remove", json!({"path": "/"})).await.refused(400, "invalid_argument");
    call(&agent, "Remove", json!({"path": "//./"})).await.refused(400, "invalid_argument");
}

async fn upload(agent: &Agent, path: &str) {
    let headers = [("content-type", "application/octet-stream")];
    let answer = agent.http(http::Method::POST, &format!("/files?path={path}"), &headers, "content").await;
    assert_eq!(answer.status, 200, "{answer:?}");
}

#[tokio::test]
async fn a_poll_after_an_upload_shows_exactly_create_chmod_write() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let watcher = call(&agent, "CreateWatcher", json!({"path": path})).await.ok();
    upload(&agent, &format!("{path}/new")).await;
    let events = call(&agent, "GetWatcherEvents", watcher.clone()).await.ok();
    let expected = json!([
        {"name": "new", "type": "EVENT_TYPE_CREATE"},
        {"name": "new", "type": "EVENT_TYPE_CHMOD"},
        {"name": "new", "type": "EVENT_TYPE_WRITE"},
    ]);
    assert_eq!(events["events"], expected);
    assert_eq!(call(&agent, "GetWatcherEvents", watcher.clone()).await.ok(), json!({}));
    call(&agent, "RemoveWatcher", watcher.clone()).await.ok();
    call(&agent, "GetWatcherEvents", watcher.clone()).await.refused(404, "not_found");
    call(&agent, "RemoveWatcher", watcher).await.refused(404, "not_found");
}

async fn next_change(events: &mut Events) -> (String, String) {
    let (flags, message) = events.frame().await.expect("another event");
    assert_eq!(flags, 0, "{message}");
    let text = |field: &str| message["filesystem"][field].as_str().unwrap_or_default().to_owned();
    (text("name"), text("type"))
}

#[tokio::test]
async fn a_stream_shows_each_change_as_it_happens() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let request = json!({"path": path, "includeEntry": true});
    let mut events = agent.open("filesystem.Filesystem/WatchDir", &request, &[]).await;
    assert_eq!(events.frame().await, Some((0, json!({"start": {}}))));
    let file = format!("{path}/file");
    fs::write(&file, "x").expect("written");
    let (_, created) = events.frame().await.expect("an event");
    assert_eq!(created["filesystem"]["type"], "EVENT_TYPE_CREATE");
    assert_eq!(created["filesystem"]["entry"]["path"], file);
    assert_eq!(next_change(&mut events).await, ("file".into(), "EVENT_TYPE_WRITE".into()));
    fs::rename(&file, format!("{path}/moved")).expect("moved");
    assert_eq!(next_change(&mut events).await, ("file".into(), "EVENT_TYPE_RENAME".into()));
    assert_eq!(next_change(&mut events).await, ("moved".into(), "EVENT_TYPE_CREATE".into()));
    fs::remove_file(format!("{path}/moved")).expect("removed");
    assert_eq!(next_change(&mut events).await, ("moved".into(), "EVENT_TYPE_REMOVE".into()));
}

#[tokio::test]
async fn a_recursive_watch_follows_into_what_is_new() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    fs::create_dir(format!("{path}/old")).expect("made");
    let request = json!({"path": path, "recursive": true});
    let mut events = agent.open("filesystem.Filesystem/WatchDir", &request, &[]).await;
    events.frame().await;
    fs::write(format!("{path}/old/a"), "").expect("written");
    assert_eq!(next_change(&mut events).await.0, "old/a");
    fs::create_dir_all(format!("{path}/new/er")).expect("made");
    let mut seen = Vec::new();
    while !seen.contains(&"new/er".to_owned()) {
        seen.push(next_change(&mut events).await.0);
    }
    fs::write(format!("{path}/new/er/b"), "").expect("written");
    within(async { while next_change(&mut events).await.0 != "new/er/b" {} }).await;
}

#[tokio::test]
async fn only_directories_that_are_there_can_be_watched() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    upload(&agent, &format!("{path}/file")).await;
    call(&agent, "CreateWatcher", json!({"path": format!("{path}/file")}))
        .await
        .refused(400, "invalid_argument");
    call(&agent, "CreateWatcher", json!({"path": format!("{path}/none")})).await.refused(404, "not_found");
}

#[tokio::test]
async fn watchers_are_bounded() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let mut last = None;
    for _ in 0..65 {
        last = Some(call(&agent, "CreateWatcher", json!({"path": path})).await);
    }
    let refused = last.map(|answer| answer.refused(429, "resource_exhausted"));
    assert!(refused.is_some_and(|message| message.contains("remove some")));
}
