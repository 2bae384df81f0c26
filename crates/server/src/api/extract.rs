//! What handlers take out of requests, each refusal naming the field.

use crate::{
    api::{State, check},
    error::ApiError,
    plane,
};
use aenv_api_types::ErrorCode;
use aenv_node::model::{BuildId, SandboxId};
use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, RawPathParams, Request},
};
use http::{HeaderMap, HeaderValue, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use std::{fmt::Display, str::FromStr};

/// A JSON body that must be there.
pub(super) struct Json<T>(pub(super) T);

/// A JSON body that may be missing or empty, whatever its Content-Length says.
pub(super) struct MaybeJson<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<State> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &State) -> Result<Self, ApiError> {
        let bytes = read(request, state).await?;
        if bytes.trim_ascii().is_empty() {
            return Err(ApiError::invalid("the body is empty: a JSON object was expected"));
        }
        parse(&bytes).map(Self)
    }
}

impl<T: DeserializeOwned + Default> FromRequest<State> for MaybeJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &State) -> Result<Self, ApiError> {
        let bytes = read(request, state).await?;
        if bytes.trim_ascii().is_empty() { Ok(Self(T::default())) } else { parse(&bytes).map(Self) }
    }
}

async fn read(request: Request, state: &State) -> Result<Bytes, ApiError> {
    if let Some(coding) = request.headers().get(header::CONTENT_ENCODING)
        && !coding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorCode::InvalidRequest,
            "content-encoding: only 'identity' is accepted on the control plane",
        ));
    }
    let limit = state.options.max_body_bytes;
    let body = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(state.options.body_timeout, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            ErrorCode::BodyTooLarge,
            format!("the body is larger than {limit} bytes"),
        )),
        Ok(Err(error)) => Err(ApiError::invalid(format!("the body could not be read: {error}"))),
        Err(_) => Err(ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            ErrorCode::BodyTimeout,
            format!("the body did not arrive within {} s", state.options.body_timeout.as_secs()),
        )),
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // A struct would also read from an array by position: no SDK does that, and it hides mistakes.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(ApiError::invalid("the body must be a JSON object"));
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        match path.as_str() {
            "." | "" => ApiError::invalid(format!("the body: {}", error.inner())),
            path => ApiError::invalid(format!("{path}: {}", error.inner())),
        }
    })?;
    json.end().map_err(|error| ApiError::invalid(format!("the body: {error}")))?;
    Ok(value)
}

async fn params(parts: &mut Parts, state: &State) -> Result<Vec<(String, String)>, ApiError> {
    let raw = RawPathParams::from_request_parts(parts, state)
        .await
        .map_err(|error| ApiError::invalid(format!("the path: {error}")))?;
    Ok(raw.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

fn named(params: &mut [(String, String)], name: &str) -> String {
    params.iter_mut().find(|(n, _)| n == name).map(|(_, value)| std::mem::take(value)).unwrap_or_default()
}

/// `{sandboxID}`: 400 when malformed, 404 when well-formed but nobody's.
pub(super) struct SandboxPath(pub(super) SandboxId);

impl FromRequestParts<State> for SandboxPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, ApiError> {
        let text = named(&mut params(parts, state).await?, "sandboxID");
        sandbox_id(&text).map(Self)
    }
}

pub(super) fn sandbox_id(text: &str) -> Result<SandboxId, ApiError> {
    let (id, written) = plane::sandbox_id(text)
        .ok_or_else(|| ApiError::invalid("sandboxID: must be lower-case letters and digits (^[a-z0-9]+$)"))?;
    tracing::Span::current().record("sandbox_id", written.as_str());
    id.ok_or_else(|| ApiError::sandbox_not_found(&written))
}

/// `{templateID}` (or `{alias}`): an id, alias, `name:tag` or `ns/name`, percent-decoded.
pub(super) struct TemplatePath(pub(super) String);

impl FromRequestParts<State> for TemplatePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, ApiError> {
        let mut params = params(parts, state).await?;
        let text = match named(&mut params, "templateID") {
            text if text.is_empty() => named(&mut params, "alias"),
            text => text,
        };
        check::template_reference("templateID", &text)?;
        Ok(Self(text))
    }
}

/// `{templateID}` and `{buildID}`.
pub(super) struct BuildPath(pub(super) String, pub(super) BuildId);

impl FromRequestParts<State> for BuildPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, ApiError> {
        let mut params = params(parts, state).await?;
        let template = named(&mut params, "templateID");
        check::template_reference("templateID", &template)?;
        let build = named(&mut params, "buildID")
            .parse()
            .map_err(|_| ApiError::invalid("buildID: must be a UUID"))?;
        Ok(Self(template, BuildId(build)))
    }
}

/// Query parameters, decoded once. Unknown ones are ignored.
#[derive(Debug)]
pub(super) struct Query(Vec<(String, String)>);

impl FromRequestParts<State> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &State) -> Result<Self, ApiError> {
        Self::parse(parts.uri.query().unwrap_or(""))
    }
}

impl Query {
    pub(super) fn parse(text: &str) -> Result<Self, ApiError> {
        if let Some(pair) = text.split('&').find(|pair| !percent_encoded(pair)) {
            let name: String = pair.split('=').next().unwrap_or_default().chars().take(64).collect();
            return Err(ApiError::invalid(format!(
                "{name}: a '%' must be followed by two hexadecimal digits; write %25 for '%' itself"
            )));
        }
        let pairs: Vec<_> = url::form_urlencoded::parse(text.as_bytes()).into_owned().collect();
        // Bytes that aren't UTF-8 come out as the replacement character; so would an honest one, which no value needs.
        match pairs.iter().find(|(name, value)| name.contains('\u{fffd}') || value.contains('\u{fffd}')) {
            Some((name, _)) => {
                Err(ApiError::invalid(format!("{name}: not valid UTF-8 when percent-decoded")))
            }
            None => Ok(Self(pairs)),
        }
    }

    /// The value of a parameter that may be given once, as free text without NUL. Empty counts as absent, as clients
    /// send `nextToken=`.
    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, ApiError> {
        let mut values = self.0.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_str());
        let first = values.next().filter(|value| !value.is_empty());
        if values.next().is_some() {
            return Err(ApiError::invalid(format!("{name}: given more than once; give it once")));
        }
        if first.is_some_and(|value| value.contains('\0')) {
            return Err(ApiError::invalid(format!("{name}: must not contain NUL")));
        }
        Ok(first)
    }

    /// Like [`Query::text`], for what no client sends without a value: an empty one is a mistake, not a wish.
    pub(super) fn filled(&self, name: &str) -> Result<Option<&str>, ApiError> {
        match self.text(name)? {
            None if self.0.iter().any(|(n, _)| n == name) => {
                Err(ApiError::invalid(format!("{name}: is empty; give a value or leave it out")))
            }
            value => Ok(value),
        }
    }

    /// The values of a list parameter, both as `a,b` and repeated. An empty list counts as absent, as clients send it
    /// so; a gap in one is a mistake.
    pub(super) fn list(&self, name: &str) -> Result<Vec<&str>, ApiError> {
        let lists = self.0.iter().filter(|(n, value)| n == name && !value.is_empty());
        let values: Vec<_> = lists.flat_map(|(_, list)| list.split(',')).map(str::trim).collect();
        if values.iter().any(|value| value.is_empty()) {
            return Err(ApiError::invalid(format!("{name}: has an empty entry between its commas")));
        }
        Ok(values)
    }

    /// A whole number within bounds.
    pub(super) fn int<T>(
        &self,
        name: &str,
        bounds: std::ops::RangeInclusive<T>,
    ) -> Result<Option<T>, ApiError>
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some(text) = self.filled(name)? else { return Ok(None) };
        // Rust would also read "+5".
        let digits = text.bytes().all(|b| b.is_ascii_digit());
        match text.parse() {
            Ok(value) if digits && bounds.contains(&value) => Ok(Some(value)),
            _ => Err(ApiError::invalid(format!(
                "{name}: must be a whole number from {} to {}",
                bounds.start(),
                bounds.end()
            ))),
        }
    }

    /// One of a few words.
    pub(super) fn word<T: Copy>(&self, name: &str, words: &[(&str, T)]) -> Result<Option<T>, ApiError> {
        let Some(text) = self.filled(name)? else { return Ok(None) };
        words.iter().find(|(word, _)| *word == text).map(|(_, value)| Some(*value)).ok_or_else(|| {
            let accepted: Vec<_> = words.iter().map(|(word, _)| *word).collect();
            ApiError::invalid(format!("{name}: must be one of {}", accepted.join(", ")))
        })
    }
}

/// Whether every '%' stands before two hexadecimal digits.
fn percent_encoded(text: &str) -> bool {
    text.split('%')
        .skip(1)
        .map(str::as_bytes)
        .all(|rest| rest.len() >= 2 && rest.iter().take(2).all(u8::is_ascii_hexdigit))
}

/// A header that says one thing, and so may be given once.
pub(super) fn single<'h>(headers: &'h HeaderMap, name: &str) -> Result<Option<&'h HeaderValue>, ApiError> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    match values.next() {
        Some(_) => Err(ApiError::invalid(format!("{name}: given more than once; give it once"))),
        None => Ok(first),
    }
}

/// The client's key for a safe retry.
pub(super) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = single(headers, aenv_api_types::IDEMPOTENCY_KEY_HEADER)? else { return Ok(None) };
    let text = value.to_str().unwrap_or("");
    let ok = (1..=255).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if ok {
        Ok(Some(text.to_owned()))
    } else {
        Err(ApiError::invalid("Idempotency-Key: must be 1 to 255 lower-case letters, digits and '-'"))
    }
}
