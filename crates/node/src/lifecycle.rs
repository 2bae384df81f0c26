//! What may happen to a sandbox when: the whole state machine as two pure functions.
//!
//! ```text
//!              create                      pause / ttl
//!   Creating ──────────► Running ───────────────────────► Pausing ──► Paused
//!      │                 ▲  │  ▲ snapshot/fork              │           │
//!      │ failed          │  └──┴─► Snapshotting, Forking    │ failed:   │ connect / resume / wake
//!      ▼                 │ resumed                          ▼ Running   ▼
//!    Dead ◄── Killing    └───────────────────────────────────────── Resuming ── failed: Paused
//! ```
//! - Deleting wins over everything and needs nobody's help: [`Decision::Preempt`] stops what runs (its undo completes).
//! - A request that wants what is already under way joins it; one that must come after it waits in line.
//! - An exit of the machine ends a running sandbox at once. During an operation the operation itself meets it (its
//!   step fails) and its [`Outcome`] says what is left.
//! - The states of operations ([`State::Pausing`] …) are written down before their first effect, so that a later
//!   process knows what was interrupted; see `adoption`.

use crate::model::{EndCause, OnTimeout, State};

/// What a driver does over time. One at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Make it.
    Create,
    /// Capture it and free its machine.
    Pause {
        /// Keep memory, not only the disk.
        memory: bool,
    },
    /// Restore it.
    Resume,
    /// Take a snapshot while it goes on.
    Snapshot,
    /// Make children.
    Fork,
    /// End it.
    End(EndCause),
}

impl Op {
    /// The state while it runs.
    #[must_use]
    pub fn state(self) -> State {
        match self {
            Self::Create => State::Creating,
            Self::Pause { .. } => State::Pausing,
            Self::Resume => State::Resuming,
            Self::Snapshot => State::Snapshotting,
            Self::Fork => State::Forking,
            Self::End(_) => State::Killing,
        }
    }

    /// Its name in metrics and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Pause { .. } => "pause",
            Self::Resume => "resume",
            Self::Snapshot => "snapshot",
            Self::Fork => "fork",
            Self::End(_) => "kill",
        }
    }
}

/// What someone asks of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Request {
    /// End it.
    Kill,
    /// Pause it.
    Pause {
        /// Keep memory.
        memory: bool,
    },
    /// Make it run and live at least so long.
    Connect,
    /// Make it run if it is paused.
    Resume,
    /// Make it run because of traffic.
    Wake,
    /// Set the end of its life.
    SetTimeout,
    /// Move the end of its life further.
    Refresh,
    /// Take a snapshot.
    Snapshot,
    /// Make children.
    Fork,
    /// The create that made it, repeated with its idempotency key.
    Create,
}

/// What happens by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// The machine ended.
    Exited,
    /// The end of its life has come.
    Expired(OnTimeout),
}

/// Why a request is refused; the words are the caller's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It runs and the request is for a paused one.
    Running,
    /// It is paused, or becoming so, and the request is for a running one.
    Paused,
    /// It has ended or is ending.
    Ended,
}

/// What the driver does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Begin this operation; answer when it ends.
    Start(Op),
    /// The running operation brings what is asked: answer when it ends.
    Join,
    /// Decide again when the running operation has ended.
    Queue,
    /// Carry out at once, without an operation.
    Apply,
    /// Answer with a refusal.
    Refuse(Reason),
    /// Stop the running operation, undo it, then begin this one.
    Preempt(Op),
}

/// What the driver does with an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reaction {
    /// Begin this operation.
    Start(Op),
    /// The running operation meets it by itself.
    Defer,
    /// Look again when the running operation has ended.
    Later,
    /// It says nothing new.
    Ignore,
}

/// What is left after an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It did what it was for.
    Done,
    /// It failed and was undone; the machine of before still runs.
    Undone,
    /// It failed and there is no machine any more.
    Lost,
}

/// Decides about a request.
#[must_use]
pub fn decide(state: State, request: Request) -> Decision {
    use Decision::{Apply, Join, Preempt, Queue, Refuse, Start};
    let end = Op::End(EndCause::Killed);
    match (state, request) {
        (State::Dead, _) => Refuse(Reason::Ended),
        (State::Killing, Request::Kill) => Join,
        (State::Killing, _) => Refuse(Reason::Ended),
        (State::Running | State::Paused, Request::Kill) => Start(end),
        (_, Request::Kill) => Preempt(end),

        (State::Creating, Request::Create) => Join,
        (_, Request::Create) => Apply,

        (State::Creating | State::Resuming, Request::Connect | Request::Wake) => Join,
        (State::Creating | State::Resuming, _) => Queue,

        (State::Running, Request::Pause { memory }) => Start(Op::Pause { memory }),
        (State::Running, Request::Resume) => Refuse(Reason::Running),
        (State::Running, Request::Snapshot) => Start(Op::Snapshot),
        (State::Running, Request::Fork) => Start(Op::Fork),
        (State::Running, _) => Apply,

        // Whoever wants it to run gets it back once it is whole; its end of life can't be moved meanwhile.
        (State::Pausing, Request::Pause { .. }) => Join,
        (State::Pausing, Request::SetTimeout | Request::Refresh) => Refuse(Reason::Paused),
        (State::Pausing, _) => Queue,

        (State::Paused, Request::Connect | Request::Resume | Request::Wake) => Start(Op::Resume),
        (State::Paused, Request::Pause { .. } | Request::SetTimeout | Request::Refresh) => {
            Refuse(Reason::Paused)
        }
        (State::Paused, Request::Snapshot) => Start(Op::Snapshot),
        (State::Paused, Request::Fork) => Start(Op::Fork),

        // To the outside it runs on.
        (State::Snapshotting | State::Forking, Request::Resume) => Refuse(Reason::Running),
        (State::Snapshotting | State::Forking, Request::Pause { .. } | Request::Snapshot | Request::Fork) => {
            Queue
        }
        (State::Snapshotting | State::Forking, _) => Apply,
    }
}

/// Decides about an event.
#[must_use]
pub fn react(state: State, event: Event) -> Reaction {
    match (state, event) {
        // The cause is refined by the driver from the machine's exit.
        (State::Running, Event::Exited) => Reaction::Start(Op::End(EndCause::VmmCrash)),
        (State::Running, Event::Expired(OnTimeout::Pause)) => Reaction::Start(Op::Pause { memory: true }),
        (State::Running, Event::Expired(OnTimeout::Kill)) => Reaction::Start(Op::End(EndCause::Ttl)),
        (State::Snapshotting | State::Forking, Event::Expired(_)) => Reaction::Later,
        (
            State::Creating | State::Pausing | State::Resuming | State::Snapshotting | State::Forking,
            Event::Exited,
        ) => Reaction::Defer,
        (State::Creating | State::Pausing | State::Resuming, Event::Expired(_))
        | (State::Paused | State::Killing | State::Dead, _) => Reaction::Ignore,
    }
}

/// The state after an operation.
#[must_use]
pub fn settle(op: Op, outcome: Outcome) -> State {
    match (op, outcome) {
        (Op::Create | Op::Resume | Op::Snapshot | Op::Fork, Outcome::Done) => State::Running,
        (Op::Pause { .. }, Outcome::Done) => State::Paused,
        (Op::Pause { .. } | Op::Snapshot | Op::Fork, Outcome::Undone) => State::Running,
        // What was saved before is still there: resuming doesn't consume it.
        (Op::Resume, Outcome::Undone | Outcome::Lost) => State::Paused,
        (Op::Create, Outcome::Undone | Outcome::Lost)
        | (Op::Pause { .. } | Op::Snapshot | Op::Fork, Outcome::Lost)
        | (Op::End(_), _) => State::Dead,
    }
}

#[cfg(test)]
mod tests;
