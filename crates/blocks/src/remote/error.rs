//! Why bytes could not be had, told apart by what to do about it.

use std::io;
use std::time::Duration;

/// Why bytes could not be had. The text is the source's own, naming place and thing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// May work when asked again: a broken connection, a truncated body, 5xx.
    #[error("{0}")]
    Retryable(String),
    /// Asked too often (429).
    #[error("{reason}{}", wait(.retry_after))]
    Throttled {
        /// What the source asked for by `Retry-After`.
        retry_after: Option<Duration>,
        /// Its words.
        reason: String,
    },
    /// No such blob (404).
    #[error("{0}")]
    NotFound(String),
    /// Other credentials are needed (401, 403).
    #[error("{0}")]
    Denied(String),
    /// The bytes are not what their digest says.
    #[error("{0}")]
    Damaged(String),
    /// The request makes no sense to the source, or the source none to us; asking again doesn't help.
    #[error("{0}")]
    Invalid(String),
    /// No answer in time.
    #[error("{what} did not come within {after:?}: check the network, or allow more time")]
    TimedOut {
        /// What was awaited.
        what: String,
        /// For how long.
        after: Duration,
    },
    /// Too many fetches wait already.
    #[error("{0} fetches wait already: ask again later, or allow more at a time")]
    Busy(usize),
}

fn wait(retry_after: &Option<Duration>) -> String {
    retry_after.map_or_else(String::new, |after| format!(" (wait {} s)", after.as_secs().max(1)))
}

impl FetchError {
    /// Whether asking the same source again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Retryable(_) | Self::Throttled { .. } | Self::TimedOut { .. })
    }
}

/// For readers of devices; the error itself can be had back by downcasting.
impl From<FetchError> for io::Error {
    fn from(error: FetchError) -> Self {
        let kind = match &error {
            FetchError::NotFound(_) => io::ErrorKind::NotFound,
            FetchError::Denied(_) => io::ErrorKind::PermissionDenied,
            FetchError::Damaged(_) => io::ErrorKind::InvalidData,
            FetchError::Invalid(_) => io::ErrorKind::InvalidInput,
            FetchError::TimedOut { .. } => io::ErrorKind::TimedOut,
            FetchError::Busy(_) | FetchError::Throttled { .. } => io::ErrorKind::ResourceBusy,
            FetchError::Retryable(_) => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
