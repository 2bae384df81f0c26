//! The framing of Connect streams: JSON messages in envelopes.
//!
//! ```text
//! +-------+----------------------+------------------+
//! | flags | length, u32 big end. | `length` bytes   |   flags: 1 = compressed, 2 = end of stream
//! +-------+----------------------+------------------+
//! ```
//! The last envelope of an answer carries flag 2 and `{}` or `{"error":{"code","message"}}`. Source: the Connect
//! protocol's "Streaming-Request" and "EndStreamResponse".

use bytes::{Buf as _, Bytes, BytesMut};
use serde::Deserialize;

/// Longest message taken from a guest. Agents send output in far smaller pieces; a guest is hostile, and its length
/// field is only a claim.
pub const MAX_MESSAGE: usize = 8 << 20;

const HEADER: usize = 5;
const COMPRESSED: u8 = 1;
const END: u8 = 2;

/// Why a stream can't be read on.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EnvelopeError {
    /// The length field exceeds [`MAX_MESSAGE`].
    #[error("the guest announced a message of {0} bytes; at most {MAX_MESSAGE} are accepted")]
    TooLong(usize),
    /// A flag this client did not negotiate.
    #[error("the guest sent an envelope with unknown flags {0:#04x}")]
    Flags(u8),
    /// The end-of-stream envelope is no JSON.
    #[error("the guest ended the stream with something that is not JSON")]
    End,
    /// A message of more than 4 GiB can't be framed.
    #[error("a message of {0} bytes is too long to send")]
    TooLongToSend(usize),
}

/// An error the agent reports.
#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
pub struct Failure {
    /// Connect code: `not_found`, `invalid_argument`, …
    #[serde(default)]
    pub code: String,
    /// Words.
    #[serde(default)]
    pub message: String,
}

/// One envelope.
#[derive(Debug, PartialEq, Eq)]
pub enum Envelope {
    /// A message, JSON.
    Message(Bytes),
    /// The stream is over, well or not.
    End(Option<Failure>),
}

/// Puts a message into an envelope.
///
/// # Errors
/// [`EnvelopeError::TooLongToSend`].
pub fn encode(message: &[u8]) -> Result<Bytes, EnvelopeError> {
    let length = u32::try_from(message.len()).map_err(|_| EnvelopeError::TooLongToSend(message.len()))?;
    let mut out = BytesMut::with_capacity(HEADER + message.len());
    out.extend_from_slice(&[0]);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(message);
    Ok(out.freeze())
}

/// Takes envelopes out of bytes that arrive in any pieces. Holds at most one message and one piece.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: BytesMut,
}

impl Decoder {
    /// Adds what arrived.
    pub fn push(&mut self, piece: &[u8]) {
        self.buffer.extend_from_slice(piece);
    }

    /// The next whole envelope; `None` until more arrives.
    ///
    /// # Errors
    /// See [`EnvelopeError`]; the stream can't be used after one.
    pub fn take(&mut self) -> Result<Option<Envelope>, EnvelopeError> {
        if self.buffer.len() < HEADER {
            return Ok(None);
        }
        let flags = self.buffer[0];
        if flags & !END != 0 || flags & COMPRESSED != 0 {
            return Err(EnvelopeError::Flags(flags));
        }
        let length = u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]]);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_MESSAGE {
            return Err(EnvelopeError::TooLong(length));
        }
        if self.buffer.len() - HEADER < length {
            return Ok(None);
        }
        self.buffer.advance(HEADER);
        let body = self.buffer.split_to(length).freeze();
        if flags & END == 0 {
            return Ok(Some(Envelope::Message(body)));
        }
        #[derive(Deserialize)]
        struct EndOfStream {
            error: Option<Failure>,
        }
        let end: EndOfStream = serde_json::from_slice(&body).map_err(|_| EnvelopeError::End)?;
        Ok(Some(Envelope::End(end.error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_in_pieces(bytes: &[u8], size: usize) -> Vec<Envelope> {
        let mut decoder = Decoder::default();
        let mut out = Vec::new();
        for piece in bytes.chunks(size) {
            decoder.push(piece);
            while let Some(envelope) = decoder.take().expect("well-formed") {
                out.push(envelope);
            }
        }
        out
    }

    #[test]
    fn messages_survive_any_cutting() {
        let mut bytes = encode(b"{\"a\":1}").expect("fits").to_vec();
        bytes.extend_from_slice(&encode(b"").expect("fits"));
        bytes.extend_from_slice(b"\x02\x00\x00\x00\x02{}");
        for size in 1..bytes.len() {
            let got = decode_in_pieces(&bytes, size);
            let want = [
                Envelope::Message(Bytes::from_static(b"{\"a\":1}")),
                Envelope::Message(Bytes::new()),
                Envelope::End(None),
            ];
            assert_eq!(got, want, "cut every {size} bytes");
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_protocol() {
        assert_eq!(encode(b"{}").expect("fits").as_ref(), b"\x00\x00\x00\x00\x02{}");
    }

    #[test]
    fn a_failure_at_the_end_is_told() {
        let body = br#"{"error":{"code":"not_found","message":"no such process"}}"#;
        let mut bytes = vec![2];
        bytes.extend_from_slice(&u32::try_from(body.len()).expect("short").to_be_bytes());
        bytes.extend_from_slice(body);
        let failure = Failure { code: "not_found".into(), message: "no such process".into() };
        assert_eq!(decode_in_pieces(&bytes, 7), [Envelope::End(Some(failure))]);
    }

    #[test]
    fn hostile_lengths_and_flags_are_refused_before_anything_is_kept() {
        let refused = |bytes: &[u8]| {
            let mut decoder = Decoder::default();
            decoder.push(bytes);
            decoder.take().expect_err("refused")
        };
        assert_eq!(refused(b"\x00\xff\xff\xff\xff"), EnvelopeError::TooLong(0xffff_ffff));
        assert_eq!(refused(b"\x01\x00\x00\x00\x00"), EnvelopeError::Flags(1));
        assert_eq!(refused(b"\x80\x00\x00\x00\x00"), EnvelopeError::Flags(0x80));
        assert_eq!(refused(b"\x02\x00\x00\x00\x01?"), EnvelopeError::End);
    }
}
