//! One slot: how it is built, adopted and torn down.
//!
//! Building makes, in this order, so that whatever a killed process leaves is found again by name: the namespace's
//! name, then the veth pair (which carries the same name on the host), then everything inside. Tearing down goes the
//! other way round and accepts that any part is missing. A failed build tears down what it made.

use crate::{
    During as _, Error, GATEWAY_IP, GUEST_IP, LINK_PREFIX, TAP, dns, link, namespace,
    netlink::Socket,
    nft,
    plan::{NodePrefix, Plan},
    rules,
    threads::{HostNamespace, current},
};
use std::{fs, io, os::fd::OwnedFd, path::PathBuf};

/// [`GUEST_MAC`](crate::GUEST_MAC) as bytes.
const GUEST_MAC_BYTES: [u8; 6] = [0x02, 0xae, 0, 0, 0, 0x15];
/// The same in every slot, because a restored guest still has its parent's gateway in its neighbour cache.
const GATEWAY_MAC_BYTES: [u8; 6] = [0x02, 0xae, 0, 0, 0, 0x16];

/// What all slots of a node have in common.
#[derive(Debug, Clone)]
pub(crate) struct Blueprint {
    pub(crate) node: NodePrefix,
    pub(crate) plan: Plan,
    /// Holds the namespaces' names.
    pub(crate) directory: PathBuf,
    /// Whether slots have a resolver.
    pub(crate) resolver: bool,
}

/// A slot's kernel side.
pub(crate) struct Parts {
    pub(crate) namespace: OwnedFd,
    pub(crate) resolver: Option<dns::Sockets>,
    pub(crate) open: bool,
}

impl Blueprint {
    /// Name of one use of an index.
    pub(crate) fn name(&self, index: u32, generation: u64) -> String {
        self.node.slot_name(index, generation)
    }

    /// Where that namespace is mounted.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Builds a slot whose guest reaches nothing yet. Blocking, 10 ms, of which the firewall is more than half.
    pub(crate) fn build(&self, host: &HostNamespace, index: u32, generation: u64) -> Result<Parts, Error> {
        let name = self.name(index, generation);
        let built = host
            .within_new(|| self.inside(host, &name, index))
            .during("make a network namespace")
            .flatten()
            .and_then(|parts| self.outside(&name, index).map(|()| parts));
        if built.is_err()
            && let Err(e) = self.tear_down(&name)
        {
            tracing::warn!(slot = name, error = %e, "a failed slot left something behind; the next reap removes it");
        }
        built
    }

    fn inside(&self, host: &HostNamespace, name: &str, index: u32) -> Result<Parts, Error> {
        namespace::name_current(&self.path(name)).during("mount the network namespace")?;
        let namespace = current().during("open the network namespace")?;
        // No IPv6 on any link, also not on those that come later.
        for which in ["all", "default"] {
            sysctl(&format!("net/ipv6/conf/{which}/disable_ipv6"), "1")
                .during("switch IPv6 off in the slot")?;
        }
        sysctl("net/ipv4/ip_forward", "1").during("switch forwarding on in the slot")?;
        let mut socket = Socket::route().during("open netlink in the slot")?;
        link::veth(&mut socket, rules::UPLINK, name, host.fd()).during("make the slot's veth pair")?;
        link::set_up(&mut socket, 1).during("bring the slot's loopback up")?;
        link::persistent_tap(TAP).during("make the slot's tap (is the module tun loaded?)")?;
        // The rules come before the tap is up: there is no moment without them.
        nft::apply(&rules::slot()).during("load the slot's firewall rules")?;
        let tap = link::index(&socket, TAP).during("find the slot's tap")?;
        link::set_mac(&mut socket, tap, GATEWAY_MAC_BYTES).during("set the tap's hardware address")?;
        link::add_address(&mut socket, tap, GATEWAY_IP, LINK_PREFIX).during("set the tap's address")?;
        link::set_up(&mut socket, tap).during("bring the tap up")?;
        link::pin_neighbour(&mut socket, tap, GUEST_IP, GUEST_MAC_BYTES).during("pin the guest's address")?;
        let uplink = link::index(&socket, rules::UPLINK).during("find the slot's veth")?;
        link::add_address(&mut socket, uplink, self.plan.peer_ip(index), LINK_PREFIX)
            .during("set the slot's uplink address")?;
        link::default_route(&mut socket, self.plan.host_ip(index)).during("set the slot's default route")?;
        let resolver = self.resolver.then(dns::bind).transpose().during("bind the slot's resolver")?;
        Ok(Parts { namespace, resolver, open: false })
    }

    fn outside(&self, name: &str, index: u32) -> Result<(), Error> {
        sysctl(&format!("net/ipv6/conf/{name}/disable_ipv6"), "1").during("switch IPv6 off on the veth")?;
        let mut socket = Socket::route().during("open netlink")?;
        let veth = link::index(&socket, name).during("find the veth on the host")?;
        link::add_address(&mut socket, veth, self.plan.host_ip(index), LINK_PREFIX)
            .during("set the veth's host address")?;
        link::set_up(&mut socket, veth).during("bring the veth up")
    }

    /// Opens a slot that a former process built. `None` when it is gone or incomplete.
    pub(crate) fn adopt(&self, host: &HostNamespace, name: &str) -> Result<Option<Parts>, Error> {
        let Some(inside) = namespace::open(&self.path(name)).during("open the network namespace")? else {
            return Ok(None);
        };
        let veth = Socket::route().and_then(|socket| link::index(&socket, name));
        if veth.is_err() {
            return Ok(None);
        }
        let found = host.within(&inside, || -> Result<_, Error> {
            let Some(open) = nft::is_open().during("read the slot's firewall rules")? else {
                return Ok(None);
            };
            let resolver = self.resolver.then(dns::bind).transpose().during("bind the slot's resolver")?;
            Ok(Some((open, resolver)))
        });
        let found = found.during("enter the network namespace")??;
        Ok(found.map(|(open, resolver)| Parts { namespace: inside, resolver, open }))
    }

    /// Removes everything that bears this name. Idempotent. Blocking, tens of milliseconds.
    pub(crate) fn tear_down(&self, name: &str) -> Result<(), Error> {
        // The link goes first and explicitly: with the namespace it would go at the kernel's leisure, and the address
        // could be given out again while the old link still has it.
        let mut socket = Socket::route().during("open netlink")?;
        link::remove(&mut socket, name).during("remove the veth pair")?;
        namespace::remove(&self.path(name)).during("unmount the network namespace")
    }
}

/// Writes a setting of the calling thread's network namespace. A kernel without the setting is fine for IPv6.
pub(crate) fn sysctl(setting: &str, value: &str) -> io::Result<()> {
    match fs::write(format!("/proc/sys/{setting}"), value) {
        Err(e) if e.kind() == io::ErrorKind::NotFound && setting.starts_with("net/ipv6/") => Ok(()),
        other => other,
    }
}
