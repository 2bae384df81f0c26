//! What follows when an operation has ended.

use super::{Ask, Driver, RETRY_EXPIRED, Running, Waiter};
use crate::{
    lifecycle::{Op, settle},
    model::{EndCause, State},
    sandbox::{Finished, after, end::cause_of},
    steps::StepError,
};
use jiff::Timestamp;

impl Driver {
    pub(super) async fn finished(&mut self, finished: Finished) {
        let Some(Running { op, joined, .. }) = self.running.take() else { return };
        let Finished { record, machine, outcome, error, exit } = finished;
        self.record = record;
        self.exit = machine.as_ref().map(|machine| machine.vm.exit());
        self.machine = machine;
        let state = settle(op, outcome);
        self.inner.observe(op.name(), &self.record.sandbox.phases);
        self.report(op, error.as_ref());

        if state == State::Dead && !matches!(op, Op::End(_)) {
            // It failed and nothing is left to go on with: clean up first, then answer.
            if let Some(error) = &error {
                let id = self.record.sandbox.id.to_string();
                self.failed.extend(joined.into_iter().map(|waiter| (waiter, error.answer(&id))));
            }
            let killed = self.then.take();
            let cause = match (&killed, &exit, &error) {
                (Some(_), _, _) => EndCause::Killed,
                (None, Some(exit), _) => cause_of(exit),
                (None, None, Some(StepError::Exited { exit, .. })) if op != Op::Create => cause_of(exit),
                _ => EndCause::StartFailed,
            };
            let detail = match (&killed, &exit, &error) {
                (Some(_), _, _) => "asked for".to_owned(),
                (None, Some(exit), _) => exit.detail.clone(),
                (None, None, Some(error)) => error.to_string(),
                (None, None, None) => String::new(),
            };
            self.bury(cause, &detail, op.state());
            if let (Some((_, waiter)), Some(running)) = (killed, &mut self.running) {
                running.joined.push(waiter);
            }
            return;
        }
        self.record.sandbox.state = state;
        self.publish();
        for (waiter, error) in self.failed.drain(..) {
            let _ = waiter.reply.send(Err(error));
        }
        if let Some(error) = &error {
            if self.expired_already() {
                self.retry_at = Some(tokio::time::Instant::now() + RETRY_EXPIRED);
            }
            for waiter in joined {
                self.answer(waiter, Err(error));
            }
        } else {
            self.extend(&joined).await;
            for waiter in joined {
                self.joined_answer(op, waiter);
            }
        }
        if let Some((op, waiter)) = self.then.take() {
            match state {
                State::Dead => self.answer(waiter, Ok(())),
                _ => self.begin(op, Some(waiter)),
            }
        }
        while self.running.is_none()
            && let Some(waiter) = self.queued.pop_front()
        {
            if self.state() == State::Dead {
                self.answer(waiter, Ok(()));
            } else {
                self.receive(waiter).await;
            }
        }
        // What still waits belongs behind the operation that has just begun: decided again, so that a kill comes first.
        if self.running.is_some() {
            for waiter in std::mem::take(&mut self.queued) {
                self.receive(waiter).await;
            }
        }
        if let (None, Some(merged)) = (&self.running, self.merged.take()) {
            self.merged(Some(merged)).await;
        }
        self.tidy();
    }

    fn joined_answer(&self, op: Op, waiter: Waiter) {
        match waiter.ask {
            Ask::Connect { .. } => self.respond(waiter, op == Op::Resume),
            _ => self.answer(waiter, Ok(())),
        }
    }

    /// Several may have asked for the same resume: the longest life wins.
    async fn extend(&mut self, joined: &[Waiter]) {
        if self.state() != State::Running {
            return;
        }
        let longest = joined.iter().filter_map(|waiter| match waiter.ask {
            Ask::Connect { ttl } | Ask::Wake { ttl } | Ask::Resume { ttl, .. } => Some(after(ttl)),
            _ => None,
        });
        let Some(longest) = longest.max() else { return };
        // A millisecond has passed since the operation set it: that is no reason to write again.
        if longest.duration_since(self.record.sandbox.end_at) > jiff::SignedDuration::from_secs(1) {
            self.record.sandbox.end_at = longest;
            if let Err(error) = self.inner.db.save(&self.record).await {
                tracing::error!(sandbox = %self.record.sandbox.id, %error, "a longer life could not be written down");
            }
            self.publish();
        }
    }

    fn expired_already(&self) -> bool {
        self.state() == State::Running && Timestamp::now() >= self.record.sandbox.end_at
    }

    fn report(&self, op: Op, error: Option<&StepError>) {
        let id = &self.record.sandbox.id;
        let micros = self.record.sandbox.phases.last().map_or(0, |phase| phase.micros);
        match error {
            None => {
                tracing::info!(sandbox = %id, operation = op.name(), micros, "done");
                self.inner.note(id, "info", &format!("{} done in {} ms", op.name(), micros / 1000));
            }
            Some(error) => {
                tracing::warn!(sandbox = %id, operation = op.name(), micros, %error, "failed");
                self.inner.note(id, "error", &format!("{} failed: {error}", op.name()));
            }
        }
        if let (Op::End(_), Some(tombstone)) = (op, &self.record.sandbox.tombstone) {
            self.inner.ended(tombstone.cause);
        }
    }
}
