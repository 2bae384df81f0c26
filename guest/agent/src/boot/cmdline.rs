//! The parameters of the kernel command line that are the agent's.
//!
//! | Parameter | Meaning |
//! |---|---|
//! | `aenv.root=/dev/vda` | device of the ext4 root, mounted read-write |
//! | `aenv.ip=169.254.0.21/30` | address of eth0 |
//! | `aenv.gw=169.254.0.22` | default route |
//! | `aenv.dns=169.254.0.22` | resolver, may be repeated with commas |
//! | `aenv.hostname=sandbox` | host name until `/init` gives another |
//! | `aenv.init=<sha256 hex>` | hash of the secret that `/init` must carry |

use std::net::Ipv4Addr;

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommandLine {
    pub(crate) root: String,
    pub(crate) address: Option<(Ipv4Addr, u8)>,
    pub(crate) gateway: Option<Ipv4Addr>,
    pub(crate) dns: Vec<Ipv4Addr>,
    pub(crate) hostname: Option<String>,
    pub(crate) init_sha256: Option<String>,
}

impl Default for CommandLine {
    fn default() -> Self {
        Self {
            root: "/dev/vda".to_owned(),
            address: None,
            gateway: None,
            dns: Vec::new(),
            hostname: None,
            init_sha256: None,
        }
    }
}

impl CommandLine {
    pub(crate) fn read() -> std::io::Result<Self> {
        std::fs::read_to_string("/proc/cmdline").map(|line| Self::parse(&line))
    }

    /// A value that makes no sense is left out, as the kernel does: a guest with a typo still boots to be looked into.
    fn parse(line: &str) -> Self {
        let mut parsed = Self::default();
        for (key, value) in line.split_ascii_whitespace().filter_map(|word| word.split_once('=')) {
            match key {
                "aenv.root" => parsed.root = value.to_owned(),
                "aenv.ip" => parsed.address = address(value),
                "aenv.gw" => parsed.gateway = value.parse().ok(),
                "aenv.dns" => parsed.dns = value.split(',').filter_map(|addr| addr.parse().ok()).collect(),
                "aenv.hostname" => parsed.hostname = Some(value.to_owned()),
                "aenv.init" => parsed.init_sha256 = Some(value.to_ascii_lowercase()),
                _ => {}
            }
        }
        parsed
    }
}

fn address(value: &str) -> Option<(Ipv4Addr, u8)> {
    let (addr, prefix) = value.split_once('/')?;
    let prefix = prefix.parse().ok().filter(|bits| *bits <= 32)?;
    Some((addr.parse().ok()?, prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_is_read_among_foreign_ones() {
        let line = CommandLine::parse(
            "console=ttyS0 quiet aenv.root=/dev/vdb aenv.ip=169.254.0.21/30 aenv.gw=169.254.0.22 \
             aenv.dns=169.254.0.22,1.1.1.1 aenv.hostname=box aenv.init=ABCD panic=-1\n",
        );
        assert_eq!(line.root, "/dev/vdb");
        assert_eq!(line.address, Some((Ipv4Addr::new(169, 254, 0, 21), 30)));
        assert_eq!(line.gateway, Some(Ipv4Addr::new(169, 254, 0, 22)));
        assert_eq!(line.dns.len(), 2);
        assert_eq!(line.hostname.as_deref(), Some("box"));
        assert_eq!(line.init_sha256.as_deref(), Some("abcd"));
    }

    #[test]
    fn nonsense_is_left_out() {
        let line = CommandLine::parse("aenv.ip=169.254.0.21/99 aenv.gw=gateway aenv.dns=,x");
        assert_eq!(line, CommandLine::default());
    }
}
