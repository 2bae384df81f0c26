//! Settings of the roles: `/etc/aenv/config.toml`, then `AENV_…` in the environment, then flags; the later wins.
//! Unknown keys are refused with the nearest known one.

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

/// Where the state of a single machine lies unless told otherwise.
pub(crate) const DEFAULT_DATA_DIR: &str = "/var/lib/aenv";
const DEFAULT_RUN_DIR: &str = "/run/aenv";
const DEFAULT_CONFIG: &str = "/etc/aenv/config.toml";

/// Flags of every role that serves; each has its twin in the environment and in the file.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Flags {
    /// Settings file [default: /etc/aenv/config.toml when it exists]
    #[arg(long, env = "AENV_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Directory of all persistent state [default: /var/lib/aenv]
    #[arg(long, env = "AENV_DATA_DIR", value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Directory of sockets and namespaces [default: /run/aenv, or DATA_DIR/run with a --data-dir]
    #[arg(long, env = "AENV_RUN_DIR", value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    /// Address to listen on [default: 127.0.0.1:8000]
    #[arg(long, env = "AENV_LISTEN", value_name = "ADDR:PORT")]
    pub(crate) listen: Option<SocketAddr>,
    /// Domain under which sandboxes are reached as {port}-{id}.{domain}
    #[arg(long, env = "AENV_DOMAIN", value_name = "NAME")]
    pub(crate) domain: Option<String>,
    /// Guest kit: kernel, initramfs, manifest [default: DATA_DIR/guest]
    #[arg(long, env = "AENV_GUEST_DIR", value_name = "DIR")]
    pub(crate) guest_dir: Option<PathBuf>,
    /// QEMU program [default: qemu-system-x86_64 in the PATH]
    #[arg(long, env = "AENV_QEMU", value_name = "FILE")]
    pub(crate) qemu: Option<PathBuf>,
    /// Machines kept warm for each template in use; 0 turns warm starts off [default: 2]
    #[arg(long, env = "AENV_WARM", value_name = "N")]
    pub(crate) warm: Option<usize>,
    /// Most sandboxes running at once [default: bound by memory]
    #[arg(long, env = "AENV_MAX_SANDBOXES", value_name = "N")]
    pub(crate) max_sandboxes: Option<usize>,
    /// Guest memory this node may promise, MiB [default: from the host's memory]
    #[arg(long, env = "AENV_MEMORY_LIMIT_MIB", value_name = "MIB")]
    pub(crate) memory_limit_mib: Option<u64>,
    /// Let API users make templates from files of this machine (oci:DIR, …-archive:FILE) [default: only on loopback]
    #[arg(long, env = "AENV_LOCAL_IMAGES", value_name = "BOOL")]
    pub(crate) local_images: Option<bool>,
}

/// The file's shape.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    data_dir: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    listen: Option<SocketAddr>,
    domain: Option<String>,
    guest_dir: Option<PathBuf>,
    qemu: Option<PathBuf>,
    warm: Option<usize>,
    max_sandboxes: Option<usize>,
    memory_limit_mib: Option<u64>,
    local_images: Option<bool>,
    network: Network,
}

/// `[network]` of the file.
#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct Network {
    /// Range cut into one /30 a sandbox.
    pub(crate) supernet: Option<String>,
    /// Most slots at once.
    pub(crate) slots: Option<u32>,
    /// Slots kept ready.
    pub(crate) prepared: Option<usize>,
}

const KEYS: &[&str] = &[
    "data_dir",
    "run_dir",
    "listen",
    "domain",
    "guest_dir",
    "qemu",
    "warm",
    "max_sandboxes",
    "memory_limit_mib",
    "local_images",
    "network",
];
const NETWORK_KEYS: &[&str] = &["supernet", "slots", "prepared"];

/// The settings in force.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) config: Option<PathBuf>,
    pub(crate) data_dir: PathBuf,
    pub(crate) run_dir: PathBuf,
    pub(crate) listen: SocketAddr,
    pub(crate) domain: Option<String>,
    pub(crate) guest_dir: PathBuf,
    pub(crate) qemu: Option<PathBuf>,
    pub(crate) warm: Option<usize>,
    pub(crate) max_sandboxes: Option<usize>,
    pub(crate) memory_limit_mib: Option<u64>,
    pub(crate) local_images: bool,
    pub(crate) network: Network,
}

impl Settings {
    /// Reads the file named by the flags (or the default one if it exists) and lays the flags over it.
    pub(crate) fn load(flags: &Flags) -> Result<Self> {
        let file = match &flags.config {
            Some(path) => read(path)?,
            None if Path::new(DEFAULT_CONFIG).exists() => read(Path::new(DEFAULT_CONFIG))?,
            None => File::default(),
        };
        let own_data_dir = flags.data_dir.clone().or(file.data_dir);
        let run_dir = flags.run_dir.clone().or(file.run_dir).unwrap_or_else(|| match &own_data_dir {
            Some(dir) if dir != Path::new(DEFAULT_DATA_DIR) => dir.join("run"),
            _ => DEFAULT_RUN_DIR.into(),
        });
        let data_dir = own_data_dir.unwrap_or_else(|| DEFAULT_DATA_DIR.into());
        for dir in [&data_dir, &run_dir] {
            if !dir.is_absolute() {
                bail!("{} must be an absolute path", dir.display());
            }
        }
        let listen = flags.listen.or(file.listen).unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8000)));
        Ok(Self {
            // Handed on to other roles, which start elsewhere.
            config: flags.config.as_ref().map(std::path::absolute).transpose()?,
            guest_dir: flags.guest_dir.clone().or(file.guest_dir).unwrap_or_else(|| data_dir.join("guest")),
            domain: flags.domain.clone().or(file.domain),
            qemu: flags.qemu.clone().or(file.qemu),
            warm: flags.warm.or(file.warm),
            max_sandboxes: flags.max_sandboxes.or(file.max_sandboxes),
            memory_limit_mib: flags.memory_limit_mib.or(file.memory_limit_mib),
            local_images: flags
                .local_images
                .or(file.local_images)
                .unwrap_or_else(|| listen.ip().is_loopback()),
            network: file.network,
            data_dir,
            run_dir,
            listen,
        })
    }

    /// The address at which this machine reaches its own server.
    pub(crate) fn reachable(&self) -> SocketAddr {
        reachable(self.listen)
    }

    /// Socket of storaged.
    pub(crate) fn storaged_socket(&self) -> PathBuf {
        self.run_dir.join("storaged.sock")
    }

    /// Pid file of the server.
    pub(crate) fn server_pid_file(&self) -> PathBuf {
        self.run_dir.join("server.pid")
    }

    /// Pid file of storaged.
    pub(crate) fn storaged_pid_file(&self) -> PathBuf {
        self.run_dir.join("storaged.pid")
    }

    /// Directory of the roles' logs.
    pub(crate) fn log_dir(&self) -> PathBuf {
        self.data_dir.join("logs")
    }

    /// The flags that make another process of this program see the same settings.
    pub(crate) fn as_arguments(&self) -> Vec<std::ffi::OsString> {
        let mut arguments: Vec<std::ffi::OsString> = vec![
            "--data-dir".into(),
            self.data_dir.clone().into(),
            "--run-dir".into(),
            self.run_dir.clone().into(),
            "--listen".into(),
            self.listen.to_string().into(),
            "--guest-dir".into(),
            self.guest_dir.clone().into(),
            "--local-images".into(),
            self.local_images.to_string().into(),
        ];
        let mut optional = |flag: &str, value: Option<std::ffi::OsString>| {
            if let Some(value) = value {
                arguments.extend([flag.into(), value]);
            }
        };
        optional("--config", self.config.clone().map(Into::into));
        optional("--domain", self.domain.clone().map(Into::into));
        optional("--qemu", self.qemu.clone().map(Into::into));
        optional("--warm", self.warm.map(|n| n.to_string().into()));
        optional("--max-sandboxes", self.max_sandboxes.map(|n| n.to_string().into()));
        optional("--memory-limit-mib", self.memory_limit_mib.map(|n| n.to_string().into()));
        arguments
    }
}

fn read(path: &Path) -> Result<File> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("can't read settings from {}", path.display()))?;
    parse(&text).with_context(|| format!("in {}", path.display()))
}

fn parse(text: &str) -> Result<File> {
    let table: toml::Table = text.parse().context("not valid TOML")?;
    refuse_unknown(&table, KEYS, "")?;
    if let Some(toml::Value::Table(network)) = table.get("network") {
        refuse_unknown(network, NETWORK_KEYS, "network.")?;
    }
    table.try_into().context("a setting has the wrong type")
}

fn refuse_unknown(table: &toml::Table, known: &[&str], prefix: &str) -> Result<()> {
    for key in table.keys() {
        if !known.contains(&key.as_str()) {
            let nearest = known.iter().min_by_key(|k| distance(k, key)).copied().unwrap_or_default();
            bail!("unknown setting '{prefix}{key}'; did you mean '{prefix}{nearest}'?");
        }
    }
    Ok(())
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

/// The address at which a server that listens on `listen` is reached from its own machine.
pub(crate) fn reachable(listen: SocketAddr) -> SocketAddr {
    let loopback = SocketAddr::from(([127, 0, 0, 1], listen.port()));
    if listen.ip().is_unspecified() { loopback } else { listen }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest_known_one() {
        let error = parse("data_dri = '/x'").unwrap_err().to_string();
        assert_eq!(error, "unknown setting 'data_dri'; did you mean 'data_dir'?");
        let error = parse("[network]\nslot = 3").unwrap_err().to_string();
        assert_eq!(error, "unknown setting 'network.slot'; did you mean 'network.slots'?");
    }

    #[test]
    fn a_wrong_type_names_the_setting() {
        let error = format!("{:#}", parse("warm = 'two'").unwrap_err());
        assert!(error.contains("warm"), "{error}");
    }

    #[test]
    fn flags_win_over_the_file_and_a_data_dir_of_ones_own_brings_its_own_run_dir() {
        let dir = std::env::temp_dir().join(format!("aenv-settings-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let config = dir.join("config.toml");
        std::fs::write(&config, "data_dir = '/srv/a'\nwarm = 1\nlisten = '0.0.0.0:9'").unwrap();
        let flags = Flags { config: Some(config), warm: Some(5), ..Flags::default() };
        let settings = Settings::load(&flags).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(settings.warm, Some(5));
        assert_eq!(settings.run_dir, Path::new("/srv/a/run"));
        assert_eq!(settings.guest_dir, Path::new("/srv/a/guest"));
        assert!(!settings.local_images, "files of this machine aren't for the users of a public listener");
    }
}
