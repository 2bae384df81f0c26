//! The one task that acts for a sandbox.
//!
//! It holds the record and the machine, takes requests from a bounded mailbox, lets the table in
//! [`lifecycle`](crate::lifecycle) decide, and runs at most one operation at a time. An operation owns record and
//! machine while it runs and hands them back; whoever asked may be gone by then. When the sandbox is dead the driver
//! answers what is left in the mailbox and ends.

mod asked;
mod finished;
mod merging;

pub(crate) use asked::{Answer, Ask, Message, in_words};

use self::asked::Waiter;
use super::{
    Finished, Source, after, create,
    end::{cause_of, end, tombstone},
    merge::Merged,
    pause, resume,
};
use crate::{
    control::{self},
    lifecycle::{self, Decision, Event, Op, Outcome, Reaction, Reason},
    machine::Machine,
    model::{Connected, EndCause, State},
    node::Inner,
    records::Record,
    steps::{StepError, ended},
};
use aenv_vmm::Exit;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinError, JoinHandle},
};
use tokio_util::sync::CancellationToken;

/// Requests waiting for the running operation; more are refused.
const MAX_WAITING: usize = 64;
/// Messages in a mailbox; senders wait when it is full.
pub(crate) const MAILBOX: usize = 64;
/// A failed end-of-life pause is tried again after this long.
const RETRY_EXPIRED: Duration = Duration::from_secs(30);

/// How a driver begins.
pub(crate) enum Begin {
    /// Makes the sandbox; the record is written.
    Create(Source),
    /// It runs: adopted.
    Running(Machine),
    /// It is paused.
    Paused,
}

struct Running {
    op: Op,
    /// A task of its own: a panic in it doesn't take the driver along.
    work: JoinHandle<Finished>,
    cancel: CancellationToken,
    /// Answered when it ends.
    joined: Vec<Waiter>,
}

/// The task's state.
pub(crate) struct Driver {
    inner: Arc<Inner>,
    record: Record,
    machine: Option<Machine>,
    exit: Option<watch::Receiver<Option<Exit>>>,
    running: Option<Running>,
    queued: VecDeque<Waiter>,
    /// Begun when the running operation has ended, whatever its outcome.
    then: Option<(Op, Waiter)>,
    /// Answers held back until a failed operation is cleaned up.
    failed: Vec<(Waiter, control::Error)>,
    /// Before this time an end of life that could not be carried out isn't tried again.
    retry_at: Option<tokio::time::Instant>,
    merging: bool,
    merged: Option<Merged>,
    mailbox: mpsc::Sender<Message>,
}

enum Next {
    Finished(Result<Box<Finished>, JoinError>),
    Exited(Exit),
    Message(Option<Message>),
    Expired,
    Stopped,
}

impl Driver {
    /// Starts the task; the sender is its mailbox.
    pub(crate) fn spawn(inner: &Arc<Inner>, record: Record, begin: Begin) -> mpsc::Sender<Message> {
        let (sender, receiver) = mpsc::channel(MAILBOX);
        let mut driver = Self {
            inner: Arc::clone(inner),
            record,
            machine: None,
            exit: None,
            running: None,
            queued: VecDeque::new(),
            then: None,
            failed: Vec::new(),
            retry_at: None,
            merging: false,
            merged: None,
            mailbox: sender.clone(),
        };
        match begin {
            Begin::Create(source) => {
                let cancel = CancellationToken::new();
                let work = create::create(Arc::clone(inner), driver.record.clone(), source, cancel.clone());
                let work = inner.tasks.spawn(work);
                driver.running = Some(Running { op: Op::Create, work, cancel, joined: Vec::new() });
            }
            Begin::Running(machine) => {
                driver.exit = Some(machine.vm.exit());
                driver.machine = Some(machine);
            }
            Begin::Paused => {}
        }
        driver.publish();
        inner.tasks.spawn(driver.run(receiver));
        sender
    }

    async fn run(mut self, mut mailbox: mpsc::Receiver<Message>) {
        self.tidy();
        while self.record.sandbox.state != State::Dead || self.running.is_some() {
            match self.next(&mut mailbox).await {
                Next::Finished(Ok(finished)) => self.finished(*finished).await,
                Next::Finished(Err(error)) => self.broken(&error).await,
                Next::Exited(exit) => self.exited(&exit),
                Next::Message(Some(Message::Ask(ask, reply))) => self.receive(Waiter { ask, reply }).await,
                Next::Message(Some(Message::Merged(merged))) => self.merged(merged).await,
                Next::Expired => self.expired(),
                // The server stops: machines and records stay as they are.
                Next::Message(None) | Next::Stopped => return,
            }
        }
        self.inner.retire(&self.record.sandbox.id);
        mailbox.close();
        while let Some(message) = mailbox.recv().await {
            match message {
                Message::Ask(ask, reply) => self.answer(Waiter { ask, reply }, Ok(())),
                Message::Merged(_) => {}
            }
        }
    }

    async fn next(&mut self, mailbox: &mut mpsc::Receiver<Message>) -> Next {
        let idle = self.running.is_none();
        let expiry = self.expiry();
        let Self { running, exit, inner, .. } = self;
        tokio::select! {
            biased;
            finished = async {
                match running {
                    Some(running) => (&mut running.work).await,
                    None => std::future::pending().await,
                }
            } => Next::Finished(finished.map(Box::new)),
            exit = async {
                match exit {
                    Some(exit) if idle => ended(exit).await,
                    _ => std::future::pending().await,
                }
            } => Next::Exited(exit),
            message = mailbox.recv() => Next::Message(message),
            () = tokio::time::sleep(expiry.unwrap_or_default()), if idle && expiry.is_some() => Next::Expired,
            () = inner.stop.cancelled(), if idle => Next::Stopped,
        }
    }

    fn state(&self) -> State {
        self.record.sandbox.state
    }

    /// Time until the end of life, when that means something now.
    fn expiry(&self) -> Option<Duration> {
        if self.state() != State::Running {
            return None;
        }
        let left = Timestamp::now().duration_until(self.record.sandbox.end_at);
        let left = Duration::try_from(left).unwrap_or_default();
        let retry = self.retry_at.map_or(Duration::ZERO, |at| at.duration_since(tokio::time::Instant::now()));
        Some(left.max(retry))
    }

    fn publish(&self) {
        self.inner.publish(&self.record, self.machine.as_ref().map(|machine| &machine.record.slot));
    }

    /// Takes a request in.
    async fn receive(&mut self, waiter: Waiter) {
        let state = self.running.as_ref().map_or(self.state(), |running| running.op.state());
        match lifecycle::decide(state, waiter.ask.request()) {
            Decision::Start(op) => self.begin(op, Some(waiter)),
            Decision::Join => match &mut self.running {
                Some(running) if running.joined.len() < MAX_WAITING => running.joined.push(waiter),
                _ => Self::overrun(waiter),
            },
            Decision::Queue if self.queued.len() < MAX_WAITING => self.queued.push_back(waiter),
            Decision::Queue => Self::overrun(waiter),
            Decision::Apply => self.apply(waiter).await,
            Decision::Refuse(reason) => {
                let error = self.refusal(reason);
                let _ = waiter.reply.send(Err(error));
            }
            Decision::Preempt(op) => {
                if let Some(running) = &self.running {
                    running.cancel.cancel();
                }
                match &self.then {
                    None => self.then = Some((op, waiter)),
                    // A second delete waits with the first.
                    Some(_) if self.queued.len() < MAX_WAITING => self.queued.push_back(waiter),
                    Some(_) => Self::overrun(waiter),
                }
            }
        }
    }

    fn overrun(waiter: Waiter) {
        let message = format!("{MAX_WAITING} requests wait for this sandbox already; try again");
        let _ = waiter.reply.send(Err(control::Error::Full { message, retry_after: Duration::from_secs(1) }));
    }

    fn refusal(&self, reason: Reason) -> control::Error {
        let id = &self.record.sandbox.id;
        match reason {
            Reason::Running => control::Error::Conflict(format!("sandbox {id} is already running")),
            Reason::Paused => control::Error::Conflict(format!("sandbox {id} is paused")),
            Reason::Ended => {
                let cause = self.record.sandbox.tombstone.as_ref();
                control::Error::SandboxEnded {
                    id: id.to_string(),
                    cause: cause.map_or_else(|| "it is being ended".to_owned(), in_words),
                }
            }
        }
    }

    /// Carries out what needs no operation.
    async fn apply(&mut self, waiter: Waiter) {
        let end_at = self.record.sandbox.end_at;
        let wanted = match waiter.ask {
            Ask::SetTimeout { ttl } => after(ttl),
            Ask::Connect { ttl } | Ask::Refresh { ttl } => end_at.max(after(ttl)),
            _ => end_at,
        };
        if wanted != end_at && self.state() == State::Running {
            self.retry_at = None;
            self.record.sandbox.end_at = wanted;
            if let Err(error) = self.inner.db.save(&self.record).await {
                self.record.sandbox.end_at = end_at;
                let _ = waiter.reply.send(Err(control::Error::Internal(error.to_string())));
                return;
            }
            self.publish();
        }
        self.respond(waiter, false);
    }

    /// Answers a request that was met.
    fn respond(&self, waiter: Waiter, resumed: bool) {
        let sandbox = || Box::new(self.record.sandbox.clone());
        let answer = match waiter.ask {
            Ask::Create | Ask::Resume { .. } => Answer::Sandbox(sandbox()),
            Ask::Connect { .. } => Answer::Connected(Box::new(Connected { sandbox: *sandbox(), resumed })),
            Ask::Wake { .. } => match self.inner.route_of(&self.record.sandbox.id) {
                Some(route) => Answer::Route(Box::new(route)),
                None => {
                    let id = self.record.sandbox.id.to_string();
                    let _ = waiter.reply.send(Err(control::Error::SandboxNotFound(id)));
                    return;
                }
            },
            Ask::Kill | Ask::Pause { .. } | Ask::SetTimeout { .. } | Ask::Refresh { .. } => Answer::Done,
        };
        let _ = waiter.reply.send(Ok(answer));
    }

    /// Answers a request by what became of the operation it waited for.
    fn answer(&self, waiter: Waiter, result: Result<(), &StepError>) {
        let id = self.record.sandbox.id.as_str();
        match (result, waiter.ask) {
            (_, Ask::Kill) if self.state() == State::Dead => self.respond(waiter, false),
            (Err(error), _) => {
                let _ = waiter.reply.send(Err(error.answer(id)));
            }
            (Ok(()), _) if self.state() == State::Dead => {
                let _ = waiter.reply.send(Err(self.refusal(Reason::Ended)));
            }
            (Ok(()), _) => self.respond(waiter, true),
        }
    }

    /// Begins an operation from rest.
    fn begin(&mut self, op: Op, waiter: Option<Waiter>) {
        let detail = match op {
            Op::End(EndCause::Ttl) => "its time to live ended",
            _ => "asked for",
        };
        let end_of = |driver: &Self, cause| tombstone(cause, detail, driver.state());
        let cancel = CancellationToken::new();
        let inner = Arc::clone(&self.inner);
        let record = self.record.clone();
        let work: BoxFuture<'static, Finished> = match (op, self.machine.take()) {
            (Op::Pause { memory }, Some(machine)) => {
                Box::pin(pause::pause(inner, record, machine, memory, cancel.clone()))
            }
            (Op::Resume, None) => {
                let (ttl, on_timeout) = match waiter.as_ref().map(|waiter| waiter.ask) {
                    Some(Ask::Resume { ttl, on_timeout }) => (ttl, on_timeout),
                    Some(Ask::Connect { ttl } | Ask::Wake { ttl }) => (ttl, None),
                    _ => (Duration::from_secs(self.record.ttl), None),
                };
                Box::pin(resume::resume(inner, record, ttl, on_timeout, cancel.clone()))
            }
            (Op::End(cause), machine) => Box::pin(end(inner, record, machine, end_of(self, cause))),
            (op, machine) => {
                self.machine = machine;
                let error = control::Error::Invalid(format!("this node can't {} a sandbox yet", op.name()));
                if let Some(waiter) = waiter {
                    let _ = waiter.reply.send(Err(error));
                }
                return;
            }
        };
        self.launch(op, work, cancel, waiter.into_iter().collect());
    }

    fn launch(
        &mut self,
        op: Op,
        work: BoxFuture<'static, Finished>,
        cancel: CancellationToken,
        joined: Vec<Waiter>,
    ) {
        self.exit = None;
        self.record.sandbox.state = op.state();
        self.publish();
        self.inner.note(&self.record.sandbox.id, "info", &format!("{} begins", op.name()));
        let work = self.inner.tasks.spawn(work);
        self.running = Some(Running { op, work, cancel, joined });
    }

    /// Ends it for a reason of its own, with the answers that wait for that.
    fn bury(&mut self, cause: EndCause, detail: &str, last: State) {
        let machine = self.machine.take();
        let tombstone = tombstone(cause, detail, last);
        let work = end(Arc::clone(&self.inner), self.record.clone(), machine, tombstone);
        self.launch(Op::End(cause), Box::pin(work), CancellationToken::new(), Vec::new());
    }

    /// An operation panicked: a fault of this program. What it held is unknown, so the sandbox ends; a machine that is
    /// still there is reaped by the next start.
    async fn broken(&mut self, error: &JoinError) {
        tracing::error!(sandbox = %self.record.sandbox.id, %error, "an operation broke off");
        let error = Some(StepError::failed("running an operation", error));
        let record = self.record.clone();
        self.finished(Finished { record, machine: None, outcome: Outcome::Lost, error, exit: None }).await;
    }

    fn exited(&mut self, exit: &Exit) {
        self.exit = None;
        if let Reaction::Start(Op::End(_)) = lifecycle::react(self.state(), Event::Exited) {
            tracing::warn!(sandbox = %self.record.sandbox.id, %exit, "the machine ended");
            self.inner.note(&self.record.sandbox.id, "error", &format!("the machine ended: {exit}"));
            self.bury(cause_of(exit), &exit.detail, self.state());
        }
    }

    fn expired(&mut self) {
        self.retry_at = None;
        let event = Event::Expired(self.record.sandbox.on_timeout);
        if let Reaction::Start(op) = lifecycle::react(self.state(), event) {
            self.begin(op, None);
        }
    }
}
