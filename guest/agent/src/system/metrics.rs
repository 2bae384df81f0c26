//! `GET /metrics`.

use std::{
    fs,
    sync::{Mutex, PoisonError},
};

use aenv_envd_proto::http::Metrics;

/// Remembers the previous processor times, because load is a difference.
#[derive(Default)]
pub(crate) struct Meter(Mutex<Option<Times>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Times {
    busy: u64,
    total: u64,
}

impl Meter {
    /// Reads a handful of files of /proc; blocks for that.
    pub(crate) fn measure(&self) -> Metrics {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let memory = Memory::parse(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
        let cpu_used_pct = times(&stat).map_or(0.0, |now| {
            let mut before = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let since = before.replace(now).unwrap_or(Times { busy: 0, total: 0 });
            percent(since, now)
        });
        let (disk_used, disk_total) = disk("/");
        let mem_used = memory.total.saturating_sub(memory.available);
        Metrics {
            ts: jiff::Timestamp::now().as_second(),
            cpu_count: u32::try_from(stat.lines().filter(|line| is_processor(line)).count())
                .unwrap_or_default()
                .max(1),
            cpu_used_pct,
            mem_total: memory.total,
            mem_used,
            mem_cache: memory.cached,
            mem_total_mib: memory.total >> 20,
            mem_used_mib: mem_used >> 20,
            disk_used,
            disk_total,
        }
    }
}

/// Bytes of memory of this machine.
pub(crate) fn total_memory() -> u64 {
    Memory::parse(&fs::read_to_string("/proc/meminfo").unwrap_or_default()).total
}

fn is_processor(line: &str) -> bool {
    line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// First line of /proc/stat: user nice system idle iowait irq softirq steal.
fn times(stat: &str) -> Option<Times> {
    let line = stat.lines().find(|line| line.starts_with("cpu "))?;
    let fields: Vec<u64> =
        line.split_ascii_whitespace().skip(1).take(8).filter_map(|field| field.parse().ok()).collect();
    let [user, nice, system, idle, iowait, rest @ ..] = fields.as_slice() else { return None };
    let busy = user + nice + system + rest.iter().sum::<u64>();
    Some(Times { busy, total: busy + idle + iowait })
}

fn percent(since: Times, now: Times) -> f32 {
    let total = now.total.saturating_sub(since.total);
    if total == 0 {
        return 0.0;
    }
    let hundredths = now.busy.saturating_sub(since.busy).saturating_mul(10_000) / total;
    f32::from(u16::try_from(hundredths).unwrap_or(10_000)) / 100.0
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    total: u64,
    available: u64,
    cached: u64,
}

impl Memory {
    fn parse(meminfo: &str) -> Self {
        let field = |name: &str| {
            meminfo
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
                .unwrap_or_default()
                << 10
        };
        Self { total: field("MemTotal"), available: field("MemAvailable"), cached: field("Cached") }
    }
}

fn disk(path: &str) -> (u64, u64) {
    rustix::fs::statvfs(path).map_or((0, 0), |fs| {
        let size = fs.f_frsize;
        let total = fs.f_blocks * size;
        (total.saturating_sub(fs.f_bavail * size), total)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_the_share_between_two_readings() {
        let before = times("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3 4\n").expect("a cpu line");
        let after = times("cpu  150 0 150 800 100 0 0 0 0 0\n").expect("a cpu line");
        assert!((percent(before, after) - 50.0).abs() < f32::EPSILON);
        assert!((percent(after, after)).abs() < f32::EPSILON);
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let memory =
            Memory::parse("MemTotal:  2048 kB\nMemAvailable: 1024 kB\nCached: 4 kB\nSwapCached: 9 kB\n");
        assert_eq!(memory, Memory { total: 2 << 20, available: 1 << 20, cached: 4 << 10 });
    }
}
