//! When to ask again.

use jiff::{Timestamp, fmt::rfc2822::DateTimeParser};
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(200);
const LARGEST: Duration = Duration::from_secs(10);
/// More is a mistake or a refusal; a caller's deadline is shorter anyway.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// The pause after round `round` (from 0) failed: doubling, and at random between half and the whole, so that many
/// clients that failed together don't return together.
pub(crate) fn pause(round: u32) -> Duration {
    spread(round, rand::random_range(0.0..=1.0))
}

fn spread(round: u32, chance: f64) -> Duration {
    FIRST.saturating_mul(1 << round.min(10)).min(LARGEST).mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0)
}

/// Reads `Retry-After`: seconds, or a date (RFC 9110 §10.2.3).
pub(crate) fn retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) {
        let seconds = value.parse().unwrap_or(u64::MAX);
        return Some(Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
    }
    static PARSER: DateTimeParser = DateTimeParser::new();
    let at = PARSER.parse_timestamp(value).ok()?;
    // A date that is past: now.
    let ahead = Duration::try_from(at.duration_since(now)).unwrap_or_default();
    Some(ahead.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_with_jitter_up_to_a_bound() {
        assert_eq!((spread(0, 0.0), spread(0, 1.0)), (FIRST / 2, FIRST));
        assert_eq!((spread(2, 0.0), spread(2, 1.0)), (FIRST * 2, FIRST * 4));
        assert_eq!(spread(u32::MAX, 1.0), LARGEST);
        let all: std::collections::HashSet<_> = (0..20).map(|_| pause(3)).collect();
        assert!(all.len() > 1);
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now: Timestamp = "2015-10-21T07:27:50Z".parse().unwrap();
        let read = |value| retry_after(value, now).map(|d| d.as_secs());
        assert_eq!(read("120"), Some(120));
        assert_eq!(read(" 0 "), Some(0));
        assert_eq!(read("Wed, 21 Oct 2015 07:28:00 GMT"), Some(10));
        assert_eq!(read("Wed, 21 Oct 2015 07:27:00 GMT"), Some(0));
        assert_eq!(read("99999999999999999999999"), Some(3600));
        assert_eq!((read("soon"), read(""), read("-1")), (None, None, None));
    }
}
