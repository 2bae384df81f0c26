//! Links, addresses, routes and neighbours by rtnetlink, and taps by ioctl.
//!
//! Every function works in the namespace of the [`Socket`] it is given. Message layouts: rtnetlink(7).

use crate::netlink::{ACK, Attrs, CREATE, DUMP, EXCL, Message, REPLACE, REQUEST, Socket, attributes};
use crate::plan::Ipv4Net;
use std::{
    fs::{File, OpenOptions},
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, OwnedFd},
};

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const INET: u8 = 2;
const UP: u32 = 1;
const TABLE_MAIN: u8 = 254;
const PROTO_STATIC: u8 = 4;
const UNICAST: u8 = 1;
const UNREACHABLE: u8 = 7;

fn link_body(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut body = [0; 16];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[8..12].copy_from_slice(&flags.to_ne_bytes());
    body[12..16].copy_from_slice(&change.to_ne_bytes());
    body
}

fn name_bytes(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

/// Index of the link called `name`; `NotFound`-like `ENODEV` when there is none.
pub(crate) fn index(socket: &Socket, name: &str) -> io::Result<u32> {
    Ok(rustix::net::netdevice::name_to_index(socket.fd(), name)?)
}

pub(crate) fn set_up(socket: &mut Socket, index: u32) -> io::Result<()> {
    socket.request(Message::new(RTM_NEWLINK, REQUEST | ACK, &link_body(index, UP, UP)))
}

/// Gives a link, still down, this hardware address.
pub(crate) fn set_mac(socket: &mut Socket, index: u32, mac: [u8; 6]) -> io::Result<()> {
    let message = Message::new(RTM_NEWLINK, REQUEST | ACK, &link_body(index, 0, 0)).attr(IFLA_ADDRESS, &mac);
    socket.request(message)
}

/// Makes a veth pair: `here` in the socket's namespace, up, and `there` in the namespace `other`, down.
pub(crate) fn veth(socket: &mut Socket, here: &str, there: &str, other: &OwnedFd) -> io::Result<()> {
    let peer = Attrs::after(&link_body(0, 0, 0))
        .attr(IFLA_IFNAME, &name_bytes(there))
        .attr(IFLA_NET_NS_FD, &other.as_raw_fd().to_ne_bytes());
    let info = Attrs::default().attr(1, b"veth").nest(2, &Attrs::default().nest(1, &peer));
    let message = Message::new(RTM_NEWLINK, REQUEST | ACK | CREATE | EXCL, &link_body(0, UP, UP))
        .attr(IFLA_IFNAME, &name_bytes(here))
        .attr(IFLA_LINKINFO, info.bytes());
    socket.request(message)
}

/// Removes a link and its veth peer. A link that isn't there is fine.
pub(crate) fn remove(socket: &mut Socket, name: &str) -> io::Result<()> {
    let message = Message::new(RTM_DELLINK, REQUEST | ACK, &link_body(0, 0, 0));
    match socket.request(message.attr(IFLA_IFNAME, &name_bytes(name))) {
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other,
    }
}

/// Names of all links.
pub(crate) fn names(socket: &mut Socket) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    socket.dump(Message::new(RTM_GETLINK, REQUEST | DUMP, &link_body(0, 0, 0)), |kind, body| {
        if let (RTM_NEWLINK, Some(rest)) = (kind, body.get(16..))
            && let Some((_, name)) = attributes(rest).find(|(kind, _)| *kind == IFLA_IFNAME)
        {
            found.push(String::from_utf8_lossy(name.strip_suffix(&[0]).unwrap_or(name)).into_owned());
        }
    })?;
    Ok(found)
}

pub(crate) fn add_address(socket: &mut Socket, index: u32, address: Ipv4Addr, length: u8) -> io::Result<()> {
    let mut body = [INET, length, 0, 0, 0, 0, 0, 0];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    let message = Message::new(RTM_NEWADDR, REQUEST | ACK | CREATE | EXCL, &body);
    socket.request(message.attr(1, &address.octets()).attr(2, &address.octets()))
}

fn route_body(to: Ipv4Net, kind: u8) -> [u8; 12] {
    [INET, to.length(), 0, 0, TABLE_MAIN, PROTO_STATIC, 0, kind, 0, 0, 0, 0]
}

/// Default route through `gateway`.
pub(crate) fn default_route(socket: &mut Socket, gateway: Ipv4Addr) -> io::Result<()> {
    let body = [INET, 0, 0, 0, TABLE_MAIN, PROTO_STATIC, 0, UNICAST, 0, 0, 0, 0];
    socket
        .request(Message::new(RTM_NEWROUTE, REQUEST | ACK | CREATE | EXCL, &body).attr(5, &gateway.octets()))
}

/// Claims a network in the routing table: more specific routes win, everything else in it is unreachable.
/// `AlreadyExists` when the table has a route for exactly this network.
pub(crate) fn claim(socket: &mut Socket, net: Ipv4Net) -> io::Result<()> {
    let message = Message::new(RTM_NEWROUTE, REQUEST | ACK | CREATE | EXCL, &route_body(net, UNREACHABLE));
    socket.request(message.attr(1, &net.address().octets()))
}

/// Undoes [`claim`]; a claim that isn't there is fine.
pub(crate) fn unclaim(socket: &mut Socket, net: Ipv4Net) -> io::Result<()> {
    let message = Message::new(RTM_DELROUTE, REQUEST | ACK, &route_body(net, UNREACHABLE));
    match socket.request(message.attr(1, &net.address().octets())) {
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        other => other,
    }
}

/// An IPv4 route of any table.
struct Route {
    /// `None` for a default route.
    to: Option<Ipv4Net>,
    /// Index of the outgoing link, as the kernel writes it.
    link: Option<Vec<u8>>,
    /// Directly on that link, without a gateway.
    attached: bool,
}

fn route_table(socket: &mut Socket) -> io::Result<Vec<Route>> {
    /// `RT_SCOPE_LINK` of linux/rtnetlink.h.
    const LINK: u8 = 253;
    let mut found = Vec::new();
    let all =
        Ipv4Net::new(Ipv4Addr::UNSPECIFIED, 0).unwrap_or_else(|| unreachable!("0.0.0.0/0 is canonical"));
    socket.dump(Message::new(RTM_GETROUTE, REQUEST | DUMP, &route_body(all, 0)), |kind, body| {
        let (RTM_NEWROUTE, Some([INET, length, _, _, _, _, scope, route_type, ..]), Some(rest)) =
            (kind, body.get(..12), body.get(12..))
        else {
            return;
        };
        let attribute =
            |wanted: u16| attributes(rest).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let to = match *length {
            0 => None,
            length => {
                let octets = attribute(1).and_then(|to| <[u8; 4]>::try_from(to).ok());
                let Some(net) = octets.and_then(|octets| Ipv4Net::new(octets.into(), length)) else { return };
                Some(net)
            }
        };
        let attached = (*scope, *route_type) == (LINK, UNICAST);
        found.push(Route { to, link: attribute(4).map(<[u8]>::to_vec), attached });
    })?;
    Ok(found)
}

/// Destinations of the IPv4 routes of all tables, without default routes.
pub(crate) fn routes(socket: &mut Socket) -> io::Result<Vec<Ipv4Net>> {
    Ok(route_table(socket)?.into_iter().filter_map(|route| route.to).collect())
}

/// IPv4 networks in which the host itself lives: those directly attached to a link that a default route uses. Guests
/// have no business with the host's neighbours, whatever their addresses.
pub(crate) fn neighbourhood(socket: &mut Socket) -> io::Result<Vec<Ipv4Net>> {
    let table = route_table(socket)?;
    let outward = |link: &Option<Vec<u8>>| {
        link.is_some() && table.iter().any(|route| route.to.is_none() && route.link == *link)
    };
    Ok(table
        .iter()
        .filter(|route| route.attached && outward(&route.link))
        .filter_map(|route| route.to)
        .collect())
}

/// A neighbour entry that no ARP answer can change.
pub(crate) fn pin_neighbour(socket: &mut Socket, index: u32, ip: Ipv4Addr, mac: [u8; 6]) -> io::Result<()> {
    const PERMANENT: u16 = 0x80;
    let mut body = [INET, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[8..10].copy_from_slice(&PERMANENT.to_ne_bytes());
    let message = Message::new(RTM_NEWNEIGH, REQUEST | ACK | CREATE | REPLACE, &body);
    socket.request(message.attr(1, &ip.octets()).attr(2, &mac))
}

/// `struct ifreq` of netdevice(7), as far as TUNSETIFF uses it.
#[repr(C)]
struct TunRequest {
    name: [u8; 16],
    flags: libc::c_short,
    padding: [u8; 22],
}

/// Opens (making it when it is missing) the tap `name` in the calling thread's namespace: one queue, a virtio-net
/// header on every frame, no packet information. Whoever attaches later must use the same flags.
fn open_tap(name: &str) -> io::Result<File> {
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut request = TunRequest { name: [0; 16], flags: 0, padding: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    request.flags = libc::c_short::try_from(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR)
        .map_err(io::Error::other)?;
    // SAFETY: the request is a live, fully initialised struct of the size of the kernel's ifreq (40 bytes), and the
    // descriptor is open for the duration of the call.
    let outcome = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if outcome == 0 { Ok(tun) } else { Err(io::Error::last_os_error()) }
}

/// Makes a tap that stays when nobody has it open.
pub(crate) fn persistent_tap(name: &str) -> io::Result<()> {
    let tap = open_tap(name)?;
    // SAFETY: TUNSETPERSIST takes an integer by value; the descriptor is open.
    let outcome = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETPERSIST, 1 as libc::c_ulong) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
