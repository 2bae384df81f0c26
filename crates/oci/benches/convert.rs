//! Conversion of an image against the peers' pipeline, `umoci unpack` and `mke2fs -d`, on the same image in one run.
//!
//! `cargo bench -p aenv-oci --bench convert -- [layout]`. Without a layout the base image in the target directory, or
//! one made here. Digests are verified and what was made is synced in ours; the peers' results are synced, too.
#![allow(missing_docs, clippy::print_stdout)]

#[path = "../tests/convert/archive.rs"]
#[allow(dead_code)]
mod archive;

use aenv_oci::convert::{ConvertOptions, LayoutSource, Store, convert_image, layers_of};
use archive::{Archive, Compression, file, layout};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Instant,
};

const ROUNDS: usize = 3;

fn blob(layout: &Path, descriptor: &serde_json::Value) -> Vec<u8> {
    let digest = descriptor["digest"].as_str().expect("a digest");
    fs::read(layout.join("blobs/sha256").join(&digest[7..])).expect("a blob of the layout")
}

/// Three layers, 12,000 small files and some large ones, about 220 MB.
fn made(at: &Path) {
    let mut seed = 1u64;
    let mut noise = |len: usize| {
        let mut bytes = vec![0u8; len];
        for chunk in bytes.chunks_mut(16) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            // Half of it compresses.
            let half = chunk.len() / 2;
            chunk[..half].copy_from_slice(&seed.to_le_bytes()[..half]);
        }
        bytes
    };
    let tars: Vec<_> = (0..3)
        .map(|layer| {
            let mut archive = Archive::default();
            for n in 0..4000usize {
                let name = format!("l{layer}/d{}/f{n}", n % 97);
                archive.add(&file(&name, &noise(200 + n * 37 % 12_000)));
            }
            for n in 0..4 {
                archive.add(&file(&format!("l{layer}/big{n}"), &noise(12 << 20)));
            }
            archive.end()
        })
        .collect();
    layout(at, &tars, Compression::Gzip);
}

fn run(program: &str, arguments: &[&str]) {
    let out = Command::new(program).args(arguments).output().expect("it starts");
    assert!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
}

fn main() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let given = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).map(PathBuf::from);
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/base-image");
    let layout = given.or_else(|| base.join("index.json").exists().then_some(base)).unwrap_or_else(|| {
        let at = dir.path().join("layout");
        made(&at);
        at
    });
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).expect("an index")).expect("JSON");
    let descriptor = &index["manifests"][0];
    let tag = descriptor["annotations"]["org.opencontainers.image.ref.name"]
        .as_str()
        .unwrap_or("latest")
        .to_owned();
    let bytes = blob(&layout, descriptor);
    let manifest: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
    let config = blob(&layout, &manifest["config"]);
    let manifest = oci_spec::image::ImageManifest::from_reader(&bytes[..]).expect("a manifest");
    let layers = layers_of(&manifest, &config).expect("layers");
    let compressed: u64 = layers.iter().map(|layer| layer.size).sum();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let mib = |bytes: u64| bytes / (1 << 20);
    println!("{} layers, {} MiB compressed", layers.len(), mib(compressed));
    let (mut ours, mut theirs, mut used) = (Vec::new(), Vec::new(), 0);
    for round in 0..ROUNDS {
        let store = Store::open(dir.path().join(format!("store{round}"))).expect("a store");
        let source = Arc::new(LayoutSource { layout: layout.clone() });
        let start = Instant::now();
        let image = runtime
            .block_on(convert_image(source, &layers, &store, &ConvertOptions::default()))
            .expect("it converts");
        ours.push(start.elapsed().as_secs_f64());
        used = image.layers.iter().map(|layer| layer.size).sum();
        fs::remove_dir_all(store.root()).expect("removed");

        if !rustix::process::geteuid().is_root() {
            println!("Skipped: umoci needs root");
            continue;
        }
        let (bundle, disk) = (dir.path().join("bundle"), dir.path().join("disk"));
        let (bundle_text, disk_text) = (bundle.to_str().expect("text"), disk.to_str().expect("text"));
        let start = Instant::now();
        run("umoci", &["unpack", "--image", &format!("{}:{tag}", layout.display()), bundle_text]);
        let size = format!("{}M", mib(used) * 5 / 4 + 256);
        run(
            "mke2fs",
            &[
                "-q",
                "-F",
                "-t",
                "ext4",
                "-E",
                "lazy_itable_init=0,root_owner=0:0",
                "-d",
                &format!("{bundle_text}/rootfs"),
                disk_text,
                &size,
            ],
        );
        fs::File::open(&disk).and_then(|disk| disk.sync_all()).expect("synced");
        theirs.push(start.elapsed().as_secs_f64());
        fs::remove_dir_all(&bundle).expect("removed");
        fs::remove_file(&disk).expect("removed");
    }
    let best = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
    let megabytes = f64::from(u32::try_from(mib(used)).expect("below 4 PiB"));
    println!(
        "ours:              {ours:.2?} s; {megabytes} MiB of layers, {:.0} MiB/s",
        megabytes / best(&ours)
    );
    println!("umoci + mke2fs -d: {theirs:.2?} s; {:.2} times as long", best(&theirs) / best(&ours));
}
