//! Exports through a real FUSE mount.

#![allow(clippy::print_stderr, reason = "seeds and skips belong in a test's output")]

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::process::Command;

use aenv_blocks::control::wire::Code;
use aenv_blocks::spec::{LayerSpec, Mode};
use aenv_blocks::storaged;
use common::{MIB, daemon, pattern, patterned, run, stack};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

#[test]
fn a_read_only_export_shows_the_layer_and_refuses_writes() {
    let Some(daemon) = daemon() else { return };
    let base = patterned(&daemon.path("base.raw"), 4 * MIB);
    // Larger than the layer, so that this is no pass-through of one file.
    let opened = daemon.open("ro", stack(6 * MIB, &[base]), Mode::ReadOnly);
    assert_eq!(std::fs::metadata(&opened.path).unwrap().len(), 6 * MIB);
    let bytes = std::fs::read(&opened.path).unwrap();
    for (block, got) in (0u64..).zip(bytes.chunks(4096)) {
        let wanted = if block < 1024 { pattern(block) } else { vec![0; 4096] };
        assert!(got == wanted, "block {block} differs");
    }
    let file = OpenOptions::new().read(true).write(true).open(&opened.path).unwrap();
    assert_eq!(file.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EROFS));
    drop(file);
    daemon.close("ro");
    assert!(!opened.path.exists());
}

#[test]
fn a_hole_punched_into_a_memory_image_leaves_it_as_it_was() {
    let Some(daemon) = daemon() else { return };
    let base = patterned(&daemon.path("mem.raw"), 4 * MIB);
    for (name, size) in [("passed-through", 4 * MIB), ("served", 5 * MIB)] {
        let opened = daemon.open(name, stack(size, std::slice::from_ref(&base)), Mode::ReadOnly);
        let file = OpenOptions::new().read(true).write(true).open(&opened.path).unwrap();
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, punch, 0, MIB).unwrap();
        let mut got = vec![0; 4096];
        file.read_exact_at(&mut got, 8192).unwrap();
        assert!(got == pattern(2), "{name}: the punched range changed");
    }
    let on_disk = std::fs::read(&base.path).unwrap();
    assert!(on_disk[8192..12288] == pattern(2), "the base file changed");
}

#[test]
fn what_is_written_is_read_back_after_seals_and_reopening() {
    let Some(daemon) = daemon() else { return };
    let seed: u64 = rand::random();
    eprintln!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let size = 8 * MIB;
    let mut layers = vec![patterned(&daemon.path("base.raw"), 2 * MIB)];
    let mut model = std::fs::read(&layers[0].path).unwrap();
    model.resize(usize::try_from(size).unwrap(), 0);
    let opened = daemon.open_writable("disk", stack(size, &layers));
    let file = OpenOptions::new().read(true).write(true).open(&opened.path).unwrap();
    for step in 0..400 {
        let offset = rng.random_range(0..size - 70_000);
        let at = usize::try_from(offset).unwrap();
        let len = rng.random_range(1..70_000usize);
        match rng.random_range(0..10) {
            0..5 => {
                let mut bytes = vec![0; len];
                rng.fill(&mut bytes[..]);
                file.write_all_at(&bytes, offset).unwrap();
                model[at..at + len].copy_from_slice(&bytes);
            }
            5 => {
                let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, punch, offset, u64::try_from(len).unwrap()).unwrap();
                model[at..at + len].fill(0);
            }
            _ => {
                let mut got = vec![0; len];
                file.read_exact_at(&mut got, offset).unwrap();
                assert!(got == model[at..at + len], "step {step}: {len} bytes at {offset} differ");
            }
        }
        if step % 100 == 50 {
            layers.push(daemon.seal("disk", &format!("layer-{step}"), step % 200 == 50));
        }
    }
    file.sync_all().unwrap();
    drop(file);
    daemon.close("disk");
    let opened = daemon.open_writable("disk", stack(size, &layers));
    assert!(std::fs::read(&opened.path).unwrap() == model, "the reopened disk differs");
    daemon.close("disk");
}

#[test]
fn an_ext4_file_system_stays_clean_with_a_seal_in_the_middle() {
    let Some(daemon) = daemon() else { return };
    let size = 96 * MIB;
    let opened = daemon.open_writable("disk", stack(size, &[]));
    let path = opened.path.to_str().unwrap();
    let (made, text) = run("mkfs.ext4", &["-q", "-F", path]);
    assert!(made, "{text}");
    let mount_point = daemon.path("mnt");
    std::fs::create_dir(&mount_point).unwrap();
    let at = mount_point.to_str().unwrap();
    let (mounted, text) = run("mount", &["-o", "loop", path, at]);
    if !mounted {
        eprintln!("Skipped: no loop device: {text}");
        return;
    }
    let unmount = || run("umount", &[at]);
    let fill = |name: &str| {
        let dir = mount_point.join(name);
        std::fs::create_dir(&dir).unwrap();
        for i in 0u64..200 {
            std::fs::write(dir.join(i.to_string()), pattern(i).repeat(usize::try_from(i % 7).unwrap()))
                .unwrap();
        }
        let (synced, text) = run("sync", &["-f", at]);
        assert!(synced, "{text}");
    };
    let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        fill("before");
        let layer = daemon.seal("disk", "layer", true);
        fill("after");
        std::fs::remove_dir_all(mount_point.join("before")).unwrap();
        layer
    }));
    let (unmounted, text) = unmount();
    assert!(unmounted, "{text}");
    let layer = worked.unwrap();
    daemon.close("disk");
    let opened = daemon.open_writable("disk", stack(size, &[layer]));
    let (clean, text) = run("e2fsck", &["-f", "-n", opened.path.to_str().unwrap()]);
    assert!(clean, "{text}");
    let (listed, text) = run("debugfs", &["-R", "ls -p /after", opened.path.to_str().unwrap()]);
    assert!(listed && text.matches("/199/").count() == 1, "{text}");
}

#[test]
fn two_private_mappings_share_a_read_only_export() {
    let Some(daemon) = daemon() else { return };
    let base = patterned(&daemon.path("mem.raw"), 4 * MIB);
    let script = "import mmap,os,sys\n\
        f=os.open(sys.argv[1],os.O_RDWR)\n\
        a=mmap.mmap(f,4<<20,mmap.MAP_PRIVATE)\n\
        b=mmap.mmap(f,4<<20,mmap.MAP_PRIVATE)\n\
        a[0:4]=b'mine'\n\
        assert a[0:4]==b'mine' and b[0:4]!=b'mine' and a[4096:]==b[4096:]\n\
        sys.stdout.write(__import__('hashlib').sha256(b).hexdigest())";
    let (_, wanted) = run("sha256sum", &[base.path.to_str().unwrap()]);
    for (name, size) in [("passed-through", 4 * MIB), ("served", 5 * MIB)] {
        let opened = daemon.open(name, stack(size, std::slice::from_ref(&base)), Mode::ReadOnly);
        let (worked, hash) = run("python3", &["-c", script, opened.path.to_str().unwrap()]);
        assert!(worked, "{name}: {hash}");
        assert_eq!(hash, wanted.split(' ').next().unwrap(), "{name}");
    }
}

#[test]
fn holes_are_found_by_seeking() {
    let Some(daemon) = daemon() else { return };
    let opened = daemon.open_writable("disk", stack(64 * MIB, &[]));
    let file = OpenOptions::new().read(true).write(true).open(&opened.path).unwrap();
    file.write_all_at(&pattern(5), 32 * MIB).unwrap();
    let seek = |from| rustix::fs::seek(&file, from);
    assert_eq!(seek(rustix::fs::SeekFrom::Data(0)), Ok(32 * MIB));
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(32 * MIB)), Ok(32 * MIB + 4096));
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(0)), Ok(0));
    assert!(seek(rustix::fs::SeekFrom::Data(33 * MIB)).is_err());
}

#[test]
fn many_threads_write_their_own_parts_of_one_disk() {
    let Some(daemon) = daemon() else { return };
    let opened = daemon.open_writable("disk", stack(16 * MIB, &[]));
    std::thread::scope(|scope| {
        for worker in 0u64..8 {
            let path = &opened.path;
            scope.spawn(move || {
                let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
                for round in 0..60 {
                    let block = worker * 512 + (round * 37) % 512;
                    file.write_all_at(&pattern(block + round), block * 4096).unwrap();
                    let mut got = vec![0; 4096];
                    file.read_exact_at(&mut got, block * 4096).unwrap();
                    assert!(got == pattern(block + round), "block {block} of round {round}");
                    if round % 20 == 0 {
                        file.sync_data().unwrap();
                    }
                }
            });
        }
        for i in 0..5 {
            daemon.seal("disk", &format!("layer-{i}"), false);
        }
    });
}

#[test]
fn a_disk_in_use_is_neither_closed_nor_shut_down() {
    let Some(daemon) = daemon() else { return };
    let opened = daemon.open_writable("disk", stack(MIB, &[]));
    let file = File::open(&opened.path).unwrap();
    let refused = daemon.runtime.block_on(daemon.client.shutdown()).unwrap_err();
    assert_eq!(refused.code(), Some(Code::Busy), "{refused}");
    let refused = daemon.runtime.block_on(daemon.client.close("disk", "test")).unwrap_err();
    assert_eq!(refused.code(), Some(Code::Busy), "{refused}");
    drop(file);
    daemon.close("disk");
    daemon.close("disk");
    daemon.runtime.block_on(daemon.client.shutdown()).unwrap();
    daemon.runtime.block_on(daemon.client.gone());
}

#[test]
fn a_signal_waits_for_open_disks_and_then_ends_all_the_same() {
    let Some(daemon) = daemon() else { return };
    let opened = daemon.open_writable("disk", stack(MIB, &[]));
    let file = OpenOptions::new().write(true).open(&opened.path).unwrap();
    file.write_all_at(&pattern(1), 0).unwrap();
    let upper = daemon.path("disk.upper");
    let (dir, result) = daemon.stop();
    assert!(matches!(result, Err(storaged::Error::StillBusy(1))), "{result:?}");
    assert!(!opened.path.exists());
    drop(file);
    assert!(std::fs::metadata(upper.join("upper.data")).unwrap().len() >= 8192);
    drop(dir);
}

#[test]
fn a_second_storaged_on_the_same_directory_is_refused() {
    let Some(daemon) = daemon() else { return };
    let options = storaged::Options::in_run_dir(daemon.path("run"));
    let second = daemon.runtime.block_on(storaged::run(options, std::future::pending()));
    assert!(matches!(second, Err(storaged::Error::AlreadyRunning(_))), "{second:?}");
    daemon.runtime.block_on(daemon.client.hello()).unwrap();
}

#[test]
fn a_read_only_export_lives_until_its_last_holder() {
    let Some(daemon) = daemon() else { return };
    let base = patterned(&daemon.path("base.raw"), MIB);
    let spec = stack(MIB, &[base]);
    let request = |holder: &str| aenv_blocks::exports::OpenRequest {
        name: "shared".into(),
        stack: spec.clone(),
        mode: Mode::ReadOnly,
        holder: holder.into(),
    };
    let call = |holder: &str| daemon.runtime.block_on(daemon.client.open(request(holder)));
    let first = call("one").unwrap();
    assert_eq!(call("two").unwrap(), first);
    assert_eq!(call("two").unwrap(), first);
    let close = |holder: &str| daemon.runtime.block_on(daemon.client.close("shared", holder)).unwrap();
    close("two");
    close("two");
    assert!(first.path.exists());
    let mut other = request("three");
    other.stack.virtual_size = 2 * MIB;
    let refused = daemon.runtime.block_on(daemon.client.open(other)).unwrap_err();
    assert_eq!(refused.code(), Some(Code::Different), "{refused}");
    close("one");
    assert!(!first.path.exists());
}

#[test]
fn bad_requests_are_refused_with_the_reason() {
    let Some(daemon) = daemon() else { return };
    let open = |name: &str, layers: &[LayerSpec], size| {
        let request = aenv_blocks::exports::OpenRequest {
            name: name.into(),
            stack: stack(size, layers),
            mode: Mode::ReadOnly,
            holder: "test".into(),
        };
        daemon.runtime.block_on(daemon.client.open(request)).unwrap_err()
    };
    std::fs::write(daemon.path("junk"), vec![9u8; 20_000]).unwrap();
    std::fs::write(daemon.path("odd"), vec![9u8; 100]).unwrap();
    let junk = LayerSpec::lsmt(daemon.path("junk"));
    for (error, code, word) in [
        (open("../x", &[], MIB), Code::BadRequest, "letters"),
        (open(".x", &[], MIB), Code::BadRequest, "letters"),
        (open("x", &[], 1000), Code::BadLayer, "multiple of 512"),
        (open("x", &[LayerSpec::raw("relative")], MIB), Code::Io, "absolute"),
        (open("x", &[LayerSpec::raw(daemon.path("missing"))], MIB), Code::Io, "missing"),
        (open("x", &[LayerSpec::raw(daemon.path("odd"))], MIB), Code::BadLayer, "pad it"),
        (open("x", &vec![LayerSpec::raw(daemon.path("junk")); 256], MIB), Code::BadLayer, ""),
        (open("x", &[junk], MIB), Code::BadLayer, "magic"),
    ] {
        assert_eq!(error.code(), Some(code), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    let refused = daemon.runtime.block_on(daemon.client.flush("nobody")).unwrap_err();
    assert_eq!(refused.code(), Some(Code::Unknown));
    assert!(daemon.runtime.block_on(daemon.client.list()).unwrap().is_empty());
}

#[test]
fn a_client_of_nobody_says_that_storaged_is_gone() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = aenv_blocks::control::Client::new("/nonexistent/storaged.sock");
    let error = runtime.block_on(client.list()).unwrap_err();
    assert!(matches!(error, aenv_blocks::control::ClientError::Gone { .. }), "{error}");
    runtime.block_on(client.gone());
}

#[test]
fn qemu_img_reads_an_export_as_the_disk_it_is() {
    let Some(daemon) = daemon() else { return };
    if Command::new("qemu-img").arg("--version").output().is_err() {
        eprintln!("Skipped: qemu-img is not installed");
        return;
    }
    let base = patterned(&daemon.path("base.raw"), 4 * MIB);
    let opened = daemon.open_writable("disk", stack(4 * MIB, std::slice::from_ref(&base)));
    let (raw, disk) = (base.path.to_str().unwrap(), opened.path.to_str().unwrap());
    let (same, text) = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", raw, disk]);
    assert!(same, "{text}");
}
