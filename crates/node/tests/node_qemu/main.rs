//! The node on real machines: QEMU, storaged over FUSE, network namespaces, Debian's kernel and the base image.
//!
//! Needs root, /dev/fuse, qemu-system-x86_64, the guest kit (`AENV_GUEST_DIR` or `target/guest`) and a base image
//! (`AENV_BASE_IMAGE` or `target/base-image`); says Skipped and why without them. One template is made for all tests.
#![allow(clippy::print_stderr, reason = "a skipped test says so, and measurements are read")]

mod adoption;
mod life;
mod speed;
mod stage;

use stage::Stage;

/// One process, one template: a build takes longer than all the rest.
fn main() {
    // The child that is killed in the middle of its work is this program, started anew.
    if std::env::var_os(stage::CHILD).is_some() {
        return stage::child();
    }
    let only = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    if std::env::args().any(|word| word == "--list") {
        // What nextest asks; ignored tests are none.
        if !std::env::args().any(|word| word == "--ignored") {
            stdout("node_on_qemu: test\n");
        }
        return;
    }
    if only.is_some_and(|only| !"node_on_qemu".contains(&only)) {
        return;
    }
    let stage = match Stage::new() {
        Ok(stage) => stage,
        Err(why) => {
            eprintln!("Skipped: {why}");
            return;
        }
    };
    stage.act("a template is made from the base image", life::template);
    stage.act("a sandbox starts, runs commands and keeps its environment", life::start);
    stage.act("memory, processes and files survive pauses, many times", life::cycles);
    stage.act("a pause without memory keeps the disk", life::disk_only);
    stage.act("clones of one template are independent", life::clones);
    stage.act("a guest that powers off leaves a tombstone", life::power_off);
    stage.alone("a server killed at any time leaves the truth behind", adoption::scenes);
    stage.act("cold starts restore and pauses capture memory", speed::cold);
    stage.alone("warm starts continue a waiting machine", speed::warm);
    stage.end();
}

/// What a test runner reads.
fn stdout(text: &str) {
    use std::io::Write;
    std::io::stdout().write_all(text.as_bytes()).expect("standard output takes text");
}
