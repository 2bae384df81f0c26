//! Content and accept encodings: identity and gzip.

use std::io::Write;

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use futures_util::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use http::{HeaderMap, StatusCode, header};

use crate::server::answer::{BodyError, Refusal};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
}

/// Encoding of a request's body.
pub(super) fn of_body(headers: &HeaderMap) -> Result<Encoding, Refusal> {
    let Some(value) = headers.get(header::CONTENT_ENCODING) else { return Ok(Encoding::Identity) };
    match value.to_str().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(Encoding::Identity),
        "gzip" => Ok(Encoding::Gzip),
        other => Err(Refusal::bad_request(format!(
            "unsupported Content-Encoding: {other:?}, supported: identity, gzip"
        ))),
    }
}

/// The encoding a client likes best for an answer (RFC 9110, 12.5.3). Ranges are of the file as it is: with
/// `identity_only` there is no choice but to refuse.
pub(super) fn for_answer(headers: &HeaderMap, identity_only: bool) -> Result<Encoding, Refusal> {
    let accepted =
        headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let quality = |wanted: &str| {
        accepted.split(',').find_map(|choice| {
            let (name, parameters) = choice.split_once(';').unwrap_or((choice, ""));
            name.trim().eq_ignore_ascii_case(wanted).then(|| {
                let quality = parameters.trim().strip_prefix("q=").map(str::trim);
                quality.and_then(|text| text.parse::<f32>().ok()).unwrap_or(1.0)
            })
        })
    };
    let any = quality("*");
    let gzip = quality("gzip").unwrap_or(0.0);
    // Unless refused, the file as it is is always welcome, but named favourites come first.
    let identity = quality("identity").or(any.filter(|any| *any == 0.0));
    let identity_refused = identity.is_some_and(|identity| identity <= 0.0);
    if identity_only {
        return if identity_refused { Err(not_acceptable()) } else { Ok(Encoding::Identity) };
    }
    if gzip > 0.0 && gzip >= identity.unwrap_or(0.0) {
        return Ok(Encoding::Gzip);
    }
    if !identity_refused {
        return Ok(Encoding::Identity);
    }
    if any.is_some_and(|any| any > 0.0) { Ok(Encoding::Gzip) } else { Err(not_acceptable()) }
}

fn not_acceptable() -> Refusal {
    Refusal::new(StatusCode::NOT_ACCEPTABLE, "no acceptable encoding found, supported: identity, gzip")
}

/// How much compressed input is expanded at a time: at gzip's worst ratio that is a megabyte.
const STEP: usize = 1 << 10;

/// A body as its sender meant it.
pub(super) fn decoded<'a>(
    body: impl Stream<Item = Result<Bytes, BodyError>> + Send + Unpin + 'a,
    encoding: Encoding,
) -> BoxStream<'a, Result<Bytes, BodyError>> {
    match encoding {
        Encoding::Identity => body.boxed(),
        Encoding::Gzip => gunzip(body).boxed(),
    }
}

fn gunzip<'a>(
    body: impl Stream<Item = Result<Bytes, BodyError>> + Send + Unpin + 'a,
) -> impl Stream<Item = Result<Bytes, BodyError>> + Send + 'a {
    struct State<S> {
        body: S,
        decoder: Option<MultiGzDecoder<Vec<u8>>>,
        pending: Bytes,
    }
    let state = State { body, decoder: Some(MultiGzDecoder::new(Vec::new())), pending: Bytes::new() };
    stream::try_unfold(state, |mut state| async move {
        loop {
            let Some(decoder) = state.decoder.as_mut() else { return Ok(None) };
            if state.pending.is_empty() {
                match state.body.next().await {
                    Some(chunk) => state.pending = chunk?,
                    None => {
                        // Checks that the stream was whole.
                        let rest = match state.decoder.take() {
                            Some(decoder) => decoder.finish()?,
                            None => Vec::new(),
                        };
                        return Ok((!rest.is_empty()).then(|| (Bytes::from(rest), state)));
                    }
                }
                continue;
            }
            let step = state.pending.split_to(state.pending.len().min(STEP));
            decoder.write_all(&step)?;
            let out = std::mem::take(decoder.get_mut());
            if !out.is_empty() {
                return Ok(Some((Bytes::from(out), state)));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(accept: &'static str, identity_only: bool) -> Result<Encoding, StatusCode> {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_ENCODING, http::HeaderValue::from_static(accept));
        for_answer(&headers, identity_only).map_err(|refusal| refusal.status)
    }

    #[test]
    fn the_favourite_wins_and_identity_is_welcome_unless_refused() {
        assert_eq!(chosen("", false), Ok(Encoding::Identity));
        assert_eq!(chosen("gzip, deflate, br", false), Ok(Encoding::Gzip));
        assert_eq!(chosen("identity", false), Ok(Encoding::Identity));
        assert_eq!(chosen("gzip;q=0.5, identity;q=0.8", false), Ok(Encoding::Identity));
        assert_eq!(chosen("br", false), Ok(Encoding::Identity));
        assert_eq!(chosen("*", false), Ok(Encoding::Identity));
        assert_eq!(chosen("identity;q=0, *", false), Ok(Encoding::Gzip));
        assert_eq!(chosen("br, *;q=0", false), Err(StatusCode::NOT_ACCEPTABLE));
    }

    #[test]
    fn ranges_are_never_compressed() {
        assert_eq!(chosen("gzip", true), Ok(Encoding::Identity));
        assert_eq!(chosen("gzip, identity;q=0", true), Err(StatusCode::NOT_ACCEPTABLE));
    }
}
