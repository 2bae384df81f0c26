//! What the CLI reads from a guest agent, in protobuf's JSON: fields at their default are left out, bytes are base64,
//! 64-bit integers are text. The control plane's types are `aenv-api-types`.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde::{Deserialize, Deserializer};

/// A message of a process stream, `Start` or `Connect`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProcessMessage {
    /// The event.
    pub event: ProcessEvent,
}

/// One of its fields is set.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProcessEvent {
    /// The process runs.
    pub start: Option<Started>,
    /// Output.
    pub data: Option<Output>,
    /// It ended.
    pub end: Option<Ended>,
    /// Nothing to say.
    pub keepalive: Option<serde::de::IgnoredAny>,
}

/// First event of a stream.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Started {
    /// Process id in the guest.
    pub pid: u32,
    /// Bytes of output that are no longer kept.
    #[serde(deserialize_with = "proto_u64")]
    pub dropped: Option<u64>,
    /// Offset of the first byte that follows.
    #[serde(deserialize_with = "proto_u64")]
    pub offset: Option<u64>,
}

/// Output of a process.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Output {
    /// Bytes.
    #[serde(deserialize_with = "proto_bytes")]
    pub stdout: Option<Bytes>,
    /// Bytes.
    #[serde(deserialize_with = "proto_bytes")]
    pub stderr: Option<Bytes>,
    /// Bytes.
    #[serde(deserialize_with = "proto_bytes")]
    pub pty: Option<Bytes>,
    /// Offset of the first byte.
    #[serde(deserialize_with = "proto_u64")]
    pub offset: Option<u64>,
}

/// Last event of a process.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Ended {
    /// Exit code; negative when a signal ended it.
    pub exit_code: i32,
    /// Whether it exited by itself.
    pub exited: bool,
    /// `exit status 1`, `signal: killed`.
    pub status: String,
    /// More words.
    pub error: Option<String>,
}

/// A file or directory in the guest.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Entry {
    /// Last part of the path.
    pub name: String,
    /// `FILE_TYPE_FILE`, `FILE_TYPE_DIRECTORY`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Absolute path.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// Set on symbolic links.
    pub symlink_target: Option<String>,
}

impl Entry {
    /// Whether it is a directory, or a link to one.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.kind == "FILE_TYPE_DIRECTORY"
    }
}

/// Protobuf's JSON writes 64-bit integers as text; numbers are accepted too.
fn proto_u64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Plain(u64),
        Text(String),
    }
    match Option::<Number>::deserialize(deserializer)? {
        None => Ok(None),
        Some(Number::Plain(value)) => Ok(Some(value)),
        Some(Number::Text(text)) => text.parse().map(Some).map_err(serde::de::Error::custom),
    }
}

/// Protobuf's JSON writes bytes as base64.
fn proto_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Bytes>, D::Error> {
    let text = Option::<std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
    text.map(|text| STANDARD.decode(text.as_bytes()).map(Bytes::from).map_err(serde::de::Error::custom))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_read_as_protobuf_writes_it() {
        let message: ProcessMessage =
            serde_json::from_str(r#"{"event":{"data":{"stdout":"aGkA/w==","offset":"41"}}}"#)
                .expect("parses");
        let data = message.event.data.expect("data");
        assert_eq!(data.stdout.as_deref(), Some(&b"hi\0\xff"[..]));
        assert_eq!((data.offset, data.stderr), (Some(41), None));
    }

    #[test]
    fn an_exit_code_of_zero_is_left_out_on_the_wire() {
        let message: ProcessMessage =
            serde_json::from_str(r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#)
                .expect("parses");
        assert_eq!(message.event.end.expect("end").exit_code, 0);
    }
}
