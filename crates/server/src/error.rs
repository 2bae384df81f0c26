//! The one mapping from what can go wrong to status, `error_code` and headers.

use aenv_api_types::{ErrorBody, ErrorCode};
use aenv_node::control;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use std::time::Duration;

/// An answer that isn't a success, in the control plane's error body.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
    pub(crate) retry_after: Option<Duration>,
}

/// Results of handlers.
pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: ErrorCode, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), retry_after: None }
    }

    /// 400: a value the client sent; `message` begins with the field's name.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorCode::InvalidRequest, message)
    }

    /// 501: part of the contract that this version does not have.
    pub(crate) fn later(what: &str) -> Self {
        Self::new(
            StatusCode::NOT_IMPLEMENTED,
            ErrorCode::NotImplemented,
            format!("{what} is not available in this version of AgentENV"),
        )
    }

    pub(crate) fn sandbox_not_found(id: &str) -> Self {
        control::Error::SandboxNotFound(id.chars().take(64).collect()).into()
    }
}

impl From<control::Error> for ApiError {
    fn from(error: control::Error) -> Self {
        use control::Error as E;
        let message = error.to_string();
        let (status, code) = match &error {
            E::SandboxNotFound(_) => (StatusCode::NOT_FOUND, ErrorCode::SandboxNotFound),
            E::SandboxEnded { .. } => (StatusCode::NOT_FOUND, ErrorCode::SandboxEnded),
            E::TemplateNotFound(_) => (StatusCode::NOT_FOUND, ErrorCode::TemplateNotFound),
            E::TemplateForbidden(_) => (StatusCode::FORBIDDEN, ErrorCode::Forbidden),
            E::BuildNotFound(_) => (StatusCode::NOT_FOUND, ErrorCode::BuildNotFound),
            E::Conflict(_) => (StatusCode::CONFLICT, ErrorCode::SandboxConflict),
            E::Invalid(_) => (StatusCode::BAD_REQUEST, ErrorCode::InvalidRequest),
            E::Full { .. } => (StatusCode::TOO_MANY_REQUESTS, ErrorCode::SandboxCapacityUnavailable),
            E::Unavailable(_) => (StatusCode::SERVICE_UNAVAILABLE, ErrorCode::SandboxUnavailable),
            E::Timeout(_) => (StatusCode::GATEWAY_TIMEOUT, ErrorCode::DeadlineExceeded),
            // The enum may grow; what we can't name is ours to answer for.
            _ => (StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::InternalServerError),
        };
        let mut answer = Self::new(status, code, message);
        match error {
            E::Full { message, retry_after } => {
                // The SDKs' users grep for these words.
                if !message.contains("maximum number of concurrent") {
                    answer.message =
                        format!("you have reached the maximum number of concurrent sandboxes: {message}");
                }
                answer.retry_after = Some(retry_after.max(Duration::from_secs(1)));
            }
            E::Unavailable(_) => answer.retry_after = Some(Duration::from_secs(1)),
            _ => {}
        }
        answer
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() && self.status != StatusCode::NOT_IMPLEMENTED {
            // Logged here and nowhere else; the span carries request and sandbox ids.
            tracing::error!(status = self.status.as_u16(), code = ?self.code, "{}", self.message);
        }
        let body =
            ErrorBody { code: self.status.as_u16(), message: self.message, error_code: Some(self.code) };
        let mut response = (self.status, axum::Json(body)).into_response();
        if let Some(after) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs().max(1)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
