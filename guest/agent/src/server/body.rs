//! Request bodies that are read whole.

use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;

use super::answer::Refusal;

/// The whole body, if it is at most `limit` bytes long.
pub(crate) async fn collect(body: Incoming, limit: usize) -> Result<Bytes, Refusal> {
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(err) if err.is::<http_body_util::LengthLimitError>() => {
            Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {limit} bytes")))
        }
        Err(err) => Err(Refusal::bad_request(format!("the body could not be read: {err}"))),
    }
}
