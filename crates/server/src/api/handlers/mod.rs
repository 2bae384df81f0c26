//! One function a route. Each checks, asks the node once, and translates.

pub(super) mod node;
pub(super) mod observe;
pub(super) mod sandboxes;
pub(super) mod templates;

use aenv_api_types::NEXT_TOKEN_HEADER;
use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use serde::Serialize;

/// A page of a list with the header the SDKs page by; empty on the last page.
fn page<T: Serialize>(items: &[T], next: Option<&str>) -> Response {
    let mut response = axum::Json(items).into_response();
    let token = HeaderValue::from_str(next.unwrap_or("")).unwrap_or(HeaderValue::from_static(""));
    response.headers_mut().insert(NEXT_TOKEN_HEADER, token);
    response
}
