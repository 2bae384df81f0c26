//! A client over sockets: one request a connection, or whatever bytes a test wants.

use crate::fake::{KEY, World};
use aenv_node::model::SandboxId;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::{Body, Incoming};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Nothing in these tests takes this long unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// An answer read to its end.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body))
    }

    pub(crate) fn message(&self) -> String {
        self.json()["message"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Sends a request on a connection of its own and returns once the response's head is there.
pub(crate) async fn send<B>(address: SocketAddr, request: Request<B>) -> Response<Incoming>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    tokio::time::timeout(PATIENCE, sender.send_request(request)).await.expect("no answer in time").unwrap()
}

pub(crate) async fn read(response: Response<Incoming>) -> Answer {
    let (head, body) = response.into_parts();
    let body = tokio::time::timeout(PATIENCE, body.collect()).await.expect("no end in time").unwrap();
    Answer { status: head.status, headers: head.headers, body: body.to_bytes() }
}

pub(crate) fn body(text: impl Into<Bytes>) -> BoxBody<Bytes, std::convert::Infallible> {
    Full::new(text.into()).boxed()
}

impl World {
    /// A control-plane request with the key; `json` is the body if not empty.
    pub(crate) async fn call(&self, method: &str, path: &str, json: &str) -> Answer {
        self.call_with(method, path, json, &[("x-api-key", KEY)]).await
    }

    pub(crate) async fn call_with(
        &self,
        method: &str,
        path: &str,
        json: &str,
        headers: &[(&str, &str)],
    ) -> Answer {
        let mut request =
            Request::builder().method(method).uri(path).header("host", self.address.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if !json.is_empty() {
            request = request.header("content-type", "application/json");
        }
        read(send(self.address, request.body(body(json.to_owned())).unwrap()).await).await
    }

    /// A request to a port of a sandbox, addressed by header.
    pub(crate) fn guest(&self, id: &SandboxId, port: u16, path: &str) -> http::request::Builder {
        Request::builder()
            .uri(path)
            .header("host", self.address.to_string())
            .header("e2b-sandbox-id", id.as_str())
            .header("e2b-sandbox-port", port.to_string())
    }

    pub(crate) async fn get_guest(&self, id: &SandboxId, port: u16, path: &str) -> Answer {
        read(send(self.address, self.guest(id, port, path).body(body("")).unwrap()).await).await
    }

    /// Writes bytes and returns everything that comes back until the server closes or is silent for a second.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        // The server may hang up before it has read everything; what it said is still there.
        stream.write_all(bytes).await.ok();
        let mut answer = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(Ok(n @ 1..)) =
            tokio::time::timeout(Duration::from_secs(1), stream.read(&mut buffer)).await
        {
            answer.extend_from_slice(&buffer[..n]);
        }
        String::from_utf8_lossy(&answer).into_owned()
    }
}
