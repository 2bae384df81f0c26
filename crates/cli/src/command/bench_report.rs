//! Figures of a bench: percentiles by nearest rank, phases, the machine they were taken on.

use crate::{error::Result, output};
use aenv_api_types::PhaseTiming;
use serde::{Serialize, Serializer, ser::SerializeStruct as _};
use std::{collections::BTreeMap, time::Duration};

/// Where it was measured. Fields that this system doesn't tell are empty.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Machine {
    os: String,
    arch: String,
    kernel: String,
    cpu: String,
    cpus: usize,
    memory: String,
    kvm: bool,
    load_average: String,
    at: jiff::Timestamp,
}

impl Machine {
    pub(super) fn here() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let value = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            line.and_then(|line| line.split_once(':')).map_or(String::new(), |(_, v)| v.trim().to_owned())
        };
        Self {
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            cpu: value(&read("/proc/cpuinfo"), "model name"),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            memory: value(&read("/proc/meminfo"), "MemTotal"),
            kvm: std::path::Path::new("/dev/kvm").exists(),
            load_average: read("/proc/loadavg").trim().to_owned(),
            at: jiff::Timestamp::now(),
        }
    }
}

/// One measurement, microseconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Sample {
    total_micros: u64,
    /// What this client measured along the way.
    steps: BTreeMap<String, u64>,
    /// What the server says it spent time on.
    phases: Vec<PhaseTiming>,
}

impl Sample {
    pub(super) fn new(total: Duration, steps: &BTreeMap<String, Duration>, phases: Vec<PhaseTiming>) -> Self {
        let steps = steps.iter().map(|(name, d)| (name.clone(), micros(*d))).collect();
        Self { total_micros: micros(total), steps, phases }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// All measurements of one contestant.
#[derive(Debug)]
pub(super) struct Variant {
    name: String,
    pub(super) failures: u32,
    pub(super) samples: Vec<Sample>,
}

impl Variant {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), failures: 0, samples: Vec::new() }
    }

    fn totals(&self) -> Vec<u64> {
        sorted(self.samples.iter().map(|s| s.total_micros))
    }

    /// Median of each step and phase, in the order the server reports them.
    fn parts(&self) -> Vec<(String, u64)> {
        let mut order: Vec<String> = Vec::new();
        let mut values: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for sample in &self.samples {
            let steps = ["request", "command"].iter().filter_map(|n| sample.steps.get_key_value(*n));
            let steps = steps.map(|(name, micros)| (format!("client {name}"), *micros));
            let phases = sample.phases.iter().map(|p| (format!("server {}", p.name), p.micros));
            for (name, micros) in steps.chain(phases) {
                if !order.contains(&name) {
                    order.push(name.clone());
                }
                values.entry(name).or_default().push(micros);
            }
        }
        order
            .into_iter()
            .map(|name| {
                let all = sorted(values.remove(&name).unwrap_or_default());
                let median = percentile(&all, 50).unwrap_or_default();
                (name, median)
            })
            .collect()
    }
}

impl Serialize for Variant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let totals = self.totals();
        let parts: serde_json::Map<_, _> = self.parts().into_iter().map(|(n, m)| (n, m.into())).collect();
        let mut out = serializer.serialize_struct("Variant", 9)?;
        out.serialize_field("name", &self.name)?;
        out.serialize_field("n", &totals.len())?;
        out.serialize_field("failures", &self.failures)?;
        out.serialize_field("p50Micros", &percentile(&totals, 50))?;
        out.serialize_field("p95Micros", &percentile(&totals, 95))?;
        out.serialize_field("p99Micros", &percentile(&totals, 99))?;
        out.serialize_field("maxMicros", &totals.last())?;
        out.serialize_field("partsP50Micros", &parts)?;
        out.serialize_field("samples", &self.samples)?;
        out.end()
    }
}

/// A whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) settings: serde_json::Value,
    pub(super) variants: Vec<Variant>,
}

impl Report {
    pub(super) fn failures(&self) -> u32 {
        self.variants.iter().map(|v| v.failures).sum()
    }

    pub(super) fn print(&self) -> Result<()> {
        let m = &self.machine;
        let kvm = if m.kvm { "with" } else { "without" };
        output::line(&format!(
            "{} {} {}, {} × {}, {}, {kvm} /dev/kvm",
            m.os, m.kernel, m.arch, m.cpus, m.cpu, m.memory
        ))?;
        output::line(&format!("load {} at {}", m.load_average, m.at))?;
        let rows = self.variants.iter().map(|v| {
            let totals = v.totals();
            let at = |p| percentile(&totals, p).map_or("-".to_owned(), millis);
            let max = totals.last().copied().map_or("-".to_owned(), millis);
            [v.name.clone(), totals.len().to_string(), v.failures.to_string(), at(50), at(95), at(99), max]
        });
        output::table(["", "N", "FAILED", "P50 ms", "P95 ms", "P99 ms", "MAX ms"], rows)?;
        let rows = self
            .variants
            .iter()
            .flat_map(|v| v.parts().into_iter().map(|(part, micros)| [v.name.clone(), part, millis(micros)]));
        let rows: Vec<_> = rows.collect();
        if !rows.is_empty() {
            output::line("")?;
            output::table(["", "PART", "P50 ms"], rows)?;
        }
        Ok(())
    }
}

fn millis(micros: u64) -> String {
    format!("{}.{}", micros / 1000, micros % 1000 / 100)
}

fn sorted(values: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.into_iter().collect();
    values.sort_unstable();
    values
}

/// Nearest rank: the smallest value that at least `percent` % of all don't exceed.
fn percentile(sorted: &[u64], percent: usize) -> Option<u64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values: Vec<u64> = (1..=20).collect();
        assert_eq!(percentile(&values, 50), Some(10));
        assert_eq!(percentile(&values, 95), Some(19));
        assert_eq!(percentile(&values, 99), Some(20));
        assert_eq!(percentile(&[7], 1), Some(7));
        assert_eq!(percentile(&[], 50), None);
    }

    #[test]
    fn parts_are_medians_in_the_order_they_happen() {
        let mut variant = Variant::new("cold");
        for n in [3, 1, 2] {
            let phases = vec![
                PhaseTiming { name: "restore".into(), micros: n * 10 },
                PhaseTiming { name: "agent".into(), micros: n },
            ];
            let steps = BTreeMap::from([("request".to_owned(), Duration::from_micros(n * 100))]);
            variant.samples.push(Sample::new(Duration::from_micros(n * 200), &steps, phases));
        }
        let parts = variant.parts();
        let want = [("client request", 200), ("server restore", 20), ("server agent", 2)];
        assert_eq!(parts, want.map(|(name, micros)| (name.to_owned(), micros)));
    }
}
