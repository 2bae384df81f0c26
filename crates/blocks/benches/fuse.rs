//! `cargo bench -p aenv-blocks`: fio against a raw file and against the same bytes exported over FUSE, in one run.
//! Needs root, /dev/fuse and fio. Each line is MiB/s; the last column is the share of the raw file's.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use aenv_blocks::control::Client;
use aenv_blocks::exports::OpenRequest;
use aenv_blocks::spec::{LayerSpec, Mode, StackSpec};
use aenv_blocks::storaged::{self, Options};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const SIZE: u64 = 512 << 20;

fn main() {
    if Command::new("fio").arg("--version").output().is_err() || !rustix::process::geteuid().is_root() {
        println!("Skipped: needs root and fio");
        return;
    }
    let dir =
        tempfile::tempdir_in(std::env::var_os("BENCH_DIR").unwrap_or(std::env::temp_dir().into())).unwrap();
    let raw = dir.path().join("raw");
    let mut file = File::create(&raw).unwrap();
    let mut rng = StdRng::seed_from_u64(1);
    let mut chunk = vec![0u8; 1 << 20];
    for _ in 0..SIZE >> 20 {
        rng.fill(&mut chunk[..]);
        file.write_all(&chunk).unwrap();
    }
    file.sync_all().unwrap();

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let options = Options::in_run_dir(dir.path().join("run"));
    let client = Client::new(options.socket.clone());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let daemon = runtime.spawn(storaged::run(options, async {
        let _dropped = stopped.await;
    }));
    while runtime.block_on(client.hello()).is_err() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let open = |name: &str, virtual_size, mode| {
        let stack = StackSpec { virtual_size, layers: vec![LayerSpec::raw(&raw)] };
        let request = OpenRequest { name: name.into(), stack, mode, holder: "bench".into() };
        runtime.block_on(client.open(request)).unwrap().path
    };
    let passed = open("passed", SIZE, Mode::ReadOnly);
    let served = open("served", SIZE + 4096, Mode::ReadOnly);
    let writable = open("writable", SIZE, Mode::Writable { dir: dir.path().join("upper") });

    println!(
        "{:<44} {:>8} {:>16} {:>16} {:>16}",
        "MiB/s (share of raw)", "raw", "passthrough", "served", "writable"
    );
    for (what, args) in [
        ("sequential read, 1 MiB, page cache cold", &["--rw=read", "--bs=1M", "--invalidate=1"][..]),
        ("sequential read, 1 MiB, page cache warm", &["--rw=read", "--bs=1M", "--invalidate=0"]),
        ("sequential read, 1 MiB, O_DIRECT", &["--rw=read", "--bs=1M", "--direct=1"]),
        ("random read, 4 KiB, page cache warm", &["--rw=randread", "--bs=4k", "--invalidate=0"]),
        (
            "random read, 4 KiB, O_DIRECT, depth 32",
            &["--rw=randread", "--bs=4k", "--direct=1", "--ioengine=libaio", "--iodepth=32"],
        ),
    ] {
        let warm = what.ends_with("warm");
        let speed = |path: &Path| {
            if warm {
                std::io::copy(&mut File::open(path).unwrap(), &mut std::io::sink()).unwrap();
            }
            fio(path, args)
        };
        let base = speed(&raw);
        let shares = [&passed, &served, &writable].map(|path| {
            let speed = speed(path);
            format!("{speed:.0} ({:.0} %)", 100.0 * speed / base)
        });
        println!("{what:<44} {base:>8.0} {:>16} {:>16} {:>16}", shares[0], shares[1], shares[2]);
    }
    for (what, args) in [
        ("sequential write, 1 MiB", &["--rw=write", "--bs=1M"][..]),
        ("random write, 4 KiB", &["--rw=randwrite", "--bs=4k"]),
        (
            "random write, 4 KiB, O_DIRECT, depth 32",
            &["--rw=randwrite", "--bs=4k", "--direct=1", "--ioengine=libaio", "--iodepth=32"],
        ),
    ] {
        let copy = dir.path().join("copy");
        std::fs::copy(&raw, &copy).unwrap();
        let base = fio(&copy, args);
        let speed = fio(&writable, args);
        println!("{what:<44} {base:>8.0} {:>50}", format!("{speed:.0} ({:.0} %)", 100.0 * speed / base));
    }
    drop(stop);
    runtime.block_on(daemon).unwrap().unwrap();
}

/// MiB/s of three seconds of fio.
fn fio(path: &Path, args: &[&str]) -> f64 {
    let output = Command::new("fio")
        .args(["--name=bench", "--size=512M", "--runtime=3", "--time_based=1", "--output-format=json"])
        .arg("--allow_file_create=0")
        .arg(format!("--filename={}", path.display()))
        .args(args)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let json: serde_json::Value = serde_json::from_str(&text[text.find('{').unwrap()..]).unwrap();
    let job = &json["jobs"][0];
    let kib = |side: &str| job[side]["bw"].as_f64().unwrap_or_default();
    (kib("read") + kib("write")) / 1024.0
}
