//! What the proxy itself answers. The SDKs match on "was not found" and "port is not open" in `message`.

use crate::plane::Address;
use aenv_api_types::{ErrorBody, GuestErrorBody};
use axum::{
    body::Body,
    response::{Html, IntoResponse},
};
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use std::time::Duration;

/// Why a guest request was not forwarded, or got no answer.
#[derive(Debug)]
pub(super) enum Refusal {
    /// No such sandbox, or it has no machine; the reason if there is one to tell.
    NotFound(Option<String>),
    /// Nothing listens on the port.
    Closed,
    /// Route of the agent that is not for clients.
    Internal,
    /// Traffic token missing or wrong.
    Token,
    /// CONNECT.
    Method,
    /// Too much at once.
    Busy(usize),
    /// No room to resume it.
    Full(String, Duration),
    /// Starting, stopping.
    Unavailable(String),
    /// A deadline passed.
    Slow(String),
    /// The guest hung up or spoke something else than HTTP.
    Broken(String),
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::NotFound(_) | Self::Closed | Self::Broken(_) => StatusCode::BAD_GATEWAY,
            Self::Internal => StatusCode::NOT_FOUND,
            Self::Token => StatusCode::FORBIDDEN,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Busy(_) | Self::Full(..) => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Slow(_) => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    fn message(&self) -> String {
        match self {
            Self::NotFound(None) => "The sandbox was not found".to_owned(),
            Self::NotFound(Some(why)) => format!("The sandbox was not found: {why}"),
            Self::Closed => "The sandbox is running but port is not open".to_owned(),
            Self::Internal => "This route of the sandbox's agent is not reachable from outside".to_owned(),
            Self::Token => {
                "The traffic access token is missing or wrong; send it as E2b-Traffic-Access-Token".to_owned()
            }
            Self::Method => "CONNECT is not supported".to_owned(),
            Self::Busy(limit) => format!("The sandbox already serves {limit} requests at once; retry later"),
            Self::Full(message, _) | Self::Unavailable(message) | Self::Broken(message) => message.clone(),
            Self::Slow(what) => format!("The sandbox {what}"),
        }
    }

    pub(super) fn into_response(self, address: &Address, html: bool) -> Response<Body> {
        let status = self.status();
        let message = self.message();
        let port = matches!(self, Self::Closed).then_some(address.port);
        let mut response = if html {
            // Status and id are ours; the message may carry words of the node, so it is escaped.
            let page = format!(
                "<!doctype html><meta charset=utf-8><title>{status}</title>\
                 <body style=\"font-family:system-ui;max-width:40em;margin:15vh auto;padding:0 1em\">\
                 <h1>{}</h1><p>{}</p><p>Sandbox <code>{}</code>, port <code>{}</code></p>",
                status.as_u16(),
                escape(&message),
                escape(&address.written),
                address.port
            );
            (status, Html(page)).into_response()
        } else {
            let body =
                GuestErrorBody { sandbox_id: address.written.clone(), message, port, code: status.as_u16() };
            (status, axum::Json(body)).into_response()
        };
        let headers = response.headers_mut();
        // Scripts in a browser must be able to read why.
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        match self {
            Self::Full(_, after) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs().max(1)));
            }
            Self::Busy(_) | Self::Unavailable(_) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(1));
            }
            _ => {}
        }
        response
    }
}

/// An answer where no sandbox is known.
pub(super) fn bare(status: StatusCode, message: &str) -> Response<Body> {
    let body = ErrorBody { code: status.as_u16(), message: message.to_owned(), error_code: None };
    (status, axum::Json(body)).into_response()
}

/// A person in a browser, rather than a program.
pub(super) fn wants_html(request: &Request<Body>) -> bool {
    let accepts = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok());
    request.method() == Method::GET && accepts.is_some_and(|accept| accept.contains("text/html"))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
