//! What every exporter promises, on each exporter there is. `cargo xtask lab --test ublk` runs it where ublk is.

#![allow(clippy::print_stderr, reason = "seeds and skips belong in a test's output")]

mod file_device;
mod recovery;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aenv_blocks::device::Device;
use aenv_blocks::export::fuse::FuseExporter;
use aenv_blocks::export::ublk::{self, UblkExporter};
use aenv_blocks::export::{ExportError, Exporter};
use file_device::FileDevice;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

/// Set in the lab, where nothing may be skipped.
fn in_lab() -> bool {
    std::env::var_os("AENV_LAB").is_some()
}

/// False, after saying why, where there is no ublk.
pub(crate) fn ublk_is_here() -> bool {
    match ublk::available() {
        Ok(_) => true,
        Err(why) => {
            assert!(!in_lab(), "the lab has no ublk: {why}");
            eprintln!("Skipped: {why}");
            false
        }
    }
}

/// Runs `check` on every exporter that this machine can have.
fn on_each(check: impl Fn(&dyn Exporter, &Path)) {
    let fuse = rustix::process::geteuid().is_root()
        && File::options().read(true).write(true).open("/dev/fuse").is_ok();
    if fuse {
        eprintln!("on FUSE");
        let dir = TempDir::new().unwrap();
        let mount_point = dir.path().join("mnt");
        std::fs::create_dir(&mount_point).unwrap();
        let exporter = FuseExporter::mount(&mount_point, 4).unwrap();
        check(&exporter, dir.path());
        exporter.unmount().unwrap();
    } else {
        assert!(!in_lab(), "the lab has no FUSE");
        eprintln!("Skipped: mounting FUSE needs root and /dev/fuse");
    }
    if ublk_is_here() {
        for queues in [1, 2] {
            eprintln!("on ublk with {queues} queues");
            let dir = TempDir::new().unwrap();
            let options = ublk::Options { queues, ..ublk::Options::default() };
            let exporter = UblkExporter::new(&dir.path().join("exports"), options).unwrap();
            check(&exporter, dir.path());
            drop(exporter);
        }
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(path).unwrap()
}

#[test]
fn random_writes_discards_and_reads_agree_with_a_model() {
    let seed: u64 = rand::random();
    eprintln!("seed {seed}");
    on_each(|exporter, dir| {
        let mut rng = StdRng::seed_from_u64(seed);
        let device = Arc::new(FileDevice::make(&dir.join("bytes"), 8 * MIB));
        let path = exporter.publish("disk", device.clone()).unwrap();
        let file = open(&path);
        let mut model = vec![0; usize::try_from(8 * MIB).unwrap()];
        for step in 0..300 {
            let offset = rng.random_range(0..(8 * MIB - 70_000) / 512) * 512;
            let blocks = rng.random_range(1..130u64);
            let (at, len) = (usize::try_from(offset).unwrap(), usize::try_from(blocks * 512).unwrap());
            match rng.random_range(0..10) {
                0..5 => {
                    let mut bytes = vec![0; len];
                    rng.fill(&mut bytes[..]);
                    file.write_all_at(&bytes, offset).unwrap();
                    model[at..at + len].copy_from_slice(&bytes);
                }
                5 => {
                    let punch =
                        rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(&file, punch, offset, blocks * 512).unwrap();
                    model[at..at + len].fill(0);
                }
                _ => {
                    let mut got = vec![0; len];
                    file.read_exact_at(&mut got, offset).unwrap();
                    assert!(got == model[at..at + len], "step {step}: {len} bytes at {offset} differ");
                }
            }
        }
        let flushes = device.flushes.load(Ordering::SeqCst);
        file.sync_all().unwrap();
        assert!(device.flushes.load(Ordering::SeqCst) > flushes, "fsync did not reach the device");
        drop(file);
        assert!(std::fs::read(dir.join("bytes")).unwrap() == model, "the device's bytes differ");
        assert!(device.traffic().stat().writes > 0);
        exporter.drain("disk", Duration::from_secs(5)).unwrap();
        exporter.withdraw("disk");
    });
}

#[test]
fn a_read_only_export_refuses_writes() {
    on_each(|exporter, dir| {
        let mut device = FileDevice::make(&dir.join("bytes"), MIB);
        device.writable = false;
        let path = exporter.publish("disk", Arc::new(device)).unwrap();
        let refused = OpenOptions::new().write(true).open(&path).and_then(|file| file.write_at(&[1; 512], 0));
        // FUSE says so at the write, a block device at the open or the write.
        let code = refused.unwrap_err().raw_os_error();
        assert!([Some(libc::EROFS), Some(libc::EACCES), Some(libc::EPERM)].contains(&code), "{code:?}");
        assert_eq!(std::fs::read(&path).unwrap().len() as u64, MIB);
        exporter.withdraw("disk");
    });
}

#[test]
fn an_open_export_is_busy_until_it_is_closed() {
    on_each(|exporter, dir| {
        let path = exporter.publish("disk", Arc::new(FileDevice::make(&dir.join("bytes"), MIB))).unwrap();
        assert_eq!(exporter.handles("disk"), 0);
        let file = open(&path);
        assert_eq!((exporter.handles("disk"), exporter.all_handles()), (1, 1));
        let busy = exporter.drain("disk", Duration::from_millis(50)).unwrap_err();
        assert!(matches!(busy, ExportError::Busy { handles: 1, .. }), "{busy}");
        // Refused: as if nothing had been asked.
        drop(open(&path));
        let closer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(file);
        });
        exporter.drain("disk", Duration::from_secs(10)).unwrap();
        closer.join().unwrap();
        assert!(File::open(&path).is_err(), "a drained export can be opened");
        exporter.withdraw("disk");
        assert!(!path.exists());
        exporter.withdraw("disk");
        let unknown = exporter.drain("disk", Duration::ZERO).unwrap_err();
        assert!(matches!(unknown, ExportError::Unknown(_)), "{unknown}");
    });
}

#[test]
fn handles_of_a_withdrawn_export_go_on_working() {
    on_each(|exporter, dir| {
        let path = exporter.publish("disk", Arc::new(FileDevice::make(&dir.join("bytes"), MIB))).unwrap();
        let file = open(&path);
        exporter.withdraw("disk");
        assert!(!path.exists());
        file.write_all_at(&[7; 4096], 8192).unwrap();
        file.sync_all().unwrap();
        let mut got = [0; 4096];
        file.read_exact_at(&mut got, 8192).unwrap();
        assert_eq!(got, [7; 4096]);
        assert_eq!(exporter.all_handles(), 1);
        drop(file);
        let closed = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(25));
            exporter.all_handles() == 0
        });
        assert!(closed, "the handle is still counted");
        // The name is free again.
        exporter.publish("disk", Arc::new(FileDevice::make(&dir.join("other"), MIB))).unwrap();
        exporter.withdraw("disk");
    });
}

#[test]
fn a_name_is_given_once() {
    on_each(|exporter, dir| {
        exporter.publish("disk", Arc::new(FileDevice::make(&dir.join("bytes"), MIB))).unwrap();
        let twice =
            exporter.publish("disk", Arc::new(FileDevice::make(&dir.join("other"), MIB))).unwrap_err();
        assert!(matches!(twice, ExportError::Exists(_)), "{twice}");
        exporter.withdraw("disk");
    });
}

#[test]
fn a_stuck_read_holds_up_no_other() {
    on_each(|exporter, dir| {
        let device = Arc::new(FileDevice::make(&dir.join("bytes"), 4 * MIB));
        let path = exporter.publish("disk", device.clone()).unwrap();
        let gate = device.block_reads_from(3 * MIB);
        let stuck = {
            let path = path.clone();
            std::thread::spawn(move || {
                File::open(path).unwrap().read_exact_at(&mut [0; 4096], 3 * MIB).unwrap()
            })
        };
        gate.wait_until_stuck(Duration::from_secs(20));
        File::open(&path).unwrap().read_exact_at(&mut [0; 4096], 0).unwrap();
        assert!(!stuck.is_finished());
        gate.open();
        stuck.join().unwrap();
        exporter.withdraw("disk");
    });
}

#[test]
fn a_failing_device_gives_io_errors_and_counts_them() {
    on_each(|exporter, dir| {
        let device = Arc::new(FileDevice::make(&dir.join("bytes"), 4 * MIB));
        let path = exporter.publish("disk", device.clone()).unwrap();
        device.broken.store(true, Ordering::SeqCst);
        let error = File::open(&path).unwrap().read_exact_at(&mut [0; 4096], 2 * MIB).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert!(device.traffic().stat().errors > 0);
        device.broken.store(false, Ordering::SeqCst);
        File::open(&path).unwrap().read_exact_at(&mut [0; 4096], MIB).unwrap();
        exporter.withdraw("disk");
    });
}

#[test]
fn a_ublk_export_has_the_block_size_asked_for_and_refuses_others() {
    if !ublk_is_here() {
        return;
    }
    for block_bytes in [512, 4096] {
        let dir = TempDir::new().unwrap();
        let options = ublk::Options { block_bytes, ..ublk::Options::default() };
        let exporter = UblkExporter::new(&dir.path().join("exports"), options).unwrap();
        let path =
            exporter.publish("disk", Arc::new(FileDevice::make(&dir.path().join("bytes"), MIB))).unwrap();
        let node = std::fs::read_link(path).unwrap();
        let name = node.file_name().unwrap().to_str().unwrap();
        let knob = |knob: &str| {
            std::fs::read_to_string(format!("/sys/block/{name}/queue/{knob}")).unwrap().trim().to_owned()
        };
        assert_eq!(knob("logical_block_size"), block_bytes.to_string());
        assert_eq!((knob("write_cache").as_str(), knob("fua").as_str()), ("write back", "1"));
        let odd = exporter.publish("odd", Arc::new(FileDevice::make(&dir.path().join("odd"), MIB + 100)));
        assert!(odd.unwrap_err().to_string().contains("no multiple of the block size"));
        exporter.withdraw("disk");
        assert!(!Path::new(&format!("/sys/block/{name}")).exists(), "the device is left behind");
    }
}
