//! The guest agent: PID 1 of every microVM and the envd services its clients talk to.
//!
//! As PID 1 it comes out of the initramfs, finds and enters the root filesystem and then serves on port 49983; see
//! [`boot`]. Otherwise `aenv-agent --serve --listen ADDR` only serves, which is how tests run it on a host: then it
//! never touches the machine's clock, name or mounts.

use std::{net::SocketAddr, process::ExitCode, time::Instant};

mod boot;
mod console;
mod credentials;
mod environment;
mod files;
mod filesystem;
mod guest;
mod paths;
mod process;
mod server;
mod system;
mod users;

use boot::Phases;
use console::say;

const USAGE: &str = "usage: aenv-agent --serve --listen ADDR:PORT [--init-sha256 HEX]";

fn main() -> ExitCode {
    let started = Instant::now();
    // One heap for the few threads there are: an arena for each would multiply what stays resident in every guest.
    // SAFETY: only sets a parameter of the allocator; no other thread exists yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    if std::process::id() == 1 {
        return boot::as_init(started);
    }
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(why) => {
            say(&format!("{why}; {USAGE}"));
            return ExitCode::from(2);
        }
    };
    let guest = guest::Guest::new(guest::Machine::NotOurs, options.init_sha256);
    match server::run(guest, &[options.listen], &Phases::from(started), || {}) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            say(&format!("cannot serve: {err}"));
            ExitCode::FAILURE
        }
    }
}

struct Options {
    listen: SocketAddr,
    init_sha256: Option<String>,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let (mut serve, mut listen, mut init_sha256) = (false, None, None);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--serve" => serve = true,
            "--listen" => {
                let addr = args.next().ok_or("--listen needs an address")?;
                listen = Some(addr.parse().map_err(|_| format!("--listen {addr:?} is not IP:PORT"))?);
            }
            "--init-sha256" => init_sha256 = Some(args.next().ok_or("--init-sha256 needs 64 hex digits")?),
            other => return Err(format!("unknown argument {other:?}")),
        }
    }
    if !serve {
        return Err("not PID 1 and no --serve: nothing to do".to_owned());
    }
    Ok(Options { listen: listen.ok_or("--listen is missing")?, init_sha256 })
}
