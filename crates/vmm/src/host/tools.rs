//! Programs that the server and the scripts call.

use super::Check;
use std::{process::Stdio, time::Duration};
use tokio::{process::Command, time::timeout};

const LIMIT: Duration = Duration::from_secs(5);

struct Tool {
    name: &'static str,
    arguments: &'static [&'static str],
    package: &'static str,
    needed: bool,
    purpose: &'static str,
}

const TOOLS: &[Tool] = &[
    // Asks the kernel too, so that a program without its kernel side is told.
    Tool {
        name: "nft",
        arguments: &["list", "tables"],
        package: "nftables",
        needed: true,
        purpose: "egress rules",
    },
    Tool {
        name: "mke2fs",
        arguments: &["-V"],
        package: "e2fsprogs",
        needed: true,
        purpose: "disks of templates",
    },
    Tool {
        name: "skopeo",
        arguments: &["--version"],
        package: "skopeo",
        needed: false,
        purpose: "pulling images",
    },
    Tool {
        name: "umoci",
        arguments: &["--version"],
        package: "umoci",
        needed: false,
        purpose: "unpacking images",
    },
    Tool {
        name: "mmdebstrap",
        arguments: &["--version"],
        package: "mmdebstrap",
        needed: false,
        purpose: "a base image without a registry",
    },
];

/// Starts each of them once.
pub(super) async fn examine() -> Vec<Check> {
    let mut checks = Vec::new();
    for tool in TOOLS {
        checks.push(tool.check().await);
    }
    checks
}

impl Tool {
    async fn check(&self) -> Check {
        let remedy = format!("apt-get install {} (for {})", self.package, self.purpose);
        match self.run().await {
            Ok(found) => Check::ok(self.name, found),
            Err(reason) if self.needed => Check::fail(self.name, reason, remedy),
            Err(reason) => Check::warn(self.name, reason, remedy),
        }
    }

    async fn run(&self) -> Result<String, String> {
        let run =
            Command::new(self.name).args(self.arguments).stdin(Stdio::null()).kill_on_drop(true).output();
        let output = match timeout(LIMIT, run).await {
            Err(_) => return Err(format!("did not end within {LIMIT:?}")),
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err("not installed".to_owned());
            }
            Ok(Err(error)) => return Err(error.to_string()),
            Ok(Ok(output)) => output,
        };
        let words = [&output.stdout[..], &output.stderr[..]].concat();
        let words = String::from_utf8_lossy(&words);
        let first = words.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("works");
        if !output.status.success() {
            return Err(first.to_owned());
        }
        // nft lists what the host has, which is nobody's business here.
        Ok(if self.name == "nft" { "works".to_owned() } else { first.to_owned() })
    }
}
