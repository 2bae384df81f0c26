//! Converts damaged archives for a while: `cargo run -p aenv-oci --release --example fuzz_convert -- --seconds 600 [--seed N]`.
//!
//! Ends with an error at the first panic, hang or file system that e2fsck finds fault with, and names its seed.
#![allow(missing_docs, clippy::print_stdout, dead_code)]

#[path = "../tests/convert/archive.rs"]
mod archive;
#[path = "../tests/convert/random.rs"]
mod random;
#[path = "../tests/convert/tree.rs"]
mod tree;

use std::time::{Duration, Instant};

fn option(name: &str) -> Option<u64> {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1).map(|value| value.parse().expect("a number"))
}

#[tokio::main]
async fn main() {
    let end = Instant::now() + Duration::from_secs(option("--seconds").unwrap_or(10));
    let mut seed = option("--seed").unwrap_or(1);
    let (mut runs, mut converted) = (0u64, 0u64);
    while Instant::now() < end {
        let outcome = tokio::spawn(random::damaged_once(seed)).await;
        let outcome = outcome.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        if let Some((dir, image)) = outcome {
            converted += 1;
            let disk = dir.path().join("disk");
            tree::export(&image.paths(), image.fs_size, &disk);
            println!("seed {seed}: converted nevertheless, checking");
            tree::assert_clean(&disk);
        }
        runs += 1;
        seed += 1;
    }
    println!("{runs} damaged images, {converted} of them convertible and clean");
}
