//! The event stream of `Start` and `Connect`.

use std::time::{Duration, Instant};

use aenv_envd_proto::{
    oneof::{Output, ProcessEvent as Event},
    process::{
        ProcessEvent,
        process_event::{DataEvent, EndEvent, KeepAlive, StartEvent},
    },
};
use connectrpc::ConnectError;
use futures_util::{Stream as Events, stream};
use http::HeaderMap;
use tokio::sync::watch;

use super::spool::{Chunk, End, Listener, Next, Stream};

/// What a stream does while nothing happens, unless the caller says otherwise: Keepalive-Ping-Interval, in seconds.
const KEEPALIVE: Duration = Duration::from_secs(90);

/// The interval a caller wants to hear something in.
pub(crate) fn keepalive(headers: &HeaderMap) -> Result<Duration, ConnectError> {
    let Some(value) = headers.get("keepalive-ping-interval") else { return Ok(KEEPALIVE) };
    let asked = value.to_str().ok().and_then(|value| value.parse().ok());
    asked.filter(|secs| (1..=86_400).contains(secs)).map(Duration::from_secs).ok_or_else(|| {
        ConnectError::invalid_argument("Keepalive-Ping-Interval must be a number of seconds from 1 to 86400")
    })
}

/// How a stream ends when the guest has become another one under it.
pub(crate) fn restored() -> ConnectError {
    ConnectError::unavailable("the sandbox was restored from a snapshot: connect again")
}

pub(super) struct Attached {
    pub(super) pid: u32,
    pub(super) listener: Listener,
    /// Whether to send offsets: only to who asked, because E2B's clients don't know them.
    pub(super) with_offsets: bool,
    pub(super) keepalive: Duration,
    pub(super) deadline: Option<Instant>,
    pub(super) generation: watch::Receiver<u64>,
}

enum State {
    Starting,
    Running,
    Done,
}

impl Attached {
    pub(super) fn events(self) -> impl Events<Item = Result<ProcessEvent, ConnectError>> + Send + 'static {
        stream::unfold((State::Starting, self), |(state, mut attached)| async move {
            let event = match state {
                State::Done => return None,
                State::Starting => Ok(attached.start()),
                State::Running => attached.next().await,
            };
            let ended = match &event {
                Err(_) => true,
                Ok(event) => matches!(event, Event::End(_)),
            };
            let next = if ended { State::Done } else { State::Running };
            let event = event.map(|event| ProcessEvent { event: Some(event), ..Default::default() });
            Some((event, (next, attached)))
        })
    }

    fn start(&self) -> Event {
        let (offset, dropped) = (self.listener.position(), self.listener.dropped());
        Event::Start(Box::new(StartEvent {
            pid: self.pid,
            offset: self.with_offsets.then_some(offset),
            dropped: (self.with_offsets && dropped > 0).then_some(dropped),
            ..Default::default()
        }))
    }

    async fn next(&mut self) -> Result<Event, ConnectError> {
        let keepalive = tokio::time::sleep(self.keepalive);
        tokio::pin!(keepalive);
        loop {
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(ConnectError::deadline_exceeded(
                    "the process ran out of its time and was killed",
                ));
            }
            match self.listener.next() {
                Next::Chunk(chunk) => return Ok(self.data(chunk)),
                Next::End(end) => return Ok(ended(end)),
                Next::Lost { at, oldest } => {
                    return Err(ConnectError::data_loss(format!(
                        "this stream fell behind: output from offset {at} to {oldest} is no longer kept; connect \
                         again with x-aenv-offset: {oldest} to read on"
                    )));
                }
                Next::Wait => {}
            }
            let deadline = self.deadline;
            let overdue = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.listener.changed() => {}
                () = overdue => {}
                _ = self.generation.changed() => return Err(restored()),
                () = &mut keepalive => return Ok(Event::Keepalive(Box::<KeepAlive>::default())),
            }
        }
    }

    fn data(&self, chunk: Chunk) -> Event {
        let output = match chunk.stream {
            Stream::Stdout => Output::Stdout(chunk.data),
            Stream::Stderr => Output::Stderr(chunk.data),
            Stream::Pty => Output::Pty(chunk.data),
        };
        Event::Data(Box::new(DataEvent {
            offset: self.with_offsets.then_some(chunk.offset),
            output: Some(output),
            ..Default::default()
        }))
    }
}

fn ended(end: End) -> Event {
    Event::End(Box::new(EndEvent {
        exit_code: end.exit_code,
        exited: end.exited,
        status: end.status,
        error: end.error,
        ..Default::default()
    }))
}
