//! Starting a sandbox from a template.
//!
//! ```text
//!   record written (Creating) ─► turn ─► slot ∥ disk ─► restore ─► agent ─► record written (Running)
//!                                 └ or a warm machine: continue ─────┘
//! ```
//! Any failure ends the machine and gives everything back; the driver then buries the sandbox (`start_failed`).
//! A crash at any point leaves a record in `Creating`, which adoption turns into a tombstone.

use super::{Finished, after, home, introduce, machine_id};
use crate::{
    admission::Room,
    lifecycle::Outcome,
    machine::{Machine, Plan, Start},
    model::State,
    node::Inner,
    records::{Record, SavedMemory},
    steps::{Clock, Named, StepError, within},
};
use aenv_network::Egress;
use std::{sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

/// Where the machine comes from.
pub(crate) enum Source {
    /// Restored from the template's snapshot.
    Template {
        /// Its memory half.
        memory: SavedMemory,
        /// Taken when the request was admitted.
        room: Room,
    },
    /// Restored, exercised and stopped ahead of need; its files lie in this sandbox's directory already.
    Warm(Machine),
}

pub(crate) async fn create(
    inner: Arc<Inner>,
    mut record: Record,
    source: Source,
    cancel: CancellationToken,
) -> Finished {
    let mut clock = Clock::start();
    let made = make(&inner, &record, source, &mut clock, &cancel).await;
    match made {
        Ok(machine) => {
            record.machine = Some(machine.record.clone());
            let ttl = Duration::from_secs(record.ttl);
            started(&mut record, ttl, clock);
            if let Err(error) = inner.db.save(&record).await.step("writing the record") {
                inner.end_machine(machine).await;
                record.machine = None;
                return failed(record, error);
            }
            Finished { record, machine: Some(machine), outcome: Outcome::Done, error: None, exit: None }
        }
        Err(error) => {
            record.sandbox.phases = clock.finish();
            failed(record, error)
        }
    }
}

/// Marks a record as running from now on.
pub(super) fn started(record: &mut Record, ttl: Duration, clock: Clock) {
    let sandbox = &mut record.sandbox;
    sandbox.state = State::Running;
    sandbox.end_at = after(ttl);
    sandbox.phases = clock.finish();
}

fn failed(record: Record, error: StepError) -> Finished {
    Finished { record, machine: None, outcome: Outcome::Lost, error: Some(error), exit: None }
}

async fn make(
    inner: &Arc<Inner>,
    record: &Record,
    source: Source,
    clock: &mut Clock,
    cancel: &CancellationToken,
) -> Result<Machine, StepError> {
    let machine = match source {
        Source::Warm(machine) => {
            let woken = wake(inner, record, &machine, clock).await;
            if let Err(error) = woken {
                inner.end_machine(machine).await;
                return Err(error);
            }
            machine
        }
        Source::Template { memory, room } => {
            let _turn = clock.time("queued", inner.admission.turn(cancel)).await?;
            let plan = Plan {
                id: machine_id(&record.sandbox.id, record.generation),
                vcpus: record.sandbox.vcpus,
                memory_mib: record.sandbox.memory_mib,
                disk: record.disk.clone(),
                disk_size: record.disk_size,
                upper: home(&record.sandbox.id).join(format!("upper-{}", record.generation)),
                egress: egress(record),
                start: Start::Restore(memory),
            };
            inner.launch(plan, Some(room), clock).await?
        }
    };
    match introduce(inner, record, &machine, inner.deadlines.agent, clock, cancel).await {
        Ok(()) => Ok(machine),
        Err(error) => {
            inner.end_machine(machine).await;
            Err(error)
        }
    }
}

/// What the sandbox's guest may reach.
pub(super) fn egress(record: &Record) -> Egress {
    if record.sandbox.allow_internet_access { Egress::Internet } else { Egress::Nothing }
}

/// Lets a warm machine run on, under the rules of the sandbox it now is.
async fn wake(
    inner: &Arc<Inner>,
    record: &Record,
    machine: &Machine,
    clock: &mut Clock,
) -> Result<(), StepError> {
    if egress(record) != Egress::Internet {
        let (network, slot) = (Arc::clone(&inner.parts.network), machine.record.slot.clone());
        let work =
            async move { network.set_egress(&slot, Egress::Nothing).await.step("closing the network") };
        clock.time("network", within("closing the network", inner.deadlines.network, work)).await?;
    }
    let vm = Arc::clone(&machine.vm);
    let work = async move { vm.resume().await.step("continuing the machine") };
    clock.time("continue", within("continuing the machine", inner.deadlines.machine, work)).await
}
