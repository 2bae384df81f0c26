//! The other end of storaged's socket.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

use super::wire::{
    Answer, Call, Code, Failure, Hello, MAX_REPLY, PROTOCOL, Reply, Request, Welcome, WelcomeAnswer, receive,
    send,
};
use crate::exports::{ExportInfo, OpenRequest, Opened, SealedLayer};

/// Idle connections kept for the next calls.
const MAX_IDLE: usize = 16;
const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);

/// A cheap handle to a storaged; clone it freely. Connections are made when needed and again after a loss, and a
/// call that was cut off is repeated once: all operations can be.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
    deadline: Duration,
}

struct Shared {
    socket: PathBuf,
    idle: Mutex<Vec<Connection>>,
}

struct Connection {
    stream: UnixStream,
    welcome: Welcome,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers on the socket: every export of it is gone.
    #[error("storaged is gone ({socket}: {source}); start it again")]
    Gone {
        /// The socket.
        socket: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// No answer in time. The operation may still happen; ask again to learn its result.
    #[error("storaged did not answer within {0:?}; ask again")]
    Deadline(Duration),
    /// storaged refused or failed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The two ends don't understand each other.
    #[error("storaged speaks another protocol: {0}; use the same version of both programs")]
    Protocol(String),
}

impl ClientError {
    /// The kind of failure storaged reported, when it did.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Failed(failure) => Some(failure.code),
            Self::Deadline(_) => Some(Code::Deadline),
            _ => None,
        }
    }
}

impl Client {
    /// A handle to whatever listens on `socket`; connects with the first call.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        let shared = Shared { socket: socket.into(), idle: Mutex::default() };
        Self { shared: Arc::new(shared), deadline: DEFAULT_DEADLINE }
    }

    /// The same handle, whose calls wait at most `deadline` (30 s by default).
    #[must_use]
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self { shared: self.shared.clone(), deadline }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.shared.socket
    }

    /// Who answers: its instance id changes with every start of storaged.
    pub async fn hello(&self) -> Result<Welcome, ClientError> {
        let deadline = Instant::now() + self.deadline;
        let connection = self.connect(deadline).await?;
        let welcome = connection.welcome.clone();
        self.keep(connection);
        Ok(welcome)
    }

    /// Returns when the storaged that answers now is gone; at once when none does.
    pub async fn gone(&self) {
        let Ok(mut connection) = self.connect(Instant::now() + self.deadline).await else { return };
        // Nothing is ever sent unasked: whatever ends this read is the end.
        let _: io::Result<Option<Reply>> = receive(&mut connection.stream, MAX_REPLY).await;
    }

    /// Opens an export or joins it. Same name and spec: same export.
    pub async fn open(&self, request: OpenRequest) -> Result<Opened, ClientError> {
        match self.call(Request::Open(request)).await? {
            Reply::Opened(opened) => Ok(opened),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes the upper of `name` the layer file `to` and goes on with an empty one; the VM must be paused.
    pub async fn seal(
        &self,
        name: impl Into<String>,
        to: impl Into<PathBuf>,
        durable: bool,
    ) -> Result<SealedLayer, ClientError> {
        match self.call(Request::Seal { name: name.into(), to: to.into(), durable }).await? {
            Reply::Sealed(layer) => Ok(layer),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes all acknowledged writes of `name` durable.
    pub async fn flush(&self, name: impl Into<String>) -> Result<(), ClientError> {
        self.done(Request::Flush { name: name.into() }).await
    }

    /// Gives up `holder`'s claim on `name`; the last one ends the export. Fine when it is closed already.
    pub async fn close(&self, name: impl Into<String>, holder: impl Into<String>) -> Result<(), ClientError> {
        self.done(Request::Close { name: name.into(), holder: holder.into() }).await
    }

    /// All exports by name.
    pub async fn list(&self) -> Result<Vec<ExportInfo>, ClientError> {
        match self.call(Request::List).await? {
            Reply::Exports { exports } => Ok(exports),
            other => Err(unexpected(&other)),
        }
    }

    /// One export.
    pub async fn stat(&self, name: impl Into<String>) -> Result<ExportInfo, ClientError> {
        match self.call(Request::Stat { name: name.into() }).await? {
            Reply::Export(info) => Ok(*info),
            other => Err(unexpected(&other)),
        }
    }

    /// Ends storaged; refused as [`Code::Busy`] while some process has an export open.
    pub async fn shutdown(&self) -> Result<(), ClientError> {
        self.done(Request::Shutdown).await
    }

    async fn done(&self, request: Request) -> Result<(), ClientError> {
        match self.call(request).await? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    async fn call(&self, request: Request) -> Result<Reply, ClientError> {
        let deadline = Instant::now() + self.deadline;
        let call =
            Call { deadline_ms: u64::try_from(self.deadline.as_millis()).unwrap_or(u64::MAX), request };
        let idle = self.shared.idle.lock().pop();
        if let Some(connection) = idle
            && let Ok(reply) = self.exchange(connection, &call, deadline).await?
        {
            return reply.map_err(ClientError::Failed);
        }
        // No idle connection, or a stale one: those left are of the same age.
        self.shared.idle.lock().clear();
        let connection = self.connect(deadline).await?;
        match self.exchange(connection, &call, deadline).await? {
            Ok(reply) => reply.map_err(ClientError::Failed),
            Err(source) => Err(self.lost(source)),
        }
    }

    /// Outer error: out of time. Middle: the connection broke. Inner: what storaged said.
    async fn exchange(
        &self,
        mut connection: Connection,
        call: &Call,
        deadline: Instant,
    ) -> Result<io::Result<Result<Reply, Failure>>, ClientError> {
        let exchange = async {
            send(&mut connection.stream, call).await?;
            receive(&mut connection.stream, MAX_REPLY).await?.ok_or(io::ErrorKind::UnexpectedEof.into())
        };
        match timeout_at(deadline, exchange).await {
            Err(_) => Err(ClientError::Deadline(self.deadline)),
            Ok(Ok(Answer::Ok(reply))) => {
                self.keep(connection);
                Ok(Ok(Ok(reply)))
            }
            Ok(Ok(Answer::Err(failure))) => {
                self.keep(connection);
                Ok(Ok(Err(failure)))
            }
            Ok(Err(error)) => Ok(Err(error)),
        }
    }

    async fn connect(&self, deadline: Instant) -> Result<Connection, ClientError> {
        let connect = async {
            let mut stream = UnixStream::connect(&self.shared.socket).await?;
            send(&mut stream, &Hello { protocol: PROTOCOL }).await?;
            let answer: Option<WelcomeAnswer> = receive(&mut stream, MAX_REPLY).await?;
            let answer = answer.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
            Ok::<_, io::Error>((stream, answer))
        };
        match timeout_at(deadline, connect).await {
            Err(_) => Err(ClientError::Deadline(self.deadline)),
            Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                Err(ClientError::Protocol(error.to_string()))
            }
            Ok(Err(source)) => Err(self.lost(source)),
            Ok(Ok((_, WelcomeAnswer::Err(failure)))) if failure.code == Code::Protocol => {
                Err(ClientError::Protocol(failure.message))
            }
            Ok(Ok((_, WelcomeAnswer::Err(failure)))) => Err(ClientError::Failed(failure)),
            Ok(Ok((stream, WelcomeAnswer::Ok(welcome)))) => Ok(Connection { stream, welcome }),
        }
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.shared.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }

    fn lost(&self, source: io::Error) -> ClientError {
        ClientError::Gone { socket: self.shared.socket.clone(), source }
    }
}

fn unexpected(reply: &Reply) -> ClientError {
    ClientError::Protocol(format!("an answer to another question: {reply:?}"))
}
