//! Identity and limits of the guest: host name, `/etc` files, kernel settings.

use std::{fs, io, io::Write as _, path::Path};

use rustix::process::{Resource, Rlimit, setrlimit};

use super::CommandLine;
use crate::console::say;

/// Sets the host name if the kernel takes it.
pub(crate) fn set_hostname(name: &str) {
    if let Err(err) = rustix::system::sethostname(name.as_bytes()) {
        say(&format!("host name {name:?}: {err}"));
    }
}

/// Writes the files that an image leaves to its runtime, and the limits processes start with.
pub(super) fn write_files(line: &CommandLine) {
    if let Err(err) = resolv_conf(line) {
        say(&format!("/etc/resolv.conf: {err}"));
    }
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if let Err(err) = name_self(&name) {
        say(&format!("/etc/hosts: {err}"));
    }
    for (key, value) in [
        // What servers and language runtimes commonly ask for; Debian's defaults are for small desktops.
        ("/proc/sys/fs/inotify/max_user_watches", "524288"),
        ("/proc/sys/fs/inotify/max_user_instances", "1024"),
        ("/proc/sys/vm/max_map_count", "262144"),
        ("/proc/sys/net/ipv4/ping_group_range", "0 2147483647"),
        ("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0"),
        // The console costs an exit per character.
        ("/proc/sys/kernel/printk", "3 4 1 3"),
    ] {
        let _ = fs::write(key, value);
    }
    let _ = fs::create_dir_all("/run/e2b");
    // E2B's own marker file, which programs in a sandbox look for.
    let _ = fs::write("/run/e2b/.E2B_SANDBOX", "true");
}

/// Limits of the agent and, by inheritance, of every process.
pub(super) fn raise_limits() {
    let files = Rlimit { current: Some(1_048_576), maximum: Some(1_048_576) };
    let _ = setrlimit(Resource::Nofile, files);
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: None });
}

/// Ours when there is none, or only a container engine's placeholder: one whose servers are another machine's
/// loopback or embedded resolver.
fn resolv_conf(line: &CommandLine) -> io::Result<()> {
    const PATH: &str = "/etc/resolv.conf";
    if line.dns.is_empty() {
        return Ok(());
    }
    let current = fs::read_to_string(PATH).unwrap_or_default();
    if !is_placeholder(&current) {
        return Ok(());
    }
    // systemd images have a link to a file of a service that does not run here.
    if fs::symlink_metadata(PATH).is_ok_and(|meta| meta.is_symlink()) {
        fs::remove_file(PATH)?;
    }
    let servers: String = line.dns.iter().map(|addr| format!("nameserver {addr}\n")).collect();
    fs::create_dir_all("/etc")?;
    fs::write(PATH, servers)
}

fn is_placeholder(resolv_conf: &str) -> bool {
    let mut servers = resolv_conf
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver"))
        .filter_map(|addr| addr.trim().parse::<std::net::IpAddr>().ok());
    servers.all(|addr| addr.is_loopback())
}

/// Makes `name` and `localhost` resolvable in `/etc/hosts`; other lines stay.
pub(crate) fn name_self(name: &str) -> io::Result<()> {
    let path = Path::new("/etc/hosts");
    fs::create_dir_all("/etc")?;
    if fs::read_to_string("/etc/hostname").map_or(true, |current| current.trim_end() != name)
        && name != "(none)"
    {
        overwrite(Path::new("/etc/hostname"), format!("{name}\n").as_bytes())?;
    }
    let current = fs::read_to_string(path).unwrap_or_default();
    let wanted = hosts_with(&current, name);
    if wanted == current {
        return Ok(());
    }
    overwrite(path, wanted.as_bytes())
}

/// Replaces a small file's content in place. Emptying it first would make ext4 write the new blocks out when the file
/// is closed (`auto_da_alloc`), and even a cut to the length it has is a transaction: this stands on the way of every
/// start, where the new name is as long as the one before.
fn overwrite(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    file.write_all(content)?;
    let len = content.len().try_into().map_err(io::Error::other)?;
    if file.metadata()?.len() == len { Ok(()) } else { file.set_len(len) }
}

/// The line we own is marked, so that a new name replaces it.
const MARK: &str = "# this sandbox";

fn hosts_with(current: &str, name: &str) -> String {
    let mut kept: Vec<&str> = current.lines().filter(|line| !line.ends_with(MARK)).collect();
    if !kept.iter().any(|line| line.split_ascii_whitespace().skip(1).any(|host| host == "localhost")) {
        kept.push("127.0.0.1 localhost");
        kept.push("::1 localhost ip6-localhost ip6-loopback");
    }
    let own = format!("127.0.1.1 {name} {MARK}");
    let named = kept.iter().any(|line| line.split_ascii_whitespace().skip(1).any(|host| host == name));
    if !named && !name.is_empty() && name != "(none)" {
        kept.push(&own);
    }
    let mut text = kept.join("\n");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_by_a_longer_and_by_a_shorter_text() {
        let path = std::env::temp_dir().join(format!("aenv-agent-overwrite-{}", std::process::id()));
        for text in ["one", "one and two", "2"] {
            overwrite(&path, text.as_bytes()).expect("a temporary file can be written");
            assert_eq!(fs::read_to_string(&path).expect("it was just written"), text);
        }
        fs::remove_file(&path).expect("it is there");
    }

    #[test]
    fn a_resolver_on_another_machines_loopback_is_a_placeholder() {
        assert!(is_placeholder(""));
        assert!(is_placeholder("# Generated by Docker\nnameserver 127.0.0.11\noptions ndots:0\n"));
        assert!(!is_placeholder("nameserver 127.0.0.53\nnameserver 10.0.0.2\n"));
    }

    #[test]
    fn renaming_replaces_only_our_own_line() {
        let first = hosts_with("10.0.0.9 db\n", "one");
        assert!(first.contains("10.0.0.9 db") && first.contains("127.0.0.1 localhost"));
        let second = hosts_with(&first, "two");
        assert!(second.contains(" two ") && !second.contains(" one "), "{second}");
        assert_eq!(hosts_with(&second, "two"), second);
    }
}
