//! The two services behind the RPC library.

use std::sync::Arc;

use bytes::Bytes;
use connectrpc::{ConnectError, ConnectRpcService, Limits, Router};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use tower::ServiceExt;

use super::{
    answer::{Answer, Refusal},
    collect, connect,
};
use crate::{
    filesystem,
    guest::Guest,
    process::{Processes, service::Service as ProcessService},
};

/// Largest RPC message: input to a process may be a file.
const MAX_MESSAGE: usize = 16 << 20;

/// The one method whose request is a stream; all others take one message.
const STREAMS_IN: &str = "/process.Process/StreamInput";

/// One type for every body: the library is compiled anew for each, which is a third of a megabyte in every guest.
type Message = UnsyncBoxBody<Bytes, connect::StreamError>;

pub(super) struct Rpc(ConnectRpcService);

impl Rpc {
    pub(super) fn new(guest: &Arc<Guest>, processes: &Arc<Processes>) -> Self {
        let router = Router::new()
            .add_service(Arc::new(ProcessService(Arc::clone(processes))))
            .add_service(Arc::new(filesystem::Service::new(Arc::clone(guest))));
        let limits =
            Limits::default().with_max_request_body_size(MAX_MESSAGE).with_max_message_size(MAX_MESSAGE);
        Self(ConnectRpcService::new(router).with_limits(limits))
    }

    /// Answers a call whose sender may make it.
    pub(super) async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (mut parts, body) = request.into_parts();
        if let Err(err) = connect::check(&parts.headers) {
            return connect::refused(&parts.headers, &err);
        }
        if connect::is_framed(&parts.headers) && parts.uri.path() == STREAMS_IN {
            let (body, violation) = connect::Checked::new(body);
            parts.extensions.insert(violation);
            return self.call(Request::from_parts(parts, body.boxed_unsync())).await;
        }
        if !connect::is_framed(&parts.headers)
            && !connect::media_type(&parts.headers).eq_ignore_ascii_case("application/json")
        {
            let body = body.map_err(connect::StreamError::from).boxed_unsync();
            return self.call(Request::from_parts(parts, body)).await;
        }
        match whole(&parts.headers, body).await {
            Ok(body) => {
                let body = Full::new(body).map_err(|never| match never {}).boxed_unsync();
                self.call(Request::from_parts(parts, body)).await
            }
            Err(err) => connect::refused(&parts.headers, &err),
        }
    }

    async fn call(&self, mut request: Request<Message>) -> Answer {
        // E2B's clients mean "no limit" by 0, Connect "none left".
        if matches!(connect::time_limit(request.headers()), Ok(None)) {
            request.headers_mut().remove("connect-timeout-ms");
        }
        let answer = match self.0.clone().oneshot(request).await {
            Ok(answer) => answer,
            Err(never) => match never {},
        };
        answer.map(|body| body.map_err(|never| match never {}).boxed_unsync())
    }
}

/// The body of a call with one message, if it looks like one.
async fn whole(headers: &http::HeaderMap, mut body: Incoming) -> Result<Bytes, ConnectError> {
    let body = collect(&mut body, MAX_MESSAGE).await.map_err(|Refusal { status, message }| match status {
        StatusCode::PAYLOAD_TOO_LARGE => ConnectError::resource_exhausted(message),
        _ => ConnectError::invalid_argument(message),
    })?;
    if connect::is_framed(headers) {
        connect::Frames::default().follow(&body)?;
    } else if body.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
        // The JSON reader would take an array for a message without fields.
        return Err(ConnectError::invalid_argument("the message must be a JSON object"));
    }
    Ok(body)
}
