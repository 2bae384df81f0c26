//! What happened to each sandbox, and how it does: bounded rings in memory.

use crate::control::PhaseHistogram;
use crate::model::{EndCause, GuestMetrics, LogEntry, Phase, SandboxId};
use jiff::Timestamp;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Lines kept of a sandbox.
const MAX_LINES: usize = 500;
/// Samples kept of a sandbox: an hour at one in five seconds.
const MAX_SAMPLES: usize = 720;
/// Upper bounds of the phase histograms, seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];

#[derive(Default)]
pub(crate) struct Journal {
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    lines: HashMap<SandboxId, VecDeque<LogEntry>>,
    samples: HashMap<SandboxId, VecDeque<GuestMetrics>>,
    ended: BTreeMap<String, u64>,
    phases: BTreeMap<(&'static str, String), Histogram>,
}

#[derive(Default)]
struct Histogram {
    counts: [u64; BOUNDS.len()],
    sum: f64,
    count: u64,
}

/// Phase names that appear in metrics: a closed set, so that labels stay few.
const PHASES: [&str; 19] = [
    "queued", "network", "storage", "memory", "restore", "boot", "agent", "continue", "sync", "stop",
    "state", "disk", "manifest", "record", "free", "kill", "erase", "total", "exercise",
];

impl Journal {
    pub(crate) fn note(&self, id: &SandboxId, level: &str, message: &str) {
        let mut held = self.held.lock();
        let lines = held.lines.entry(id.clone()).or_default();
        if lines.len() == MAX_LINES {
            lines.pop_front();
        }
        let fields = BTreeMap::from([("source".to_owned(), "node".to_owned())]);
        lines.push_back(LogEntry {
            at: Timestamp::now(),
            level: level.to_owned(),
            message: message.to_owned(),
            fields,
        });
    }

    pub(crate) fn lines(&self, id: &SandboxId) -> Vec<LogEntry> {
        self.held.lock().lines.get(id).map(|lines| lines.iter().cloned().collect()).unwrap_or_default()
    }

    pub(crate) fn sample(&self, id: &SandboxId, sample: GuestMetrics) {
        let mut held = self.held.lock();
        let samples = held.samples.entry(id.clone()).or_default();
        if samples.len() == MAX_SAMPLES {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    pub(crate) fn samples(
        &self,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Vec<GuestMetrics> {
        let held = self.held.lock();
        let Some(samples) = held.samples.get(id) else { return Vec::new() };
        let wanted = |sample: &&GuestMetrics| {
            from.is_none_or(|from| sample.at >= from) && to.is_none_or(|to| sample.at <= to)
        };
        samples.iter().filter(wanted).cloned().collect()
    }

    /// The samples go with the sandbox; its lines stay as long as its tombstone.
    pub(crate) fn retire(&self, id: &SandboxId) {
        self.held.lock().samples.remove(id);
    }

    pub(crate) fn forget(&self, id: &SandboxId) {
        let mut held = self.held.lock();
        held.samples.remove(id);
        held.lines.remove(id);
    }

    pub(crate) fn ended(&self, cause: EndCause) {
        let word = serde_json::to_value(cause).ok().and_then(|value| value.as_str().map(str::to_owned));
        *self.held.lock().ended.entry(word.unwrap_or_default()).or_default() += 1;
    }

    pub(crate) fn observe(&self, operation: &'static str, phases: &[Phase]) {
        let mut held = self.held.lock();
        for phase in phases.iter().filter(|phase| PHASES.contains(&phase.name.as_str())) {
            let histogram = held.phases.entry((operation, phase.name.clone())).or_default();
            let seconds = std::time::Duration::from_micros(phase.micros).as_secs_f64();
            histogram.sum += seconds;
            histogram.count += 1;
            for (count, bound) in histogram.counts.iter_mut().zip(BOUNDS) {
                *count += u64::from(seconds <= bound);
            }
        }
    }

    pub(crate) fn counts(&self) -> (Vec<(String, u64)>, Vec<PhaseHistogram>) {
        let held = self.held.lock();
        let ended = held.ended.iter().map(|(cause, count)| (cause.clone(), *count)).collect();
        let phases = held
            .phases
            .iter()
            .filter_map(|((operation, phase), histogram)| {
                Some(PhaseHistogram {
                    operation,
                    phase: PHASES.into_iter().find(|name| name == phase)?,
                    buckets: BOUNDS.into_iter().zip(histogram.counts).collect(),
                    sum: histogram.sum,
                    count: histogram.count,
                })
            })
            .collect();
        (ended, phases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_lines_go_first_and_their_number_is_bounded() {
        let journal = Journal::default();
        let id = SandboxId::random();
        for line in 0..MAX_LINES + 10 {
            journal.note(&id, "info", &line.to_string());
        }
        let lines = journal.lines(&id);
        assert_eq!((lines.len(), lines[0].message.as_str()), (MAX_LINES, "10"));
    }

    #[test]
    fn buckets_are_cumulative_and_unknown_phases_make_no_labels() {
        let journal = Journal::default();
        let phase = |name: &str, micros| Phase { name: name.into(), micros };
        journal.observe("create", &[phase("restore", 30_000), phase("warm/…", 1), phase("restore", 900)]);
        let (_, phases) = journal.counts();
        assert_eq!(phases.len(), 1);
        let cumulative: Vec<u64> = phases[0].buckets.iter().map(|(_, count)| *count).collect();
        assert_eq!(cumulative, [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2]);
    }
}
