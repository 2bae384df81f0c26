//! The frequency of this host's time-stamp counter, which an emulated guest reads directly.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Frequency in kHz; 0 where there is no such counter. Takes up to 40 ms when the CPU doesn't tell.
///
/// Sources: CPUID leaf 15H (Intel SDM vol. 2A, CPUID), which is exact; else counting against CLOCK_MONOTONIC_RAW,
/// good to some ten parts in a million.
pub(crate) fn khz() -> u64 {
    told().or_else(counted).unwrap_or(0)
}

#[cfg(target_arch = "x86_64")]
fn told() -> Option<u64> {
    use std::arch::x86_64::__cpuid;
    if __cpuid(0).eax < 0x15 {
        return None;
    }
    let leaf = __cpuid(0x15);
    let (denominator, numerator, crystal) = (u64::from(leaf.eax), u64::from(leaf.ebx), u64::from(leaf.ecx));
    // Any of them may be zero: enumerated, but not told.
    let hertz = (crystal * numerator).checked_div(denominator)?;
    (hertz > 0).then_some(hertz / 1000)
}

#[cfg(target_arch = "x86_64")]
fn counted() -> Option<u64> {
    // The median of three, because a preemption between the two readings spoils one.
    let mut rates = [0; 3].map(|_: u64| count_once());
    rates.sort_unstable();
    Some(rates[1]).filter(|rate| *rate > 0)
}

#[cfg(target_arch = "x86_64")]
fn count_once() -> u64 {
    const INTERVAL: Duration = Duration::from_millis(12);
    let read = || {
        // SAFETY: rdtsc has no operands and touches no memory; every x86_64 has it.
        (now(), unsafe { std::arch::x86_64::_rdtsc() })
    };
    let (started, first) = read();
    std::thread::sleep(INTERVAL);
    let (ended, last) = read();
    let nanoseconds = u64::try_from((ended - started).as_nanos()).unwrap_or(u64::MAX);
    u64::try_from(u128::from(last.saturating_sub(first)) * 1_000_000 / u128::from(nanoseconds.max(1)))
        .unwrap_or(0)
}

#[cfg(not(target_arch = "x86_64"))]
fn told() -> Option<u64> {
    None
}

#[cfg(not(target_arch = "x86_64"))]
fn counted() -> Option<u64> {
    None
}

#[cfg(target_arch = "x86_64")]
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::MonotonicRaw)).unwrap_or_default()
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn two_readings_agree_within_the_tolerance_of_a_restore() {
        let (a, b) = (khz(), khz());
        assert!(a > 100_000, "{a} kHz");
        assert!(a.abs_diff(b) <= a / 1000, "{a} and {b} kHz");
    }
}
