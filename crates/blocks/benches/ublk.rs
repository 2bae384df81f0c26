//! `cargo xtask lab --test ublk-bench`: O_DIRECT reads and writes of a raw file, and of the same file exported over ublk
//! and over FUSE, in one run. The lab is emulated: the shares say something, the MiB/s little. `BENCH_DIR` says where.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

#[path = "../tests/exporters/file_device.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod file_device;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aenv_blocks::export::Exporter;
use aenv_blocks::export::fuse::FuseExporter;
use aenv_blocks::export::ublk::{Options, UblkExporter, available};
use file_device::FileDevice;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const SIZE: u64 = 256 << 20;
const TIME: Duration = Duration::from_secs(2);

/// One pattern of access.
struct Load {
    what: &'static str,
    write: bool,
    random: bool,
    bytes: usize,
    /// Requests at once, each by a thread of its own.
    depth: u64,
}

const LOADS: [Load; 6] = [
    Load { what: "sequential read, 1 MiB", write: false, random: false, bytes: 1 << 20, depth: 1 },
    Load { what: "sequential write, 1 MiB", write: true, random: false, bytes: 1 << 20, depth: 1 },
    Load { what: "random read, 4 KiB, depth 1", write: false, random: true, bytes: 4096, depth: 1 },
    Load { what: "random read, 4 KiB, depth 32", write: false, random: true, bytes: 4096, depth: 32 },
    Load { what: "random write, 4 KiB, depth 1", write: true, random: true, bytes: 4096, depth: 1 },
    Load { what: "random write, 4 KiB, depth 32", write: true, random: true, bytes: 4096, depth: 32 },
];

fn main() {
    if let Err(why) = available() {
        println!("Skipped: {why}");
        return;
    }
    let dir =
        tempfile::tempdir_in(std::env::var_os("BENCH_DIR").unwrap_or(std::env::temp_dir().into())).unwrap();
    let raw = dir.path().join("raw");
    let mut chunk = vec![0; 1 << 20];
    StdRng::seed_from_u64(1).fill(&mut chunk[..]);
    let file = File::create(&raw).unwrap();
    for at in (0..SIZE).step_by(1 << 20) {
        file.write_all_at(&chunk, at).unwrap();
    }
    file.sync_all().unwrap();

    let mount_point = dir.path().join("mnt");
    std::fs::create_dir(&mount_point).unwrap();
    let fuse = FuseExporter::mount(&mount_point, 4).unwrap();
    let ublk = UblkExporter::new(&dir.path().join("exports"), Options::default()).unwrap();
    let served =
        |exporter: &dyn Exporter| exporter.publish("disk", Arc::new(FileDevice::make(&raw, SIZE))).unwrap();
    let (by_ublk, by_fuse) = (served(&ublk), served(&fuse));
    println!("{:<34} {:>10} {:>18} {:>18}", "MiB/s (share of raw)", "raw", "ublk", "FUSE");
    for load in &LOADS {
        let base = speed(&raw, load);
        let [ublk, fuse] = [&by_ublk, &by_fuse].map(|path| {
            let speed = speed(path, load);
            format!("{speed:.1} ({:.0} %)", 100.0 * speed / base)
        });
        println!("{:<34} {base:>10.1} {ublk:>18} {fuse:>18}", load.what);
    }
    ublk.withdraw("disk");
    fuse.withdraw("disk");
    fuse.unmount().unwrap();
}

/// MiB/s.
fn speed(path: &Path, load: &Load) -> f64 {
    let done = AtomicU64::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for job in 0..load.depth {
            let done = &done;
            scope.spawn(move || {
                let mut options = OpenOptions::new();
                options.read(true).write(load.write).custom_flags(libc::O_DIRECT);
                let file = options.open(path).unwrap();
                let mut rng = StdRng::seed_from_u64(job);
                // O_DIRECT wants whole pages: the buffer starts at the first one of its memory.
                let mut memory = vec![0u8; load.bytes + 4096];
                let skip = memory.as_ptr().align_offset(4096);
                let buffer = &mut memory[skip..skip + load.bytes];
                let blocks = SIZE / load.bytes as u64;
                let mut next = 0;
                while started.elapsed() < TIME {
                    let block = if load.random { rng.random_range(0..blocks) } else { next % blocks };
                    let at = block * load.bytes as u64;
                    if load.write {
                        file.write_all_at(buffer, at).unwrap();
                    } else {
                        file.read_exact_at(buffer, at).unwrap();
                    }
                    next += 1;
                }
                done.fetch_add(next, Ordering::Relaxed);
            });
        }
    });
    #[allow(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let mib = (done.load(Ordering::Relaxed) * load.bytes as u64) as f64 / (1 << 20) as f64;
    mib / started.elapsed().as_secs_f64()
}
