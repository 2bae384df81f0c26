//! Why an image could not be had.

use std::{io, time::Duration};

/// Why an image could not be fetched, read or turned into a disk. Messages say what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The reference itself is wrong.
    #[error(transparent)]
    Reference(#[from] crate::reference::Error),
    /// The registry wants credentials, or others. Docker Hub says so for repositories that don't exist, too.
    #[error(
        "the registry refused {image}: log in with an account that may read it, and check its spelling ({reason})"
    )]
    Unauthorized {
        /// The reference.
        image: String,
        /// The registry's words.
        reason: String,
    },
    /// No such repository, tag, digest or file.
    #[error("{image} was not found: check its name and tag ({reason})")]
    NotFound {
        /// The reference.
        image: String,
        /// The cause in words.
        reason: String,
    },
    /// Too many requests.
    #[error("the registry's rate limit is reached for {image}: wait, or log in for a higher one ({reason})")]
    RateLimited {
        /// The reference.
        image: String,
        /// The registry's words.
        reason: String,
    },
    /// No answer from the registry.
    #[error(
        "the registry of {image} can't be reached: check this machine's network, DNS and proxy ({reason})"
    )]
    Unreachable {
        /// The reference.
        image: String,
        /// The cause in words.
        reason: String,
    },
    /// The image has no variant for this machine.
    #[error("{image} has no variant for linux/{architecture}: choose another tag ({reason})")]
    Platform {
        /// The reference.
        image: String,
        /// As OCI names it.
        architecture: &'static str,
        /// The cause in words.
        reason: String,
    },
    /// The image's data is not what it should be.
    #[error("the image is not usable: {what}: {reason}")]
    Invalid {
        /// Which part.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tool is not installed.
    #[error("{tool} is not installed: install the package {package}")]
    Missing {
        /// The program.
        tool: String,
        /// Debian's package.
        package: &'static str,
    },
    /// A tool failed.
    #[error("{tool} failed ({status}): {reason}")]
    Tool {
        /// The program.
        tool: String,
        /// Its exit status in words.
        status: String,
        /// Its last lines.
        reason: String,
    },
    /// A step took too long; it was ended and its files removed.
    #[error("{step} did not end within {after:?}; it was stopped")]
    TimedOut {
        /// The program.
        step: String,
        /// Its deadline.
        after: Duration,
    },
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
    /// A file operation failed.
    #[error("{step}: {source}")]
    Io {
        /// What was being done, with the path.
        step: String,
        /// The cause.
        source: io::Error,
    },
    /// This machine isn't set up for it.
    #[error("{0}")]
    Host(String),
}

impl Error {
    pub(crate) fn invalid(what: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        Self::Invalid { what: what.into(), reason: reason.to_string() }
    }

    /// What a registry's failure means for `image`.
    pub(crate) fn of_registry(image: &str, error: crate::registry::Error) -> Self {
        use crate::registry::Error as Registry;
        let (image, reason) = (image.to_owned(), error.to_string());
        match error {
            Registry::Unauthorized { .. } | Registry::Forbidden { .. } => {
                Self::Unauthorized { image, reason }
            }
            Registry::NotFound { .. } => Self::NotFound { image, reason },
            Registry::RateLimited { .. } => Self::RateLimited { image, reason },
            Registry::Unavailable { .. } | Registry::Unreachable { .. } | Registry::TimedOut { .. } => {
                Self::Unreachable { image, reason }
            }
            Registry::Platform { architecture, .. } => Self::Platform { image, architecture, reason },
            Registry::Setup(reason) => Self::Host(reason),
            _ => Self::Invalid { what: image, reason },
        }
    }
}

/// Says what an I/O error happened at.
pub(crate) trait During<T> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, step: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Io { step: step(), source })
    }
}

/// Runs blocking work off the async workers.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(Error::Host(format!("a worker thread broke down: {e}"))),
    }
}
