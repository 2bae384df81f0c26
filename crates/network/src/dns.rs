//! The guests' resolver: one forwarder a slot, on the gateway's port 53.
//!
//! The sockets live in the slot's namespace, the queries leave from the host, so a guest resolves like its host does
//! (a stub on 127.0.0.53 included) without being able to reach the host's resolver itself. Messages pass unread but
//! for the id and the two bits we need (RFC 1035 §4.1.1); truncation is the client's business, which asks again by TCP.
//!
//! Bounds: [`QUERIES`] queries in flight a slot (more wait in the socket's buffer, which drops), [`CONNECTIONS`] TCP
//! connections a slot, [`TRY`] for one upstream's answer, every upstream at most twice. A guest whose egress is
//! `Nothing` gets REFUSED; when no upstream answers it gets SERVFAIL.

use crate::{GATEWAY_IP, GUEST_IP};
use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    task::{AbortHandle, JoinSet},
    time::timeout,
};

const QUERIES: usize = 64;
const CONNECTIONS: usize = 8;
const TRY: Duration = Duration::from_secs(2);
const IDLE: Duration = Duration::from_secs(10);
/// Larger than what stub resolvers advertise by EDNS (1232 to 4096 bytes).
const DATAGRAM: usize = 8192;
const HEADER: usize = 12;
const REFUSED: u8 = 5;
const SERVFAIL: u8 = 2;
const PORT: u16 = 53;

/// Where guests' queries go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upstreams {
    /// The nameservers of the host's `/etc/resolv.conf`, read anew every few seconds.
    Host,
    /// These, tried in order.
    Fixed(Vec<SocketAddr>),
    /// No resolver in the slots at all.
    Off,
}

/// The upstreams in force, shared by all slots.
#[derive(Default)]
pub(crate) struct Resolver(parking_lot::RwLock<Vec<SocketAddr>>);

impl Resolver {
    pub(crate) fn replace(&self, upstreams: Vec<SocketAddr>) {
        *self.0.write() = upstreams;
    }

    pub(crate) fn upstreams(&self) -> Vec<SocketAddr> {
        self.0.read().clone()
    }
}

/// The host's nameservers. systemd-resolved's stub on loopback is used like any other, because queries leave from the
/// host; its own list is only a fallback for a resolv.conf that names nobody.
pub(crate) fn host_upstreams() -> Vec<SocketAddr> {
    ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"]
        .iter()
        .map(|path| nameservers(&std::fs::read_to_string(path).unwrap_or_default()))
        .find(|found| !found.is_empty())
        .unwrap_or_default()
}

/// Nameserver lines of resolv.conf(5). Link-local IPv6 servers need an interface and are left out.
fn nameservers(text: &str) -> Vec<SocketAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse().ok()).flatten()
    });
    servers.map(|ip| SocketAddr::new(ip, PORT)).collect()
}

/// Bound sockets that no runtime knows yet.
pub(crate) struct Sockets {
    udp: std::net::UdpSocket,
    tcp: std::net::TcpListener,
}

/// Binds in the calling thread's namespace.
pub(crate) fn bind() -> io::Result<Sockets> {
    let udp = std::net::UdpSocket::bind((GATEWAY_IP, PORT))?;
    let tcp = std::net::TcpListener::bind((GATEWAY_IP, PORT))?;
    udp.set_nonblocking(true)?;
    tcp.set_nonblocking(true)?;
    Ok(Sockets { udp, tcp })
}

/// A running forwarder; dropping it ends it and closes its sockets.
pub(crate) struct Forwarder([AbortHandle; 2]);

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// Serves on `sockets` for as long as the result lives. `open` says whether the guest may resolve.
pub(crate) fn serve(
    sockets: Sockets,
    resolver: &Arc<Resolver>,
    open: &Arc<AtomicBool>,
) -> io::Result<Forwarder> {
    let udp = Arc::new(UdpSocket::from_std(sockets.udp)?);
    let tcp = TcpListener::from_std(sockets.tcp)?;
    let datagrams = tokio::spawn(serve_udp(udp, Arc::clone(resolver), Arc::clone(open)));
    let streams = tokio::spawn(serve_tcp(tcp, Arc::clone(resolver), Arc::clone(open)));
    Ok(Forwarder([datagrams.abort_handle(), streams.abort_handle()]))
}

async fn serve_udp(socket: Arc<UdpSocket>, resolver: Arc<Resolver>, open: Arc<AtomicBool>) {
    let permits = Arc::new(Semaphore::new(QUERIES));
    let mut running = JoinSet::new();
    let mut buffer = vec![0; DATAGRAM];
    // The semaphore is never closed, so the loop ends only by abortion, which ends the running queries too.
    while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
        while running.try_join_next().is_some() {}
        let Ok((len, from)) = socket.recv_from(&mut buffer).await else {
            // An ICMP error for an earlier answer concerns nobody; one that stays must not make a busy loop.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let query = buffer[..len].to_vec();
        if from.ip() != GUEST_IP || !is_query(&query) {
            continue;
        }
        let (socket, resolver, open) = (Arc::clone(&socket), Arc::clone(&resolver), Arc::clone(&open));
        running.spawn(async move {
            let answer = answer(&query, &resolver, &open, Transport::Udp).await;
            let _ = socket.send_to(&answer, from).await;
            drop(permit);
        });
    }
}

async fn serve_tcp(listener: TcpListener, resolver: Arc<Resolver>, open: Arc<AtomicBool>) {
    let mut running = JoinSet::new();
    loop {
        if running.len() >= CONNECTIONS {
            running.join_next().await;
        }
        match listener.accept().await {
            Ok((stream, _)) => {
                let (resolver, open) = (Arc::clone(&resolver), Arc::clone(&open));
                running.spawn(async move {
                    // A broken connection is the guest's own affair.
                    let _ = serve_stream(stream, &resolver, &open).await;
                });
            }
            // Out of descriptors, or the peer went away: wait for a connection to end before trying again.
            Err(_) if !running.is_empty() => drop(running.join_next().await),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
        while running.try_join_next().is_some() {}
    }
}

async fn serve_stream(mut stream: TcpStream, resolver: &Resolver, open: &AtomicBool) -> io::Result<()> {
    loop {
        let query = timeout(IDLE, read_framed(&mut stream)).await??;
        if !is_query(&query) {
            return Ok(());
        }
        let answer = answer(&query, resolver, open, Transport::Tcp).await;
        timeout(IDLE, write_framed(&mut stream, &answer)).await??;
    }
}

async fn read_framed(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let len = stream.read_u16().await?;
    let mut message = vec![0; len.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

async fn write_framed(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let len = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&len.to_be_bytes()[..], message].concat()).await
}

#[derive(Clone, Copy)]
enum Transport {
    Udp,
    Tcp,
}

async fn answer(query: &[u8], resolver: &Resolver, open: &AtomicBool, transport: Transport) -> Vec<u8> {
    if !open.load(Ordering::Acquire) {
        return failure(query, REFUSED);
    }
    let upstreams = resolver.upstreams();
    for upstream in upstreams.iter().chain(&upstreams) {
        let exchange = async {
            match transport {
                Transport::Udp => by_udp(query, *upstream).await,
                Transport::Tcp => by_tcp(query, *upstream).await,
            }
        };
        // An error (a refused port, say) moves on at once, silence after the deadline.
        if let Ok(Ok(answer)) = timeout(TRY, exchange).await {
            return answer;
        }
    }
    failure(query, SERVFAIL)
}

async fn by_udp(query: &[u8], upstream: SocketAddr) -> io::Result<Vec<u8>> {
    let any: SocketAddr = match upstream {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    // A fresh port for every query, connected: an answer must come from the upstream itself.
    let socket = UdpSocket::bind(any).await?;
    socket.connect(upstream).await?;
    socket.send(query).await?;
    let mut answer = vec![0; DATAGRAM];
    loop {
        let len = socket.recv(&mut answer).await?;
        if answers(query, &answer[..len]) {
            answer.truncate(len);
            return Ok(answer);
        }
    }
}

async fn by_tcp(query: &[u8], upstream: SocketAddr) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(upstream).await?;
    write_framed(&mut stream, query).await?;
    let answer = read_framed(&mut stream).await?;
    if answers(query, &answer) { Ok(answer) } else { Err(io::Error::other("an answer to another query")) }
}

fn is_query(message: &[u8]) -> bool {
    message.len() >= HEADER && message[2] & 0x80 == 0
}

fn answers(query: &[u8], answer: &[u8]) -> bool {
    answer.len() >= HEADER && answer[2] & 0x80 != 0 && answer[..2] == query[..2]
}

/// An answer without records: the query's id, opcode and RD bit, its first question if that is readable, and `code`.
fn failure(query: &[u8], code: u8) -> Vec<u8> {
    let question = question_end(query);
    let mut answer = query[..question.unwrap_or(HEADER)].to_vec();
    answer[2] = (answer[2] & 0x79) | 0x80;
    answer[3] = 0x80 | code;
    answer[4..HEADER].fill(0);
    answer[5] = question.is_some().into();
    answer
}

/// Where the first question ends; `None` when there is none or it isn't plain labels.
fn question_end(query: &[u8]) -> Option<usize> {
    if query[4..6] == [0, 0] {
        return None;
    }
    let mut at = HEADER;
    loop {
        match *query.get(at)? {
            0 => break,
            len @ 1..=63 => at += usize::from(len) + 1,
            _ => return None,
        }
    }
    let end = at + 5;
    (end <= query.len()).then_some(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const QUERY: &[u8] = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01\x01a\x02bc\x00\x00\x01\x00\x01\x00\x00\x29\x10\x00\x00\x00\x00\x00\x00\x00";

    #[test]
    fn a_refusal_keeps_id_and_question_and_drops_the_rest() {
        let answer = failure(QUERY, REFUSED);
        assert_eq!(&answer[..12], b"\x12\x34\x81\x85\x00\x01\x00\x00\x00\x00\x00\x00");
        assert_eq!(&answer[12..], b"\x01a\x02bc\x00\x00\x01\x00\x01");
        assert!(answers(QUERY, &answer));
    }

    proptest! {
        #[test]
        fn a_hostile_query_is_answered_by_at_most_its_own_length(query in prop::collection::vec(any::<u8>(), HEADER..600)) {
            let answer = failure(&query, SERVFAIL);
            prop_assert!(answer.len() <= query.len());
            prop_assert_eq!(&answer[..2], &query[..2]);
            prop_assert!(answer[2] & 0x80 != 0);
        }
    }

    #[test]
    fn nameservers_are_read_from_resolv_conf_and_scoped_ones_left_out() {
        let text = "# nameserver 1.1.1.1\nsearch lan\nnameserver 9.9.9.9\nnameserver\tfe80::1%eth0\nnameserver 2001:db8::1 # x\nnameserver\n";
        let expected: Vec<SocketAddr> =
            vec!["9.9.9.9:53".parse().unwrap(), "[2001:db8::1]:53".parse().unwrap()];
        assert_eq!(nameservers(text), expected);
    }
}
