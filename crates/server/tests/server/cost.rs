//! What the proxy costs. Not a test of right or wrong, so run by hand:
//! `cargo nextest run -p aenv-server --run-ignored only --no-capture cost`.

use crate::{
    client::body,
    fake::{World, world},
};
use aenv_node::model::SandboxId;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, combinators::BoxBody};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use std::{
    convert::Infallible,
    net::SocketAddr,
    time::{Duration, Instant},
};
use tokio::net::TcpStream;

type Sender = SendRequest<BoxBody<Bytes, Infallible>>;

async fn connect(address: SocketAddr) -> Sender {
    let stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn ask(world: &World, id: &SandboxId, path: &str) -> Request<BoxBody<Bytes, Infallible>> {
    world.guest(id, 3000, path).body(body("")).unwrap()
}

async fn drained(sender: &mut Sender, request: Request<BoxBody<Bytes, Infallible>>) -> usize {
    sender.ready().await.unwrap();
    let mut response = sender.send_request(request).await.unwrap();
    let mut bytes = 0;
    while let Some(frame) = response.frame().await {
        bytes += frame.unwrap().data_ref().map_or(0, Bytes::len);
    }
    bytes
}

/// Median and 99th percentile of one request after another on one connection.
async fn latency(world: &World, id: &SandboxId, address: SocketAddr) -> (Duration, Duration) {
    const REQUESTS: usize = 3000;
    let mut sender = connect(address).await;
    let mut took = Vec::with_capacity(REQUESTS);
    for _ in 0..REQUESTS {
        let began = Instant::now();
        drained(&mut sender, ask(world, id, "/headers")).await;
        took.push(began.elapsed());
    }
    took.sort();
    (took[REQUESTS / 2], took[REQUESTS * 99 / 100])
}

/// Requests a second over 32 connections.
async fn rate(world: &World, id: &SandboxId, address: SocketAddr) -> f64 {
    const CONNECTIONS: usize = 32;
    const EACH: usize = 300;
    let began = Instant::now();
    let clients = (0..CONNECTIONS).map(|_| async {
        let mut sender = connect(address).await;
        for _ in 0..EACH {
            drained(&mut sender, ask(world, id, "/headers")).await;
        }
    });
    futures_util::future::join_all(clients).await;
    f64::from(u32::try_from(CONNECTIONS * EACH).unwrap()) / began.elapsed().as_secs_f64()
}

/// MiB a second of one download.
async fn throughput(world: &World, id: &SandboxId, address: SocketAddr) -> f64 {
    const MIB: u32 = 1024;
    let mut sender = connect(address).await;
    let began = Instant::now();
    let bytes = drained(&mut sender, ask(world, id, &format!("/big?{}", u64::from(MIB) << 20))).await;
    assert_eq!(bytes >> 20, usize::try_from(MIB).unwrap());
    f64::from(MIB) / began.elapsed().as_secs_f64()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
#[expect(clippy::print_stdout, reason = "a measurement")]
async fn cost_of_the_proxy() {
    let world = world().await;
    let id = world.node.add(|_| ());
    for (name, address) in [("direct", world.guest.address), ("proxied", world.address)] {
        latency(&world, &id, address).await;
        let (p50, p99) = latency(&world, &id, address).await;
        let (rate, mib) = (rate(&world, &id, address).await, throughput(&world, &id, address).await);
        println!("{name:8} p50 {p50:?} p99 {p99:?}  {rate:.0} requests/s on 32 connections  {mib:.0} MiB/s");
    }
}
