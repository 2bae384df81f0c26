//! A client of QEMU's control protocol (docs/interop/qmp-spec.rst in QEMU's tree): JSON lines over a unix socket.
//!
//! ```text
//!   connect ── greeting ── qmp_capabilities ──► ready ── execute … (answers by id, events in between) ──► closed
//! ```
//!
//! QEMU serves one client of a socket at a time: dropping a [`Client`] closes its connection, so that the next server
//! can connect. Every command has a deadline; a late answer is thrown away. A line longer than 1 MiB or one that is no
//! JSON closes the connection, because nothing after it can be trusted.

use bytes::BytesMut;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{oneshot, watch},
    task::JoinHandle,
    time::timeout,
};

const LONGEST_LINE: usize = 1 << 20;

/// Why a command has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("QEMU closed its control socket")]
    Closed,
    #[error("QEMU did not answer `{command}` within {limit:?}")]
    Deadline { command: &'static str, limit: Duration },
    #[error("QEMU refused `{command}`: {reason}")]
    Refused { command: &'static str, reason: String },
    #[error("connecting to QEMU's control socket: {0}")]
    Connect(#[from] io::Error),
}

/// What QEMU told without being asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Told {
    /// `reason` of a SHUTDOWN event: `guest-shutdown`, `guest-reset`, `host-signal` and others.
    pub(super) shutdown: Option<String>,
    /// How often the virtual CPUs were set running.
    pub(super) resumed: u64,
    /// The connection has ended.
    pub(super) closed: bool,
}

/// One connection.
pub(super) struct Client {
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    pending: Arc<Pending>,
    next_id: AtomicU64,
    told: watch::Receiver<Told>,
    reader: JoinHandle<()>,
}

/// Where the answer to a command goes: its value, or QEMU's reason to refuse.
type Answer = oneshot::Sender<Result<Value, String>>;

/// Commands under way by id; `None` once the connection has ended.
struct Pending(Mutex<Option<HashMap<u64, Answer>>>);

impl Client {
    /// Connects and negotiates; all of it within `limit`.
    pub(super) async fn connect(socket: &Path, limit: Duration) -> Result<Self, Error> {
        let ready = async {
            let (reader, writer) = open(socket).await?.into_split();
            let (tell, told) = watch::channel(Told::default());
            let pending = Arc::new(Pending(Mutex::new(Some(HashMap::new()))));
            let client = Self {
                writer: tokio::sync::Mutex::new(writer),
                pending: Arc::clone(&pending),
                next_id: AtomicU64::new(1),
                told,
                reader: tokio::spawn(read(reader, pending, tell)),
            };
            // QEMU sends its greeting first, but takes the answer to it at any time.
            client.execute("qmp_capabilities", json!({}), limit).await?;
            Ok(client)
        };
        timeout(limit, ready).await.map_err(|_| Error::Deadline { command: "qmp_capabilities", limit })?
    }

    /// Runs one command and returns its `return` value.
    pub(super) async fn execute(
        &self,
        command: &'static str,
        arguments: Value,
        limit: Duration,
    ) -> Result<Value, Error> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        match self.pending.0.lock().as_mut() {
            Some(waiting) => drop(waiting.insert(id, answer)),
            None => return Err(Error::Closed),
        }
        let forget = Forget { pending: &self.pending, id };
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        let talk = async {
            self.writer.lock().await.write_all(line.as_bytes()).await.map_err(|_| Error::Closed)?;
            answered.await.map_err(|_| Error::Closed)?.map_err(|reason| Error::Refused { command, reason })
        };
        let result = timeout(limit, talk).await.unwrap_or(Err(Error::Deadline { command, limit }));
        drop(forget);
        result
    }

    /// Watches what QEMU tells by itself.
    pub(super) fn told(&self) -> watch::Receiver<Told> {
        self.told.clone()
    }

    /// Whether the connection still stands.
    pub(super) fn is_open(&self) -> bool {
        !self.told.borrow().closed
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Takes a command out of the table when its caller stops waiting, for whatever reason.
struct Forget<'a> {
    pending: &'a Pending,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        if let Some(waiting) = self.pending.0.lock().as_mut() {
            waiting.remove(&self.id);
        }
    }
}

async fn open(socket: &Path) -> io::Result<UnixStream> {
    // sun_path holds 107 bytes; a longer path is reached through its directory.
    if socket.as_os_str().len() <= 107 {
        return UnixStream::connect(socket).await;
    }
    let (handle, short) = super::files::short_socket_path(socket)?;
    let stream = UnixStream::connect(short).await;
    drop(handle);
    stream
}

async fn read(mut reader: OwnedReadHalf, pending: Arc<Pending>, tell: watch::Sender<Told>) {
    let mut buffer = BytesMut::with_capacity(8192);
    'connection: loop {
        match reader.read_buf(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line = buffer.split_to(end + 1);
            let Ok(message) = serde_json::from_slice::<Value>(&line) else {
                tracing::error!("QEMU sent a line that is no JSON; closing its control connection");
                break 'connection;
            };
            take(message, &pending, &tell);
        }
        if buffer.len() > LONGEST_LINE {
            tracing::error!(
                "QEMU sent a line longer than {LONGEST_LINE} bytes; closing its control connection"
            );
            break;
        }
    }
    // Waiting commands learn of it because their senders are dropped.
    pending.0.lock().take();
    tell.send_modify(|told| told.closed = true);
}

fn take(mut message: Value, pending: &Pending, tell: &watch::Sender<Told>) {
    if let Some(event) = message.get("event").and_then(Value::as_str) {
        tracing::trace!(event, "QEMU event");
        match event {
            "SHUTDOWN" => {
                let reason = message["data"]["reason"].as_str().unwrap_or("unnamed").to_owned();
                tell.send_modify(|told| told.shutdown = Some(reason));
            }
            "RESUME" => tell.send_modify(|told| told.resumed += 1),
            _ => {}
        }
        return;
    }
    let Some(id) = message.get("id").and_then(Value::as_u64) else { return };
    let Some(waiting) = pending.0.lock().as_mut().and_then(|waiting| waiting.remove(&id)) else { return };
    let answer = match message.get("error") {
        Some(error) => Err(error["desc"].as_str().unwrap_or("no reason given").to_owned()),
        None => Ok(message["return"].take()),
    };
    // Its caller may have stopped waiting just now.
    let _ = waiting.send(answer);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{io::AsyncBufReadExt, io::BufReader, net::UnixListener};

    const SOON: Duration = Duration::from_secs(5);

    /// Serves one connection: greets, then answers each line with what `answer` makes of it.
    fn serve(listener: UnixListener, answer: impl Fn(&Value) -> String + Send + 'static) {
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (reader, mut writer) = stream.into_split();
            writer.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n").await.unwrap();
            let mut lines = BufReader::new(reader).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let request: Value = serde_json::from_str(&line).unwrap();
                let text = if request["execute"] == "qmp_capabilities" {
                    json!({ "return": {}, "id": request["id"] }).to_string()
                } else {
                    answer(&request)
                };
                if writer.write_all(format!("{text}\r\n").as_bytes()).await.is_err() {
                    return;
                }
            }
        });
    }

    async fn client(answer: impl Fn(&Value) -> String + Send + 'static) -> Client {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp.sock");
        serve(UnixListener::bind(&path).unwrap(), answer);
        Client::connect(&path, SOON).await.unwrap()
    }

    #[tokio::test]
    async fn answers_and_refusals_reach_their_callers_past_events() {
        let client = client(|request| {
            let event = json!({ "event": "RESUME", "timestamp": {} });
            if request["execute"] == "stop" {
                format!(
                    "{event}\n{}",
                    json!({ "error": { "class": "GenericError", "desc": "no" }, "id": request["id"] })
                )
            } else {
                format!("{event}\n{}", json!({ "return": request["arguments"], "id": request["id"] }))
            }
        })
        .await;
        assert_eq!(client.execute("cont", json!({ "a": 1 }), SOON).await.unwrap(), json!({ "a": 1 }));
        let refused = client.execute("stop", json!({}), SOON).await.unwrap_err();
        assert_eq!(refused.to_string(), "QEMU refused `stop`: no");
        assert_eq!(client.told().borrow().resumed, 2);
    }

    #[tokio::test]
    async fn a_silent_monitor_meets_the_deadline_and_the_connection_stays_usable() {
        let client = client(|request| {
            if request["execute"] == "stop" {
                json!({ "event": "STOP" }).to_string()
            } else {
                json!({ "return": 1, "id": request["id"] }).to_string()
            }
        })
        .await;
        let late = client.execute("stop", json!({}), Duration::from_millis(20)).await.unwrap_err();
        assert!(matches!(late, Error::Deadline { command: "stop", .. }));
        assert_eq!(client.execute("cont", json!({}), SOON).await.unwrap(), json!(1));
    }

    #[tokio::test]
    async fn garbage_closes_the_connection_and_wakes_everyone() {
        let client = client(|_| "{not json".to_owned()).await;
        assert!(matches!(client.execute("stop", json!({}), SOON).await.unwrap_err(), Error::Closed));
        assert!(!client.is_open());
        assert!(matches!(client.execute("cont", json!({}), SOON).await.unwrap_err(), Error::Closed));
    }

    #[tokio::test]
    async fn the_reason_of_a_shutdown_is_kept_after_the_end() {
        let client = client(|_| {
            json!({ "event": "SHUTDOWN", "data": { "guest": true, "reason": "guest-reset" } }).to_string()
        })
        .await;
        let mut told = client.told();
        let _ = client.execute("cont", json!({}), Duration::from_millis(50)).await;
        let reason = timeout(SOON, told.wait_for(|told| told.shutdown.is_some()))
            .await
            .unwrap()
            .unwrap()
            .shutdown
            .clone();
        assert_eq!(reason.as_deref(), Some("guest-reset"));
    }
}
