//! Request bodies: read whole, or what a refusal left of them.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;

use super::answer::Refusal;

/// The whole body, if it is at most `limit` bytes long.
pub(crate) async fn collect(body: &mut Incoming, limit: usize) -> Result<Bytes, Refusal> {
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(err) if err.is::<http_body_util::LengthLimitError>() => {
            Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {limit} bytes")))
        }
        Err(err) => Err(Refusal::bad_request(format!("the body could not be read: {err}"))),
    }
}

/// How long the rest of a refused body is taken and thrown away.
const DRAIN: Duration = Duration::from_secs(10);

/// Takes what is left of a body, so that its sender gets to read the answer instead of a broken connection, which can
/// then carry the next request. `false`: there was more than the time allowed.
pub(super) async fn drain(body: &mut Incoming) -> bool {
    let rest = async { while body.frame().await.is_some_and(|frame| frame.is_ok()) {} };
    tokio::time::timeout(DRAIN, rest).await.is_ok()
}
