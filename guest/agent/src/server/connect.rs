//! What the Connect protocol demands of a request and the RPC library lets pass: flags of frames, the time limit, and
//! the name of the user.

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use connectrpc::ConnectError;
use http::{HeaderMap, HeaderValue, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::answer::{Answer, full};
use crate::credentials;

const TIMEOUT: &str = "connect-timeout-ms";
/// Flags of a frame: compressed, and end of stream. All others are reserved.
const KNOWN_FLAGS: u8 = 0b11;
const END_OF_STREAM: u8 = 0b10;

/// The media type, without parameters.
pub(super) fn media_type(headers: &HeaderMap) -> &str {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim()
}

/// Whether the body consists of frames, in Connect's form.
pub(super) fn is_framed(headers: &HeaderMap) -> bool {
    let kind = media_type(headers).as_bytes();
    kind.get(.."application/connect+".len())
        .is_some_and(|start| start.eq_ignore_ascii_case(b"application/connect+"))
}

/// Whether the headers say what they must; which call it is doesn't matter.
pub(super) fn check(headers: &HeaderMap) -> Result<(), ConnectError> {
    time_limit(headers)?;
    credentials::named(headers)?;
    Ok(())
}

/// Connect-Timeout-Ms; 0 means none, as E2B's clients use it.
pub(crate) fn time_limit(headers: &HeaderMap) -> Result<Option<Duration>, ConnectError> {
    let mut values = headers.get_all(TIMEOUT).iter().map(HeaderValue::as_bytes);
    let Some(value) = values.next() else { return Ok(None) };
    let digits = (1..=10).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
    let millis = std::str::from_utf8(value).ok().and_then(|value| value.parse::<u64>().ok());
    match millis {
        Some(millis) if digits && values.next().is_none() => {
            Ok((millis > 0).then(|| Duration::from_millis(millis)))
        }
        _ => Err(ConnectError::invalid_argument(format!(
            "Connect-Timeout-Ms {:?} must be one number of milliseconds, of at most 10 digits",
            String::from_utf8_lossy(value.get(..32).unwrap_or(value))
        ))),
    }
}

/// The answer to a call that is refused before the library sees it, in the form its caller reads.
pub(super) fn refused(headers: &HeaderMap, err: &ConnectError) -> Answer {
    let kind = headers.get(header::CONTENT_TYPE).filter(|_| is_framed(headers));
    let Some(kind) = kind else {
        let mut answer = Answer::new(full(err.to_json()));
        *answer.status_mut() = err.http_status();
        answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        return answer;
    };
    let error = serde_json::from_slice::<serde_json::Value>(&err.to_json()).ok();
    let end = serde_json::to_vec(&serde_json::json!({ "error": error })).unwrap_or_default();
    let mut frame = BytesMut::with_capacity(end.len() + 5);
    frame.put_u8(END_OF_STREAM);
    frame.put_u32(u32::try_from(end.len()).unwrap_or(u32::MAX));
    frame.put_slice(&end);
    // A stream is always 200; how it went is in its last frame.
    let mut answer = Answer::new(full(frame.freeze()));
    answer.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
    answer
}

/// Follows the frames of a body by their heads: one byte of flags, four of length.
#[derive(Debug, Default)]
pub(super) struct Frames {
    head: [u8; 5],
    filled: usize,
    left: usize,
}

impl Frames {
    /// Reads on; the error says which flags are unknown.
    pub(super) fn follow(&mut self, mut bytes: &[u8]) -> Result<(), ConnectError> {
        loop {
            let passed = self.left.min(bytes.len());
            self.left -= passed;
            bytes = bytes.get(passed..).unwrap_or_default();
            let Some((byte, rest)) = bytes.split_first() else { return Ok(()) };
            bytes = rest;
            if self.filled == 0 && byte & !KNOWN_FLAGS != 0 {
                return Err(ConnectError::invalid_argument(format!(
                    "a frame has the flags {byte:#04x}: only 0x01 (compressed) and 0x02 (end of stream) exist"
                )));
            }
            if let Some(place) = self.head.get_mut(self.filled) {
                *place = *byte;
            }
            self.filled += 1;
            if let [_, length @ ..] = self.head
                && self.filled == self.head.len()
            {
                self.left = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
                self.filled = 0;
            }
        }
    }
}

/// Why a body broke off, for the handler: the library only passes on that it did.
#[derive(Debug, Clone, Default)]
pub(crate) struct Violation(Arc<OnceLock<ConnectError>>);

impl Violation {
    /// What was found, or else `err`.
    pub(crate) fn or(&self, err: ConnectError) -> ConnectError {
        self.0.get().cloned().unwrap_or(err)
    }
}

/// A stream of messages that ends at the first bad frame.
pub(super) struct Checked {
    body: Incoming,
    frames: Frames,
    violation: Violation,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    #[error("{0}")]
    Frame(ConnectError),
    #[error(transparent)]
    Body(#[from] hyper::Error),
}

impl Checked {
    /// The body, and where its fault will be found.
    pub(super) fn new(body: Incoming) -> (Self, Violation) {
        let violation = Violation::default();
        (Self { body, frames: Frames::default(), violation: violation.clone() }, violation)
    }
}

impl Body for Checked {
    type Data = Bytes;
    type Error = StreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StreamError>>> {
        let this = &mut *self;
        let Some(frame) = ready!(Pin::new(&mut this.body).poll_frame(cx)?) else { return Poll::Ready(None) };
        if let Some(data) = frame.data_ref()
            && let Err(err) = this.frames.follow(data)
        {
            this.violation.0.set(err.clone()).ok();
            return Poll::Ready(Some(Err(StreamError::Frame(err))));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(value: &'static str) -> Result<Option<Duration>, ConnectError> {
        time_limit(&HeaderMap::from_iter([(
            header::HeaderName::from_static(TIMEOUT),
            HeaderValue::from_static(value),
        )]))
    }

    #[test]
    fn a_time_limit_is_a_number_of_at_most_ten_digits() {
        assert!(matches!(limit("0"), Ok(None)));
        assert!(matches!(limit("9999999999"), Ok(Some(_))));
        for bad in ["soon", "-5", "+5", "1.5", "", "10000000000", "00000000005", "5 5"] {
            assert!(limit(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn frames_are_followed_however_they_are_cut() {
        let good: &[u8] = &[0, 0, 0, 0, 2, 0x40, 0x40, 1, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0xff];
        let bad: &[u8] = &[0, 0, 0, 0, 2, 0x40, 0x40, 0x40, 0, 0, 0, 0];
        for size in 1..=good.len() {
            let follow = |bytes: &[u8]| {
                let mut frames = Frames::default();
                bytes.chunks(size).try_for_each(|chunk| frames.follow(chunk))
            };
            assert!(follow(good).is_ok(), "in pieces of {size}");
            assert!(follow(bad).is_err(), "in pieces of {size}");
        }
    }
}
