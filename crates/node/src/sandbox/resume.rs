//! Making a paused sandbox run again.
//!
//! ```text
//!   record written (Resuming) ─► room, turn ─► slot ∥ disk ∥ memory ─► restore or boot ─► agent ─► written (Running)
//! ```
//! What was saved is only read. Any failure ends the half-made machine and leaves the sandbox paused as before; so does
//! a crash.

use super::{
    Finished,
    create::{egress, started},
    home, introduce, machine_id,
};
use crate::{
    lifecycle::Outcome,
    machine::{Machine, Plan, Start},
    model::{OnTimeout, State},
    node::Inner,
    records::Record,
    steps::{Clock, Named, StepError},
};
use std::{sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

pub(crate) async fn resume(
    inner: Arc<Inner>,
    mut record: Record,
    ttl: Duration,
    on_timeout: Option<OnTimeout>,
    cancel: CancellationToken,
) -> Finished {
    let mut clock = Clock::start();
    let before = record.clone();
    record.sandbox.state = State::Resuming;
    record.generation += 1;
    let made = match inner.db.save(&record).await.step("writing the record") {
        Ok(()) => make(&inner, &record, &mut clock, &cancel).await,
        Err(error) => Err(error),
    };
    let error = match made {
        Ok(machine) => {
            record.machine = Some(machine.record.clone());
            record.sandbox.on_timeout = on_timeout.unwrap_or(record.sandbox.on_timeout);
            started(&mut record, ttl, clock);
            match inner.db.save(&record).await.step("writing the record") {
                Ok(()) => {
                    return Finished {
                        record,
                        machine: Some(machine),
                        outcome: Outcome::Done,
                        error: None,
                        exit: None,
                    };
                }
                Err(error) => {
                    inner.end_machine(machine).await;
                    error
                }
            }
        }
        Err(error) => {
            record.sandbox.phases = clock.finish();
            error
        }
    };
    // Paused as before, but its generation is spent: names of the failed machine are not used again.
    let phases = record.sandbox.phases;
    let generation = record.generation;
    record = before;
    record.sandbox.phases = phases;
    record.generation = generation;
    if let Err(error) = inner.db.save(&record).await {
        tracing::error!(sandbox = %record.sandbox.id, %error, "a failed resume could not be written down");
    }
    Finished { record, machine: None, outcome: Outcome::Undone, error: Some(error), exit: None }
}

async fn make(
    inner: &Arc<Inner>,
    record: &Record,
    clock: &mut Clock,
    cancel: &CancellationToken,
) -> Result<Machine, StepError> {
    let saved = record.saved.clone().ok_or_else(|| StepError::failed("resuming", "nothing was saved"))?;
    let room = inner.admit(record.sandbox.memory_mib).await?;
    let _turn = clock.time("queued", inner.admission.turn(cancel)).await?;
    let home = home(&record.sandbox.id);
    let (start, limit) = match saved.memory {
        Some(memory) => (Start::Restore(memory), inner.deadlines.agent),
        None => (
            Start::Boot {
                secret: record.guest.init_secret.clone(),
                memory_file: home.join(format!("memory-{}.raw", record.generation)),
            },
            inner.deadlines.boot,
        ),
    };
    let memory_file = match &start {
        Start::Boot { memory_file, .. } => Some(inner.at(memory_file)),
        Start::Restore(_) => None,
    };
    let plan = Plan {
        id: machine_id(&record.sandbox.id, record.generation),
        vcpus: record.sandbox.vcpus,
        memory_mib: record.sandbox.memory_mib,
        disk: saved.disk,
        disk_size: record.disk_size,
        upper: home.join(format!("upper-{}", record.generation)),
        egress: egress(record),
        start,
    };
    let made = match inner.launch(plan, Some(room), clock).await {
        Ok(machine) => match introduce(inner, record, &machine, limit, clock, cancel).await {
            Ok(()) => Ok(machine),
            Err(error) => {
                inner.end_machine(machine).await;
                Err(error)
            }
        },
        Err(error) => Err(error),
    };
    if made.is_err() {
        crate::machine::remove_files(memory_file).await;
    }
    made
}
