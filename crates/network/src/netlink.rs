//! A blocking netlink client: just the framing that rtnetlink and nf_tables share.
//!
//! Why by hand: slots are set up on a thread that has entered a namespace, where an async connection with its own
//! driver task has no place, and one encoder of thirty lines serves both families. Framing: netlink(7).

use rustix::{
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, sockopt},
};
use std::{io, os::fd::OwnedFd, time::Duration};

pub(crate) const REQUEST: u16 = 0x1;
pub(crate) const ACK: u16 = 0x4;
pub(crate) const DUMP: u16 = 0x300;
pub(crate) const REPLACE: u16 = 0x100;
pub(crate) const EXCL: u16 = 0x200;
pub(crate) const CREATE: u16 = 0x400;

const ERROR: u16 = 2;
const DONE: u16 = 3;
const NESTED: u16 = 0x8000;
const HEADER: usize = 16;
/// The kernel answers at once or is stuck behind its own lock; a slot must not wait for ever.
const DEADLINE: Duration = Duration::from_secs(10);

/// One message being written: 16 bytes of header, then the family's struct, then attributes.
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub(crate) fn new(kind: u16, flags: u16, body: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(body);
        Self(bytes)
    }

    pub(crate) fn attr(mut self, kind: u16, value: &[u8]) -> Self {
        put(&mut self.0, kind, value);
        self
    }

    /// Ends the message: fills in length and sequence number.
    fn finish(mut self, sequence: u32) -> Vec<u8> {
        let len = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0[0..4].copy_from_slice(&len.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

/// An attribute list that becomes the value of a nested attribute.
#[derive(Default)]
pub(crate) struct Attrs(Vec<u8>);

impl Attrs {
    /// `body` comes before the attributes, as in a veth peer's link message.
    pub(crate) fn after(body: &[u8]) -> Self {
        Self(body.to_vec())
    }

    pub(crate) fn attr(mut self, kind: u16, value: &[u8]) -> Self {
        put(&mut self.0, kind, value);
        self
    }

    pub(crate) fn nest(mut self, kind: u16, inner: &Self) -> Self {
        put(&mut self.0, kind | NESTED, &inner.0);
        self
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

fn put(buffer: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    buffer.extend_from_slice(&len.to_ne_bytes());
    buffer.extend_from_slice(&kind.to_ne_bytes());
    buffer.extend_from_slice(value);
    buffer.resize(buffer.len().next_multiple_of(4), 0);
}

/// Attributes of a received message, as (type without flags, value). Stops at the first malformed one.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & 0x3fff;
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// A netlink socket of the namespace in which the calling thread was when it opened it.
pub(crate) struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    pub(crate) fn route() -> io::Result<Self> {
        // NETLINK_ROUTE is protocol 0, which is the default.
        Self::open(None)
    }

    pub(crate) fn netfilter() -> io::Result<Self> {
        Self::open(Some(netlink::NETFILTER))
    }

    fn open(family: Option<rustix::net::Protocol>) -> io::Result<Self> {
        let kind = SocketType::RAW;
        let fd = rustix::net::socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, family)?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(DEADLINE))?;
        Ok(Self { fd, sequence: 0 })
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Sends one message that has the [`ACK`] flag and waits for the kernel's verdict.
    pub(crate) fn request(&mut self, message: Message) -> io::Result<()> {
        self.transaction([message])
    }

    /// Sends messages in one datagram, of which exactly one has the [`ACK`] flag; waits for that verdict. Used for
    /// nf_tables batches, which the kernel commits as a whole.
    pub(crate) fn transaction<const N: usize>(&mut self, messages: [Message; N]) -> io::Result<()> {
        let first = self.sequence + 1;
        let mut datagram = Vec::new();
        for message in messages {
            self.sequence += 1;
            datagram.extend(message.finish(self.sequence));
        }
        rustix::net::send(&self.fd, &datagram, SendFlags::empty())?;
        loop {
            for (kind, sequence, body) in frames(&self.receive()?) {
                if kind == ERROR && (first..=self.sequence).contains(&sequence) {
                    return verdict(body);
                }
            }
        }
    }

    /// Sends a [`DUMP`] request and hands every answer's type and body to `each`.
    pub(crate) fn dump(&mut self, message: Message, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.sequence += 1;
        rustix::net::send(&self.fd, &message.finish(self.sequence), SendFlags::empty())?;
        loop {
            for (kind, sequence, body) in frames(&self.receive()?) {
                match kind {
                    _ if sequence != self.sequence => {}
                    DONE => return Ok(()),
                    ERROR => return verdict(body),
                    kind => each(kind, body),
                }
            }
        }
    }

    fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match rustix::net::recv(&self.fd, &mut buffer, RecvFlags::empty()) {
                Ok((read, _)) => {
                    buffer.truncate(read);
                    return Ok(buffer);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "the kernel did not answer on netlink",
                    ));
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// An error message's body starts with a negated errno; zero is an acknowledgement.
fn verdict(body: &[u8]) -> io::Result<()> {
    match body.get(..4).and_then(|b| b.try_into().ok()).map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "a netlink error message was cut short")),
    }
}

fn frames(mut bytes: &[u8]) -> impl Iterator<Item = (u16, u32, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::try_from(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?)).ok()?;
        let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
        let sequence = u32::from_ne_bytes(bytes.get(8..12)?.try_into().ok()?);
        let body = bytes.get(HEADER..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, sequence, body))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_to_four_bytes_and_read_back() {
        let inner = Attrs::default().attr(1, b"abc").attr(2, &[]);
        let message = Message::new(16, REQUEST, &[9; 4]).attr(3, b"x").attr(7, inner.bytes()).finish(5);
        assert_eq!(message.len() % 4, 0);
        let all: Vec<_> = frames(&message).collect();
        assert_eq!((all.len(), all[0].0, all[0].1), (1, 16, 5));
        let read: Vec<_> = attributes(&all[0].2[4..]).collect();
        assert_eq!(read[0], (3, &b"x"[..]));
        assert_eq!(attributes(read[1].1).collect::<Vec<_>>(), [(1, &b"abc"[..]), (2, &b""[..])]);
    }

    #[test]
    fn malformed_input_ends_the_iteration() {
        assert_eq!(attributes(&[3, 0, 1, 0, 0, 0, 0, 0]).count(), 0);
        assert_eq!(attributes(&[200, 0, 1, 0]).count(), 0);
        assert_eq!(frames(&[0; 16]).count(), 0);
        assert_eq!(frames(&[255; 20]).count(), 0);
    }
}
