//! What a node sets up once on its host, and what it remembers between its processes.
//!
//! - `<run_dir>/<prefix>.network.json`: supernet and generation counter. A generation is never given out twice: numbers
//!   are reserved in blocks before use, and a lost file is made up for by starting at the seconds since 2026.
//! - `<run_dir>/<prefix>.network.lock`: held while a process of the node lives, so that two can't share a plan.
//! - an unreachable route for the whole supernet: it claims the range from other nodes on the machine and keeps packets
//!   for unused slots from wandering off to the default gateway.
//! - the nftables table, and accept rules in iptables' FORWARD chain where that drops (Docker and ufw make it so).

use crate::{
    During as _, Error, link,
    netlink::Socket,
    nft,
    plan::{Ipv4Net, MAX_GENERATION, NodePrefix},
    rules, slot,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// 2026-01-01T00:00:00Z in Unix seconds.
const EPOCH: u64 = 1_767_225_600;
/// Generations reserved by one write.
const BLOCK: u64 = 1024;
/// For an earlier instance of the same process that is still finishing.
const LOCK_WAIT: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    supernet: String,
    /// No generation at or above this was ever given out.
    next_generation: u64,
}

/// The node's memory between its processes.
pub(crate) struct Memory {
    file: PathBuf,
    supernet: Ipv4Net,
    next: u64,
    reserved: u64,
    _lock: File,
}

impl Memory {
    /// Settles the supernet under the node's lock: the remembered one, the wanted one if it collides with
    /// nothing, or the first free of a fixed list; and claims it.
    pub(crate) fn open(
        lock: File,
        run_dir: &Path,
        node: &NodePrefix,
        wanted: Option<Ipv4Net>,
        leftovers: bool,
        resolvers: &[SocketAddr],
    ) -> Result<Self, Error> {
        let file = run_dir.join(format!("{}.network.json", node.as_str()));
        let saved = read(&file)?;
        let mut socket = Socket::route().during("open netlink")?;
        let remembered = saved.as_ref().map(|(net, _)| *net);
        let supernet = match (remembered, wanted) {
            (Some(old), None) => reclaim(&mut socket, old)?,
            (Some(old), Some(new)) if old == new => reclaim(&mut socket, old)?,
            (Some(old), Some(new)) if leftovers => {
                return Err(Error::step(
                    "choose the sandboxes' address range",
                    format!(
                        "sandboxes of an earlier run still use {old}; keep that range or end them before changing to {new}"
                    ),
                ));
            }
            (old, wanted) => {
                if let Some(old) = old {
                    link::unclaim(&mut socket, old).during("give up the former address range")?;
                }
                choose(&mut socket, wanted, resolvers)?
            }
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let next = saved.map_or(0, |(_, next)| next).max(now.saturating_sub(EPOCH)).max(1);
        let mut memory = Self { file, supernet, next, reserved: next, _lock: lock };
        memory.reserve()?;
        Ok(memory)
    }

    pub(crate) fn supernet(&self) -> Ipv4Net {
        self.supernet
    }

    /// A number that was never given out before. Blocking every [`BLOCK`] calls.
    pub(crate) fn generation(&mut self) -> Result<u64, Error> {
        if self.next == self.reserved {
            self.reserve()?;
        }
        self.next += 1;
        Ok(self.next - 1)
    }

    fn reserve(&mut self) -> Result<(), Error> {
        let reserved = self.next + BLOCK;
        if reserved > MAX_GENERATION {
            return Err(Error::step(
                "name a slot",
                "all slot names are used up; give the node another prefix",
            ));
        }
        let saved = Saved { supernet: self.supernet.to_string(), next_generation: reserved };
        let partial = self.file.with_extension("json.partial");
        serde_json::to_vec(&saved)
            .map_err(io::Error::from)
            .and_then(|json| fs::write(&partial, json))
            .and_then(|()| fs::rename(&partial, &self.file))
            .during("write the node's network state")?;
        self.reserved = reserved;
        Ok(())
    }
}

/// Takes the node's lock, for as long as the file is open.
pub(crate) fn lock(run_dir: &Path, node: &NodePrefix) -> Result<File, Error> {
    let path = run_dir.join(format!("{}.network.lock", node.as_str()));
    let file =
        File::options().create(true).append(true).open(&path).during("open the node's network lock")?;
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            // A file lock has no wait with a deadline, so look again.
            Err(fs::TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_WAIT / 100)
            }
            Err(fs::TryLockError::WouldBlock) => {
                return Err(Error::step(
                    "take the node's network lock",
                    format!(
                        "{} is held: another server runs with the same data directory; stop it first",
                        path.display()
                    ),
                ));
            }
            Err(fs::TryLockError::Error(e)) => return Err(Error::step("take the node's network lock", e)),
        }
    }
}

fn read(file: &Path) -> Result<Option<(Ipv4Net, u64)>, Error> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::step("read the node's network state", e)),
    };
    let parsed = serde_json::from_str::<Saved>(&text).map_err(|e| e.to_string()).and_then(|saved| {
        Ok((saved.supernet.parse().map_err(|e: crate::plan::Error| e.to_string())?, saved.next_generation))
    });
    parsed.map(Some).map_err(|e| {
        Error::step(
            "read the node's network state",
            format!("{} is damaged ({e}); remove it when no sandbox runs", file.display()),
        )
    })
}

fn reclaim(socket: &mut Socket, net: Ipv4Net) -> Result<Ipv4Net, Error> {
    match link::claim(socket, net) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(Error::step("claim the address range", e)),
        _ => Ok(net),
    }
}

fn choose(socket: &mut Socket, wanted: Option<Ipv4Net>, resolvers: &[SocketAddr]) -> Result<Ipv4Net, Error> {
    let routes = link::routes(socket).during("read the host's routes")?;
    let candidates: Vec<Ipv4Net> = match wanted {
        Some(net) => vec![net],
        None => (231..=254).filter_map(|n| Ipv4Net::new(Ipv4Addr::new(10, n, 0, 0), 16)).collect(),
    };
    let mut reason = String::new();
    for net in candidates {
        if let Some(obstacle) = obstacle(net, &routes, resolvers) {
            reason = format!("{net} {obstacle}");
            continue;
        }
        match link::claim(socket, net) {
            Ok(()) => return Ok(net),
            // Another node was quicker.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => reason = format!("{net} was just taken"),
            Err(e) => return Err(Error::step("claim the address range", e)),
        }
    }
    Err(Error::step(
        "choose the sandboxes' address range",
        format!("{reason}; set network.supernet to a private range that nothing on this host uses"),
    ))
}

/// Why slots can't use `net`: a pure look at what the host uses.
fn obstacle(net: Ipv4Net, routes: &[Ipv4Net], resolvers: &[SocketAddr]) -> Option<String> {
    if let Some(route) = routes.iter().find(|route| route.overlaps(net)) {
        return Some(format!("overlaps the host's route to {route}"));
    }
    let mut ips = resolvers.iter().map(SocketAddr::ip);
    ips.find(|ip| matches!(ip, IpAddr::V4(ip) if net.contains(*ip)))
        .map(|ip| format!("contains the host's nameserver {ip}"))
}

/// Switches forwarding on and loads the node's table.
pub(crate) fn set_up(node: &NodePrefix, supernet: Ipv4Net) -> Result<(), Error> {
    const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";
    let forward = fs::read_to_string(FORWARD).during("read net.ipv4.ip_forward")?;
    if forward.trim() == "0" {
        tracing::info!(
            "setting net.ipv4.ip_forward=1: sandboxes reach the Internet through this host; it stays set"
        );
        slot::sysctl("net/ipv4/ip_forward", "1").during("set net.ipv4.ip_forward (is this root?)")?;
    }
    load(node, supernet)?;
    open_foreign_chains(node)
}

fn load(node: &NodePrefix, supernet: Ipv4Net) -> Result<(), Error> {
    let neighbourhood = Socket::route()
        .and_then(|mut socket| link::neighbourhood(&mut socket))
        .during("read the host's routes")?;
    nft::apply(&rules::host(&node.table(), &node.stem(), supernet, &neighbourhood))
        .during("load the host's firewall rules")
}

/// Puts back what `nft flush ruleset` or another firewall's (re)start took away or closed.
pub(crate) fn mend(node: &NodePrefix, supernet: Ipv4Net) -> Result<(), Error> {
    let table = node.table();
    if nft::run(Command::new("nft").args(["list", "chain", "inet", &table, "input"]), "").is_err() {
        tracing::warn!(table, "the host's firewall rules for sandboxes had vanished; loading them again");
        load(node, supernet)?;
    }
    open_iptables(node, &foreign_chains(node)?)
}

/// Takes away everything of the node from the host; called when no slot is left.
pub(crate) fn clear(node: &NodePrefix, supernet: Ipv4Net) -> Result<(), Error> {
    nft::apply(&rules::no_host(&node.table())).during("remove the host's firewall rules")?;
    close_foreign_chains(node)?;
    Socket::route()
        .and_then(|mut socket| link::unclaim(&mut socket, supernet))
        .during("give up the address range")
}

#[derive(Deserialize)]
struct Listing {
    nftables: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    chain: Option<Chain>,
}

#[derive(Deserialize)]
struct Chain {
    family: String,
    table: String,
    name: String,
    hook: Option<String>,
    policy: Option<String>,
}

impl Chain {
    fn is_iptables(&self) -> bool {
        self.family == "ip" && self.table == "filter"
    }

    fn drops_forwarded(&self) -> bool {
        self.hook.as_deref() == Some("forward") && self.policy.as_deref() == Some("drop")
    }
}

fn foreign_chains(node: &NodePrefix) -> Result<Vec<Chain>, Error> {
    let text = nft::run(Command::new("nft").args(["-j", "list", "chains"]), "")
        .during("list the host's firewall")?;
    let listing: Listing = serde_json::from_str(&text).during("read the host's firewall listing")?;
    Ok(listing.nftables.into_iter().filter_map(|e| e.chain).filter(|c| c.table != node.table()).collect())
}

/// A packet passes only if every chain at a hook accepts it, so our accepting is not enough where another forward
/// chain drops by policy. iptables' chain (Docker, ufw) gets two rules of ours; others are named in a warning.
fn open_foreign_chains(node: &NodePrefix) -> Result<(), Error> {
    let chains = foreign_chains(node)?;
    open_iptables(node, &chains)?;
    for chain in chains.iter().filter(|c| c.drops_forwarded() && !c.is_iptables()) {
        tracing::warn!(
            family = chain.family,
            table = chain.table,
            chain = chain.name,
            "a firewall of this host drops forwarded packets; allow interfaces named {}* there or sandboxes have no Internet",
            node.stem()
        );
    }
    Ok(())
}

fn open_iptables(node: &NodePrefix, chains: &[Chain]) -> Result<(), Error> {
    let docker = chains.iter().any(|c| c.is_iptables() && c.name == "DOCKER-USER");
    if docker || chains.iter().any(|c| c.is_iptables() && c.drops_forwarded()) {
        let chain = if docker { "DOCKER-USER" } else { "FORWARD" };
        for rule in foreign_rules(node) {
            let present = iptables("-C", chain, &rule).is_ok();
            if !present {
                iptables("-I", chain, &rule).during("let sandboxes through iptables' forward chain")?;
                tracing::info!(
                    chain,
                    rule = rule.join(" "),
                    "inserted an iptables rule, since that chain drops by default"
                );
            }
        }
    }
    Ok(())
}

fn close_foreign_chains(node: &NodePrefix) -> Result<(), Error> {
    let chains = foreign_chains(node)?;
    for name in ["DOCKER-USER", "FORWARD"] {
        if chains.iter().any(|c| c.is_iptables() && c.name == name) {
            for rule in foreign_rules(node) {
                while iptables("-C", name, &rule).is_ok() {
                    iptables("-D", name, &rule).during("remove our rule from iptables' forward chain")?;
                }
            }
        }
    }
    Ok(())
}

/// `+` is iptables' wildcard. The second rule has the state match because Docker's own chains come after ours.
fn foreign_rules(node: &NodePrefix) -> [Vec<String>; 2] {
    let links = format!("{}+", node.stem());
    let comment = node.table();
    let words = |text: String| text.split(' ').map(str::to_owned).collect();
    [
        words(format!("-i {links} -m comment --comment {comment} -j ACCEPT")),
        words(format!(
            "-o {links} -m conntrack --ctstate RELATED,ESTABLISHED -m comment --comment {comment} -j ACCEPT"
        )),
    ]
}

fn iptables(action: &str, chain: &str, rule: &[String]) -> io::Result<()> {
    nft::run(Command::new("iptables").args(["-w", "5", action, chain]).args(rule), "").map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_the_host_routes_or_resolves_through_is_an_obstacle() {
        let net: Ipv4Net = "10.231.0.0/16".parse().unwrap();
        let far = ["192.0.2.0/24".parse().unwrap(), "10.232.0.0/16".parse().unwrap()];
        assert_eq!(obstacle(net, &far, &[]), None);
        assert!(obstacle(net, &["10.0.0.0/8".parse().unwrap()], &[]).unwrap().contains("10.0.0.0/8"));
        assert!(obstacle(net, &["10.231.5.0/30".parse().unwrap()], &[]).is_some());
        assert!(obstacle(net, &far, &["10.231.0.53:53".parse().unwrap()]).unwrap().contains("10.231.0.53"));
    }

    #[test]
    fn forward_chains_that_drop_are_told_from_those_that_accept() {
        let json = r#"{"nftables":[{"metainfo":{}},
            {"chain":{"family":"ip","table":"filter","name":"FORWARD","handle":1,"type":"filter","hook":"forward","prio":0,"policy":"drop"}},
            {"chain":{"family":"inet","table":"x","name":"f","handle":1,"type":"filter","hook":"forward","prio":0,"policy":"accept"}},
            {"chain":{"family":"ip","table":"filter","name":"DOCKER-USER","handle":2}}]}"#;
        let listing: Listing = serde_json::from_str(json).unwrap();
        let chains: Vec<Chain> = listing.nftables.into_iter().filter_map(|e| e.chain).collect();
        assert_eq!(chains.iter().map(Chain::drops_forwarded).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!(chains.iter().map(Chain::is_iptables).collect::<Vec<_>>(), [true, false, true]);
    }
}
