//! The address plan: pure arithmetic from a slot's index to its addresses and names.
//!
//! A supernet is cut into /30s, one a slot. In slot `i`'s /30 the first usable address is the host's end of the veth
//! pair and the second is the namespace's end.
//!
//! A slot's name is `<prefix>-<index>-<generation>`, both numbers in base 36. It names the host's end of the veth pair,
//! so it has at most 15 bytes: 4 for the prefix, 3 for the index, 6 for the generation, and two dashes. The dash makes
//! `ab-` and `a-` distinguishable as name prefixes, on which firewall rules match.

use std::{fmt, net::Ipv4Addr, str::FromStr};

/// Longest node prefix, in bytes.
pub const MAX_NODE_PREFIX: usize = 4;
/// One more than the largest index a name can hold.
pub const MAX_SLOTS: u32 = 36 * 36 * 36;
/// One more than the largest generation a name can hold: 36⁶.
pub const MAX_GENERATION: u64 = 36 * 36 * 36 * 36 * 36 * 36;

/// Why an address plan can't be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not `a.b.c.d/n` with all host bits zero.
    #[error(
        "{0:?} is not an IPv4 network; write it as address/length with zero host bits, like 10.231.0.0/16"
    )]
    Network(String),
    /// The prefix can't be part of an interface name.
    #[error("node prefix {0:?} must be 1 to {MAX_NODE_PREFIX} characters of a-z and 0-9")]
    NodePrefix(String),
    /// More slots than /30s.
    #[error("{supernet} holds {room} slots but {wanted} are wanted; take a larger supernet or fewer slots")]
    TooSmall {
        /// The network to be cut.
        supernet: Ipv4Net,
        /// /30s in it, at most [`MAX_SLOTS`].
        room: u32,
        /// Slots asked for.
        wanted: u32,
    },
}

/// An IPv4 network in canonical form: host bits are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ipv4Net {
    address: u32,
    length: u8,
}

impl Ipv4Net {
    /// `None` when `length` exceeds 32 or a host bit is set.
    pub fn new(address: Ipv4Addr, length: u8) -> Option<Self> {
        let address = u32::from(address);
        (length <= 32 && address & !mask(length) == 0).then_some(Self { address, length })
    }

    /// First address.
    pub fn address(self) -> Ipv4Addr {
        self.address.into()
    }

    /// Prefix length, 0 to 32.
    pub fn length(self) -> u8 {
        self.length
    }

    /// Whether `ip` lies inside.
    pub fn contains(self, ip: Ipv4Addr) -> bool {
        u32::from(ip) & mask(self.length) == self.address
    }

    /// Whether the two have an address in common.
    pub fn overlaps(self, other: Self) -> bool {
        let shorter = mask(self.length.min(other.length));
        self.address & shorter == other.address & shorter
    }
}

fn mask(length: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0)
}

impl fmt::Display for Ipv4Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address(), self.length)
    }
}

impl FromStr for Ipv4Net {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || {
            let (address, length) = text.split_once('/')?;
            Self::new(address.parse().ok()?, length.parse().ok()?)
        };
        parse().ok_or_else(|| Error::Network(text.to_owned()))
    }
}

/// Part of every name one node makes, so that several servers share a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePrefix(String);

impl NodePrefix {
    /// Checks length and alphabet.
    pub fn new(prefix: &str) -> Result<Self, Error> {
        let plain = prefix.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if plain && (1..=MAX_NODE_PREFIX).contains(&prefix.len()) {
            Ok(Self(prefix.to_owned()))
        } else {
            Err(Error::NodePrefix(prefix.to_owned()))
        }
    }

    /// The prefix itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Name of one use of a slot: of its namespace and of the host's end of its veth pair. At most 15 bytes for an
    /// index below [`MAX_SLOTS`] and a generation below [`MAX_GENERATION`].
    pub fn slot_name(&self, index: u32, generation: u64) -> String {
        format!("{}-{}-{}", self.0, base36(index.into()), base36(generation))
    }

    /// Index and generation, when `name` is one that [`slot_name`](Self::slot_name) makes.
    pub fn parse(&self, name: &str) -> Option<(u32, u64)> {
        let (index, generation) = name.strip_prefix(&self.0)?.strip_prefix('-')?.split_once('-')?;
        let index = u32::from_str_radix(index, 36).ok().filter(|i| *i < MAX_SLOTS)?;
        let generation = u64::from_str_radix(generation, 36).ok().filter(|g| *g < MAX_GENERATION)?;
        // from_str_radix also takes signs, capitals and leading zeros; only the canonical spelling is ours.
        (self.slot_name(index, generation) == name).then_some((index, generation))
    }

    /// What every slot name starts with.
    pub fn stem(&self) -> String {
        format!("{}-", self.0)
    }

    /// Name of the node's firewall table on the host.
    pub fn table(&self) -> String {
        format!("aenv_{}", self.0)
    }
}

/// The addresses of all slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    supernet: Ipv4Net,
}

impl Plan {
    /// Checks that `slots` /30s fit into `supernet` and into names.
    pub fn new(supernet: Ipv4Net, slots: u32) -> Result<Self, Error> {
        let room = match supernet.length {
            length @ 0..=30 => 1_u32.checked_shl(u32::from(30 - length)).unwrap_or(MAX_SLOTS).min(MAX_SLOTS),
            _ => 0,
        };
        if slots == 0 || slots > room {
            return Err(Error::TooSmall { supernet, room, wanted: slots });
        }
        Ok(Self { supernet })
    }

    /// The network that is cut.
    pub fn supernet(self) -> Ipv4Net {
        self.supernet
    }

    /// Address of the host's end of slot `index`'s veth pair.
    pub fn host_ip(self, index: u32) -> Ipv4Addr {
        (self.supernet.address + 4 * index + 1).into()
    }

    /// Address of the namespace's end.
    pub fn peer_ip(self, index: u32) -> Ipv4Addr {
        (self.supernet.address + 4 * index + 2).into()
    }
}

fn base36(mut n: u64) -> String {
    let mut digits = Vec::with_capacity(6);
    loop {
        digits.push(b"0123456789abcdefghijklmnopqrstuvwxyz"[usize::try_from(n % 36).unwrap_or(0)]);
        n /= 36;
        if n == 0 {
            break;
        }
    }
    digits.iter().rev().map(|b| char::from(*b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_name_fits_an_interface_and_reads_back(
            prefix in "[a-z0-9]{1,4}", index in 0..MAX_SLOTS, generation in 0..MAX_GENERATION,
        ) {
            let node = NodePrefix::new(&prefix).unwrap();
            let name = node.slot_name(index, generation);
            prop_assert!(name.len() <= 15);
            prop_assert_eq!(node.parse(&name), Some((index, generation)));
        }

        #[test]
        fn two_nodes_never_read_each_others_names(
            a in "[a-z0-9]{1,4}", b in "[a-z0-9]{1,4}", index in 0..MAX_SLOTS, generation in 0..MAX_GENERATION,
        ) {
            prop_assume!(a != b);
            let name = NodePrefix::new(&a).unwrap().slot_name(index, generation);
            prop_assert_eq!(NodePrefix::new(&b).unwrap().parse(&name), None);
        }

        #[test]
        fn slots_have_disjoint_addresses_inside_the_supernet(length in 8u8..=26, i in 0u32..16, j in 0u32..16) {
            let supernet = Ipv4Net::new(Ipv4Addr::new(10, 0, 0, 0), length).unwrap();
            let plan = Plan::new(supernet, 16).unwrap();
            for ip in [plan.host_ip(i), plan.peer_ip(i)] {
                prop_assert!(supernet.contains(ip));
            }
            let own = Ipv4Net::new((u32::from(plan.host_ip(i)) - 1).into(), 30).unwrap();
            prop_assert!(own.contains(plan.host_ip(i)) && own.contains(plan.peer_ip(i)));
            prop_assert_ne!(plan.host_ip(i), plan.peer_ip(i));
            prop_assert_eq!(i == j, own.contains(plan.host_ip(j)));
        }

        #[test]
        fn overlap_is_symmetric_and_means_a_shared_address(a in any::<u32>(), la in 0u8..=32, b in any::<u32>(), lb in 0u8..=32) {
            let a = Ipv4Net::new((a & mask(la)).into(), la).unwrap();
            let b = Ipv4Net::new((b & mask(lb)).into(), lb).unwrap();
            prop_assert_eq!(a.overlaps(b), b.overlaps(a));
            prop_assert_eq!(a.overlaps(b), a.contains(b.address()) || b.contains(a.address()));
            prop_assert_eq!(a.to_string().parse::<Ipv4Net>().unwrap(), a);
        }
    }

    #[test]
    fn bad_networks_prefixes_and_sizes_are_named_in_the_error() {
        for text in ["", "10.0.0.0", "10.0.0.1/16", "10.0.0.0/33", "10.0.0/8", "::/0", "10.0.0.0/-1"] {
            assert_eq!(text.parse::<Ipv4Net>(), Err(Error::Network(text.to_owned())));
        }
        for prefix in ["", "ABC", "a-b", "abcde", "é"] {
            assert_eq!(NodePrefix::new(prefix), Err(Error::NodePrefix(prefix.to_owned())));
        }
        let small: Ipv4Net = "10.231.0.0/24".parse().unwrap();
        assert!(Plan::new(small, 64).is_ok());
        assert!(Plan::new(small, 65).unwrap_err().to_string().contains("64 slots but 65"));
        assert!(Plan::new(small, 0).is_err());
        assert!(Plan::new("10.231.0.4/31".parse().unwrap(), 1).is_err());
    }

    #[test]
    fn only_the_canonical_spelling_of_a_name_is_ours() {
        let node = NodePrefix::new("ab").unwrap();
        for name in [
            "ab-01-1",
            "ab-+1-1",
            "ab-A-1",
            "ab-1",
            "ab-1-",
            "ab--1",
            "ab-1-1-1",
            "ab-1000-1",
            "x-1-1",
            "ab-1-1000000",
        ] {
            assert_eq!(node.parse(name), None, "{name}");
        }
        assert_eq!(node.parse("ab-zzz-zzzzzz"), Some((MAX_SLOTS - 1, MAX_GENERATION - 1)));
    }
}
