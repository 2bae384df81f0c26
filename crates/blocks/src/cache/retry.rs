//! Asking a source until it answers, gives a final no, or the time is up.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep_until, timeout};

use super::Options;
use super::places::Place;
use crate::remote::{FetchError, RangeSource};

const FIRST: Duration = Duration::from_millis(100);
const LARGEST: Duration = Duration::from_secs(5);

/// Exactly `len` bytes at `offset`.
pub(crate) async fn read(
    source: &dyn RangeSource,
    place: &Place,
    options: &Options,
    (offset, len): (u64, usize),
    end: Instant,
) -> Result<Bytes, FetchError> {
    let mut round = 0;
    loop {
        if let Some(until) = place.closed_until() {
            if until >= end {
                let retry_after = Some(until - Instant::now());
                let reason = format!("{} limits the rate of requests", source.place());
                return Err(FetchError::Throttled { retry_after, reason });
            }
            sleep_until(until).await;
        }
        let now = Instant::now();
        let patience = options.attempt_timeout.min(end.saturating_duration_since(now));
        let error = match timeout(patience, source.read(offset, len)).await {
            Ok(Ok(bytes)) if bytes.len() == len => return Ok(bytes),
            Ok(Ok(bytes)) => FetchError::Retryable(format!(
                "{} sent {} of {len} bytes at {offset} of {}",
                source.place(),
                bytes.len(),
                source.id()
            )),
            Ok(Err(error)) => error,
            Err(_) => FetchError::TimedOut { what: name(source, offset, len), after: patience },
        };
        round += 1;
        let pause = match &error {
            FetchError::Throttled { retry_after: Some(after), .. } => {
                place.close_until(Instant::now() + *after);
                *after
            }
            _ => pause(round),
        };
        if !error.is_retryable() || round >= options.attempts || Instant::now() + pause >= end {
            return Err(error);
        }
        tracing::debug!(%error, round, "a fetch failed and is tried again");
        sleep_until(Instant::now() + pause).await;
    }
}

fn name(source: &dyn RangeSource, offset: u64, len: usize) -> String {
    format!("{len} bytes at {offset} of {} from {}", source.id(), source.place())
}

/// Doubling, and at random between half and the whole: who failed together doesn't return together.
fn pause(round: u32) -> Duration {
    let whole = FIRST.saturating_mul(1 << (round - 1).min(10)).min(LARGEST);
    whole.mul_f64(rand::random_range(0.5..=1.0))
}
