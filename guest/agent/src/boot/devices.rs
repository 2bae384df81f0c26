//! Waiting for a device without polling: the kernel announces each one on a netlink socket.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{AddressFamily, RecvFlags, SocketFlags, SocketType, netlink},
};

use super::BootError;

/// The kernel's device events. Subscribed before the drivers are loaded, so that none is missed.
pub(super) struct Events(Option<OwnedFd>);

/// Longest sleep without looking again, for kernels whose events can't be had.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

impl Events {
    pub(super) fn subscribe() -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let protocol = Some(netlink::KOBJECT_UEVENT);
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)
            // Group 1 is the kernel's own multicast group.
            .and_then(|fd| rustix::net::bind(&fd, &netlink::SocketAddrNetlink::new(0, 1)).map(|()| fd));
        Self(socket.ok())
    }

    fn next(&self, at_most: Duration) {
        let Some(fd) = &self.0 else {
            std::thread::sleep(at_most.min(LOOK_AGAIN));
            return;
        };
        let wait = rustix::event::Timespec::try_from(at_most).ok();
        if poll(&mut [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)], wait.as_ref()).is_ok() {
            let mut event = [0_u8; 4096];
            // What it says does not matter: the caller looks for itself.
            let _ = rustix::net::recv(fd, &mut event, RecvFlags::empty());
        }
    }

    /// Waits until `ready` says so; false when the time is over.
    pub(super) fn wait_until(&self, ready: impl Fn() -> bool, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        loop {
            if ready() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.next(left);
        }
    }
}

pub(super) fn wait_for(events: &Events, device: &str, at_most: Duration) -> Result<(), BootError> {
    if events.wait_until(|| Path::new(device).exists(), at_most) {
        Ok(())
    } else {
        Err(BootError::NoDevice { device: device.to_owned() })
    }
}
