//! The output of one process, kept in memory with offsets so that a listener that went away can read on.
//!
//! Bytes get offsets in the order they were read, stdout and stderr together. The spool holds at most [`CAPACITY`] of
//! them (all spools together at most [`Budget`]); the oldest go first and it is known how many went.
//!
//! - Nobody listens: the process runs freely, the oldest output is dropped.
//! - Somebody listens: the process waits for its *fastest* listener once that one is [`LEAD`] behind, so a client on a
//!   slow line loses nothing. A listener that took nothing for [`STALL`] no longer holds the process.
//! - A listener that falls behind what is kept gets [`Next::Lost`]. It never holds up another one.
//!
//! A chunk counts as delivered when its listener asks for the next one; what was not delivered to anybody is what the
//! next listener without an offset starts with.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use tokio::sync::{Notify, watch};

/// Bytes kept for one process, bookkeeping included.
pub(crate) const CAPACITY: usize = 4 << 20;
/// How far the fastest listener may fall behind before the process has to wait for it.
const LEAD: u64 = 1 << 20;
/// How long a listener may take nothing and still make the process wait.
const STALL: Duration = Duration::from_secs(20);
/// What a spool keeps even when all spools together are over their budget.
const AT_LEAST: usize = 16 << 10;
/// Charged per chunk on top of its bytes, so that single-byte writes don't multiply.
const PER_CHUNK: usize = 96;
/// Small chunks are joined up to this size when they are read.
const JOINED: usize = 32 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
    Pty,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) offset: u64,
    pub(crate) stream: Stream,
    pub(crate) data: Bytes,
}

/// How a process ended, in the words of E2B's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) exit_code: i32,
    pub(crate) exited: bool,
    pub(crate) status: String,
    pub(crate) error: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Chunk(Chunk),
    End(End),
    /// Nothing yet.
    Wait,
    /// The listener fell behind: bytes from `at` to `oldest` are gone.
    Lost {
        at: u64,
        oldest: u64,
    },
}

/// The bound on all spools together. When it is reached, processes that ended lose their output first, oldest first.
pub(crate) struct Budget {
    used: AtomicUsize,
    limit: usize,
    ended: Mutex<VecDeque<Weak<Spool>>>,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), limit, ended: Mutex::default() })
    }

    fn is_over(&self) -> bool {
        self.used.load(Ordering::Relaxed) > self.limit
    }

    fn evict_ended(&self) {
        while self.is_over() {
            let oldest = self.ended.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match oldest {
                Some(spool) => {
                    if let Some(spool) = spool.upgrade() {
                        spool.shrink_to(0);
                    }
                }
                None => return,
            }
        }
    }

    fn note_ended(&self, spool: &Arc<Spool>) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.retain(|spool| spool.strong_count() > 0);
        ended.push_back(Arc::downgrade(spool));
    }
}

pub(crate) struct Spool {
    kept: Mutex<Kept>,
    changed: watch::Sender<()>,
    progress: Notify,
    waiting: AtomicUsize,
    budget: Arc<Budget>,
}

struct Kept {
    chunks: VecDeque<Chunk>,
    cost: usize,
    /// Offset of the oldest byte kept, and of the next one to come.
    start: u64,
    end: u64,
    /// Everything before was delivered to some listener.
    delivered: u64,
    listeners: HashMap<u64, u64>,
    next_listener: u64,
    last_progress: Instant,
    result: Option<End>,
}

impl Spool {
    pub(crate) fn new(budget: Arc<Budget>) -> Arc<Self> {
        Arc::new(Self {
            kept: Mutex::new(Kept {
                chunks: VecDeque::new(),
                cost: 0,
                start: 0,
                end: 0,
                delivered: 0,
                listeners: HashMap::new(),
                next_listener: 0,
                last_progress: Instant::now(),
                result: None,
            }),
            changed: watch::Sender::new(()),
            progress: Notify::new(),
            waiting: AtomicUsize::new(0),
            budget,
        })
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds output. After the end it is thrown away: nobody can be listening any more.
    pub(crate) fn append(&self, stream: Stream, data: Bytes) {
        if data.is_empty() {
            return;
        }
        {
            let mut kept = self.kept();
            if kept.result.is_some() {
                return;
            }
            let offset = kept.end;
            kept.end += data.len() as u64;
            let cost = data.len() + PER_CHUNK;
            kept.cost += cost;
            self.budget.used.fetch_add(cost, Ordering::Relaxed);
            kept.chunks.push_back(Chunk { offset, stream, data });
            kept.shrink(CAPACITY, &self.budget);
        }
        if self.budget.is_over() {
            self.budget.evict_ended();
            if self.budget.is_over() {
                self.shrink_to(AT_LEAST);
            }
        }
        self.changed.send_replace(());
    }

    fn shrink_to(&self, size: usize) {
        self.kept().shrink(size, &self.budget);
    }

    /// Ends the output. Listeners get what is left, then `end`.
    pub(crate) fn finish(self: &Arc<Self>, end: End) {
        self.kept().result = Some(end);
        self.budget.note_ended(self);
        self.changed.send_replace(());
        self.progress.notify_waiters();
    }

    /// Offset of the next byte to come.
    pub(crate) fn end_offset(&self) -> u64 {
        self.kept().end
    }

    /// Whether somebody waits in [`Spool::room`].
    pub(crate) fn is_held(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Waits until more output may be read from the process.
    pub(crate) async fn room(&self) {
        if self.kept().may_grow().is_ok() {
            return;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        loop {
            let progress = self.progress.notified();
            tokio::pin!(progress);
            progress.as_mut().enable();
            let Err(until) = self.kept().may_grow() else { break };
            // Either outcome means to look again.
            let _ = tokio::time::timeout_at(until.into(), progress).await;
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    /// Starts listening at `offset`, or at the first byte that was delivered to nobody.
    pub(crate) fn listen(self: &Arc<Self>, offset: Option<u64>) -> Listener {
        let mut kept = self.kept();
        let wanted = offset.unwrap_or(kept.delivered).min(kept.end);
        let position = wanted.max(kept.start);
        let id = kept.next_listener;
        kept.next_listener += 1;
        kept.listeners.insert(id, position);
        kept.last_progress = Instant::now();
        Listener {
            id,
            position,
            dropped: position - wanted,
            changed: self.changed.subscribe(),
            spool: Arc::clone(self),
        }
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

impl Kept {
    fn shrink(&mut self, size: usize, budget: &Budget) {
        while self.cost > size {
            let Some(oldest) = self.chunks.pop_front() else { return };
            let cost = oldest.data.len() + PER_CHUNK;
            self.cost -= cost;
            self.start = oldest.offset + oldest.data.len() as u64;
            budget.used.fetch_sub(cost, Ordering::Relaxed);
        }
    }

    /// Err holds the moment at which the answer changes by itself.
    fn may_grow(&self) -> Result<(), Instant> {
        let Some(fastest) = self.listeners.values().max() else { return Ok(()) };
        let patience = self.last_progress + STALL;
        if self.end - (*fastest).min(self.end) < LEAD || self.result.is_some() || Instant::now() >= patience {
            Ok(())
        } else {
            Err(patience)
        }
    }

    fn read(&self, at: u64) -> Next {
        if at < self.start {
            return Next::Lost { at, oldest: self.start };
        }
        if at >= self.end {
            return self.result.clone().map_or(Next::Wait, Next::End);
        }
        let index = self.chunks.partition_point(|chunk| chunk.offset + chunk.data.len() as u64 <= at);
        let Some(first) = self.chunks.get(index) else { return Next::Wait };
        let skip = usize::try_from(at - first.offset).unwrap_or_default();
        let data = first.data.slice(skip..);
        let joins =
            |next: &Chunk, size: usize| next.stream == first.stream && size + next.data.len() <= JOINED;
        match self.chunks.get(index + 1) {
            Some(second) if joins(second, data.len()) => {
                let mut joined = BytesMut::with_capacity(JOINED);
                joined.extend_from_slice(&data);
                for chunk in self.chunks.iter().skip(index + 1) {
                    if !joins(chunk, joined.len()) {
                        break;
                    }
                    joined.extend_from_slice(&chunk.data);
                }
                Next::Chunk(Chunk { offset: at, stream: first.stream, data: joined.freeze() })
            }
            _ => Next::Chunk(Chunk { offset: at, stream: first.stream, data }),
        }
    }
}

/// One reader of a spool, with its own position.
pub(crate) struct Listener {
    spool: Arc<Spool>,
    id: u64,
    position: u64,
    dropped: u64,
    changed: watch::Receiver<()>,
}

impl Listener {
    /// Offset of the next byte it gets.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Bytes that were asked for and are no longer kept.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// What comes next. Asking for it confirms that everything before has been handed on.
    pub(crate) fn next(&mut self) -> Next {
        self.changed.mark_unchanged();
        let mut kept = self.spool.kept();
        if kept.listeners.insert(self.id, self.position).is_some_and(|before| before < self.position) {
            kept.last_progress = Instant::now();
            self.spool.progress.notify_waiters();
        }
        kept.delivered = kept.delivered.max(self.position);
        let next = kept.read(self.position);
        if let Next::Chunk(chunk) = &next {
            self.position = chunk.offset + chunk.data.len() as u64;
        }
        next
    }

    /// Waits until [`Listener::next`] may have something else to say.
    pub(crate) async fn changed(&mut self) {
        // The sender lives in the spool, which we hold.
        let _ = self.changed.changed().await;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.spool.kept().listeners.remove(&self.id);
        self.spool.progress.notify_waiters();
    }
}

#[cfg(test)]
#[path = "spool_tests.rs"]
mod tests;
