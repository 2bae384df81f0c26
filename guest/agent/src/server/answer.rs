//! Answers of the plain HTTP routes.

use std::convert::Infallible;

use aenv_envd_proto::http::ErrorBody;
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, Full, combinators::UnsyncBoxBody};
use serde::Serialize;

pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;
pub(crate) type Body = UnsyncBoxBody<Bytes, BodyError>;
pub(crate) type Answer = Response<Body>;

/// A request that is refused: its status, and what was wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub(crate) fn answer(&self) -> Answer {
        let body = ErrorBody { code: self.status.as_u16(), message: self.message.clone() };
        json(self.status, &body)
    }
}

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed_unsync()
}

pub(crate) fn empty() -> Body {
    Empty::new().map_err(|never: Infallible| match never {}).boxed_unsync()
}

pub(crate) fn status(status: StatusCode) -> Answer {
    let mut answer = Response::new(empty());
    *answer.status_mut() = status;
    answer
}

pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Answer {
    // Our own types always serialise.
    let mut answer = Response::new(full(serde_json::to_vec(value).unwrap_or_default()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}
