//! Why a registry's answer could not be had.

use std::{fmt, sync::Arc, time::Duration};

/// Who was asked, and for which repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Host with optional port: the registry's, a mirror's, or that of storage it redirected to.
    pub host: String,
    /// As in the reference.
    pub repository: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (for {})", self.host, self.repository)
    }
}

/// What to do about an error, for callers that retry or give up by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It may work later; the client has retried already.
    Passing,
    /// Not later than after this time.
    Throttled(Option<Duration>),
    /// Other credentials are needed.
    Denied,
    /// There is no such thing.
    Missing,
    /// The bytes are wrong.
    Damaged,
    /// Neither waiting nor asking elsewhere helps.
    Final,
}

/// Why a registry's answer could not be had. Messages name host and repository and say what to do next.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// 401 that no credentials at hand answer. Docker Hub says so for repositories that don't exist, too.
    #[error(
        "{place} wants other credentials: log in with an account that may read it, and check its spelling ({reason})"
    )]
    Unauthorized {
        /// Who, for what.
        place: Arc<Place>,
        /// The registry's words.
        reason: String,
    },
    /// 403.
    #[error("{place} refused this account: ask the repository's owner for access ({reason})")]
    Forbidden {
        /// Who, for what.
        place: Arc<Place>,
        /// The registry's words.
        reason: String,
    },
    /// 404.
    #[error("{place} has no {what}: check its name, tag or digest ({reason})")]
    NotFound {
        /// Who, for what.
        place: Arc<Place>,
        /// Which manifest or blob.
        what: String,
        /// The registry's words.
        reason: String,
    },
    /// 429.
    #[error("{place} limits the rate of requests: {}, or log in for a higher limit ({reason})", wait(.retry_after))]
    RateLimited {
        /// Who, for what.
        place: Arc<Place>,
        /// What it asked for by `Retry-After`.
        retry_after: Option<Duration>,
        /// The registry's words.
        reason: String,
    },
    /// 408 or 5xx.
    #[error("{place} failed with status {status}: try again later, or configure a mirror ({reason})")]
    Unavailable {
        /// Who, for what.
        place: Arc<Place>,
        /// HTTP's.
        status: u16,
        /// `Retry-After`.
        retry_after: Option<Duration>,
        /// The registry's words.
        reason: String,
    },
    /// No connection, or none with a trusted certificate.
    #[error("{place} can't be reached: check this machine's network, DNS, proxy and certificates ({reason})")]
    Unreachable {
        /// Who, for what.
        place: Arc<Place>,
        /// The cause in words.
        reason: String,
    },
    /// It took too long.
    #[error("{place} did not finish {what} within {after:?}: check the network, or allow more time")]
    TimedOut {
        /// Who, for what.
        place: Arc<Place>,
        /// What was awaited.
        what: String,
        /// The deadline.
        after: Duration,
    },
    /// A body ended early.
    #[error(
        "{place} ended {what} after {got} of {expected} bytes: try again; if it recurs, the registry or a proxy before it is broken"
    )]
    Truncated {
        /// Who, for what.
        place: Arc<Place>,
        /// Which body.
        what: String,
        /// Bytes that were to come.
        expected: u64,
        /// Bytes that came.
        got: u64,
    },
    /// The content is not what its digest says.
    #[error(
        "{place} sent wrong bytes for {what}: they are {actual}; don't use them, and check registry, mirrors and proxies"
    )]
    Digest {
        /// Who, for what.
        place: Arc<Place>,
        /// Which manifest or blob, with the digest it should have.
        what: String,
        /// The digest of what came.
        actual: String,
    },
    /// More bytes than a bound allows.
    #[error("{place} sent more than {limit} bytes of {what}: it is not usable here")]
    TooLarge {
        /// Who, for what.
        place: Arc<Place>,
        /// Which document.
        what: String,
        /// In bytes.
        limit: u64,
    },
    /// `Range` was ignored in the midst of a blob.
    #[error("{place} does not serve byte ranges: fetch layers whole, or use a mirror that does")]
    Ranges {
        /// Who, for what.
        place: Arc<Place>,
    },
    /// A redirect or token service that would be unsafe to follow.
    #[error("{place} sent us to {target}, which is refused: {reason}")]
    Redirect {
        /// Who, for what.
        place: Arc<Place>,
        /// Where to, without query.
        target: String,
        /// Why not.
        reason: String,
    },
    /// An answer that is none.
    #[error("{place} gave an unusable answer for {what}: {reason}; check that it is a registry")]
    Protocol {
        /// Who, for what.
        place: Arc<Place>,
        /// What was asked for.
        what: String,
        /// What is wrong.
        reason: String,
    },
    /// The image has no variant for this machine.
    #[error("{place} has no variant of {what} for linux/{architecture}: choose another tag (it has: {has})")]
    Platform {
        /// Who, for what.
        place: Arc<Place>,
        /// Which tag or digest.
        what: String,
        /// As OCI names it.
        architecture: &'static str,
        /// What there is.
        has: String,
    },
    /// A range that isn't in the blob, or too long: the caller's mistake.
    #[error(
        "bytes {offset}+{len} are not a range of blob {digest} of {size} bytes, or more than one read may ask for"
    )]
    Range {
        /// Of the blob.
        digest: String,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: usize,
        /// Of the blob, in bytes.
        size: u64,
    },
    /// The client's own settings or this machine are at fault.
    #[error("{0}")]
    Setup(String),
}

fn wait(retry_after: &Option<Duration>) -> String {
    retry_after.map_or_else(|| "wait".to_owned(), |after| format!("wait {} s", after.as_secs().max(1)))
}

impl Error {
    /// What to do about it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Unauthorized { .. } | Self::Forbidden { .. } => Kind::Denied,
            Self::NotFound { .. } => Kind::Missing,
            Self::RateLimited { retry_after, .. } => Kind::Throttled(*retry_after),
            Self::Unavailable { .. }
            | Self::Unreachable { .. }
            | Self::TimedOut { .. }
            | Self::Truncated { .. } => Kind::Passing,
            Self::Digest { .. } => Kind::Damaged,
            _ => Kind::Final,
        }
    }

    /// Whether asking the same host again may help.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self.kind(), Kind::Passing | Kind::Throttled(_))
    }

    /// Whether the host rather than what it was asked for is at fault.
    pub(crate) fn blames_host(&self) -> bool {
        matches!(
            self,
            Self::Unreachable { .. }
                | Self::TimedOut { .. }
                | Self::RateLimited { .. }
                | Self::Unavailable { .. }
        )
    }

    /// How long it asked us to wait.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after, .. } | Self::Unavailable { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    pub(crate) fn protocol(place: &Arc<Place>, what: &str, reason: impl fmt::Display) -> Self {
        Self::Protocol { place: Arc::clone(place), what: what.to_owned(), reason: reason.to_string() }
    }
}

/// A remote's words, fit for a log line: printable, one line, short.
pub(crate) fn words(text: &str) -> String {
    let mut out: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    out.truncate(out.trim_end().len());
    out
}
