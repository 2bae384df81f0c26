//! What can go wrong for a caller of the CLI, and the exit code of each.

use reqwest::StatusCode;

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed command. The message says what happened and what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that can't be right.
    #[error("{0}")]
    Usage(String),
    /// What was named does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Policy, credentials or capacity said no.
    #[error("{0}")]
    Refused(String),
    /// Nothing answers at the address.
    #[error(
        "can't reach {url}: {detail}\n  Is the server running? Start it with `aenv up`, or set E2B_API_URL."
    )]
    Unreachable {
        /// Address that was tried.
        url: String,
        /// The transport's words.
        detail: String,
    },
    /// The stream or connection broke in the middle; trying again may help.
    #[error("the connection to the sandbox broke: {0}")]
    Dropped(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// Exit code for scripts: 1 failed, 2 usage, 3 not found, 4 refused by policy or capacity.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Unreachable { .. } | Self::Dropped(_) | Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::NotFound(_) => 3,
            Self::Refused(_) => 4,
        }
    }

    /// From a control-plane answer: its status and the `message` of its body.
    #[must_use]
    pub fn from_status(status: StatusCode, message: String) -> Self {
        match status.as_u16() {
            404 | 410 => Self::NotFound(message),
            400 | 405 | 413..=415 | 422 => Self::Usage(message),
            401 => Self::Refused(format!("{message}\n  Store a valid API key with `aenv auth login`.")),
            402 | 403 | 429 | 503 | 507 => Self::Refused(message),
            _ => Self::Failed(format!("{message} (HTTP {})", status.as_u16())),
        }
    }

    /// From a Connect error code of the guest agent.
    #[must_use]
    pub fn from_connect(code: &str, message: &str) -> Self {
        let text = if message.is_empty() { code.to_owned() } else { message.to_owned() };
        match code {
            "not_found" => Self::NotFound(text),
            "invalid_argument" | "out_of_range" | "already_exists" => Self::Usage(text),
            "unauthenticated" | "permission_denied" | "resource_exhausted" => Self::Refused(text),
            "unavailable" | "aborted" => Self::Dropped(text),
            _ => Self::Failed(format!("{text} ({code})")),
        }
    }

    /// From the HTTP client: told apart are "nothing there", "too slow" and "broke in the middle".
    #[must_use]
    pub fn from_transport(error: &reqwest::Error, url: &str) -> Self {
        let detail = innermost(error);
        if error.is_connect() {
            Self::Unreachable { url: url.to_owned(), detail }
        } else if error.is_timeout() {
            Self::Failed(format!(
                "{url} did not answer in time; look at the server's log or try again (`aenv info` shows the state)"
            ))
        } else {
            Self::Dropped(detail)
        }
    }
}

/// The last cause in the chain says most: `Connection refused` rather than `error sending request`.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_of_answer_has_its_exit_code() {
        let code = |status: u16| {
            Error::from_status(StatusCode::from_u16(status).expect("a status"), "m".into()).exit_code()
        };
        assert_eq!((code(400), code(422)), (2, 2));
        assert_eq!(code(404), 3);
        assert_eq!((code(401), code(403), code(429), code(503)), (4, 4, 4, 4));
        assert_eq!((code(409), code(500)), (1, 1));
    }

    #[test]
    fn a_guest_error_keeps_its_words() {
        let error = Error::from_connect("not_found", "process 7 not found");
        assert_eq!((error.exit_code(), error.to_string().as_str()), (3, "process 7 not found"));
        assert!(matches!(Error::from_connect("unavailable", ""), Error::Dropped(m) if m == "unavailable"));
    }
}
