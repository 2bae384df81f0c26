//! The protocol: frames of JSON, a hello each way, then requests and replies in turn.
//!
//! ```text
//!   frame = u32 big-endian length, then that many bytes of JSON (at most MAX_REQUEST or MAX_REPLY)
//!   client → hello {protocol}          server → {ok: {protocol, instance, version}} or {err}
//!   client → {deadline_ms, op, …}      server → {ok: …} or {err: {code, message}}
//! ```

use std::io;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::exports::{ExportInfo, OpenRequest, Opened, SealedLayer};

/// Raised when a request or reply changes its meaning.
pub const PROTOCOL: u32 = 1;
/// Bytes of the largest request: a stack of 255 layers with the longest paths.
pub const MAX_REQUEST: u32 = 2 << 20;
/// Bytes of the largest reply: a list of everything.
pub const MAX_REPLY: u32 = 64 << 20;

/// First frame of a client.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Its protocol.
    pub protocol: u32,
}

/// First frame of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Its protocol.
    pub protocol: u32,
    /// Another one after each start: exports opened before are gone when it changed.
    pub instance: uuid::Uuid,
    /// Version of its program.
    pub version: String,
}

/// A request with the time its caller will wait.
#[derive(Debug, Serialize, Deserialize)]
pub struct Call {
    /// Milliseconds from its arrival; afterwards the answer is `deadline` and the work goes on by itself.
    pub deadline_ms: u64,
    /// What to do.
    #[serde(flatten)]
    pub request: Request,
}

/// What can be asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// See [`Exports::open`](crate::exports::Exports::open).
    Open(OpenRequest),
    /// See [`Exports::seal`](crate::exports::Exports::seal).
    Seal {
        /// The export.
        name: String,
        /// The layer's file.
        to: PathBuf,
        /// Whether it must survive a power loss at once.
        durable: bool,
    },
    /// See [`Exports::flush`](crate::exports::Exports::flush).
    Flush {
        /// The export.
        name: String,
    },
    /// See [`Exports::close`](crate::exports::Exports::close).
    Close {
        /// The export.
        name: String,
        /// Who gives it up.
        holder: String,
    },
    /// All exports.
    List,
    /// One export.
    Stat {
        /// The export.
        name: String,
    },
    /// End the process, if nothing is open.
    Shutdown,
}

/// What a request is answered with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Reply {
    /// To `open`.
    Opened(Opened),
    /// To `seal`.
    Sealed(SealedLayer),
    /// To `flush`, `close` and `shutdown`.
    Done,
    /// To `list`.
    Exports {
        /// By name.
        exports: Vec<ExportInfo>,
    },
    /// To `stat`.
    Export(Box<ExportInfo>),
}

/// A refusal or failure.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Failure {
    /// What kind.
    pub code: Code,
    /// For people.
    pub message: String,
}

/// A reply or a failure, as it travels.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T = Reply> {
    /// It worked.
    Ok(T),
    /// It did not.
    Err(Failure),
}

/// The answer to a hello.
pub type WelcomeAnswer = Answer<Welcome>;

/// Kinds of failure that callers tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request makes no sense.
    BadRequest,
    /// No such export.
    Unknown,
    /// The name stands for something else.
    Different,
    /// In use, or too many.
    Busy,
    /// A layer or upper is damaged or doesn't fit.
    BadLayer,
    /// Reading or writing failed.
    Io,
    /// Not done in the caller's time; it may still be done.
    Deadline,
    /// The process is ending.
    Ending,
    /// The two ends speak different protocols.
    Protocol,
}

/// Writes one frame.
pub async fn send<T: Serialize>(to: &mut (impl AsyncWrite + Unpin), value: &T) -> io::Result<()> {
    let body = serde_json::to_vec(value)?;
    let len = u32::try_from(body.len()).ok().filter(|&len| len <= MAX_REPLY);
    let len = len.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "message too large to send"))?;
    let mut frame = Vec::with_capacity(4 + body.len());
    frame.extend_from_slice(&len.to_be_bytes());
    frame.extend_from_slice(&body);
    to.write_all(&frame).await
}

/// Reads one frame of at most `max` bytes; `None` when the other end closed between frames.
pub async fn receive<T: DeserializeOwned>(
    from: &mut (impl AsyncRead + Unpin),
    max: u32,
) -> io::Result<Option<T>> {
    let mut len = [0u8; 4];
    match from.read(&mut len[..1]).await? {
        0 => return Ok(None),
        _ => from.read_exact(&mut len[1..]).await?,
    };
    let len = u32::from_be_bytes(len);
    if len > max {
        let what = format!("a message of {len} bytes, the most allowed is {max}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    // Grown as bytes come: a length alone takes no memory.
    let mut body = Vec::new();
    let got = from.take(len.into()).read_to_end(&mut body).await?;
    if u32::try_from(got) != Ok(len) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // Whatever is wrong with the text is wrong with the data, an early end of it too.
    let value = serde_json::from_slice(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    Ok(Some(value))
}
