//! How many fetches run and wait, overall and at one place.
//!
//! Read-ahead gets at most half of either, so that a reader who waits finds a turn soon. A place that said
//! `Retry-After` is left alone by all fetches until then.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use super::Options;
use crate::remote::FetchError;

pub(crate) struct Places {
    all: Turns,
    waiting: AtomicUsize,
    most_waiting: usize,
    per_place: usize,
    known: Mutex<HashMap<String, Weak<Place>>>,
}

/// One host, bucket or directory.
pub(crate) struct Place {
    name: String,
    turns: Turns,
    /// Until when it wants to be left alone.
    closed: Mutex<Option<Instant>>,
}

struct Turns {
    all: Semaphore,
    background: Semaphore,
}

/// Held while a fetch is under way.
pub(crate) struct Turn<'a> {
    _held: [Option<SemaphorePermit<'a>>; 4],
}

impl Turns {
    fn new(many: usize) -> Self {
        let many = many.max(1);
        Self { all: Semaphore::new(many), background: Semaphore::new((many / 2).max(1)) }
    }
}

impl Places {
    pub(crate) fn new(options: &Options) -> Self {
        Self {
            all: Turns::new(options.fetches),
            waiting: AtomicUsize::new(0),
            most_waiting: options.queue,
            per_place: options.fetches_per_place,
            known: Mutex::default(),
        }
    }

    pub(crate) fn place(&self, name: String) -> Arc<Place> {
        let mut known = self.known.lock();
        if let Some(place) = known.get(&name).and_then(Weak::upgrade) {
            return place;
        }
        known.retain(|_, place| place.strong_count() > 0);
        let turns = Turns::new(self.per_place);
        let place = Arc::new(Place { name: name.clone(), turns, closed: Mutex::default() });
        known.insert(name, Arc::downgrade(&place));
        place
    }

    /// Waits for a turn. `urgent` makes a fetch in the background one that a reader waits for.
    pub(crate) async fn turn<'a>(
        &'a self,
        place: &'a Place,
        background: bool,
        urgent: &Notify,
        end: Instant,
    ) -> Result<Turn<'a>, FetchError> {
        // Readers who wait find room in the queue even when read-ahead doesn't.
        let room = if background { self.most_waiting / 2 } else { self.most_waiting };
        let waiting = Waiting::enter(&self.waiting, room)?;
        let take =
            |semaphore: &'a Semaphore| async { Some(semaphore.acquire().await.expect("never closed")) };
        let turn = async {
            let mut held = [None, None, None, None];
            if background {
                let both = async { [take(&place.turns.background).await, take(&self.all.background).await] };
                tokio::select! {
                    [here, all] = both => (held[0], held[1]) = (here, all),
                    () = urgent.notified() => {}
                }
            }
            held[2] = take(&place.turns.all).await;
            held[3] = take(&self.all.all).await;
            Turn { _held: held }
        };
        let turn = timeout_at(end, turn).await;
        drop(waiting);
        turn.map_err(|_| FetchError::Retryable(format!("{} has too much to do: no turn came", place.name)))
    }
}

impl Place {
    pub(crate) fn close_until(&self, until: Instant) {
        let mut closed = self.closed.lock();
        if closed.is_none_or(|known| known < until) {
            *closed = Some(until);
        }
    }

    pub(crate) fn closed_until(&self) -> Option<Instant> {
        self.closed.lock().filter(|until| *until > Instant::now())
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn enter(count: &'a AtomicUsize, most: usize) -> Result<Self, FetchError> {
        if count.fetch_add(1, Ordering::AcqRel) >= most {
            count.fetch_sub(1, Ordering::AcqRel);
            return Err(FetchError::Busy(most));
        }
        Ok(Self(count))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
