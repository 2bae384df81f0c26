//! Background observation: resource samples of running sandboxes, and the forgetting of old tombstones.

use crate::{model::SandboxId, node::Inner};
use futures_util::StreamExt;
use jiff::Timestamp;
use std::{sync::Arc, time::Duration};
use tokio::time::MissedTickBehavior;

const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// A guest that takes longer is skipped this time.
const SAMPLE_LIMIT: Duration = Duration::from_secs(2);
/// Guests asked at the same time.
const SAMPLE_WIDTH: usize = 4;
const PURGE_EVERY: Duration = Duration::from_secs(60);

/// Asks every running guest for a sample, again and again.
pub(crate) async fn sample(inner: Arc<Inner>) {
    let mut ticks = tokio::time::interval(SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = inner.stop.cancelled() => return,
        }
        let running: Vec<_> = {
            let views = inner.views.read();
            views
                .values()
                .filter(|view| view.route.running)
                .filter_map(|view| {
                    Some((view.sandbox.id.clone(), view.route.slot.clone()?, view.route.clone()))
                })
                .collect()
        };
        let samples =
            futures_util::stream::iter(running).for_each_concurrent(SAMPLE_WIDTH, |(id, slot, route)| {
                let inner = Arc::clone(&inner);
                async move {
                    let asked = inner.parts.guests.metrics(&slot, route.envd_token.as_deref());
                    match tokio::time::timeout(SAMPLE_LIMIT, asked).await {
                        // It may have been paused meanwhile; a sample taken before is still true.
                        Ok(Ok(sample)) => inner.journal.sample(&id, sample),
                        Ok(Err(error)) => tracing::debug!(sandbox = %id, %error, "no sample"),
                        Err(_) => tracing::debug!(sandbox = %id, "no sample in time"),
                    }
                }
            });
        tokio::select! {
            () = samples => {}
            () = inner.stop.cancelled() => return,
        }
    }
}

/// Forgets tombstones that are old or too many.
pub(crate) async fn purge(inner: Arc<Inner>) {
    let mut ticks = tokio::time::interval(PURGE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = inner.stop.cancelled() => return,
        }
        purge_once(&inner, Timestamp::now()).await;
    }
}

pub(crate) async fn purge_once(inner: &Inner, now: Timestamp) -> Vec<SandboxId> {
    let before = now.checked_sub(inner.limits.tombstone_age).unwrap_or(Timestamp::MIN);
    match inner.db.purge(before, inner.limits.max_tombstones).await {
        Ok(gone) => {
            {
                let mut views = inner.views.write();
                for id in &gone {
                    views.remove(id);
                }
            }
            inner.idempotent.lock().retain(|_, id| !gone.contains(id));
            for id in &gone {
                inner.journal.forget(id);
            }
            gone
        }
        Err(error) => {
            tracing::warn!(%error, "old tombstones stay for now");
            Vec::new()
        }
    }
}
