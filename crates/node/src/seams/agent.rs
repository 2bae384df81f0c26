//! The agent over HTTP/1.1, through sockets made inside the slot's namespace.

use super::{Fault, Guests, Init, Result};
use crate::model::GuestMetrics;
use aenv_envd_proto::http::{INIT_SECRET, InitRequest};
use aenv_network::{Network, Slot};
use async_trait::async_trait;
use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::{Bytes, BytesMut};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use serde::Deserialize;
use std::{io, sync::Arc, time::Duration};
use tokio::net::TcpStream;

/// Port of the agent in every guest.
pub(crate) const AGENT_PORT: u16 = 49983;
/// Answers are small; a hostile guest can't make us hold more.
const MAX_ANSWER: usize = 1 << 20;
/// Pauses between attempts to connect: a restored guest answers within milliseconds, a booting one within seconds.
const FIRST_BACKOFF: Duration = Duration::from_millis(1);
const LAST_BACKOFF: Duration = Duration::from_millis(50);
/// A SYN that got lost would be repeated after a second: trying anew is faster.
/// A guest whose code isn't translated yet takes some 20 ms to answer one; giving up on that costs it more.
const FIRST_ATTEMPT: Duration = Duration::from_millis(60);
const LAST_ATTEMPT: Duration = Duration::from_millis(1000);

/// The real [`Guests`].
pub struct HttpGuests {
    network: Arc<dyn Network>,
}

impl HttpGuests {
    /// Guests reached through this network.
    #[must_use]
    pub fn new(network: Arc<dyn Network>) -> Self {
        Self { network }
    }

    async fn connect(&self, slot: &Slot) -> Result<TcpStream> {
        let (mut backoff, mut attempt) = (FIRST_BACKOFF, FIRST_ATTEMPT);
        loop {
            match tokio::time::timeout(attempt, self.network.connect(slot, AGENT_PORT)).await {
                Ok(Ok(stream)) => {
                    stream
                        .set_nodelay(true)
                        .map_err(|error| fault("connecting to the guest agent", &error))?;
                    return Ok(stream);
                }
                Ok(Err(error)) if may_pass(&error) => {}
                Ok(Err(error)) => return Err(fault("connecting to the guest agent", &error)),
                Err(_) => attempt = (attempt * 2).min(LAST_ATTEMPT),
            }
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(LAST_BACKOFF);
        }
    }

    async fn send(&self, slot: &Slot, request: Request<Full<Bytes>>) -> Result<Response<Incoming>> {
        let what = request.uri().path().to_owned();
        let stream = self.connect(slot).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| fault(&what, &e))?;
        // Ends with the exchange: when the response body is read or dropped.
        tokio::spawn(connection);
        sender.send_request(request).await.map_err(|error| fault(&what, &error))
    }

    async fn call(&self, slot: &Slot, request: Request<Full<Bytes>>) -> Result<Bytes> {
        let what = request.uri().path().to_owned();
        let response = self.send(slot, request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER)
            .collect()
            .await
            .map_err(|error| Fault::new(format!("the guest agent's answer to {what}: {error}")))?
            .to_bytes();
        accepted(&what, status, &body)?;
        Ok(body)
    }
}

#[derive(Deserialize)]
struct MetricsBody {
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

#[async_trait]
impl Guests for HttpGuests {
    async fn reach(&self, slot: &Slot) -> Result<()> {
        let request =
            request(Method::GET, "/health").body(Full::default()).map_err(|e| fault("/health", &e))?;
        self.call(slot, request).await.map(drop)
    }

    async fn init(&self, slot: &Slot, init: &Init) -> Result<()> {
        let body = InitRequest {
            env_vars: Some(init.env.clone()),
            // Empty takes an earlier token away.
            access_token: Some(init.access_token.clone().unwrap_or_default()),
            timestamp: Some(Timestamp::now().to_string()),
            default_user: Some(init.default_user.clone()),
            default_workdir: init.default_workdir.clone(),
            volume_mounts: Vec::new(),
            entropy: Some(BASE64_STANDARD.encode(rand::random::<[u8; 64]>())),
            hostname: Some(init.sandbox.clone()),
            sandbox_id: Some(init.sandbox.clone()),
            template_id: Some(init.template.clone()),
            generation: Some(init.generation),
        };
        let body = serde_json::to_vec(&body).map_err(|error| fault("/init", &error))?;
        let request = request(Method::POST, "/init")
            .header(INIT_SECRET, &init.secret)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body))
            .map_err(|error| fault("/init", &error))?;
        self.call(slot, request).await.map(drop)
    }

    async fn sync(&self, slot: &Slot, secret: &str) -> Result<()> {
        let request = request(Method::POST, "/aenv/sync")
            .header(INIT_SECRET, secret)
            .body(Full::default())
            .map_err(|error| fault("/aenv/sync", &error))?;
        self.call(slot, request).await.map(drop)
    }

    async fn run(&self, slot: &Slot, user: &str, cmd: &str, args: &[&str], limit: Duration) -> Result<i32> {
        let message =
            serde_json::json!({ "process": { "cmd": cmd, "args": args }, "stdin": false }).to_string();
        let len = u32::try_from(message.len()).map_err(|error| fault("starting a command", &error))?;
        let mut body = BytesMut::with_capacity(message.len() + 5);
        body.extend_from_slice(&[0]);
        body.extend_from_slice(&len.to_be_bytes());
        body.extend_from_slice(message.as_bytes());
        let request = request(Method::POST, "/process.Process/Start")
            .header(header::CONTENT_TYPE, "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("connect-timeout-ms", limit.as_millis().to_string())
            .header(header::AUTHORIZATION, format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:"))))
            .body(Full::from(body.freeze()))
            .map_err(|error| fault("starting a command", &error))?;
        let run = async {
            let response = self.send(slot, request).await?;
            let status = response.status();
            let mut body = response.into_body();
            let mut frames = Frames::default();
            let mut exit = None;
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| fault("reading a command's output", &error))?;
                let Ok(data) = frame.into_data() else { continue };
                if status != StatusCode::OK {
                    accepted("/process.Process/Start", status, &data)?;
                }
                frames.push(&data)?;
                while let Some((flags, message)) = frames.next() {
                    match outcome(flags, &message)? {
                        Some(code) if flags & END == 0 => exit = Some(code),
                        _ => {}
                    }
                }
            }
            exit.ok_or_else(|| Fault::new(format!("the stream of '{cmd}' ended without an exit code")))
        };
        tokio::time::timeout(limit, run)
            .await
            .map_err(|_| Fault::new(format!("'{cmd}' did not end within {limit:?}")))?
    }

    async fn metrics(&self, slot: &Slot, token: Option<&str>) -> Result<GuestMetrics> {
        let mut request = request(Method::GET, "/metrics");
        if let Some(token) = token {
            request = request.header("x-access-token", token);
        }
        let request = request.body(Full::default()).map_err(|error| fault("/metrics", &error))?;
        let body = self.call(slot, request).await?;
        let body: MetricsBody = serde_json::from_slice(&body).map_err(|error| fault("/metrics", &error))?;
        Ok(GuestMetrics {
            at: Timestamp::now(),
            cpu_count: body.cpu_count,
            cpu_used_pct: if body.cpu_used_pct.is_finite() { body.cpu_used_pct } else { 0.0 },
            mem_used: body.mem_used,
            mem_total: body.mem_total,
            mem_cache: body.mem_cache,
            disk_used: body.disk_used,
            disk_total: body.disk_total,
        })
    }
}

fn request(method: Method, path: &str) -> http::request::Builder {
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "guest")
        .header(header::CONNECTION, "close")
}

fn accepted(what: &str, status: StatusCode, body: &[u8]) -> Result<()> {
    if status.is_success() {
        return Ok(());
    }
    let words: String = String::from_utf8_lossy(body).chars().take(300).collect();
    Err(Fault::new(format!("the guest agent answered {what} with {status}: {words}")))
}

/// Whether waiting may help: the guest isn't up yet, or its network isn't.
fn may_pass(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::ConnectionRefused
            | Kind::ConnectionReset
            | Kind::TimedOut
            | Kind::HostUnreachable
            | Kind::NetworkUnreachable
            | Kind::Interrupted
            | Kind::WouldBlock
    )
}

fn fault(what: &str, error: &dyn std::fmt::Display) -> Fault {
    Fault::new(format!("{what}: {error}"))
}

/// Flag of a Connect stream's last message.
const END: u8 = 2;

/// Splits a Connect stream into its messages: flags, u32 length (big-endian), content.
#[derive(Default)]
struct Frames {
    buffer: BytesMut,
}

impl Frames {
    fn push(&mut self, data: &[u8]) -> Result<()> {
        if self.buffer.len() + data.len() > 2 * MAX_ANSWER {
            return Err(Fault::new("the guest agent sent a message that is too long"));
        }
        self.buffer.extend_from_slice(data);
        Ok(())
    }

    fn next(&mut self) -> Option<(u8, Bytes)> {
        let head = self.buffer.first_chunk::<5>()?;
        let flags = head[0];
        let len = usize::try_from(u32::from_be_bytes([head[1], head[2], head[3], head[4]])).ok()?;
        if self.buffer.len() < 5 + len {
            return None;
        }
        let _ = self.buffer.split_to(5);
        Some((flags, self.buffer.split_to(len).freeze()))
    }
}

/// The exit code in a message of a process stream, if it holds one. An error that ends the stream is an error.
fn outcome(flags: u8, message: &[u8]) -> Result<Option<i32>> {
    let value: serde_json::Value =
        serde_json::from_slice(message).map_err(|e| fault("reading a process event", &e))?;
    if flags & END != 0 {
        return match value.get("error") {
            Some(error) if !error.is_null() => {
                Err(Fault::new(format!("the guest agent ended the command: {error}")))
            }
            _ => Ok(None),
        };
    }
    let Some(end) = value.get("event").and_then(|event| event.get("end")) else { return Ok(None) };
    // Zero is left out in protobuf's JSON.
    let code = end.get("exitCode").and_then(serde_json::Value::as_i64).unwrap_or(0);
    Ok(Some(i32::try_from(code).unwrap_or(-1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(flags: u8, text: &str) -> Vec<u8> {
        let mut bytes = vec![flags];
        bytes.extend(u32::try_from(text.len()).unwrap().to_be_bytes());
        bytes.extend(text.as_bytes());
        bytes
    }

    #[test]
    fn messages_are_found_however_the_bytes_arrive() {
        let mut stream = frame(0, r#"{"event":{"start":{"pid":7}}}"#);
        stream.extend(frame(0, r#"{"event":{"end":{"exitCode":3,"exited":true}}}"#));
        stream.extend(frame(END, "{}"));
        for step in 1..stream.len() {
            let mut frames = Frames::default();
            let mut codes = Vec::new();
            for part in stream.chunks(step) {
                frames.push(part).unwrap();
                while let Some((flags, message)) = frames.next() {
                    codes.push(outcome(flags, &message).unwrap());
                }
            }
            assert_eq!(codes, [None, Some(3), None], "in steps of {step}");
        }
    }

    #[test]
    fn an_exit_code_of_zero_may_be_left_out() {
        assert_eq!(outcome(0, br#"{"event":{"end":{"exited":true}}}"#).unwrap(), Some(0));
    }

    #[test]
    fn an_error_at_the_end_of_the_stream_is_an_error() {
        let error = outcome(END, br#"{"error":{"code":"not_found","message":"no such file"}}"#).unwrap_err();
        assert!(error.to_string().contains("no such file"), "{error}");
    }

    #[test]
    fn a_guest_that_sends_without_end_is_cut_off() {
        let mut frames = Frames::default();
        frames.push(&[0, 0xff, 0xff, 0xff, 0xff]).unwrap();
        let chunk = vec![0; MAX_ANSWER];
        frames.push(&chunk).unwrap();
        frames.push(&chunk).unwrap_err();
    }
}
