//! Ending a sandbox.
//!
//! ```text
//!   written (Killing) ─► machine killed ─► exports, slot, directories given back ─► written (Dead, tombstone)
//! ```
//! Needs no working guest. A step that fails is logged and passed over: the end always comes, and what could not be
//! given back is found by the next start of the server. A crash leaves a record in `Killing`, which adoption finishes.

use super::{Finished, home};
use crate::{
    lifecycle::Outcome,
    machine::{Machine, remove_dirs},
    model::{EndCause, State, Tombstone},
    node::Inner,
    records::Record,
    steps::Clock,
};
use aenv_vmm::{Exit, ExitCause};
use jiff::Timestamp;
use std::sync::Arc;

pub(crate) async fn end(
    inner: Arc<Inner>,
    mut record: Record,
    machine: Option<Machine>,
    tombstone: Tombstone,
) -> Finished {
    let mut clock = Clock::start();
    record.sandbox.state = State::Killing;
    record.sandbox.tombstone = Some(tombstone);
    if let Err(error) = inner.db.save(&record).await {
        tracing::error!(sandbox = %record.sandbox.id, %error, "the begin of an end could not be written down");
    }
    if let Some(machine) = machine {
        clock.time("kill", inner.end_machine(machine)).await;
    }
    clock.time("erase", erase(&inner, &mut record)).await;
    record.sandbox.phases = clock.finish();
    Finished { record, machine: None, outcome: Outcome::Done, error: None, exit: None }
}

/// Removes the files of a sandbox that has no machine and writes its tombstone, which the record holds.
pub(crate) async fn erase(inner: &Arc<Inner>, record: &mut Record) {
    remove_dirs(vec![inner.at(&home(&record.sandbox.id))]).await;
    record.sandbox.state = State::Dead;
    record.machine = None;
    record.saved = None;
    record.disk.clear();
    record.garbage.clear();
    record.env_vars.clear();
    record.guest.init_secret.clear();
    record.sandbox.envd_token = None;
    record.sandbox.traffic_token = None;
    if let Some(tombstone) = &record.sandbox.tombstone {
        record.sandbox.end_at = tombstone.at;
    }
    if let Err(error) = inner.db.save(record).await {
        tracing::error!(sandbox = %record.sandbox.id, %error, "a tombstone could not be written");
    }
}

/// A tombstone from here and now.
pub(crate) fn tombstone(cause: EndCause, detail: impl Into<String>, last_state: State) -> Tombstone {
    let detail: String = detail.into();
    Tombstone { cause, detail: detail.chars().take(500).collect(), at: Timestamp::now(), last_state }
}

/// A machine's exit as the cause of a sandbox's end.
pub(crate) fn cause_of(exit: &Exit) -> EndCause {
    match exit.cause {
        ExitCause::Killed => EndCause::Killed,
        ExitCause::GuestShutdown => EndCause::GuestShutdown,
        ExitCause::GuestPanic => EndCause::GuestPanic,
        ExitCause::GuestOom => EndCause::GuestOom,
        ExitCause::HostOom => EndCause::HostOom,
        _ => EndCause::VmmCrash,
    }
}
