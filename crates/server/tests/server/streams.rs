//! Bodies and tunnels: nothing is buffered, nothing outlives its sandbox.

use crate::{
    client::{PATIENCE, body, read, send},
    fake::{KEY, World, world},
};
use aenv_node::model::{EndCause, SandboxId};
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use std::{convert::Infallible, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
    time::timeout,
};
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest};

/// Streams must end this soon after their sandbox.
const SOON: Duration = Duration::from_secs(2);

type Upload = (mpsc::Sender<Frame<Bytes>>, BoxBody<Bytes, Infallible>);

fn upload() -> Upload {
    let (tx, rx) = mpsc::channel(1);
    let frames =
        futures_util::stream::unfold(rx, |mut rx| async move { rx.recv().await.map(|f| (Ok(f), rx)) });
    (tx, BodyExt::boxed(StreamBody::new(frames)))
}

async fn chunk(response: &mut Response<Incoming>) -> Bytes {
    let frame =
        timeout(PATIENCE, response.frame()).await.expect("nothing came").expect("the end came").unwrap();
    frame.into_data().expect("data")
}

async fn sse(world: &World, id: &SandboxId) -> Response<Incoming> {
    let mut response = send(world.address, world.guest(id, 3000, "/sse").body(body("")).unwrap()).await;
    assert_eq!(chunk(&mut response).await, "data: 0\n\n");
    response
}

/// The stream ends as broken, not as complete.
async fn ends_broken(mut response: Response<Incoming>) {
    let end = timeout(SOON, async {
        loop {
            match response.frame().await {
                Some(Ok(_)) => {}
                other => break other,
            }
        }
    });
    assert!(
        matches!(end.await.expect("the stream went on"), Some(Err(_))),
        "the stream must not look complete"
    );
}

#[tokio::test]
async fn each_chunk_goes_through_before_the_next_is_sent() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let (tx, upload) = upload();
    let request = world.guest(&id, 3000, "/echo").method("POST").body(upload).unwrap();
    let address = world.address;
    let response = tokio::spawn(async move { send(address, request).await });
    tx.send(Frame::data("one".into())).await.unwrap();
    let mut response = response.await.unwrap();
    assert_eq!(chunk(&mut response).await, "one");
    for text in ["two", "three"] {
        tx.send(Frame::data(text.into())).await.unwrap();
        assert_eq!(chunk(&mut response).await, text);
    }
    drop(tx);
    assert!(timeout(PATIENCE, response.frame()).await.unwrap().is_none());
}

#[tokio::test]
async fn server_sent_events_arrive_one_by_one() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let mut response = sse(&world, &id).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    for n in 1..4 {
        world.guest.go.notify_one();
        assert_eq!(chunk(&mut response).await, format!("data: {n}\n\n"));
    }
}

#[tokio::test]
async fn trailers_go_through_both_ways() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let request = world.guest(&id, 3000, "/trailers").header("te", "trailers").body(body("")).unwrap();
    let response = send(world.address, request).await;
    let all = response.collect().await.unwrap();
    assert_eq!(all.trailers().unwrap()["x-sum"], "42");

    let (tx, upload) = upload();
    let request = world
        .guest(&id, 3000, "/echo")
        .method("POST")
        .header("te", "trailers")
        .header("trailer", "x-check")
        .body(upload)
        .unwrap();
    tokio::spawn(async move {
        tx.send(Frame::data("x".into())).await.unwrap();
        let trailers = HeaderMap::from_iter([("x-check".parse().unwrap(), "7".parse().unwrap())]);
        tx.send(Frame::trailers(trailers)).await.unwrap();
    });
    // The echo has no Trailer header of its own, so its trailers end at the guest; that it ends well shows they were framed.
    assert_eq!(read(send(world.address, request).await).await.text(), "x");
}

/// Peak resident memory of this process since the last call, bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    kib << 10
}

#[tokio::test]
async fn a_hundred_megabytes_each_way_take_a_few_of_memory() {
    const SIZE: usize = 100 << 20;
    const ALLOWED: usize = 24 << 20;
    if std::fs::write("/proc/self/clear_refs", "5").is_err() {
        #[expect(clippy::print_stdout, reason = "the house's way to say that a test was skipped")]
        {
            println!("Skipped: this kernel does not reset the peak of resident memory");
        }
        return;
    }
    let world = world().await;
    let id = world.node.add(|_| ());
    world.get_guest(&id, 3000, "/headers").await;
    peak();
    let before = peak();

    let request = world.guest(&id, 3000, &format!("/big?{SIZE}")).body(body("")).unwrap();
    let mut response = send(world.address, request).await;
    let mut received = 0;
    while let Some(frame) = timeout(PATIENCE, response.frame()).await.unwrap() {
        received += frame.unwrap().data_ref().map_or(0, Bytes::len);
    }
    assert_eq!(received, SIZE);

    let (tx, upload) = upload();
    let request = world.guest(&id, 3000, "/sink").method("POST").body(upload).unwrap();
    tokio::spawn(async move {
        let part = Bytes::from(vec![7; 1 << 20]);
        for _ in 0..SIZE >> 20 {
            tx.send(Frame::data(part.clone())).await.unwrap();
        }
    });
    assert_eq!(read(send(world.address, request).await).await.text(), SIZE.to_string());
    let grown = peak().saturating_sub(before);
    assert!(grown < ALLOWED, "client, proxy and guest together took {} MiB more", grown >> 20);
    let metrics = world.call("GET", "/metrics", "").await.text();
    let counted: usize = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("aenv_proxy_bytes_total{direction=\"up\"} "))
        .map(|count| count.parse::<usize>().unwrap())
        .sum();
    assert!(counted >= SIZE, "{counted}");
}

#[tokio::test]
async fn a_slow_reader_holds_the_guest_back_instead_of_filling_memory() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let request = world.guest(&id, 3000, &format!("/big?{}", 1usize << 30)).body(body("")).unwrap();
    let response = send(world.address, request).await;
    // Nobody reads: after the sockets' and the proxy's buffers are full, the count must stand still.
    let down = || async {
        let text = world.call("GET", "/metrics", "").await.text();
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix("aenv_proxy_bytes_total{direction=\"down\"} "))
            .unwrap()
            .to_owned();
        line.parse::<usize>().unwrap()
    };
    let mut last = usize::MAX;
    timeout(PATIENCE, async {
        loop {
            let now = down().await;
            if now == last && now > 0 {
                break;
            }
            last = now;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await
    .expect("the proxy went on reading");
    assert!(last < 64 << 20, "{last} bytes were taken for a reader that read nothing");
    drop(response);
}

#[tokio::test]
async fn a_websocket_echoes_by_header_and_by_host() {
    let world = world().await;
    let id = world.node.add(|_| ());
    for by_host in [true, false] {
        let mut request = format!("ws://{}/ws", world.address).into_client_request().unwrap();
        let headers = request.headers_mut();
        if by_host {
            headers.insert("host", format!("3000-{id}.box.test").parse().unwrap());
        } else {
            headers.insert("e2b-sandbox-id", id.as_str().parse().unwrap());
            headers.insert("e2b-sandbox-port", "3000".parse().unwrap());
        }
        let stream = TcpStream::connect(world.address).await.unwrap();
        let (mut socket, _) = tokio_tungstenite::client_async(request, stream).await.unwrap();
        for message in [Message::text("hello"), Message::binary(vec![1; 300_000])] {
            socket.send(message.clone()).await.unwrap();
            let echoed = timeout(PATIENCE, socket.next()).await.unwrap().unwrap().unwrap();
            assert_eq!(echoed, message);
        }
        socket.close(None).await.unwrap();
    }
}

async fn tunnel(world: &World, id: &SandboxId) -> TokioIo<hyper::upgrade::Upgraded> {
    let request = world.guest(id, 3000, "/raw").header("connection", "upgrade").header("upgrade", "raw");
    let mut response = send(world.address, request.body(body("")).unwrap()).await;
    assert_eq!(response.status(), 101);
    assert_eq!(response.headers()["upgrade"], "raw");
    TokioIo::new(hyper::upgrade::on(&mut response).await.unwrap())
}

#[tokio::test]
async fn each_half_of_a_tunnel_closes_by_itself() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let mut io = tunnel(&world, &id).await;
    io.write_all(&[1; 100_000]).await.unwrap();
    io.shutdown().await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, io.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert_eq!(answer, "got 100000");
}

#[tokio::test]
async fn killing_a_sandbox_over_the_api_breaks_its_streams_at_once() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let (stream, mut io) = (sse(&world, &id).await, tunnel(&world, &id).await);
    assert_eq!(world.call("DELETE", &format!("/sandboxes/{id}"), "").await.status, 204);
    ends_broken(stream).await;
    let mut rest = Vec::new();
    timeout(SOON, io.read_to_end(&mut rest)).await.expect("the tunnel went on").ok();
}

#[tokio::test]
async fn a_machine_that_vanishes_without_a_word_breaks_its_streams_soon() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let (stream, mut io) = (sse(&world, &id).await, tunnel(&world, &id).await);
    let (tx, upload) = upload();
    let request = world.guest(&id, 3000, "/sink").method("POST").body(upload).unwrap();
    let address = world.address;
    let waiting = tokio::spawn(async move { read(send(address, request).await).await });
    tx.send(Frame::data("x".into())).await.unwrap();
    while !world.guest.seen.lock().contains(&"POST /sink".to_owned()) {
        tokio::task::yield_now().await;
    }
    world.node.vanish(&id, EndCause::VmmCrash);
    ends_broken(stream).await;
    let mut rest = Vec::new();
    timeout(SOON, io.read_to_end(&mut rest)).await.expect("the tunnel went on").ok();
    let answer = timeout(SOON, waiting).await.expect("the upload went on").unwrap();
    assert_eq!(answer.status, 502);
    assert!(answer.message().starts_with("The sandbox was not found"), "{}", answer.message());
}

#[tokio::test]
async fn pausing_or_replacing_a_machine_breaks_its_streams() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let stream = sse(&world, &id).await;
    assert_eq!(world.call("POST", &format!("/sandboxes/{id}/pause"), "").await.status, 204);
    ends_broken(stream).await;

    let id = world.node.add(|_| ());
    let stream = sse(&world, &id).await;
    world.node.change(&id, |entry| entry.generation += 1);
    ends_broken(stream).await;
    assert_eq!(
        world.get_guest(&id, 3000, "/headers").await.status,
        200,
        "the new machine is reached at once"
    );
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_by_the_guest() {
    let world = world().await;
    let id = world.node.add(|_| ());
    drop(sse(&world, &id).await);
    timeout(PATIENCE, world.guest.abandoned.notified()).await.expect("the guest goes on for nobody");
}

#[tokio::test]
async fn a_client_that_asks_first_sends_its_body_only_to_a_sandbox_that_takes_it() {
    let world = world().await;
    let id = world.node.add(|entry| entry.sandbox.traffic_token = Some("secret".into()));
    let ask = |token: &str| {
        format!(
            "POST /echo HTTP/1.1\r\nhost: x\r\ne2b-sandbox-id: {id}\r\ne2b-sandbox-port: 3000\r\n\
             e2b-traffic-access-token: {token}\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
        )
    };
    assert!(world.raw(ask("wrong").as_bytes()).await.starts_with("HTTP/1.1 403"));

    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(ask("secret").as_bytes()).await.unwrap();
    let mut buffer = [0; 1024];
    let n = timeout(PATIENCE, stream.read(&mut buffer)).await.unwrap().unwrap();
    assert!(buffer[..n].starts_with(b"HTTP/1.1 100"));
    stream.write_all(b"hello").await.unwrap();
    let mut answer = String::new();
    while !answer.ends_with("hello") {
        let n = timeout(PATIENCE, stream.read(&mut buffer)).await.unwrap().unwrap();
        assert_ne!(n, 0, "{answer}");
        answer.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
    }
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn what_both_framings_say_reaches_the_guest_as_one_request() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let smuggled = format!(
        "POST /sink HTTP/1.1\r\nhost: x\r\nconnection: close\r\ne2b-sandbox-id: {id}\r\ne2b-sandbox-port: 3000\r\n\
         content-length: 6\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\n\r\n"
    );
    let answer = world.raw(smuggled.as_bytes()).await;
    let seen = world.guest.seen.lock().clone();
    assert!(!seen.iter().any(|line| line.contains("smuggled")), "{seen:?}\n{answer}");
    assert!(seen.len() <= 1, "{seen:?}");
}

#[tokio::test]
async fn requests_may_follow_each_other_on_one_connection() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let stream = TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    for n in 0..50 {
        let guest = world.guest(&id, 3000, "/echo").method("POST").body(body(n.to_string())).unwrap();
        assert_eq!(read(sender.send_request(guest).await.unwrap()).await.text(), n.to_string());
        let control = Request::get("/health").header("host", "x").body(body("")).unwrap();
        assert_eq!(read(sender.send_request(control).await.unwrap()).await.status, 200);
    }
    assert_eq!(world.guest.connections.load(std::sync::atomic::Ordering::SeqCst), 1);
}
