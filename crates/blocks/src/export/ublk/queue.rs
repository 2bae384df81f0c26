//! One hardware queue of a device: a thread that talks to the driver, and workers that talk to the [`Device`].
//!
//! ```text
//!   driver ──request──► queue thread ──waiting (≤ depth)──► workers ──► Device (blocks: disk, network, locks)
//!      ▲                     ▲                                 │   └─── data by pread/pwrite on the character device
//!      └──commit and fetch───┴──── answered (≤ depth), eventfd ┘
//!
//!   a tag:  fetching ──request──► taken ──answer──► fetching        ended: the driver answered a fetch with an error,
//!              └──────────────────────────────────► ended           which it does when the device stops
//! ```
//! The driver takes a queue's commands only from the thread that first spoke for it, so answers go through that
//! thread. A blocked worker stalls neither the queue nor its other requests. Both lists hold a tag at most once, so
//! the queue's depth bounds them. When this process dies, taken requests go to the next server (`USER_RECOVERY`).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::abi::{self, Descriptor, IoCommand};
use crate::device::Device;

/// Completion that says "look at the answers".
const WAKE: u64 = u64::MAX;
const SECTOR: u64 = 512;
/// `linux/prctl.h`.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// What a queue is made of.
pub(super) struct Setup {
    pub(super) name: String,
    pub(super) device: Arc<dyn Device>,
    pub(super) character: Arc<File>,
    pub(super) queue: u16,
    pub(super) depth: u16,
    pub(super) workers: usize,
    pub(super) max_io_bytes: u32,
}

#[derive(Clone, Copy)]
struct Request {
    tag: u16,
    descriptor: Descriptor,
}

#[derive(Default)]
struct Lists {
    waiting: VecDeque<Request>,
    answered: Vec<(u16, i32)>,
    ended: bool,
}

struct Shared {
    setup: Setup,
    lists: Mutex<Lists>,
    work: Condvar,
    wake: OwnedFd,
}

/// The threads of a queue. They end when the driver stops the device.
pub(super) struct Queue {
    threads: Vec<JoinHandle<()>>,
}

impl Queue {
    /// Starts the threads; the driver learns of the queue when they run.
    pub(super) fn start(setup: Setup) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let label = format!("ublk-{}", setup.queue);
        let workers = setup.workers.max(1);
        let driver = Driver::new(&setup)?;
        let shared = Arc::new(Shared { setup, lists: Mutex::default(), work: Condvar::new(), wake });
        let mut threads = Vec::new();
        for _ in 0..workers {
            let shared = shared.clone();
            let run = move || shared.work();
            threads.push(std::thread::Builder::new().name(format!("{label}-work")).spawn(run)?);
        }
        let run = move || {
            if let Err(error) = driver.run(&shared) {
                tracing::error!(%error, export = shared.setup.name, "a ublk queue ended; its device waits");
            }
            shared.lists.lock().ended = true;
            shared.work.notify_all();
        };
        threads.push(std::thread::Builder::new().name(label).spawn(run)?);
        Ok(Self { threads })
    }

    /// Waits for the threads.
    pub(super) fn join(self) {
        for thread in self.threads {
            let _panic_was_printed = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        allow_writing_back();
        let mut buffer = vec![0; usize::try_from(self.setup.max_io_bytes).unwrap_or(1 << 20)];
        loop {
            let mut lists = self.lists.lock();
            let request = loop {
                if let Some(request) = lists.waiting.pop_front() {
                    break request;
                }
                if lists.ended {
                    return;
                }
                self.work.wait(&mut lists);
            };
            drop(lists);
            // A device that panics must not leave its guest waiting for ever.
            let served = catch_unwind(AssertUnwindSafe(|| self.serve(request, &mut buffer)));
            let result = match served.unwrap_or_else(|_| Err(io::Error::other("the device panicked"))) {
                Ok(bytes) => i32::try_from(bytes).unwrap_or(i32::MAX),
                Err(error) => {
                    if self.setup.device.traffic().failed() {
                        tracing::error!(%error, export = self.setup.name, "the first failed request of an export");
                    }
                    if error.raw_os_error() == Some(libc::ENOSPC) { -libc::ENOSPC } else { -libc::EIO }
                }
            };
            let first = {
                let mut lists = self.lists.lock();
                lists.answered.push((request.tag, result));
                lists.answered.len() == 1
            };
            // Only the first answer wakes: the queue thread takes all there are.
            if first {
                let _counter_is_up_already = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
            }
        }
    }

    /// Bytes done.
    fn serve(&self, request: Request, buffer: &mut [u8]) -> io::Result<u64> {
        let Setup { device, character, queue, .. } = &self.setup;
        let Descriptor { operation, sectors, start_sector, .. } = request.descriptor;
        if operation & 0xff == abi::OP_FLUSH {
            // Its sectors mean nothing: the kernel sends -1.
            return device.flush().map(|()| 0);
        }
        let len = u64::from(sectors) * SECTOR;
        let offset = start_sector.checked_mul(SECTOR).ok_or(io::ErrorKind::InvalidInput)?;
        let data = abi::buffer_position(*queue, request.tag);
        match operation & 0xff {
            abi::OP_READ => {
                let buffer = part(buffer, len)?;
                device.read_at(buffer, offset)?;
                character.write_all_at(buffer, data)?;
                device.traffic().read(len);
                Ok(len)
            }
            abi::OP_WRITE => {
                let buffer = part(buffer, len)?;
                character.read_exact_at(buffer, data)?;
                device.write_at(buffer, offset)?;
                if operation & abi::IO_FUA != 0 {
                    device.flush()?;
                }
                device.traffic().wrote(len);
                Ok(len)
            }
            abi::OP_DISCARD | abi::OP_WRITE_ZEROES => {
                device.write_zeroes(offset, len)?;
                if operation & abi::IO_FUA != 0 {
                    device.flush()?;
                }
                Ok(0)
            }
            other => {
                Err(io::Error::other(format!("the kernel asked for operation {other}, which is unknown")))
            }
        }
    }
}

fn part(buffer: &mut [u8], len: u64) -> io::Result<&mut [u8]> {
    let len = usize::try_from(len).map_err(io::Error::other)?;
    buffer.get_mut(..len).ok_or_else(|| io::Error::other("a request is larger than was agreed"))
}

/// The queue thread's side: the ring and the descriptors that the driver fills.
struct Driver {
    ring: IoUring,
    descriptors: *mut Descriptor,
    mapped: usize,
    queue: u16,
    depth: u16,
    /// Tags that are not ended.
    live: u16,
}

// SAFETY: `descriptors` is a mapping that belongs to this value alone.
unsafe impl Send for Driver {}

impl Driver {
    fn new(setup: &Setup) -> io::Result<Self> {
        let ring = IoUring::builder()
            .setup_cqsize(u32::from(setup.depth) * 2 + 2)
            .build(u32::from(setup.depth) + 1)?;
        let per_queue = usize::from(abi::MAX_DEPTH) * size_of::<Descriptor>();
        let mapped = (usize::from(setup.depth) * size_of::<Descriptor>()).next_multiple_of(4096);
        let at = (per_queue * usize::from(setup.queue)) as u64;
        // SAFETY: a new mapping, placed by the kernel.
        let descriptors = unsafe {
            mmap(std::ptr::null_mut(), mapped, ProtFlags::READ, MapFlags::SHARED, &*setup.character, at)?
        };
        let descriptors = descriptors.cast();
        Ok(Self { ring, descriptors, mapped, queue: setup.queue, depth: setup.depth, live: setup.depth })
    }

    fn run(mut self, shared: &Shared) -> io::Result<()> {
        allow_writing_back();
        let character = Fd(shared.setup.character.as_raw_fd());
        let wake = Fd(shared.wake.as_raw_fd());
        let (queue, depth) = (self.queue, self.depth);
        let speak = move |operation: u32, tag: u16, result: i32| {
            opcode::UringCmd16::new(character, operation)
                .cmd(IoCommand::new(queue, tag, result).bytes())
                .build()
                .user_data(tag.into())
        };
        for tag in 0..depth {
            self.push(&speak(abi::FETCH_REQ, tag, 0))?;
        }
        let listen = || opcode::PollAdd::new(wake, libc::POLLIN as u32).build().user_data(WAKE);
        self.push(&listen())?;
        let mut requests = Vec::new();
        let mut answers = Vec::new();
        while self.live > 0 {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            let mut woken = false;
            let completions: Vec<_> = self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
            for (user_data, result) in completions {
                let Ok(tag) = u16::try_from(user_data) else {
                    woken = true;
                    continue;
                };
                if result == 0 {
                    requests.push(Request { tag, descriptor: self.descriptor(tag) });
                } else {
                    // -ENODEV when the device stops; anything else can't be mended by asking again.
                    if result != -libc::ENODEV && result != -libc::ECANCELED {
                        let error = io::Error::from_raw_os_error(-result);
                        tracing::error!(%error, export = shared.setup.name, tag, "the ublk driver refused a command");
                    }
                    self.live -= 1;
                }
            }
            if woken {
                let mut counter = [0; 8];
                let _was_zero = rustix::io::read(&shared.wake, &mut counter);
                self.push(&listen())?;
            }
            if !requests.is_empty() || woken {
                let many = requests.len();
                let mut lists = shared.lists.lock();
                lists.waiting.extend(requests.drain(..));
                std::mem::swap(&mut lists.answered, &mut answers);
                drop(lists);
                for _ in 0..many {
                    shared.work.notify_one();
                }
            }
            for (tag, result) in answers.drain(..) {
                self.push(&speak(abi::COMMIT_AND_FETCH_REQ, tag, result))?;
            }
        }
        Ok(())
    }

    fn descriptor(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "the driver named tag {tag} of {}", self.depth);
        // SAFETY: within the mapping; the driver wrote it before it completed the fetch and leaves it until the answer.
        unsafe { self.descriptors.add(tag.into()).read_volatile() }
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: the entry points to no memory; its files outlive the ring, which this thread owns.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.ring.submit()?;
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SAFETY: made by `new`, used by nobody else.
        let _unmapped = unsafe { munmap(self.descriptors.cast(), self.mapped) };
    }
}

/// Tells the kernel that this thread writes blocks back: when memory is short it must not wait for itself.
fn allow_writing_back() {
    // SAFETY: sets a flag of the calling thread. Without CAP_SYS_RESOURCE it fails and nothing changes.
    unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
}
