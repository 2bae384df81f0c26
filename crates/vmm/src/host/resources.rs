//! Kernel, privileges, memory, disk and control groups.

use super::Check;
use std::{fs, path::Path};

const GIB: u64 = 1 << 30;

/// What the machine is.
pub(super) fn machine() -> Vec<Check> {
    vec![kernel(), architecture(), privileges()]
}

/// How much room it has.
pub(super) fn room(data_dir: &Path) -> Vec<Check> {
    vec![memory(), disk(data_dir), cgroup(Path::new("/sys/fs/cgroup"))]
}

fn kernel() -> Check {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|word| word.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match version {
        // pidfds, close_range
        (0..=4, _) | (5, 0..=8) => Check::fail("kernel", release, "Linux 5.9 or newer is needed"),
        // PAGEMAP_SCAN
        (5, _) | (6, 0..=6) => {
            Check::warn("kernel", release, "Linux 6.7 or newer finds changed memory faster")
        }
        _ => Check::ok("kernel", release),
    }
}

fn architecture() -> Check {
    match std::env::consts::ARCH {
        "x86_64" => Check::ok("architecture", "x86_64"),
        other => Check::fail("architecture", other, "guests are x86_64 machines: use such a host"),
    }
}

fn privileges() -> Check {
    if rustix::process::geteuid().is_root() {
        Check::ok("privileges", "root")
    } else {
        Check::fail("privileges", "not root", "the server makes namespaces, taps and mounts: run it as root")
    }
}

fn memory() -> Check {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
    };
    let (available, total) = (kib("MemAvailable") << 10, kib("MemTotal") << 10);
    let found = format!("{} of {} available", gib(available), gib(total));
    if available < 2 * GIB {
        Check::warn("memory", found, "a sandbox needs some 60 MiB and what its guest writes: few will fit")
    } else {
        Check::ok("memory", found)
    }
}

fn disk(data_dir: &Path) -> Check {
    // The directory need not exist yet: the nearest one above tells the same.
    let there = data_dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(there) {
        Err(error) => {
            Check::warn("disk", format!("{}: {error}", there.display()), "choose another --data-dir")
        }
        Ok(stat) => {
            let free = stat.f_bavail * stat.f_frsize;
            let found = format!("{} free for {}", gib(free), data_dir.display());
            match free {
                0..2_147_483_648 => {
                    Check::fail("disk", found, "free some space or choose another --data-dir")
                }
                2_147_483_648..10_737_418_240 => {
                    Check::warn("disk", found, "images and snapshots take some GiB: free some space")
                }
                _ => Check::ok("disk", found),
            }
        }
    }
}

fn cgroup(root: &Path) -> Check {
    let remedy = "machines run without bounds of their own on the host's memory; boot with cgroup version 2 and run as root";
    let writable = |dir: &Path| rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok();
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    if controllers.split_whitespace().any(|name| name == "memory") {
        return if writable(root) {
            Check::ok("cgroup", "version 2, writable")
        } else {
            Check::warn("cgroup", "version 2, not writable", remedy)
        };
    }
    let memory = root.join("memory");
    if memory.join("cgroup.procs").exists() && writable(&memory) {
        Check::ok("cgroup", "version 1, memory controller writable")
    } else {
        Check::warn("cgroup", "no memory controller", remedy)
    }
}

/// With one decimal.
fn gib(bytes: u64) -> String {
    let tenths = bytes * 10 / GIB;
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}
