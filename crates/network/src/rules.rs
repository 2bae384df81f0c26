//! The firewall, as text for `nft -f`: pure functions of names and networks.
//!
//! Two layers, each enough to keep a guest away from the host and from other guests:
//! - in the slot's namespace: a guest may only be who it is (`guard`), may only reach what its egress allows
//!   (`forward`), and reaches nothing of the namespace itself but the resolver and ping (`input`);
//! - on the host: whatever comes from a slot must leave the machine again, and may not be addressed to any of the
//!   host's addresses (`fib daddr type`: asked of the routing table per packet, so an address that the host gets later
//!   is covered too, and asked before any destination NAT, so a published container port is covered).
//!
//! Egress is one set, `open`, holding the guest's address or nothing. Adding or removing that element is one
//! transaction and applies to established flows too, since it is asked before connection state.

use crate::{GATEWAY_IP, GUEST_IP, GUEST_MAC, TAP, plan::Ipv4Net};

/// Name of the namespace's end of the veth pair.
pub(crate) const UPLINK: &str = "up0";
/// Name of the table in every namespace.
pub(crate) const SLOT_TABLE: &str = "slot";
/// Name of the set that holds the guest's address while it may reach the Internet.
pub(crate) const OPEN_SET: &str = "open";

/// Never reachable: "this" network, private use, carrier NAT, loopback, link-local, protocol assignments, benchmarks,
/// multicast, reserved and broadcast (IANA special-purpose registry). Documentation ranges lead nowhere and are left
/// alone.
const CLOSED: [&str; 11] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
];

/// Connections that one guest may have in the connection table, which all guests and the host share.
const CONNECTIONS: u32 = 8192;

/// Rules inside every slot's namespace; the same for all slots. Refused traffic of the guest's own address is answered
/// with an ICMP error so that programs fail at once instead of waiting.
pub(crate) fn slot() -> String {
    let closed = CLOSED.join(", ");
    format!(
        r#"table netdev guard {{
  chain ingress {{
    type filter hook ingress device "{TAP}" priority 0; policy drop;
    ether saddr != {GUEST_MAC} drop
    ether type arp arp saddr ether {GUEST_MAC} arp saddr ip {GUEST_IP} accept
    ether type ip ip saddr {GUEST_IP} accept
  }}
}}
table inet {SLOT_TABLE} {{
  set {OPEN_SET} {{
    type ipv4_addr
  }}
  set closed {{
    type ipv4_addr
    flags interval
    elements = {{ {closed} }}
  }}
  chain input {{
    type filter hook input priority 0; policy drop;
    iif lo accept
    iifname != "{TAP}" drop
    ct state established accept
    ct state related icmp type {{ destination-unreachable, time-exceeded, parameter-problem }} accept
    ip daddr {GATEWAY_IP} meta l4proto {{ tcp, udp }} th dport 53 accept
    ip daddr {GATEWAY_IP} icmp type echo-request accept
  }}
  chain forward {{
    type filter hook forward priority 0; policy drop;
    meta nfproto != ipv4 drop
    iifname "{TAP}" ip daddr @closed reject with icmp type admin-prohibited
    iifname "{TAP}" ip saddr != @{OPEN_SET} reject with icmp type admin-prohibited
    iifname "{TAP}" ct state new ct count over {CONNECTIONS} reject with icmp type admin-prohibited
    tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    iifname "{TAP}" oifname "{UPLINK}" accept
    iifname "{UPLINK}" oifname "{TAP}" ip daddr @{OPEN_SET} ct state established,related accept
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    oifname "{UPLINK}" masquerade
  }}
}}
"#
    )
}

/// The node's table on the host, replaced as a whole in one transaction. `stem` is what the names of all of the
/// node's veths start with; `neighbourhood` is closed beside what always is.
pub(crate) fn host(table: &str, stem: &str, supernet: Ipv4Net, neighbourhood: &[Ipv4Net]) -> String {
    let always = CLOSED.iter().map(ToString::to_string);
    let closed: Vec<_> = always.chain(neighbourhood.iter().map(ToString::to_string)).collect();
    let closed = closed.join(", ");
    format!(
        r#"table inet {table} {{ }}
delete table inet {table}
table inet {table} {{
  set closed {{
    type ipv4_addr
    flags interval
    auto-merge
    elements = {{ {closed} }}
  }}
  chain early {{
    type filter hook prerouting priority -150; policy accept;
    iifname != "{stem}*" accept
    meta nfproto != ipv4 drop
    ip saddr != {supernet} drop
    fib daddr type != unicast drop
  }}
  chain input {{
    type filter hook input priority -10; policy accept;
    iifname "{stem}*" drop
  }}
  chain forward {{
    type filter hook forward priority -10; policy accept;
    iifname "{stem}*" jump leaving
    oifname "{stem}*" jump entering
  }}
  chain leaving {{
    oifname "{stem}*" drop
    ip daddr @closed reject with icmp type admin-prohibited
    tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    accept
  }}
  chain entering {{
    ct state established,related accept
    drop
  }}
  chain postrouting {{
    type nat hook postrouting priority 100; policy accept;
    ip saddr {supernet} oifname != "{stem}*" masquerade
  }}
}}
"#
    )
}

/// Removes the node's table; fine when there is none.
pub(crate) fn no_host(table: &str) -> String {
    format!("table inet {table} {{ }}\ndelete table inet {table}\n")
}
