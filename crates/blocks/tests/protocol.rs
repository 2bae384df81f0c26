//! The control socket against clients that misbehave.

#![allow(clippy::print_stderr, reason = "skips belong in a test's output")]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::{Daemon, daemon};

fn connect(daemon: &Daemon) -> UnixStream {
    let stream = UnixStream::connect(daemon.client.socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

fn send(stream: &mut UnixStream, body: &str) {
    let len = u32::try_from(body.len()).unwrap();
    stream.write_all(&[&len.to_be_bytes()[..], body.as_bytes()].concat()).unwrap();
}

/// The next frame; empty when the other end closed.
fn receive(stream: &mut UnixStream) -> String {
    let mut len = [0; 4];
    if stream.read_exact(&mut len).is_err() {
        return String::new();
    }
    let mut body = vec![0; usize::try_from(u32::from_be_bytes(len)).unwrap()];
    stream.read_exact(&mut body).unwrap();
    String::from_utf8(body).unwrap()
}

#[test]
fn a_client_of_another_version_is_told_so() {
    let Some(daemon) = daemon() else { return };
    let mut stream = connect(&daemon);
    send(&mut stream, r#"{"protocol":99}"#);
    let answer = receive(&mut stream);
    assert!(answer.contains("client 99") && answer.contains(r#""code":"protocol""#), "{answer}");
    assert_eq!(receive(&mut stream), "");
}

#[test]
fn nonsense_is_answered_or_cut_off_and_hurts_nobody_else() {
    let Some(daemon) = daemon() else { return };
    for body in [
        "",
        "{",
        "[]",
        "null",
        r#"{"deadline_ms":1}"#,
        r#"{"deadline_ms":1,"op":"nothing"}"#,
        r#"{"op":"list"}"#,
    ] {
        let mut stream = connect(&daemon);
        send(&mut stream, r#"{"protocol":1}"#);
        assert!(receive(&mut stream).contains("instance"));
        send(&mut stream, body);
        let answer = receive(&mut stream);
        assert!(answer.contains(r#""code":"bad_request""#), "{body}: {answer}");
    }
    let mut stream = connect(&daemon);
    send(&mut stream, r#"{"protocol":1}"#);
    receive(&mut stream);
    stream.write_all(&u32::MAX.to_be_bytes()).unwrap();
    assert!(receive(&mut stream).contains("most allowed"));
    let mut cut = connect(&daemon);
    cut.write_all(&[0, 0]).unwrap();
    drop(cut);
    daemon.runtime.block_on(daemon.client.list()).unwrap();
}

#[test]
fn a_storaged_that_does_not_answer_costs_a_caller_no_more_than_its_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let _silent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let client = aenv_blocks::control::Client::new(socket).with_deadline(Duration::from_millis(50));
    let error = tokio::runtime::Runtime::new().unwrap().block_on(client.list()).unwrap_err();
    assert_eq!(error.code(), Some(aenv_blocks::control::wire::Code::Deadline), "{error}");
}

#[test]
fn many_clients_are_served_at_once() {
    let Some(daemon) = daemon() else { return };
    let all = (0..300).map(|_| {
        let client = daemon.client.clone();
        daemon.runtime.spawn(async move { client.list().await.is_ok() })
    });
    let all: Vec<_> = all.collect();
    for call in all {
        assert!(daemon.runtime.block_on(call).unwrap());
    }
}
