//! Guest traffic: addressing, tokens, headers, pools, errors.

use crate::{
    client::{Answer, body, read, send},
    fake::{KEY, World, world, world_with},
};
use aenv_node::{
    control::Error,
    model::{EndCause, SandboxId, State},
};
use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use http::Request;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{sync::Arc, sync::atomic::Ordering::SeqCst, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::Notify,
};

/// What the guest saw of the headers.
fn saw(answer: &Answer, name: &str) -> Vec<String> {
    let json = answer.json();
    let headers = json["headers"].as_array().unwrap();
    headers.iter().filter(|h| h[0] == name).map(|h| h[1].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_header_routes_any_path_to_the_guest() {
    let world = world().await;
    let id = world.node.add(|_| ());
    assert_eq!(world.get_guest(&id, 3000, "/headers?a=b%20c").await.json()["uri"], "/headers?a=b%20c");
    let legacy =
        Request::get("/health").header("host", "x").header("e2b-sandbox-id", format!("{id}-6532622b"));
    let answer = read(send(world.address, legacy.body(body("")).unwrap()).await).await;
    assert_eq!(answer.json()["uri"], "/health", "without a port it is the agent's");
}

#[tokio::test]
async fn a_host_routes_any_path_to_the_guest() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let host = format!("3000-{id}.box.test");
    let request = Request::get("/headers").header("host", &host).body(body("")).unwrap();
    let answer = read(send(world.address, request).await).await;
    assert_eq!(saw(&answer, "host"), std::slice::from_ref(&host));
    assert_eq!(saw(&answer, "x-forwarded-host"), [host]);
    assert_eq!(saw(&answer, "x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(saw(&answer, "x-forwarded-proto"), ["http"]);
}

#[tokio::test]
async fn a_masked_host_is_what_the_guest_sees() {
    let world = world().await;
    let id = world.node.add(|entry| entry.mask = Some("localhost:${PORT}".into()));
    assert_eq!(saw(&world.get_guest(&id, 3000, "/headers").await, "host"), ["localhost:3000"]);
}

#[tokio::test]
async fn the_control_planes_key_never_reaches_a_guest() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let request = world.guest(&id, 3000, "/headers").header("x-api-key", KEY).body(body("")).unwrap();
    let answer = read(send(world.address, request).await).await;
    assert!(saw(&answer, "x-api-key").is_empty());
}

#[tokio::test]
async fn what_belongs_to_one_hop_is_kept_from_the_client_too() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let answer = world.get_guest(&id, 3000, "/hop").await;
    assert_eq!(answer.headers["x-public"], "2");
    assert!(!answer.headers.contains_key("x-private") && !answer.headers.contains_key("keep-alive"));
}

#[tokio::test]
async fn sandboxes_that_cannot_answer_are_told_in_the_words_the_sdks_match() {
    let world = world().await;
    let nobody = SandboxId::random();
    let answer = world.get_guest(&nobody, 49983, "/health").await;
    assert_eq!(answer.status, 502);
    assert_eq!(
        answer.json(),
        json!({"sandboxId": nobody.as_str(), "message": "The sandbox was not found", "code": 502})
    );

    let ended = world.node.add(|_| ());
    world.node.vanish(&ended, EndCause::GuestOom);
    let answer = world.get_guest(&ended, 49983, "/health").await;
    assert_eq!(answer.status, 502);
    assert!(
        answer.message().starts_with("The sandbox was not found: it has ended: GuestOom"),
        "{}",
        answer.message()
    );

    let paused = world.node.add(|entry| entry.sandbox.state = State::Paused);
    let answer = world.get_guest(&paused, 49983, "/health").await;
    assert_eq!(answer.status, 502);
    assert!(answer.message().starts_with("The sandbox was not found"), "{}", answer.message());

    let running = world.node.add(|_| ());
    let answer = world.get_guest(&running, 8080, "/").await;
    assert_eq!(answer.status, 502);
    assert_eq!(
        answer.json(),
        json!({"sandboxId": running.as_str(), "message": "The sandbox is running but port is not open", "port": 8080, "code": 502})
    );
}

#[tokio::test]
async fn a_person_in_a_browser_gets_a_page() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let request = world.guest(&id, 8080, "/").header("accept", "text/html,*/*").body(body("")).unwrap();
    let answer = read(send(world.address, request).await).await;
    assert_eq!(answer.status, 502);
    assert!(answer.headers["content-type"].to_str().unwrap().starts_with("text/html"));
    assert!(answer.text().contains("port is not open"));
}

#[tokio::test]
async fn the_agents_internal_routes_do_not_exist_outside() {
    let world = world().await;
    let id = world.node.add(|_| ());
    for path in ["/init", "/freeze", "/aenv/x", "//init", "/%69nit", "/files/../init", "/INIT"] {
        let answer = world.get_guest(&id, 49983, path).await;
        assert_eq!(answer.status, 404, "{path}");
    }
    assert_eq!(world.guest.requests.load(SeqCst), 0);
    world.get_guest(&id, 3000, "/init").await;
    assert_eq!(world.guest.requests.load(SeqCst), 1, "on other ports /init is the application's own");
}

#[tokio::test]
async fn private_traffic_needs_its_token_except_on_the_agents_port() {
    let world = world().await;
    let id = world.node.add(|entry| entry.sandbox.traffic_token = Some("secret".into()));
    for token in [None, Some("wrong"), Some("secre"), Some("secret2")] {
        let mut request = world.guest(&id, 3000, "/headers");
        if let Some(token) = token {
            request = request.header("e2b-traffic-access-token", token);
        }
        let answer = read(send(world.address, request.body(body("")).unwrap()).await).await;
        assert_eq!((answer.status.as_u16(), answer.json()["code"].as_u64()), (403, Some(403)), "{token:?}");
    }
    let request = world.guest(&id, 3000, "/headers").header("e2b-traffic-access-token", "secret");
    let answer = read(send(world.address, request.body(body("")).unwrap()).await).await;
    assert_eq!(answer.status, 200);
    assert!(saw(&answer, "e2b-traffic-access-token").is_empty());
    assert_eq!(world.get_guest(&id, 49983, "/health").await.status, 200);
}

#[tokio::test]
async fn a_hundred_requests_wake_a_paused_sandbox_once() {
    let world = world().await;
    let id = world.node.add(|entry| {
        entry.sandbox.state = State::Paused;
        entry.sandbox.auto_resume = true;
    });
    let gate = Arc::new(Notify::new());
    *world.node.gate.lock() = Some(gate.clone());
    let requests: Vec<_> = (0..100)
        .map(|_| {
            let request = world.guest(&id, 3000, "/headers").body(body("")).unwrap();
            tokio::spawn(async move { read(send(world.address, request).await).await.status })
        })
        .collect();
    // All of them must have come as far as the wake before it is let through: none has been answered yet.
    while world.node.wakes.load(SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    gate.notify_one();
    for request in requests {
        assert_eq!(request.await.unwrap(), 200);
    }
    assert_eq!(world.node.wakes.load(SeqCst), 1);
}

#[tokio::test]
async fn strangers_wake_nothing_and_a_client_that_leaves_stops_no_wake() {
    let world = world().await;
    let id = world.node.add(|entry| {
        entry.sandbox.state = State::Paused;
        entry.sandbox.auto_resume = true;
        entry.sandbox.traffic_token = Some("secret".into());
    });
    assert_eq!(world.get_guest(&id, 3000, "/headers").await.status, 403);
    assert_eq!(world.node.wakes.load(SeqCst), 0);

    let gate = Arc::new(Notify::new());
    *world.node.gate.lock() = Some(gate.clone());
    let request = world.guest(&id, 49983, "/health").body(body("")).unwrap();
    let address = world.address;
    let impatient = tokio::spawn(async move { send(address, request).await });
    while world.node.wakes.load(SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    impatient.abort();
    let patient = world.guest(&id, 49983, "/health").body(body("")).unwrap();
    let patient = tokio::spawn(async move { read(send(address, patient).await).await.status });
    gate.notify_one();
    assert_eq!(patient.await.unwrap(), 200);
    assert_eq!(world.node.wakes.load(SeqCst), 1);
}

#[tokio::test]
async fn a_wake_that_fails_or_takes_too_long_is_an_answer() {
    let world = world_with(|options| options.wake_timeout = Duration::from_millis(100)).await;
    let id = world.node.add(|entry| {
        entry.sandbox.state = State::Paused;
        entry.sandbox.auto_resume = true;
    });
    world.node.fail("wake", Error::Full { message: "no room".into(), retry_after: Duration::from_secs(3) });
    let answer = world.get_guest(&id, 3000, "/headers").await;
    assert_eq!((answer.status.as_u16(), answer.headers["retry-after"].to_str().unwrap()), (429, "3"));
    world.node.faults.lock().clear();
    *world.node.gate.lock() = Some(Arc::default());
    assert_eq!(world.get_guest(&id, 3000, "/headers").await.status, 504);
}

#[tokio::test]
async fn connections_to_the_guest_are_reused_and_dropped_with_the_generation() {
    let world = world().await;
    let id = world.node.add(|_| ());
    for _ in 0..10 {
        assert_eq!(world.get_guest(&id, 3000, "/headers").await.status, 200);
    }
    assert_eq!(world.guest.connections.load(SeqCst), 1);
    world.node.change(&id, |entry| entry.generation += 1);
    for _ in 0..10 {
        assert_eq!(world.get_guest(&id, 3000, "/headers").await.status, 200);
    }
    assert_eq!(world.guest.connections.load(SeqCst), 2, "the new machine gets connections of its own");
}

/// Answers one request on each connection as if it would take more, and closes.
async fn one_shot_guest(world: &World, port: u16) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.node.ports.lock().insert(port, listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut buffer = [0; 4096];
            if stream.read(&mut buffer).await.is_ok_and(|n| n > 0) {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.ok();
            }
        }
    });
}

#[tokio::test]
async fn a_guest_that_closes_idle_connections_costs_nobody_a_request() {
    let world = world().await;
    let id = world.node.add(|_| ());
    one_shot_guest(&world, 4000).await;
    for _ in 0..30 {
        assert_eq!(world.get_guest(&id, 4000, "/").await.status, 200);
    }
}

/// Hangs up or talks nonsense instead of answering.
#[tokio::test]
async fn a_guest_that_does_not_speak_http_is_a_bad_gateway_and_no_post_is_repeated() {
    let world = world().await;
    let id = world.node.add(|_| ());
    for (port, reply) in
        [(4001, &b""[..]), (4002, b"SSH-2.0-OpenSSH\r\n"), (4003, b"HTTP/1.1 101 Switching\r\n\r\n")]
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        world.node.ports.lock().insert(port, listener.local_addr().unwrap());
        let requests = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = requests.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut buffer = [0; 4096];
                if stream.read(&mut buffer).await.is_ok_and(|n| n > 0) {
                    count.fetch_add(1, SeqCst);
                    stream.write_all(reply).await.ok();
                }
            }
        });
        let request = world.guest(&id, port, "/").method("POST").body(body("x")).unwrap();
        let answer = read(send(world.address, request).await).await;
        assert_eq!(answer.status, 502, "{port}");
        assert!(answer.json()["message"].is_string());
        assert_eq!(requests.load(SeqCst), 1, "{port}");
    }
}

#[tokio::test]
async fn a_guest_that_accepts_nothing_is_a_gateway_timeout() {
    let world = world_with(|options| options.dial_timeout = Duration::from_millis(100)).await;
    let id = world.node.add(|_| ());
    world.node.fail("dial", Error::Internal("hangs".into()));
    assert_eq!(world.get_guest(&id, 3000, "/").await.status, 504);
}

#[tokio::test]
async fn a_sandbox_has_a_bound_on_requests_at_once() {
    let world = world_with(|options| options.max_in_flight_per_sandbox = 3).await;
    let id = world.node.add(|_| ());
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(send(world.address, world.guest(&id, 3000, "/sse").body(body("")).unwrap()).await);
    }
    let answer = world.get_guest(&id, 3000, "/headers").await;
    assert_eq!((answer.status.as_u16(), answer.headers.contains_key("retry-after")), (429, true));
    open.pop();
    // The place is free once the server has noticed that the client left.
    world.guest.abandoned.notified().await;
    assert_eq!(world.get_guest(&id, 3000, "/headers").await.status, 200);
}

fn signature(path: &str, operation: &str, user: &str, token: &str) -> String {
    let digest = Sha256::digest(format!("{path}:{operation}:{user}:{token}"));
    let signature = format!("v1_{}", STANDARD_NO_PAD.encode(digest));
    percent_encoding::utf8_percent_encode(&signature, percent_encoding::NON_ALPHANUMERIC).to_string()
}

#[tokio::test]
async fn a_signed_url_on_the_bare_address_finds_its_sandbox() {
    let world = world().await;
    let ids: Vec<_> = (0..50).map(|_| world.node.add(|_| ())).collect();
    let token = format!("envd-{}", ids[31]);
    let url = |operation| {
        format!("/files?path=a%2Fb.txt&signature={}", signature("a/b.txt", operation, "", &token))
    };
    let answer = world.call_with("GET", &url("read"), "", &[]).await;
    assert_eq!((answer.status.as_u16(), answer.json()["uri"].as_str()), (200, Some(url("read").as_str())));
    assert_eq!(world.call_with("POST", &url("write"), "x", &[]).await.status, 200);
    assert_eq!(world.call_with("POST", &url("read"), "x", &[]).await.status, 401, "a read is not a write");
    let forged = world.call_with("GET", "/files?path=b.txt&signature=v1_AAAA", "", &[]).await;
    assert_eq!((forged.status.as_u16(), forged.json()["code"].as_u64()), (401, Some(401)));
    assert_eq!(world.call_with("GET", "/files?path=b.txt", "", &[]).await.status, 404);
}

#[tokio::test]
async fn head_and_bodiless_answers_keep_their_shape() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let request = world.guest(&id, 3000, "/headers").method("HEAD").body(body("")).unwrap();
    let answer = read(send(world.address, request).await).await;
    assert!(answer.body.is_empty() && answer.headers["content-length"] != "0");
    let answer = world.get_guest(&id, 3000, "/nothing").await;
    assert_eq!(answer.status, 204);
    let get = world.get_guest(&id, 3000, "/headers").await;
    assert!(saw(&get, "transfer-encoding").is_empty(), "no framing is made up for a request without a body");
    assert_eq!(world.guest.connections.load(SeqCst), 1);
}

#[tokio::test]
async fn both_protocols_are_spoken_on_the_same_port() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let stream = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(
        hyper_util::rt::TokioExecutor::new(),
        hyper_util::rt::TokioIo::new(stream),
    )
    .await
    .unwrap();
    tokio::spawn(connection);
    let uri = format!("http://{}/health", world.address);
    let health = sender.send_request(Request::get(&uri).body(body("")).unwrap()).await.unwrap();
    assert_eq!(health.status(), 200);
    let uri = format!("http://3000-{id}.box.test/echo");
    let echo = sender.send_request(Request::post(&uri).body(body("over h2")).unwrap()).await.unwrap();
    assert_eq!(read(echo).await.text(), "over h2");
}

#[tokio::test]
async fn a_refusal_of_the_proxy_can_be_read_by_a_page() {
    let world = world().await;
    let answer = world.get_guest(&SandboxId::random(), 3000, "/").await;
    assert_eq!(answer.headers["access-control-allow-origin"], "*");
    assert_ne!(answer.json()["message"], Value::Null);
}

#[tokio::test]
async fn an_answer_that_comes_before_the_whole_body_ends_the_clients_connection_by_name() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let ask = |path: &str, length: usize, body: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {id}\r\nE2b-Sandbox-Port: 3000\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
    };
    let cut_short = world.raw(ask("/headers", 10, "x").as_bytes()).await.to_ascii_lowercase();
    assert!(cut_short.starts_with("http/1.1 200"), "{cut_short}");
    assert!(cut_short.contains("connection: close"), "{cut_short}");
    let whole = world.raw(ask("/echo", 1, "x").as_bytes()).await.to_ascii_lowercase();
    assert!(whole.starts_with("http/1.1 200") && !whole.contains("connection: close"), "{whole}");
}
