//! Reading a blob from its first to its last byte.

use super::{
    Client, Error,
    blob::{blob_question, check_span},
    endpoint::Endpoint,
    exchange::{Span, exchange},
    retry,
    route::{Ask, Plan, route},
    transport::{Answer, Transport},
};
use futures_util::Stream;
use sha2::{Digest as _, Sha256};
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};
use tokio_util::bytes::{Buf as _, Bytes};

/// Breaks in a row that brought less than [`PROGRESS`] bytes each.
const MAX_BREAKS: u32 = 5;
const PROGRESS: u64 = 1 << 20;

/// A blob's bytes in order, hashed on the way. A broken connection is resumed where it broke.
///
/// The last piece is handed over only when all of them together have the right digest. What came before it is not yet
/// proven: keep it aside, or be ready to throw it away.
pub struct BlobStream {
    client: Client,
    endpoints: Arc<[Arc<Endpoint>]>,
    repository: String,
    digest: String,
    size: u64,
    hash: Sha256,
    got: u64,
    answer: Option<Answer>,
    /// Bytes of the answer's body that are here already, where a whole body came for a range.
    skip: u64,
    opened_at: u64,
    breaks: u32,
    allowed: Duration,
    deadline: Instant,
    ended: bool,
}

impl std::fmt::Debug for BlobStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlobStream")
            .field("digest", &self.digest)
            .field("got", &self.got)
            .finish_non_exhaustive()
    }
}

impl BlobStream {
    pub(crate) fn new(
        client: Client,
        endpoints: Arc<[Arc<Endpoint>]>,
        repository: String,
        digest: String,
        size: u64,
        allowed: Duration,
    ) -> Self {
        Self {
            client,
            endpoints,
            repository,
            digest,
            size,
            hash: Sha256::new(),
            got: 0,
            answer: None,
            skip: 0,
            opened_at: 0,
            breaks: 0,
            allowed,
            deadline: Instant::now() + allowed,
            ended: false,
        }
    }

    /// Bytes handed over so far.
    pub fn position(&self) -> u64 {
        self.got
    }

    /// The next piece; `None` after the last. After an error the stream is of no more use.
    ///
    /// # Errors
    /// [`Error::Digest`] for wrong content, [`Error::TimedOut`] at the deadline; else see [`Error`].
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        if self.ended {
            return Ok(None);
        }
        if self.size == 0 {
            self.prove()?;
            return Ok(None);
        }
        loop {
            let deadline = self.deadline;
            let mut piece = match &mut self.answer {
                None => {
                    self.open().await?;
                    continue;
                }
                Some(answer) => match timeout_at(deadline, answer.chunk()).await {
                    Err(_) => return Err(self.late()),
                    Ok(Ok(Some(piece))) => piece,
                    Ok(Ok(None)) => {
                        let error = answer.truncated(self.size - self.opened_at);
                        self.broken(error).await?;
                        continue;
                    }
                    Ok(Err(error)) => {
                        self.broken(error).await?;
                        continue;
                    }
                },
            };
            let skipped = usize::try_from(self.skip).unwrap_or(usize::MAX).min(piece.len());
            self.skip -= skipped as u64;
            piece.advance(skipped);
            if piece.is_empty() {
                continue;
            }
            if piece.len() as u64 > self.size - self.got {
                return Err(self.too_long());
            }
            self.hash.update(&piece);
            self.got += piece.len() as u64;
            if self.got == self.size {
                self.prove()?;
            }
            return Ok(Some(piece));
        }
    }

    /// As a stream of pieces, ended by the first error.
    pub fn into_stream(self) -> impl Stream<Item = Result<Bytes, Error>> + Send {
        futures_util::stream::try_unfold(self, |mut blob| async move {
            Ok(blob.chunk().await?.map(|piece| (piece, blob)))
        })
    }

    fn what(&self) -> String {
        format!("blob {}", self.digest)
    }

    fn prove(&mut self) -> Result<(), Error> {
        let actual = format!("sha256:{}", hex::encode(std::mem::take(&mut self.hash).finalize()));
        let answer = self.answer.take();
        if actual != self.digest {
            let place = answer.map(|answer| Arc::clone(answer.place()));
            let place = place.unwrap_or_else(|| self.place());
            return Err(Error::Digest { place, what: self.what(), actual });
        }
        self.ended = true;
        Ok(())
    }

    fn place(&self) -> Arc<super::Place> {
        self.endpoints.last().map(|endpoint| endpoint.place(&self.repository)).unwrap_or_else(|| {
            Arc::new(super::Place { host: String::new(), repository: self.repository.clone() })
        })
    }

    fn late(&self) -> Error {
        Error::TimedOut { place: self.place(), what: self.what(), after: self.allowed }
    }

    fn too_long(&self) -> Error {
        Error::TooLarge { place: self.place(), what: self.what(), limit: self.size }
    }

    /// Decides whether a broken connection is worth another, and waits a little.
    async fn broken(&mut self, error: Error) -> Result<(), Error> {
        self.answer = None;
        self.skip = 0;
        self.breaks = if self.got - self.opened_at >= PROGRESS { 0 } else { self.breaks + 1 };
        if !error.is_passing() || self.breaks > MAX_BREAKS {
            return Err(error);
        }
        tracing::debug!(%error, at = self.got, "a blob's connection broke; resuming");
        let pause = retry::pause(self.breaks);
        if Instant::now() + pause >= self.deadline {
            return Err(self.late());
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }

    async fn open(&mut self) -> Result<(), Error> {
        let options = self.client.options();
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.late());
        }
        let plan = Plan { deadline: options.deadline.min(left), attempts: options.attempts, skip: 0 };
        let ask = Open {
            repository: &self.repository,
            digest: &self.digest,
            span: (self.got > 0).then(|| Span { first: self.got, last: self.size - 1 }),
            size: self.size,
        };
        let (_, (answer, skip)) = route(self.client.transport(), &self.endpoints, plan, &ask).await?;
        self.answer = Some(answer);
        self.skip = skip;
        self.opened_at = self.got;
        Ok(())
    }
}

/// The blob, or the rest of it.
struct Open<'a> {
    repository: &'a str,
    digest: &'a str,
    span: Option<Span>,
    size: u64,
}

impl Ask for Open<'_> {
    /// With the bytes to pass over.
    type Answer = (Answer, u64);

    fn what(&self) -> String {
        format!("blob {}", self.digest)
    }

    fn repository(&self) -> &str {
        self.repository
    }

    async fn put(
        &self,
        transport: &Transport,
        endpoint: &Endpoint,
        _index: usize,
    ) -> Result<(Answer, u64), Error> {
        let question = blob_question(self.repository, self.digest, self.span, self.what());
        let answer = exchange(transport, endpoint, &question).await?.answer;
        let span = self.span.unwrap_or(Span { first: 0, last: self.size - 1 });
        match check_span(&answer, span, self.size, &question.what) {
            Ok(()) => Ok((answer, 0)),
            // The whole blob is wanted, so reading it from its beginning again is no waste beyond the break's.
            Err(Error::Ranges { .. }) => Ok((answer, span.first)),
            Err(error) => Err(error),
        }
    }
}
