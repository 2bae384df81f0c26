//! storaged's end of the socket.
//!
//! A connection carries one request at a time. A request runs on the blocking pool and is finished whatever becomes
//! of its connection; only the waiting has a deadline. At most [`MAX_CONNECTIONS`] are served, later ones wait.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use uuid::Uuid;

use super::wire::{
    Answer, Call, Code, Failure, Hello, MAX_REQUEST, PROTOCOL, Reply, Request, Welcome, receive, send,
};
use crate::exports::{Error, Exports};

const MAX_CONNECTIONS: usize = 256;
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
const REPLY_PATIENCE: Duration = Duration::from_secs(10);
const MAX_DEADLINE: Duration = Duration::from_secs(600);

/// Sent when a client asked to end the process.
pub(crate) struct ShutdownRequest;

/// Serves one socket until dropped.
pub(crate) struct Server {
    listener: UnixListener,
    session: Arc<Session>,
}

struct Session {
    exports: Arc<Exports>,
    welcome: Welcome,
    shutdown: mpsc::Sender<ShutdownRequest>,
}

impl Server {
    /// Listens on `socket`, replacing a socket file that nobody serves; readable for the owner alone.
    pub(crate) fn bind(
        socket: &Path,
        exports: Arc<Exports>,
        shutdown: mpsc::Sender<ShutdownRequest>,
    ) -> io::Result<Self> {
        match std::fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(socket)?;
        std::fs::set_permissions(socket, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let welcome = Welcome {
            protocol: PROTOCOL,
            instance: Uuid::new_v4(),
            version: env!("CARGO_PKG_VERSION").into(),
        };
        Ok(Self { listener, session: Arc::new(Session { exports, welcome, shutdown }) })
    }

    pub(crate) async fn serve(self) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let place = places.clone().acquire_owned().await.expect("never closed");
            while connections.try_join_next().is_some() {}
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let session = self.session.clone();
                    connections.spawn(async move {
                        let _place = place;
                        if let Err(error) = session.converse(stream).await {
                            tracing::debug!(%error, "a control connection ended badly");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "could not accept a control connection");
                    // Out of file descriptors, most likely: some come back when connections end.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }
}

impl Session {
    async fn converse(&self, mut stream: UnixStream) -> io::Result<()> {
        let hello = timeout(HELLO_PATIENCE, receive::<Hello>(&mut stream, 4096)).await??;
        let Some(hello) = hello else { return Ok(()) };
        if hello.protocol != PROTOCOL {
            let message = format!("client {}, storaged {PROTOCOL}", hello.protocol);
            return reply(&mut stream, &Answer::<Welcome>::Err(Failure { code: Code::Protocol, message }))
                .await;
        }
        reply(&mut stream, &Answer::Ok(self.welcome.clone())).await?;
        loop {
            let call = match receive::<Call>(&mut stream, MAX_REQUEST).await {
                Ok(None) => return Ok(()),
                Ok(Some(call)) => call,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    let failure = Failure { code: Code::BadRequest, message: error.to_string() };
                    return reply(&mut stream, &Answer::<Reply>::Err(failure)).await;
                }
                Err(error) => return Err(error),
            };
            let ending = call.request == Request::Shutdown;
            match self.answer(call).await {
                Ok(done) => {
                    reply(&mut stream, &Answer::Ok(done)).await?;
                    if ending {
                        // After the reply, which would not survive the end. Full: it was asked for already.
                        let _asked = self.shutdown.try_send(ShutdownRequest);
                    }
                }
                Err(failure) => reply(&mut stream, &Answer::<Reply>::Err(failure)).await?,
            }
        }
    }

    async fn answer(&self, call: Call) -> Result<Reply, Failure> {
        let deadline = Duration::from_millis(call.deadline_ms).min(MAX_DEADLINE);
        let exports = self.exports.clone();
        let work = tokio::task::spawn_blocking(move || perform(&exports, call.request));
        match timeout(deadline, work).await {
            Ok(Ok(done)) => done.map_err(|error| Failure { code: code(&error), message: error.to_string() }),
            Ok(Err(panic)) => Err(Failure { code: Code::Io, message: format!("storaged failed: {panic}") }),
            Err(_) => {
                let message = format!("not done within {deadline:?}; it goes on, ask again");
                Err(Failure { code: Code::Deadline, message })
            }
        }
    }
}

async fn reply<T: serde::Serialize>(stream: &mut UnixStream, value: &T) -> io::Result<()> {
    timeout(REPLY_PATIENCE, send(stream, value)).await?
}

fn perform(exports: &Exports, request: Request) -> Result<Reply, Error> {
    match request {
        Request::Open(request) => exports.open(request).map(Reply::Opened),
        Request::Seal { name, to, durable } => exports.seal(&name, &to, durable).map(Reply::Sealed),
        Request::Flush { name } => exports.flush(&name).map(|()| Reply::Done),
        Request::Close { name, holder } => exports.close(&name, &holder).map(|()| Reply::Done),
        Request::List => Ok(Reply::Exports { exports: exports.list() }),
        Request::Stat { name } => exports.stat(&name).map(|info| Reply::Export(Box::new(info))),
        Request::Shutdown => exports.end_if_idle().map(|()| Reply::Done),
    }
}

fn code(error: &Error) -> Code {
    use crate::export::ExportError;
    use crate::upper_dir::UpperError;
    match error {
        Error::BadName(_) | Error::BadRequest(_) | Error::ReadOnly(_) => Code::BadRequest,
        Error::Unknown(_) | Error::Export(ExportError::Unknown(_)) => Code::Unknown,
        Error::Different { .. } | Error::Export(ExportError::Exists(_)) => Code::Different,
        Error::TooMany(_) | Error::Export(ExportError::Busy { .. }) | Error::Busy(_) => Code::Busy,
        Error::Upper(UpperError::InUse(_)) => Code::Busy,
        Error::Ending => Code::Ending,
        Error::Stack {
            source: aenv_overlaybd::Error::Io { .. } | aenv_overlaybd::Error::Commit(_), ..
        }
        | Error::Layer(crate::source::LayerError::Bytes { .. })
        | Error::Upper(UpperError::Io { .. })
        | Error::Export(ExportError::Failed { .. })
        | Error::Flush { .. } => Code::Io,
        Error::Stack { .. } | Error::Layer(_) | Error::Upper(_) => Code::BadLayer,
    }
}
