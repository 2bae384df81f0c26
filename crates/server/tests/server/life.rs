//! The listener's life: opening, limits, draining.

use crate::{
    client::{PATIENCE, body, read, send},
    fake::{DOMAIN, Fake, KEY, world, world_with},
};
use aenv_server::{BindError, Options, Server};
use bytes::Bytes;
use http::Request;
use http_body_util::BodyExt;
use std::{sync::Arc, time::Duration, time::Instant};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Notify,
    time::timeout,
};

#[tokio::test]
async fn a_taken_address_and_a_bad_domain_are_refused_with_advice() {
    let world = world().await;
    let options = |listen, domain: Option<&str>| Options {
        listen,
        domain: domain.map(str::to_owned),
        ..Options::default()
    };
    let taken = Server::bind(options(world.address, None), Arc::new(Fake::default())).await.err().unwrap();
    assert!(taken.to_string().contains("--listen"), "{taken}");
    for bad in ["", "a b", "http://x", "x/y", &"a".repeat(64)] {
        let refused =
            Server::bind(options("127.0.0.1:0".parse().unwrap(), Some(bad)), Arc::new(Fake::default())).await;
        assert!(matches!(refused, Err(BindError::Domain(_))), "{bad}");
    }
}

#[tokio::test]
async fn a_stop_lets_requests_under_way_finish_and_takes_no_new_ones() {
    let world = world().await;
    let gate = Arc::new(Notify::new());
    *world.node.gate.lock() = Some(gate.clone());
    let address = world.address;
    let request = Request::post("/v2/sandboxes").header("host", "x").header("x-api-key", KEY);
    let request = request.body(body(r#"{"templateID":"base"}"#)).unwrap();
    let slow = tokio::spawn(async move { read(send(address, request).await).await.status });
    while !world.node.calls.lock().contains(&"create".to_owned()) {
        tokio::task::yield_now().await;
    }
    world.stop.notify_one();
    // The listener is closed first, which is the event to wait for.
    while TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    gate.notify_one();
    assert_eq!(slow.await.unwrap(), 201);
    timeout(PATIENCE, world.running).await.expect("the server did not stop").unwrap();
}

#[tokio::test]
async fn streams_that_never_end_are_cut_at_the_deadline() {
    let world = world_with(|options| options.drain = Duration::from_millis(300)).await;
    let id = world.node.add(|_| ());
    let mut stream = send(world.address, world.guest(&id, 3000, "/sse").body(body("")).unwrap()).await;
    stream.frame().await.unwrap().unwrap();
    world.stop.notify_one();
    let began = Instant::now();
    timeout(PATIENCE, world.running).await.expect("the server did not stop").unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert!(!matches!(timeout(PATIENCE, stream.frame()).await.unwrap(), Some(Ok(_))));
}

#[tokio::test]
async fn connections_that_say_nothing_or_never_finish_are_closed() {
    let world = world_with(|options| options.header_timeout = Duration::from_millis(300)).await;
    for beginning in [
        &b""[..],
        b"GET / HT",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: ",
        b"PRI * HT",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        stream.write_all(beginning).await.unwrap();
        let mut rest = Vec::new();
        let closed = timeout(Duration::from_secs(3), stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "{:?} was kept", String::from_utf8_lossy(beginning));
    }
    // One header a moment does not buy more time.
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n").await.unwrap();
    let began = Instant::now();
    while stream.write_all(b"x-a: b\r\n").await.is_ok() {
        assert!(began.elapsed() < Duration::from_secs(3), "dripping headers kept the connection");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn beyond_the_bound_connections_wait_their_turn() {
    let world = world_with(|options| options.max_connections = 2).await;
    let hold =
        [TcpStream::connect(world.address).await.unwrap(), TcpStream::connect(world.address).await.unwrap()];
    let mut third = TcpStream::connect(world.address).await.unwrap();
    third.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut buffer = [0; 64];
    assert!(
        timeout(Duration::from_millis(300), third.read(&mut buffer)).await.is_err(),
        "it was served beyond the bound"
    );
    drop(hold);
    let n = timeout(PATIENCE, third.read(&mut buffer)).await.unwrap().unwrap();
    assert!(buffer[..n].starts_with(b"HTTP/1.1 200"));
}

#[tokio::test]
async fn the_domain_is_told_and_matched_whatever_its_case() {
    let world = world_with(|options| options.domain = Some(format!(".{}", DOMAIN.to_uppercase()))).await;
    let created = world.call("POST", "/v2/sandboxes", r#"{"templateID":"base"}"#).await.json();
    assert_eq!(created["domain"], DOMAIN);
    let host = format!("3000-{}.{DOMAIN}", created["sandboxID"].as_str().unwrap());
    let request = Request::get("/headers").header("host", host).body(body(Bytes::new())).unwrap();
    assert_eq!(read(send(world.address, request).await).await.status, 200);
}
