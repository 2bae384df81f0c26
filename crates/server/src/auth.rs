//! Who asks on the control plane.
//!
//! A key is looked up by its SHA-256, so no comparison of secrets takes a time that depends on them. Accepted keys are
//! cached for a few seconds, wrong ones never: a flood of guesses can't push real keys out.

use crate::{api::State, error::ApiError};
use aenv_api_types::{API_KEY_HEADER, ErrorCode};
use aenv_node::{control::Control, model::Principal};
use axum::{
    extract::{Request, State as Extract},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, StatusCode, header};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};
use subtle::ConstantTimeEq;

/// A revoked key works at most this long.
const FRESH: Duration = Duration::from_secs(10);
const CAPACITY: usize = 1024;
/// No key is longer; refuses to hash megabytes.
const MAX_KEY_BYTES: usize = 512;

/// Recently accepted keys.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    accepted: Mutex<HashMap<[u8; 32], (Principal, Instant)>>,
}

impl Keys {
    /// The team of these headers' key.
    pub(crate) async fn authenticate(
        &self,
        control: &dyn Control,
        headers: &HeaderMap,
    ) -> Result<Principal, ApiError> {
        let key = presented(headers).ok_or_else(|| {
            refused("no API key: send it as 'X-API-Key' or 'Authorization: Bearer'; `aenv up` on the server's machine writes one to ~/.config/aenv/env")
        })?;
        let digest: [u8; 32] = Sha256::digest(key).into();
        if let Some((who, at)) = self.accepted.lock().get(&digest)
            && at.elapsed() < FRESH
        {
            return Ok(who.clone());
        }
        let who = control.authenticate(digest).await?.ok_or_else(|| {
            refused(
                "the API key is not valid on this server; check E2B_API_KEY, or run `aenv up` on the server's machine, which writes a valid one to ~/.config/aenv/env",
            )
        })?;
        let mut accepted = self.accepted.lock();
        if accepted.len() >= CAPACITY {
            accepted.retain(|_, (_, at)| at.elapsed() < FRESH);
        }
        if accepted.len() < CAPACITY {
            accepted.insert(digest, (who.clone(), Instant::now()));
        }
        Ok(who)
    }
}

fn refused(message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, ErrorCode::Unauthorized, message)
}

fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    let key = headers.get(API_KEY_HEADER).map(http::HeaderValue::as_bytes).or_else(|| {
        let value = headers.get(header::AUTHORIZATION)?.as_bytes();
        let (scheme, token) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
    })?;
    let key = key.trim_ascii();
    (!key.is_empty() && key.len() <= MAX_KEY_BYTES).then_some(key)
}

/// Middleware: puts the [`Principal`] into the request, or answers 401.
pub(crate) async fn require_key(
    Extract(state): Extract<State>,
    mut request: Request,
    next: Next,
) -> Response {
    match state.keys.authenticate(&*state.control, request.headers()).await {
        Ok(who) => {
            request.extensions_mut().insert(who);
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

/// Whether two secrets are equal, in a time that depends on their lengths only.
pub(crate) fn same_secret(a: &[u8], b: &[u8]) -> bool {
    a.ct_eq(b).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn with(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), HeaderValue::from_static(value))])
    }

    #[test]
    fn a_key_is_taken_from_either_header() {
        assert_eq!(presented(&with("x-api-key", "e2b_1")), Some(&b"e2b_1"[..]));
        assert_eq!(presented(&with("authorization", "Bearer e2b_1")), Some(&b"e2b_1"[..]));
        assert_eq!(presented(&with("authorization", "bearer  e2b_1 ")), Some(&b"e2b_1"[..]));
    }

    #[test]
    fn other_schemes_and_empty_keys_are_no_key() {
        for value in ["Basic e2b_1", "Bearer", "Bearer ", "e2b_1", ""] {
            assert_eq!(presented(&with("authorization", value)), None, "{value}");
        }
        assert_eq!(presented(&with("x-api-key", "  ")), None);
    }
}
