//! Threads that may enter network namespaces.
//!
//! A namespace belongs to a thread, so an async worker must never enter one. These threads start in the host's
//! namespace, take closures from a bounded queue, and are back in the host's namespace before they take the next. A
//! thread that could not return (the kernel refused `setns`) tries again before its next closure and refuses that
//! closure rather than run it in the wrong place.

use crate::{During as _, Error};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use std::{
    cell::Cell,
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};
use tokio::sync::{mpsc, oneshot};

/// Closures that may wait; senders beyond that wait for room.
const QUEUE: usize = 256;

type Job = Box<dyn FnOnce(&HostNamespace) + Send>;

/// The namespace the process was started in.
pub(crate) struct HostNamespace(OwnedFd);

thread_local! {
    static ASTRAY: Cell<bool> = const { Cell::new(false) };
}

impl HostNamespace {
    pub(crate) fn of_this_thread() -> io::Result<Self> {
        Ok(Self(current()?))
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// Runs `work` inside the namespace `inside`.
    pub(crate) fn within<R>(&self, inside: &OwnedFd, work: impl FnOnce() -> R) -> io::Result<R> {
        let back = Return(self);
        enter(inside)?;
        let result = work();
        drop(back);
        Ok(result)
    }

    /// Runs `work` inside a new namespace. It lives as long as something refers to it.
    pub(crate) fn within_new<R>(&self, work: impl FnOnce() -> R) -> io::Result<R> {
        let back = Return(self);
        // SAFETY: only the network namespace is unshared, which concerns no memory or descriptor of other threads.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        let result = work();
        drop(back);
        Ok(result)
    }
}

/// Brings the thread home, also when the work panics.
struct Return<'a>(&'a HostNamespace);

impl Drop for Return<'_> {
    fn drop(&mut self) {
        if let Err(e) = enter(&self.0.0) {
            tracing::error!(error = %e, "a network thread could not return to the host's namespace");
            ASTRAY.set(true);
        }
    }
}

fn enter(namespace: &OwnedFd) -> io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// The calling thread's network namespace.
pub(crate) fn current() -> io::Result<OwnedFd> {
    Ok(File::open("/proc/thread-self/ns/net")?.into())
}

/// A few threads with one queue. They end when the last handle is dropped and the queue is empty.
#[derive(Clone)]
pub(crate) struct Threads(mpsc::Sender<Job>);

impl Threads {
    pub(crate) fn start(name: &str, count: usize, host: &Arc<HostNamespace>) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel::<Job>(QUEUE);
        let receiver = Arc::new(parking_lot::Mutex::new(receiver));
        for n in 0..count {
            let (receiver, host) = (Arc::clone(&receiver), Arc::clone(host));
            std::thread::Builder::new().name(format!("{name}{n}")).spawn(move || {
                loop {
                    // One idle thread waits in the queue while the others wait for the lock: a shared queue.
                    let Some(job) = receiver.lock().blocking_recv() else { break };
                    if ASTRAY.get() && enter(&host.0).is_err() {
                        continue;
                    }
                    ASTRAY.set(false);
                    // A panic is the caller's loss (its answer never comes), not the pool's.
                    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(&host)));
                }
            })?;
        }
        Ok(Self(sender))
    }

    /// Runs `work` on one of the threads. When the caller goes away the work still runs, and its result is dropped.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce(&HostNamespace) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |host| {
            let _ = answer.send(work(host));
        });
        self.0.send(job).await.map_err(|_| "the network threads have ended").during("network thread")?;
        answered
            .await
            .map_err(|_| "it broke down or could not return to the host's namespace")
            .during("network thread")
    }
}
