//! lo and eth0, by the classic ioctls: two addresses and a route need no netlink library.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::{CommandLine, DEVICE_WAIT, devices::Events};

const ETH0: &[u8] = b"eth0";

/// Brings lo up and, when the command line has an address, eth0 with it and the default route.
pub(super) fn up(line: &CommandLine, events: &Events) -> io::Result<()> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    set_up(&socket, b"lo").map_err(|err| because("bring lo up", &err))?;
    let Some((address, prefix)) = line.address else { return Ok(()) };
    if !events.wait_until(|| Path::new("/sys/class/net/eth0").exists(), DEVICE_WAIT) {
        return Err(io::Error::other("eth0 did not appear: is its driver in /etc/aenv/modules?"));
    }
    // The sandbox's network is IPv4; without this the kernel would chat about link-local addresses on it.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "1");
    set_address(&socket, libc::SIOCSIFADDR, address).map_err(|err| because("set the address", &err))?;
    let mask = Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0));
    set_address(&socket, libc::SIOCSIFNETMASK, mask).map_err(|err| because("set the netmask", &err))?;
    set_up(&socket, ETH0).map_err(|err| because("bring eth0 up", &err))?;
    if let Some(gateway) = line.gateway {
        add_default_route(&socket, gateway).map_err(|err| because("add the default route", &err))?;
    }
    Ok(())
}

fn because(what: &str, err: &io::Error) -> io::Error {
    io::Error::new(err.kind(), format!("cannot {what}: {err}"))
}

fn request(name: &[u8]) -> libc::ifreq {
    // SAFETY: ifreq is plain data; all zeros is an empty name and an empty union.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
    request
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let v4 = libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or_default(),
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: both are 16 bytes of plain data, and this is the layout the kernel reads.
    unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(v4) }
}

fn set_up(socket: &OwnedFd, name: &[u8]) -> io::Result<()> {
    let mut request = request(name);
    let flags = libc::IFF_UP | libc::IFF_RUNNING;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or_default();
    ioctl(socket, libc::SIOCSIFFLAGS, &mut request)
}

fn set_address(socket: &OwnedFd, what: libc::c_ulong, address: Ipv4Addr) -> io::Result<()> {
    let mut request = request(ETH0);
    request.ifr_ifru.ifru_addr = socket_address(address);
    ioctl(socket, what, &mut request)
}

fn add_default_route(socket: &OwnedFd, gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: rtentry is plain data; all zeros is a route with nothing set.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    match ioctl(socket, libc::SIOCADDRT, &mut route) {
        Err(err) if err.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn ioctl<T>(socket: &OwnedFd, what: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: `argument` is the structure that each of the requests used here takes, and lives through the call.
    match unsafe { libc::ioctl(socket.as_raw_fd(), what, std::ptr::from_mut(argument)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
