//! One fetch per block, however many ask.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Inner;
use super::entry::{BLOCK, block_len};
use super::layer::Shared;
use super::places::Place;
use super::retry;
use crate::remote::{FetchError, RangeSource};

/// Blocks of the largest single request: 1 MiB.
const RUN: usize = 8;

/// A block on its way.
pub(crate) struct Flight {
    landed: Mutex<Option<Result<Bytes, FetchError>>>,
    landing: Condvar,
    urgent: Arc<Notify>,
}

impl Flight {
    fn land(&self, outcome: Result<Bytes, FetchError>) {
        let mut landed = self.landed.lock();
        if landed.is_none() {
            *landed = Some(outcome);
            self.landing.notify_all();
        }
    }

    /// The block, or why it isn't to be had. Blocks; the fetch has its own deadline.
    pub(crate) fn wait(&self) -> Result<Bytes, FetchError> {
        let mut landed = self.landed.lock();
        while landed.is_none() {
            self.landing.wait(&mut landed);
        }
        landed.clone().expect("just seen")
    }
}

/// What a fetch needs to know of its layer.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) layer: Arc<Shared>,
    pub(crate) source: Arc<dyn RangeSource>,
    pub(crate) place: Arc<Place>,
}

/// Sees to it that `blocks` (ascending) come, and returns those on their way. One that is missing in the answer is
/// cached by now.
pub(crate) fn want(
    cache: &Arc<Inner>,
    origin: &Origin,
    blocks: &[u32],
    background: bool,
) -> Vec<(u32, Arc<Flight>)> {
    let mut on_their_way = Vec::with_capacity(blocks.len());
    let mut runs: Vec<Run> = Vec::new();
    {
        let mut flights = cache.flights.lock();
        for &block in blocks {
            let key = (origin.layer.row, block);
            if let Some(flight) = flights.get(&key) {
                if !background {
                    flight.urgent.notify_one();
                }
                on_their_way.push((block, flight.clone()));
                continue;
            }
            // A flight ends only after its block is stored: without one, the slab has the last word.
            if cache.slab.contains(key.0, block) {
                continue;
            }
            let joins = |run: &&mut Run| run.first + run.len() == block && run.flights.len() < RUN;
            let run = match runs.last_mut().filter(joins) {
                Some(run) => run,
                None => {
                    runs.push(Run::new(cache, origin, block));
                    runs.last_mut().expect("just pushed")
                }
            };
            let (landed, landing) = (Mutex::default(), Condvar::new());
            let flight = Arc::new(Flight { landed, landing, urgent: run.urgent.clone() });
            run.flights.push(flight.clone());
            flights.insert(key, flight.clone());
            on_their_way.push((block, flight));
        }
    }
    for run in runs {
        cache.runtime.spawn(run.fly(background));
    }
    on_their_way
}

/// Neighbouring blocks that are fetched by one request. Dropped early (a panic, the runtime's end), its readers get
/// an error.
struct Run {
    cache: Arc<Inner>,
    origin: Origin,
    first: u32,
    flights: Vec<Arc<Flight>>,
    urgent: Arc<Notify>,
}

impl Run {
    fn new(cache: &Arc<Inner>, origin: &Origin, first: u32) -> Self {
        let (cache, origin) = (cache.clone(), origin.clone());
        Self { cache, origin, first, flights: Vec::new(), urgent: Arc::default() }
    }

    fn len(&self) -> u32 {
        u32::try_from(self.flights.len()).expect("at most RUN")
    }

    async fn fly(self, background: bool) {
        let cache = self.cache.clone();
        let end = Instant::now() + cache.options.deadline;
        let place = self.origin.place.clone();
        let turn = match cache.places.turn(&place, background, &self.urgent, end).await {
            Ok(turn) => turn,
            Err(error) => return self.fail(&error),
        };
        let size = self.origin.layer.size;
        let lens = (self.first..).take(self.flights.len()).map(|block| block_len(size, block).unwrap_or(0));
        let lens: Vec<_> = lens.map(|len| len as usize).collect();
        let range = (u64::from(self.first) * BLOCK as u64, lens.iter().sum());
        let mut bytes = match retry::read(&*self.origin.source, &place, &cache.options, range, end).await {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::warn!(layer = %self.origin.layer.digest, %error, "a fetch failed");
                return self.fail(&error);
            }
        };
        cache.counters.fetched_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        for (flight, len) in self.flights.iter().zip(lens) {
            flight.land(Ok(bytes.split_to(len)));
        }
        // The turn is kept until the bytes are out of memory.
        let _panicked = tokio::task::spawn_blocking(move || self.store()).await;
        drop(turn);
    }

    /// Off the table first: who comes after this failure makes a fetch of its own.
    fn fail(self, error: &FetchError) {
        self.cache.counters.failed.fetch_add(1, Ordering::Relaxed);
        self.leave_table();
        for flight in &self.flights {
            flight.land(Err(error.clone()));
        }
    }

    fn leave_table(&self) {
        let mut flights = self.cache.flights.lock();
        for (block, flight) in (self.first..).zip(&self.flights) {
            let key = (self.origin.layer.row, block);
            if flights.get(&key).is_some_and(|known| Arc::ptr_eq(known, flight)) {
                flights.remove(&key);
            }
        }
    }

    fn store(self) {
        for (block, flight) in (self.first..).zip(&self.flights) {
            let landed = flight.landed.lock().clone();
            let Some(Ok(bytes)) = landed else { continue };
            if let Err(error) = self.cache.slab.put(self.origin.layer.row, block, &bytes) {
                self.cache.counters.not_stored.fetch_add(1, Ordering::Relaxed);
                if error.kind() != io::ErrorKind::StorageFull {
                    tracing::warn!(%error, "a block could not be cached; it was served without");
                }
            }
        }
        super::verify::when_whole(&self.cache, &self.origin.layer);
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.leave_table();
        for flight in &self.flights {
            flight.land(Err(FetchError::Retryable("the fetch was stopped".into())));
        }
    }
}
