//! Requests on the wire: bounded in number, each wait bounded in time, each body counted.
//!
//! Three pools, because what a connection may reach depends on who named its host: an endpoint on this machine, an
//! endpoint elsewhere, or a stranger whom an endpoint sent us to. None follows redirects or reads proxies for this
//! machine's own addresses.

use super::{
    Error, Options, Place,
    challenge::{self, Challenge},
    error::words,
    guard::{Refused, Resolver},
    retry,
};
use reqwest::{
    Certificate, Client, Response, StatusCode,
    header::{CONTENT_LENGTH, HeaderMap, RETRY_AFTER, WWW_AUTHENTICATE},
    redirect::Policy,
};
use std::{error::Error as _, sync::Arc, time::Duration};
use tokio::{
    sync::{OnceCell, OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_util::bytes::{Bytes, BytesMut};
use url::Url;

/// Of a failed request's body, what is read for its words.
const MAX_WORDS: usize = 16 << 10;
const IDLE_CONNECTIONS: usize = 8;
const IDLE_CONNECTION: Duration = Duration::from_secs(30);

/// Who named the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// We did, and it is this machine; where it sends us may be, too.
    Local,
    /// We did.
    Named,
    /// A registry did.
    Foreign,
}

/// Sends requests.
pub(crate) struct Transport {
    pools: [OnceCell<Client>; 3],
    certificates: Vec<Certificate>,
    gate: Arc<Semaphore>,
    connect: Duration,
    head: Duration,
    idle: Duration,
}

impl Transport {
    /// `certificates` are trusted beside the system's.
    pub(crate) fn new(options: &Options, certificates: Vec<Certificate>) -> Self {
        // reqwest panics without a provider. Installing fails only when there is one already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self {
            pools: [const { OnceCell::const_new() }; 3],
            certificates,
            gate: Arc::new(Semaphore::new(options.connections.clamp(1, Semaphore::MAX_PERMITS))),
            connect: options.connect_timeout,
            head: options.head_timeout,
            idle: options.idle_timeout,
        }
    }

    /// The pool, made when first needed: reading the system's certificates takes milliseconds and files.
    async fn pool(&self, reach: Reach) -> Result<&Client, Error> {
        let pool = match reach {
            Reach::Local => &self.pools[0],
            Reach::Named => &self.pools[1],
            Reach::Foreign => &self.pools[2],
        };
        let make = async || {
            let certificates = self.certificates.clone();
            let connect = self.connect;
            let built = tokio::task::spawn_blocking(move || build(reach, certificates, connect)).await;
            built.map_err(|e| Error::Setup(format!("a worker thread broke down: {e}")))?
        };
        pool.get_or_try_init(make).await
    }

    /// Sends one GET and waits for the answer's head.
    pub(crate) async fn get(
        &self,
        reach: Reach,
        url: &Url,
        headers: HeaderMap,
        place: &Arc<Place>,
        what: &str,
    ) -> Result<Answer, Error> {
        let pool = self.pool(reach).await?;
        let permit = Arc::clone(&self.gate).acquire_owned().await;
        let permit = permit.map_err(|_| Error::Setup("the registry client is closed".to_owned()))?;
        match timeout(self.head, pool.get(url.clone()).headers(headers).send()).await {
            Err(_) => Err(Error::TimedOut {
                place: Arc::clone(place),
                what: format!("the head of its answer for {what}"),
                after: self.head,
            }),
            Ok(Err(e)) => Err(unreachable(e, place, url)),
            Ok(Ok(response)) => Ok(Answer {
                response,
                place: Arc::clone(place),
                what: what.to_owned(),
                idle: self.idle,
                got: 0,
                _permit: permit,
            }),
        }
    }
}

fn build(reach: Reach, certificates: Vec<Certificate>, connect: Duration) -> Result<Client, Error> {
    let builder = Client::builder()
        .user_agent(concat!("aenv/", env!("CARGO_PKG_VERSION")))
        .redirect(Policy::none())
        .referer(false)
        .connect_timeout(connect)
        .tcp_nodelay(true)
        .pool_max_idle_per_host(IDLE_CONNECTIONS)
        .pool_idle_timeout(IDLE_CONNECTION)
        .dns_resolver(Arc::new(Resolver { loopback: reach != Reach::Foreign }));
    let builder = match reach {
        // Works where no certificates are installed, as in a minimal container.
        Reach::Local => builder.no_proxy().tls_certs_only(certificates),
        Reach::Named | Reach::Foreign => builder.tls_certs_merge(certificates),
    };
    builder.build().map_err(|e| {
        Error::Setup(format!(
            "TLS can't be set up: {}; install the package ca-certificates, or check the CA bundle",
            chain(&e)
        ))
    })
}

fn unreachable(e: reqwest::Error, place: &Arc<Place>, url: &Url) -> Error {
    let mut source = e.source();
    while let Some(cause) = source {
        if let Some(refused) = cause.downcast_ref::<Refused>() {
            return Error::Redirect {
                place: Arc::clone(place),
                target: bare(url),
                reason: refused.to_string(),
            };
        }
        source = cause.source();
    }
    // Without the address: its query may hold a signature.
    Error::Unreachable { place: Arc::clone(place), reason: words(&chain(&e.without_url())) }
}

/// An address fit for messages.
pub(crate) fn bare(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{host}{port}{}", url.scheme(), words(url.path()))
}

fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// An answer whose head is there. Dropping it ends its transfer.
pub(crate) struct Answer {
    response: Response,
    place: Arc<Place>,
    what: String,
    idle: Duration,
    got: u64,
    _permit: OwnedSemaphorePermit,
}

impl Answer {
    pub(crate) fn status(&self) -> StatusCode {
        self.response.status()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name).and_then(|value| value.to_str().ok())
    }

    /// What the head announces, whatever the body then holds.
    pub(crate) fn length(&self) -> Option<u64> {
        self.header(CONTENT_LENGTH.as_str()).and_then(|value| value.parse().ok())
    }

    pub(crate) fn challenges(&self) -> Vec<Challenge> {
        let headers = self.response.headers().get_all(WWW_AUTHENTICATE).iter().take(8);
        headers.filter_map(|value| value.to_str().ok()).flat_map(challenge::parse).collect()
    }

    pub(crate) fn place(&self) -> &Arc<Place> {
        &self.place
    }

    /// The next piece of the body; `None` at its proper end.
    ///
    /// # Errors
    /// It stalls or breaks.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        match timeout(self.idle, self.response.chunk()).await {
            Ok(Ok(Some(bytes))) => {
                self.got += bytes.len() as u64;
                Ok(Some(bytes))
            }
            Ok(Ok(None)) => Ok(None),
            Ok(Err(_)) => Err(self.truncated(self.length().unwrap_or(self.got))),
            Err(_) => Err(Error::TimedOut {
                place: Arc::clone(&self.place),
                what: format!("the next part of {}", self.what),
                after: self.idle,
            }),
        }
    }

    /// The error of a body that ended early.
    pub(crate) fn truncated(&self, expected: u64) -> Error {
        Error::Truncated { place: Arc::clone(&self.place), what: self.what.clone(), expected, got: self.got }
    }

    /// The whole body, of at most `limit` bytes.
    pub(crate) async fn document(mut self, limit: usize) -> Result<Bytes, Error> {
        let large = |answer: &Self| Error::TooLarge {
            place: Arc::clone(&answer.place),
            what: answer.what.clone(),
            limit: limit as u64,
        };
        if self.length().is_some_and(|length| length > limit as u64) {
            return Err(large(&self));
        }
        let mut bytes = BytesMut::new();
        while let Some(chunk) = self.chunk().await? {
            if bytes.len() + chunk.len() > limit {
                return Err(large(&self));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes.freeze())
    }

    /// Turns an answer that isn't the one hoped for into an error with the remote's words.
    pub(crate) async fn refusal(mut self) -> Error {
        let status = self.status();
        let retry_after = self
            .header(RETRY_AFTER.as_str())
            .and_then(|value| retry::retry_after(value, jiff::Timestamp::now()));
        let mut body = BytesMut::new();
        while body.len() < MAX_WORDS {
            // A body that breaks has said enough.
            match self.chunk().await {
                Ok(Some(chunk)) => body.extend_from_slice(&chunk[..chunk.len().min(MAX_WORDS - body.len())]),
                _ => break,
            }
        }
        let reason = reason(status, &body);
        let (place, what) = (Arc::clone(&self.place), self.what.clone());
        match status.as_u16() {
            401 => Error::Unauthorized { place, reason },
            403 => Error::Forbidden { place, reason },
            404 | 410 => Error::NotFound { place, what, reason },
            429 => Error::RateLimited { place, retry_after, reason },
            status @ (408 | 500..) => Error::Unavailable { place, status, retry_after, reason },
            _ => Error::Protocol { place, what, reason },
        }
    }
}

/// The words of a registry's error document (distribution-spec, "Error Codes"), or what else it says.
fn reason(status: StatusCode, body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Errors {
        errors: Vec<One>,
    }
    #[derive(serde::Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let said = match serde_json::from_slice::<Errors>(body) {
        Ok(Errors { errors }) => {
            let each = errors.iter().take(3).map(|e| format!("{} {}", e.code.to_lowercase(), e.message));
            each.collect::<Vec<_>>().join("; ")
        }
        // HTML pages of proxies tell nothing.
        Err(_) if body.starts_with(b"<") => String::new(),
        Err(_) => String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned(),
    };
    match words(&said).trim() {
        "" => format!("status {status}"),
        said => format!("status {}: {said}", status.as_u16()),
    }
}
