//! A small world for slots: the test's thread becomes a "host" in a network and mount namespace of its own, an
//! "internet" hangs on it by a veth pair, and guests are namespaces whose device is wired to a slot's tap.
//!
//! Nothing touches the machine's own network, and everything vanishes with the test's process.

use aenv_network::{GATEWAY_IP, GUEST_IP, GUEST_MAC, Slot, TAP};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    thread::{LinkNameSpaceType, UnshareFlags},
};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// A public address in the internet.
pub(crate) const PUBLIC: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
/// Addresses that the internet would answer too, were packets to them let through.
pub(crate) const FORBIDDEN: [Ipv4Addr; 6] = [
    Ipv4Addr::new(10, 99, 0, 1),
    Ipv4Addr::new(172, 16, 5, 1),
    Ipv4Addr::new(192, 168, 77, 1),
    Ipv4Addr::new(100, 64, 9, 9),
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(198, 18, 0, 7),
];
/// The host's own addresses.
pub(crate) const HOST: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 51, 100, 1), Ipv4Addr::new(45, 33, 32, 156)];

/// Makes the calling thread's world; `None`, with the reason printed, where that isn't possible.
#[allow(clippy::print_stdout)]
pub(crate) fn world() -> Option<Namespace> {
    let missing = if !rustix::process::geteuid().is_root() {
        Some("needs root")
    } else if !Path::new("/dev/net/tun").exists() {
        Some("needs /dev/net/tun")
    } else if Command::new("nft").arg("--version").output().is_err() {
        Some("needs nft")
    } else {
        None
    };
    if let Some(why) = missing {
        println!("Skipped: {why}");
        return None;
    }
    // SAFETY: network and mounts of this thread only; no memory or descriptor is concerned.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }.unwrap();
    rustix::mount::mount_change(
        "/",
        rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC,
    )
    .unwrap();
    let host = Namespace::current();
    let internet = Namespace::new();
    ip("link set lo up");
    ip("link add wan0 type veth peer name inet0");
    host.move_link("inet0", &internet);
    ip("addr add 198.51.100.1/24 dev wan0");
    ip("addr add 45.33.32.156/32 dev lo");
    ip("link set wan0 up");
    ip("route add default via 198.51.100.2");
    internet.run(|| {
        ip("link set lo up");
        ip("addr add 198.51.100.2/24 dev inet0");
        ip("link set inet0 up");
        for address in FORBIDDEN.into_iter().chain([PUBLIC]) {
            ip(&format!("addr add {address}/32 dev lo"));
        }
        echo_server((Ipv4Addr::UNSPECIFIED, 80).into());
    });
    Some(internet)
}

/// A node's run directory. Tests that end with live slots leave mounts in it; those go first.
pub(crate) struct RunDir(tempfile::TempDir);

impl RunDir {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
        let inside = mounts
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .filter(|at| Path::new(at).starts_with(self.path()));
        for at in inside.collect::<Vec<_>>().into_iter().rev() {
            let _ = rustix::mount::unmount(at, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Serves TCP in the calling thread's namespace: says who the peer is, then echoes.
pub(crate) fn echo_server(address: SocketAddr) {
    let listener = TcpListener::bind(address).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut stream = stream;
                let peer = stream.peer_addr().unwrap().ip();
                let _ = stream.write_all(format!("{peer}\n").as_bytes());
                let mut buffer = [0; 4096];
                while let Ok(len @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..len]).is_err() {
                        break;
                    }
                }
            });
        }
    });
}

/// Tries a TCP connection from the calling thread's namespace and returns the server's greeting.
pub(crate) fn greet(to: impl Into<IpAddr>, port: u16) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&(to.into(), port).into(), Duration::from_millis(700))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut text = [0; 64];
    let len = stream.read(&mut text)?;
    Ok(String::from_utf8_lossy(&text[..len]).trim().to_owned())
}

/// A network namespace held open.
#[derive(Clone)]
pub(crate) struct Namespace(Arc<OwnedFd>);

impl Namespace {
    pub(crate) fn current() -> Self {
        Self(Arc::new(File::open("/proc/thread-self/ns/net").unwrap().into()))
    }

    pub(crate) fn new() -> Self {
        std::thread::spawn(|| {
            // SAFETY: as above.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
            Self::current()
        })
        .join()
        .unwrap()
    }

    pub(crate) fn open(path: &Path) -> Self {
        Self(Arc::new(File::open(path).unwrap().into()))
    }

    /// Runs `work` on a thread inside the namespace.
    pub(crate) fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let inside = || {
            rustix::thread::move_into_link_name_space(self.0.as_fd(), Some(LinkNameSpaceType::Network))
                .unwrap();
            work()
        };
        std::thread::scope(|scope| match scope.spawn(inside).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    fn move_link(&self, name: &str, to: &Self) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), to.0.as_raw_fd());
        self.run(|| ip(&format!("link set {name} netns {path}")));
    }
}

/// `struct ifreq` as TUNSETIFF reads it.
#[repr(C)]
struct TunRequest {
    name: [u8; 16],
    flags: libc::c_short,
    padding: [u8; 22],
}

/// Opens a tap of the calling thread's namespace with the flags that a VMM uses.
fn open_tap(name: &str) -> File {
    let tap = OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut request = TunRequest { name: [0; 16], flags: 0, padding: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    request.flags = libc::c_short::try_from(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR).unwrap();
    // SAFETY: a live, initialised struct of the kernel's size; the descriptor is open.
    let outcome = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(outcome, 0, "TUNSETIFF {name}: {}", io::Error::last_os_error());
    tap
}

/// Plays a slot's guest: a namespace whose `eth0` is wired frame by frame to the slot's tap.
pub(crate) struct Guest {
    pub inside: Namespace,
    stop: Arc<AtomicBool>,
    pump: Option<std::thread::JoinHandle<()>>,
}

impl Guest {
    pub(crate) fn attach(slot: &Slot) -> Self {
        let inside = Namespace::new();
        let theirs = Namespace::open(&slot.netns).run(|| open_tap(TAP));
        let ours = inside.run(|| {
            let tap = open_tap("eth0");
            ip(&format!("link set eth0 address {GUEST_MAC}"));
            ip(&format!("addr add {GUEST_IP}/30 dev eth0"));
            ip("link set lo up");
            ip("link set eth0 up");
            ip(&format!("route add default via {GATEWAY_IP}"));
            tap
        });
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let pump = std::thread::spawn(move || {
            let tick = Timespec::try_from(Duration::from_millis(50)).unwrap();
            let mut frame = vec![0; 70_000];
            while !stopped.load(Ordering::Relaxed) {
                let mut fds = [PollFd::new(&ours, PollFlags::IN), PollFd::new(&theirs, PollFlags::IN)];
                if rustix::event::poll(&mut fds, Some(&tick)).is_err() {
                    continue;
                }
                let ready = [fds[0].revents(), fds[1].revents()].map(|r| r.contains(PollFlags::IN));
                for (ready, mut from, mut to) in [(ready[0], &ours, &theirs), (ready[1], &theirs, &ours)] {
                    if ready && let Ok(len) = from.read(&mut frame) {
                        let _ = to.write(&frame[..len]);
                    }
                }
            }
        });
        Self { inside, stop, pump: Some(pump) }
    }

    pub(crate) fn greet(&self, to: Ipv4Addr, port: u16) -> io::Result<String> {
        self.inside.run(|| greet(to, port))
    }

    /// Sends a DNS query for the A record of `name` to the gateway and returns the response.
    pub(crate) fn ask(&self, name: &str, id: u16) -> io::Result<Vec<u8>> {
        self.inside.run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(Duration::from_secs(8)))?;
            socket.send_to(&query(name, id), (GATEWAY_IP, 53))?;
            let mut answer = vec![0; 2048];
            let len = socket.recv(&mut answer)?;
            answer.truncate(len);
            Ok(answer)
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(pump) = self.pump.take() {
            let _ = pump.join();
        }
    }
}

/// A query for one A record.
pub(crate) fn query(name: &str, id: u16) -> Vec<u8> {
    let mut message = id.to_be_bytes().to_vec();
    message.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        message.push(u8::try_from(label.len()).unwrap());
        message.extend(label.as_bytes());
    }
    message.extend([0, 0, 1, 0, 1]);
    message
}

/// A name server on the calling thread's loopback, UDP and TCP, that answers every query with `192.0.2.33`.
pub(crate) fn name_server() -> SocketAddr {
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = udp.local_addr().unwrap();
    let tcp = TcpListener::bind(address).unwrap();
    let answer = |query: &[u8]| {
        let mut answer = query.to_vec();
        answer[2] |= 0x80;
        answer[7] = 1;
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 33]);
        answer
    };
    std::thread::spawn(move || {
        let mut query = [0; 2048];
        while let Ok((len, from)) = udp.recv_from(&mut query) {
            let _ = udp.send_to(&answer(&query[..len]), from);
        }
    });
    std::thread::spawn(move || {
        for mut stream in tcp.incoming().flatten() {
            let mut len = [0; 2];
            stream.read_exact(&mut len).unwrap();
            let mut query = vec![0; u16::from_be_bytes(len).into()];
            stream.read_exact(&mut query).unwrap();
            let answer = answer(&query);
            stream.write_all(&u16::try_from(answer.len()).unwrap().to_be_bytes()).unwrap();
            stream.write_all(&answer).unwrap();
        }
    });
    address
}

/// A runtime whose threads are in the calling thread's namespaces.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}
