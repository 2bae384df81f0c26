//! Reading a blob's bytes here and there.

use super::{
    Client, Error,
    endpoint::Endpoint,
    exchange::{Question, Reply, Span, direct, exchange},
    route::{Ask, Plan, route},
    transport::{Answer, Transport},
};
use jiff::{Timestamp, fmt::temporal::DateTimeParser};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio_util::bytes::{Bytes, BytesMut};
use url::Url;

/// What one read may ask for, in bytes: it is held in memory.
pub const MAX_READ: usize = 64 << 20;
/// How long a storage's address is used that doesn't say how long it is good.
const LINK: Duration = Duration::from_secs(300);
const MAX_LINK: Duration = Duration::from_secs(3600);
/// Before a signature's end.
const MARGIN: Duration = Duration::from_secs(30);

/// A blob of known size in a registry, read by byte range. Cheap to clone; reads may run at the same time.
///
/// Where the registry redirects to a storage, the storage's address is kept and asked directly until its signature ends
/// or it refuses. Ranges can't be checked against the digest: whoever needs more than TLS promises checks what it read.
#[derive(Clone)]
pub struct BlobReader {
    blob: Arc<Blob>,
}

struct Blob {
    client: Client,
    endpoints: Arc<[Arc<Endpoint>]>,
    repository: String,
    digest: String,
    size: u64,
    link: Mutex<Option<Link>>,
    /// Endpoint that had it last time: those before don't have it.
    known: AtomicUsize,
}

#[derive(Clone)]
struct Link {
    endpoint: usize,
    url: Url,
    until: Instant,
}

impl std::fmt::Debug for BlobReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlobReader")
            .field("digest", &self.blob.digest)
            .field("size", &self.blob.size)
            .finish()
    }
}

impl BlobReader {
    pub(crate) fn new(
        client: Client,
        endpoints: Arc<[Arc<Endpoint>]>,
        repository: String,
        digest: String,
        size: u64,
    ) -> Self {
        let (link, known) = (Mutex::default(), AtomicUsize::new(0));
        Self { blob: Arc::new(Blob { client, endpoints, repository, digest, size, link, known }) }
    }

    /// In bytes, as its descriptor says.
    pub fn size(&self) -> u64 {
        self.blob.size
    }

    /// `sha256:` and 64 hex digits.
    pub fn digest(&self) -> &str {
        &self.blob.digest
    }

    /// Reads exactly `len` bytes at `offset`, within the client's deadline.
    ///
    /// # Errors
    /// [`Error::Range`] for bytes that aren't there or more than [`MAX_READ`]; else see [`Error`].
    pub async fn read(&self, offset: u64, len: usize) -> Result<Bytes, Error> {
        let blob = &self.blob;
        let end = offset.checked_add(len as u64).filter(|end| *end <= blob.size && len <= MAX_READ);
        let Some(end) = end else {
            return Err(Error::Range { digest: blob.digest.clone(), offset, len, size: blob.size });
        };
        if len == 0 {
            return Ok(Bytes::new());
        }
        let options = blob.client.options();
        let plan = Plan {
            deadline: options.deadline,
            attempts: options.attempts,
            skip: blob.known.load(Ordering::Relaxed),
        };
        let piece = Piece { blob, offset, end, got: Mutex::default() };
        let (index, ()) = route(blob.client.transport(), &blob.endpoints, plan, &piece).await?;
        blob.known.store(index, Ordering::Relaxed);
        Ok(piece.got.into_inner().freeze())
    }
}

/// Bytes `offset..end`, of which `got` are here: what came before a connection broke isn't fetched twice.
struct Piece<'a> {
    blob: &'a Blob,
    offset: u64,
    end: u64,
    got: Mutex<BytesMut>,
}

impl Ask for Piece<'_> {
    type Answer = ();

    fn what(&self) -> String {
        format!("bytes {}-{} of blob {}", self.offset, self.end - 1, self.blob.digest)
    }

    fn repository(&self) -> &str {
        &self.blob.repository
    }

    async fn put(&self, transport: &Transport, endpoint: &Endpoint, index: usize) -> Result<(), Error> {
        let first = self.offset + self.got.lock().len() as u64;
        let span = Span { first, last: self.end - 1 };
        let question = blob_question(&self.blob.repository, &self.blob.digest, Some(span), self.what());
        let mut answer = self.blob.open(transport, endpoint, index, &question).await?;
        check_span(&answer, span, self.blob.size, &question.what)?;
        loop {
            let wanted =
                usize::try_from(self.end - self.offset).unwrap_or(usize::MAX) - self.got.lock().len();
            if wanted == 0 {
                // The rest of a body that holds more is never read: dropping the answer ends it.
                return Ok(());
            }
            match answer.chunk().await? {
                Some(chunk) => self.got.lock().extend_from_slice(&chunk[..chunk.len().min(wanted)]),
                None => return Err(answer.truncated(self.end - first)),
            }
        }
    }
}

impl Blob {
    /// Asks the storage that is known, or the endpoint.
    async fn open(
        &self,
        transport: &Transport,
        endpoint: &Endpoint,
        index: usize,
        question: &Question,
    ) -> Result<Answer, Error> {
        let link =
            self.link.lock().clone().filter(|link| link.endpoint == index && Instant::now() < link.until);
        if let Some(link) = link {
            match direct(transport, endpoint, question, &link.url).await {
                Ok(answer) => return Ok(answer),
                // Throttled is throttled; anything else may be the address's age.
                Err(error @ Error::RateLimited { .. }) => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, "a storage's address no longer serves; asking the registry for another");
                    let mut known = self.link.lock();
                    if known.as_ref().is_some_and(|known| known.url == link.url) {
                        *known = None;
                    }
                }
            }
        }
        let Reply { answer, storage } = exchange(transport, endpoint, question).await?;
        if let Some(url) = storage {
            let until = Instant::now() + lifetime(&url, Timestamp::now());
            *self.link.lock() = Some(Link { endpoint: index, url, until });
        }
        Ok(answer)
    }
}

pub(crate) fn blob_question(repository: &str, digest: &str, span: Option<Span>, what: String) -> Question {
    Question {
        repository: repository.to_owned(),
        path: format!("blobs/{digest}"),
        query: None,
        accept: "*/*",
        span,
        what,
    }
}

/// Checks that a body is, or at least begins with, the bytes asked for.
///
/// # Errors
/// [`Error::Ranges`] for the whole blob where its middle was asked for: reading up to there would cost what ranges save.
pub(crate) fn check_span(answer: &Answer, span: Span, size: u64, what: &str) -> Result<(), Error> {
    let bad = |reason: String| Error::protocol(answer.place(), what, reason);
    if answer.status() != 206 {
        return match answer.length() {
            Some(length) if length != size => {
                Err(bad(format!("the blob has {length} bytes instead of {size}")))
            }
            _ if span.first == 0 => Ok(()),
            _ => Err(Error::Ranges { place: Arc::clone(answer.place()) }),
        };
    }
    let header = answer.header("content-range").unwrap_or_default();
    let Some((first, last, total)) = content_range(header) else {
        return Err(bad(format!("its Content-Range {:?} can't be read", super::error::words(header))));
    };
    if first != span.first || last > span.last || total.is_some_and(|total| total != size) {
        return Err(bad(format!(
            "it sent bytes {header:?} for bytes {}-{} of {size}",
            span.first, span.last
        )));
    }
    Ok(())
}

/// `bytes 0-9/100` or `bytes 0-9/*` (RFC 9110 §14.4).
fn content_range(header: &str) -> Option<(u64, u64, Option<u64>)> {
    let (unit, rest) = header.trim().split_once(' ')?;
    let (range, total) = rest.trim().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let number = |text: &str| text.parse::<u64>().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()));
    let (first, last) = (number(first)?, number(last)?);
    let total = match total {
        "*" => None,
        total => Some(number(total)?),
    };
    (unit.eq_ignore_ascii_case("bytes") && first <= last && total.is_none_or(|total| last < total))
        .then_some((first, last, total))
}

/// How long a storage's address is good: signatures carry their time (S3, Google, Azure, CloudFront).
fn lifetime(url: &Url, now: Timestamp) -> Duration {
    let get = |name: &str| {
        url.query_pairs()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.into_owned())
    };
    let after = |date: &str, seconds: &str| {
        let (begin, seconds) = (basic_date(&get(date)?)?, get(seconds)?.parse::<u32>().ok()?);
        begin.checked_add(jiff::SignedDuration::from_secs(seconds.into())).ok()
    };
    let epoch = |text: String| Timestamp::from_second(text.parse().ok()?).ok();
    let end = after("X-Amz-Date", "X-Amz-Expires")
        .or_else(|| after("X-Goog-Date", "X-Goog-Expires"))
        .or_else(|| get("se").and_then(|text| DateTimeParser::new().parse_timestamp(&text).ok()))
        .or_else(|| get("Expires").and_then(epoch));
    match end {
        Some(end) => {
            let left = Duration::try_from(end.duration_since(now)).unwrap_or_default();
            left.saturating_sub(MARGIN).min(MAX_LINK)
        }
        None => LINK,
    }
}

/// `20261130T235959Z`.
fn basic_date(text: &str) -> Option<Timestamp> {
    DateTimeParser::new().parse_timestamp(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn content_ranges_are_read_strictly() {
        assert_eq!(content_range("bytes 0-9/100"), Some((0, 9, Some(100))));
        assert_eq!(content_range("BYTES 5-5/*"), Some((5, 5, None)));
        for bad in [
            "",
            "bytes",
            "bytes */100",
            "bytes 9-0/100",
            "bytes 0-100/100",
            "bytes +0-9/100",
            "items 0-9/100",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_signed_address_is_used_as_long_as_it_says() {
        let now: Timestamp = "2026-11-30T12:00:00Z".parse().unwrap();
        let left = |query: &str| {
            lifetime(&Url::parse(&format!("https://s.example/x?{query}")).unwrap(), now).as_secs()
        };
        assert_eq!(left("X-Amz-Date=20261130T115900Z&X-Amz-Expires=600&X-Amz-Signature=x"), 600 - 60 - 30);
        assert_eq!(left("X-Goog-Date=20261130T120000Z&X-Goog-Expires=100"), 70);
        assert_eq!(left("sv=2020&se=2026-11-30T12%3A02%3A00Z&sig=x"), 90);
        assert_eq!(left(&format!("Expires={}&Signature=x", now.as_second() + 60)), 30);
        assert_eq!(left("X-Amz-Date=20261130T110000Z&X-Amz-Expires=60"), 0);
        assert_eq!(left("X-Amz-Date=20261130T120000Z&X-Amz-Expires=999999"), MAX_LINK.as_secs());
        assert_eq!((left(""), left("Expires=soon")), (LINK.as_secs(), LINK.as_secs()));
    }

    proptest! {
        #[test]
        fn nothing_makes_the_readers_panic(text in "\\PC{0,40}") {
            let _ = content_range(&text);
            let mut url = Url::parse("https://s.example/").unwrap();
            url.query_pairs_mut().append_pair("Expires", &text).append_pair("X-Amz-Date", &text);
            let _ = lifetime(&url, Timestamp::now());
        }
    }
}
