//! Files over plain HTTP.
#![allow(missing_docs)]

mod harness;

use std::{fs, io::Write, os::unix::fs::MetadataExt};

use flate2::{Compression, read::MultiGzDecoder, write::GzEncoder};
use harness::{Agent, Answer, is_root};
use http::Method;
use serde_json::json;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

fn dir() -> (TempDir, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().display().to_string();
    (dir, path)
}

const RAW: (&str, &str) = ("content-type", "application/octet-stream");

async fn put(agent: &Agent, path: &str, headers: &[(&str, &str)], body: impl Into<bytes::Bytes>) -> Answer {
    let mut all = vec![RAW];
    all.extend_from_slice(headers);
    agent.http(Method::POST, &format!("/files?path={path}"), &all, body).await
}

async fn get(agent: &Agent, path: &str, headers: &[(&str, &str)]) -> Answer {
    agent.http(Method::GET, &format!("/files?path={path}"), headers, "").await
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).expect("in memory");
    encoder.finish().expect("in memory")
}

#[tokio::test]
async fn what_is_put_comes_back_whole() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let data: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let answer = put(&agent, &format!("{path}/new/dir/f%20%C3%A9"), &[], data.clone()).await;
    let file = format!("{path}/new/dir/f é");
    assert_eq!(answer.ok(), json!([{"path": file, "name": "f é", "type": "file"}]));
    assert!(fs::read(&file).is_ok_and(|stored| stored == data));
    let back = get(&agent, &format!("{path}/new/dir/f%20%C3%A9"), &[]).await;
    assert!(back.body == data);
    assert_eq!(back.header("content-length"), data.len().to_string());
    let shorter = put(&agent, &format!("{path}/new/dir/f%20%C3%A9"), &[], "short").await;
    assert_eq!(shorter.status, 200);
    assert_eq!(fs::read(&file).ok().as_deref(), Some(&b"short"[..]));
}

#[tokio::test]
async fn a_form_brings_several_files() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let part = |name: &str, file: &str, content: &str| {
        format!(
            "--B\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{path}/{file}\"\r\n\r\n{content}\r\n"
        )
    };
    let form = [part("file", "one", "1"), part("other", "ignored", "x"), part("file", "sub/two", "22")]
        .concat()
        + "--B--\r\n";
    let headers = [("content-type", "multipart/form-data; boundary=B")];
    let answer = agent.http(Method::POST, "/files", &headers, form).await.ok();
    assert_eq!(answer.as_array().map(Vec::len), Some(2));
    assert_eq!(fs::read_to_string(format!("{path}/sub/two")).ok().as_deref(), Some("22"));
    assert!(!fs::exists(format!("{path}/ignored")).unwrap_or(true));
    let same = [part("file", "one", "1"), part("file", "one", "2")].concat() + "--B--\r\n";
    let answer = agent.http(Method::POST, "/files", &headers, same).await;
    assert!(answer.refused(400, "400").contains("multiple files to the same path"));
    let named = part("file", "ignored name", "via path") + "--B--\r\n";
    agent.http(Method::POST, &format!("/files?path={path}/named"), &headers, named).await.ok();
    assert_eq!(fs::read_to_string(format!("{path}/named")).ok().as_deref(), Some("via path"));
}

#[tokio::test]
async fn compressed_bodies_are_unpacked_and_broken_ones_refused() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let data = b"content ".repeat(100_000);
    let packed = gzip(&data);
    put(&agent, &format!("{path}/f"), &[("content-encoding", "gzip")], packed.clone()).await.ok();
    assert!(fs::read(format!("{path}/f")).is_ok_and(|stored| stored == data));
    let half = packed[..packed.len() / 2].to_vec();
    put(&agent, &format!("{path}/f"), &[("content-encoding", "gzip")], half).await.refused(400, "400");
    put(&agent, &format!("{path}/f"), &[("content-encoding", "gzip")], "no gzip").await.refused(400, "400");
    put(&agent, &format!("{path}/f"), &[("content-encoding", "br")], "x").await.refused(400, "400");
}

#[tokio::test]
async fn ranges_compression_and_head_follow_http() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    fs::write(format!("{path}/f.json"), "0123456789").expect("written");
    let file = format!("{path}/f.json");
    let part = get(&agent, &file, &[("range", "bytes=2-4")]).await;
    assert_eq!((part.status.as_u16(), part.header("content-range")), (206, "bytes 2-4/10"));
    assert_eq!(part.body.as_ref(), b"234");
    get(&agent, &file, &[("range", "bytes=10-")]).await.refused(416, "416");
    let packed = get(&agent, &file, &[("accept-encoding", "gzip, br")]).await;
    assert_eq!(packed.header("content-encoding"), "gzip");
    let mut text = String::new();
    std::io::Read::read_to_string(&mut MultiGzDecoder::new(packed.body.as_ref()), &mut text).expect("gzip");
    assert_eq!(text, "0123456789");
    get(&agent, &file, &[("accept-encoding", "br, *;q=0")]).await.refused(406, "406");
    let head = agent.http(Method::HEAD, &format!("/files?path={file}"), &[], "").await;
    assert_eq!((head.header("content-length"), head.body.len()), ("10", 0));
    assert_eq!(head.header("content-type"), "application/json");
    assert_eq!(head.header("content-disposition"), "inline; filename=f.json");
}

#[tokio::test]
async fn files_without_a_size_are_read_to_their_end() {
    let agent = Agent::start();
    let answer = get(&agent, "/proc/self/status", &[]).await;
    assert!(String::from_utf8_lossy(&answer.body).contains("Name:\taenv-agent"), "{answer:?}");
}

#[tokio::test]
async fn what_is_no_file_is_refused_by_name() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    assert!(get(&agent, &path, &[]).await.refused(400, "400").contains("is a directory"));
    assert!(get(&agent, &format!("{path}/none"), &[]).await.refused(404, "404").contains("does not exist"));
    assert!(get(&agent, "/dev/zero", &[]).await.refused(400, "400").contains("not a regular file"));
    assert!(put(&agent, &path, &[], "x").await.refused(400, "400").contains("is a directory"));
    fs::write(format!("{path}/f"), "").expect("written");
    put(&agent, &format!("{path}/f/below"), &[], "x").await.refused(400, "400");
    let no_path = agent.http(Method::POST, "/files", &[RAW], "x").await;
    assert!(no_path.refused(400, "400").contains("path query parameter"));
    let no_type = agent.http(Method::POST, &format!("/files?path={path}/g"), &[], "x").await;
    assert!(no_type.refused(400, "400").contains("unsupported content type"));
}

#[tokio::test]
async fn a_full_disk_is_told_as_such() {
    let agent = Agent::start();
    if !is_root() {
        return;
    }
    // Larger than one write, so that the rest of the body has to be dealt with too.
    let answer = put(&agent, "/dev/full", &[], vec![1; 4 << 20]).await;
    assert!(answer.refused(507, "507").contains("not enough disk space"));
}

#[tokio::test]
async fn what_is_put_belongs_to_the_user() {
    if !is_root() {
        return;
    }
    let agent = Agent::start();
    let (_dir, path) = dir();
    put(&agent, &format!("{path}/d/f&username=nobody"), &[], "x").await.ok();
    for made in ["d", "d/f"] {
        assert_eq!(fs::metadata(format!("{path}/{made}")).map(|meta| meta.uid()).ok(), Some(65534), "{made}");
    }
    let unknown = put(&agent, &format!("{path}/f&username=ghost"), &[], "x").await;
    assert!(unknown.refused(401, "401").contains("ghost"));
}

#[tokio::test]
async fn metadata_is_kept_with_the_file_and_replaced_by_the_next_upload() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let file = format!("{path}/f");
    let answer = put(&agent, &file, &[("x-metadata-kind", "report")], "x").await.ok();
    if answer[0]["metadata"].is_null() {
        return; // A filesystem without user attributes.
    }
    assert_eq!(answer[0]["metadata"], json!({"kind": "report"}));
    let stat = json!({"path": file});
    let entry = agent.call("filesystem.Filesystem/Stat", &stat).await.ok()["entry"].clone();
    assert_eq!(entry["metadata"], json!({"kind": "report"}));
    put(&agent, &file, &[], "y").await.ok();
    assert!(agent.call("filesystem.Filesystem/Stat", &stat).await.ok()["entry"]["metadata"].is_null());
    put(&agent, &file, &[("x-metadata-k", "a\u{e9}")], "y").await.refused(400, "400");
}

#[tokio::test]
async fn parts_are_composed_in_order_and_go_away() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    for part in ["1", "2", "3"] {
        fs::write(format!("{path}/{part}"), part.repeat(3)).expect("written");
    }
    let sources = ["1", "2", "3"].map(|part| format!("{path}/{part}"));
    let request =
        json!({"source_paths": sources, "destination": format!("{path}/new/whole"), "username": "root"});
    assert_eq!(agent.post("/files/compose", &request).await.ok()["name"], "whole");
    assert_eq!(fs::read_to_string(format!("{path}/new/whole")).ok().as_deref(), Some("111222333"));
    assert!(!fs::exists(format!("{path}/2")).unwrap_or(true));
    agent.post("/files/compose", &request).await.refused(404, "404");
    agent.post("/files/compose", &json!({"source_paths": [], "destination": "x"})).await.refused(400, "400");
    agent.post("/files/compose", &json!({"source_paths": "x"})).await.refused(400, "400");
    let left: Vec<_> =
        fs::read_dir(&path).expect("a directory").flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["new"], "nothing half made stays");
}

#[tokio::test]
async fn a_signed_url_opens_one_file_for_one_use() {
    let agent = Agent::start();
    let (_dir, path) = dir();
    let file = format!("{path}/f");
    fs::write(&file, "secret").expect("written");
    assert_eq!(agent.post("/init", &json!({"accessToken": "tok"})).await.status, 204);
    let sign = |operation: &str, expiration: Option<i64>| {
        let tail = expiration.map(|at| format!(":{at}")).unwrap_or_default();
        let hash = Sha256::digest(format!("{file}:{operation}:root:tok{tail}"));
        let signature = harness::base64(hash).trim_end_matches('=').replace('+', "%2B").replace('/', "%2F");
        let expires = expiration.map(|at| format!("&signature_expiration={at}")).unwrap_or_default();
        format!("/files?path={file}&username=root&signature=v1_{signature}{expires}")
    };
    assert_eq!(agent.get(&sign("read", None)).await.body.as_ref(), b"secret");
    assert_eq!(agent.get(&sign("read", Some(4_000_000_000))).await.status, 200);
    assert_eq!(
        agent.get(&sign("read", Some(1_000))).await.refused(401, "401"),
        "signature is already expired"
    );
    assert_eq!(agent.get(&sign("write", None)).await.refused(401, "401"), "invalid signature");
    get(&agent, &file, &[]).await.refused(401, "401");
    let written = agent.http(Method::POST, &sign("write", None), &[RAW], "new").await;
    assert_eq!(written.status, 200, "{written:?}");
    assert_eq!(fs::read_to_string(&file).ok().as_deref(), Some("new"));
    assert_eq!(get(&agent, &file, &[("x-access-token", "tok")]).await.status, 200);
    get(&agent, &file, &[("x-access-token", "no")]).await.refused(401, "401");
}
