//! A guest: an HTTP server with a route for each way a body can behave.

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::BoxBody};
use hyper::{
    body::{Frame, Incoming},
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::json;
use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::{Notify, mpsc},
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{handshake::derive_accept_key, protocol::Role},
};

type Body = BoxBody<Bytes, Infallible>;

/// What a test sees of the guest.
#[derive(Clone)]
pub(crate) struct Guest {
    pub(crate) address: SocketAddr,
    /// Lets `/drip`, `/sse` go on by one step.
    pub(crate) go: Arc<Notify>,
    pub(crate) connections: Arc<AtomicUsize>,
    pub(crate) requests: Arc<AtomicUsize>,
    /// `METHOD path` of everything that arrived.
    pub(crate) seen: Arc<Mutex<Vec<String>>>,
    /// Notified when a streaming response is dropped because its reader has gone.
    pub(crate) abandoned: Arc<Notify>,
}

impl Guest {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let guest = Self {
            address: listener.local_addr().unwrap(),
            go: Arc::default(),
            connections: Arc::default(),
            requests: Arc::default(),
            seen: Arc::default(),
            abandoned: Arc::default(),
        };
        let shared = guest.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                shared.connections.fetch_add(1, SeqCst);
                let shared = shared.clone();
                let service = service_fn(move |request| {
                    let shared = shared.clone();
                    async move { Ok::<_, Infallible>(shared.serve(request).await) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(connection.with_upgrades());
            }
        });
        guest
    }

    async fn serve(self, request: Request<Incoming>) -> Response<Body> {
        self.requests.fetch_add(1, SeqCst);
        self.seen.lock().push(format!("{} {}", request.method(), request.uri()));
        match request.uri().path() {
            "/echo" => Response::new(request.into_body().map_err(|_| unreachable!()).boxed()),
            "/headers" | "/files" | "/health" => {
                let headers: Vec<_> = request
                    .headers()
                    .iter()
                    .map(|(name, value)| {
                        (name.as_str(), String::from_utf8_lossy(value.as_bytes()).into_owned())
                    })
                    .collect();
                let text = json!({ "method": request.method().as_str(), "uri": request.uri().to_string(), "headers": headers });
                Response::new(full(text.to_string()))
            }
            "/sink" => {
                let mut body = request.into_body();
                let mut total = 0;
                while let Some(Ok(frame)) = body.frame().await {
                    total += frame.data_ref().map_or(0, Bytes::len);
                }
                Response::new(full(total.to_string()))
            }
            "/big" => {
                let n: usize = request.uri().query().unwrap().parse().unwrap();
                let (tx, body) = stream();
                tokio::spawn(async move {
                    let chunk = Bytes::from(vec![b'x'; 64 << 10]);
                    let mut left = n;
                    while left > 0 {
                        let part = chunk.slice(..left.min(chunk.len()));
                        left -= part.len();
                        if tx.send(Frame::data(part)).await.is_err() {
                            return;
                        }
                    }
                });
                Response::new(body)
            }
            "/drip" | "/sse" => {
                let (tx, body) = stream();
                tokio::spawn(async move {
                    for n in 0.. {
                        if tx.send(Frame::data(Bytes::from(format!("data: {n}\n\n")))).await.is_err() {
                            break;
                        }
                        tokio::select! {
                            () = self.go.notified() => {}
                            () = tx.closed() => break,
                        }
                    }
                    self.abandoned.notify_one();
                });
                let mut response = Response::new(body);
                response
                    .headers_mut()
                    .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
                response
            }
            "/trailers" => {
                let (tx, body) = stream();
                let mut trailers = HeaderMap::new();
                trailers.insert("x-sum", HeaderValue::from_static("42"));
                tokio::spawn(async move {
                    tx.send(Frame::data(Bytes::from_static(b"body"))).await.ok();
                    tx.send(Frame::trailers(trailers)).await.ok();
                });
                let mut response = Response::new(body);
                response.headers_mut().insert(header::TRAILER, HeaderValue::from_static("x-sum"));
                response
            }
            "/hop" => {
                let mut response = Response::new(full("x"));
                let headers = response.headers_mut();
                headers.insert(header::CONNECTION, HeaderValue::from_static("x-private"));
                headers.insert("x-private", HeaderValue::from_static("1"));
                headers.insert("keep-alive", HeaderValue::from_static("timeout=9"));
                headers.insert("x-public", HeaderValue::from_static("2"));
                response
            }
            "/nothing" => {
                let mut response = Response::new(Empty::new().boxed());
                *response.status_mut() = StatusCode::NO_CONTENT;
                response
            }
            "/ws" => websocket(request),
            "/raw" => raw(request),
            _ => {
                let mut response = Response::new(full("no such page"));
                *response.status_mut() = StatusCode::NOT_FOUND;
                response
            }
        }
    }
}

fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed()
}

fn stream() -> (mpsc::Sender<Frame<Bytes>>, Body) {
    let (tx, rx) = mpsc::channel(1);
    let frames =
        futures_util::stream::unfold(rx, |mut rx| async move { rx.recv().await.map(|f| (Ok(f), rx)) });
    (tx, BodyExt::boxed(StreamBody::new(frames)))
}

fn switching(protocol: &'static str) -> Response<Body> {
    let mut response = Response::new(Empty::new().boxed());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static(protocol));
    response
}

/// Echoes messages.
fn websocket(mut request: Request<Incoming>) -> Response<Body> {
    let accept = derive_accept_key(request.headers()["sec-websocket-key"].as_bytes());
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let io = TokioIo::new(upgraded.await.unwrap());
        let mut socket = WebSocketStream::from_raw_socket(io, Role::Server, None).await;
        while let Some(Ok(message)) = socket.next().await {
            if (message.is_text() || message.is_binary()) && socket.send(message).await.is_err() {
                break;
            }
        }
    });
    let mut response = switching("websocket");
    response.headers_mut().insert("sec-websocket-accept", HeaderValue::from_str(&accept).unwrap());
    response
}

/// Reads until the client has closed its half, then says how much it was.
fn raw(mut request: Request<Incoming>) -> Response<Body> {
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let mut io = TokioIo::new(upgraded.await.unwrap());
        let mut all = Vec::new();
        io.read_to_end(&mut all).await.unwrap();
        io.write_all(format!("got {}", all.len()).as_bytes()).await.unwrap();
        io.shutdown().await.unwrap();
    });
    switching("raw")
}
