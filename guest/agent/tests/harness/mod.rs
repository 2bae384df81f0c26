//! The built agent on loopback, and the ways to talk to it: plain HTTP, Connect with JSON, and the generated clients.
// Each test file uses another part of this; `print_stderr` is how a test says that it was skipped.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::print_stderr)]

use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    time::Duration,
};

use aenv_envd_proto::{filesystem::FilesystemClient, process::ProcessClient};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use connectrpc::client::{ClientConfig, HttpClient};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// No answer may take longer: what hangs fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Agent {
    child: Child,
    pub address: SocketAddr,
}

impl Agent {
    pub fn start() -> Self {
        Self::with(&[])
    }

    pub fn with(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_aenv-agent"))
            .args(["--serve", "--listen", "127.0.0.1:0"])
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the agent starts");
        let stderr = child.stderr.take().expect("stderr is piped");
        let mut line = String::new();
        BufReader::new(stderr).read_line(&mut line).expect("the agent says that it is ready");
        let address = line.rsplit(' ').next().and_then(|text| text.trim().parse().ok());
        Self { child, address: address.unwrap_or_else(|| panic!("no address in {line:?}")) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the agent has ended by itself.
    pub async fn wait(&mut self) -> std::process::ExitStatus {
        within(async {
            loop {
                if let Some(status) = self.child.try_wait().expect("a child of ours") {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
    }

    /// One request on a connection of its own.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> http::Response<Incoming> {
        within(async {
            let stream = TcpStream::connect(self.address).await.expect("the port is open");
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("http/1.1");
            tokio::spawn(connection);
            sender.send_request(request).await.expect("an answer")
        })
        .await
    }

    /// The same over HTTP/2 without TLS.
    pub async fn send_h2(&self, request: Request<Full<Bytes>>) -> http::Response<Incoming> {
        within(async {
            let stream = TcpStream::connect(self.address).await.expect("the port is open");
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
                    .await
                    .expect("h2c");
            tokio::spawn(connection);
            sender.send_request(request).await.expect("an answer")
        })
        .await
    }

    pub async fn http(
        &self,
        method: Method,
        target: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let mut request =
            Request::builder().method(method).uri(target).header("host", self.address.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = self.send(request.body(Full::new(body.into())).expect("a request")).await;
        Answer::of(answer).await
    }

    pub async fn get(&self, target: &str) -> Answer {
        self.http(Method::GET, target, &[], "").await
    }

    pub async fn post(&self, target: &str, body: &Value) -> Answer {
        self.http(Method::POST, target, &[("content-type", "application/json")], body.to_string()).await
    }

    /// A unary call as E2B's clients make it.
    pub async fn call(&self, method: &str, message: &Value) -> Answer {
        self.call_as("root", method, message).await
    }

    pub async fn call_as(&self, user: &str, method: &str, message: &Value) -> Answer {
        let user = basic(user);
        let headers = [
            ("content-type", "application/json"),
            ("connect-protocol-version", "1"),
            ("content-encoding", "identity"),
            ("authorization", user.as_str()),
        ];
        self.http(Method::POST, &format!("/{method}"), &headers, message.to_string()).await
    }

    /// A server stream as E2B's clients open it.
    pub async fn open(&self, method: &str, message: &Value, headers: &[(&str, &str)]) -> Events {
        let mut request = Request::post(format!("/{method}"))
            .header("host", self.address.to_string())
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1");
        if !headers.iter().any(|(name, _)| *name == "authorization") {
            request = request.header("authorization", basic("root"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = self.send(request.body(Full::new(frame(0, message))).expect("a request")).await;
        assert_eq!(answer.status(), StatusCode::OK, "{method}");
        Events { body: answer.into_body(), buffer: BytesMut::new() }
    }

    pub async fn start_process(&self, message: &Value, headers: &[(&str, &str)]) -> Events {
        self.open("process.Process/Start", message, headers).await
    }

    /// Starts `sh -c script` and returns its pid with the stream behind the start event.
    pub async fn sh(&self, script: &str) -> (u64, Events) {
        let mut events = self.start_process(&shell(script), &[]).await;
        (events.pid().await, events)
    }

    pub fn processes(&self) -> ProcessClient<HttpClient> {
        ProcessClient::new(HttpClient::plaintext(), self.config())
    }

    pub fn files(&self) -> FilesystemClient<HttpClient> {
        FilesystemClient::new(HttpClient::plaintext(), self.config())
    }

    fn config(&self) -> ClientConfig {
        let uri = format!("http://{}", self.address).parse().expect("an address");
        ClientConfig::new(uri).with_default_header("authorization", basic("root"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("an answer in time")
}

pub fn basic(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:")))
}

pub fn shell(script: &str) -> Value {
    json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false})
}

pub fn frame(flags: u8, message: &Value) -> Bytes {
    raw_frame(flags, message.to_string().as_bytes())
}

pub fn raw_frame(flags: u8, message: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(flags);
    frame.put_u32(u32::try_from(message.len()).expect("a small message"));
    frame.extend_from_slice(message);
    frame.freeze()
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub async fn of(answer: http::Response<Incoming>) -> Self {
        let (parts, body) = answer.into_parts();
        let body = within(body.collect()).await.expect("a whole body").to_bytes();
        Self { status: parts.status, headers: parts.headers, body }
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    /// The answer's message, which must be an error of this status and (for RPCs) code.
    pub fn refused(&self, status: u16, code: &str) -> String {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        let body = self.json();
        let given = body["code"].as_str().map_or_else(|| body["code"].to_string(), str::to_owned);
        assert_eq!(given, code, "{self:?}");
        body["message"].as_str().unwrap_or_default().to_owned()
    }

    pub fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{self:?}");
        self.json()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

pub struct Events {
    body: Incoming,
    buffer: BytesMut,
}

/// What a process said until its stream ended.
#[derive(Debug, Default)]
pub struct Heard {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub pty: Vec<u8>,
    pub end: Value,
    /// Of the stream's last frame.
    pub error: Value,
}

impl Heard {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Events {
    /// The next frame: flags and message. None when the connection ended.
    pub async fn frame(&mut self) -> Option<(u8, Value)> {
        within(async {
            loop {
                if let Some(head) = self.buffer.get(..5) {
                    let (flags, mut length) = (head[0], &head[1..]);
                    let length = length.get_u32() as usize;
                    if self.buffer.len() >= 5 + length {
                        self.buffer.advance(5);
                        let message = self.buffer.split_to(length);
                        let message = serde_json::from_slice(&message).expect("frames hold JSON");
                        return Some((flags, message));
                    }
                }
                let data = self.body.frame().await?.ok()?.into_data().ok()?;
                self.buffer.extend_from_slice(&data);
            }
        })
        .await
    }

    /// The next event of a process.
    pub async fn event(&mut self) -> Value {
        let (flags, message) = self.frame().await.expect("another frame");
        assert_eq!(flags, 0, "{message}");
        message["event"].clone()
    }

    pub async fn pid(&mut self) -> u64 {
        self.event().await["start"]["pid"].as_u64().expect("the first event is start")
    }

    /// Everything to the end of the stream.
    pub async fn hear(mut self) -> Heard {
        let mut heard = Heard::default();
        while let Some((flags, message)) = self.frame().await {
            if flags & 2 != 0 {
                heard.error = message["error"].clone();
                return heard;
            }
            let event = &message["event"];
            for (kind, out) in
                [("stdout", &mut heard.stdout), ("stderr", &mut heard.stderr), ("pty", &mut heard.pty)]
            {
                if let Some(data) = event["data"][kind].as_str() {
                    out.extend(STANDARD.decode(data).expect("base64"));
                }
            }
            if !event["end"].is_null() {
                heard.end = event["end"].clone();
            }
        }
        panic!("the stream broke off: {heard:?}");
    }
}

/// Whether the tests run as root; says that they can't when not.
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("Skipped: needs root to change users");
    }
    root
}

pub fn base64(data: impl AsRef<[u8]>) -> String {
    STANDARD.encode(data)
}
