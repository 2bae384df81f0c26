//! One client connection: HTTP/1.1 or HTTP/2 without TLS (told apart by its first bytes), each request to its plane.
//!
//! Works over any byte stream, so that TLS can be put in front without a change here.

use crate::{
    api::State,
    error::ApiError,
    plane::{self, Plane},
    proxy::Peer,
    request_id,
};
use aenv_api_types::ErrorCode;
use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, MatchedPath},
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode, header};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use std::{convert::Infallible, net::SocketAddr, pin::pin, sync::Arc, time::Duration, time::Instant};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Notify,
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use tracing::Instrument;

/// Read buffer of a connection; request heads beyond it end the connection with 431. Above the limits of
/// [`crate::Options`], so that those can answer in the error body.
const MAX_HEAD: usize = 128 << 10;
const MAX_HEADERS: usize = 200;
const MAX_STREAMS: u32 = 256;
const PING_EVERY: Duration = Duration::from_secs(20);

/// What every connection gets.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) state: State,
    pub(crate) router: Router,
    /// Finish what is under way, take nothing new.
    pub(crate) drain: CancellationToken,
    /// Stop now.
    pub(crate) abort: CancellationToken,
}

impl Service {
    /// Serves until the client leaves, breaks a limit, or the server stops.
    pub(crate) async fn serve<I>(self, io: I, peer: SocketAddr, https: bool)
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let limit = self.state.options.header_timeout;
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(limit)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_HEADERS)
            // A client that closes its writing half counts as gone. Allowing it would mean not to notice those who
            // leave in the midst of a silent stream, and to hold the guest's end of it for ever.
            .half_close(false);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
            .max_concurrent_streams(MAX_STREAMS)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_EVERY);
        let first = Arc::new(Notify::new());
        let seen = Arc::clone(&first);
        let (state, router) = (self.state, self.router);
        let service = service_fn(move |request: Request<Incoming>| {
            seen.notify_one();
            let (state, router) = (Arc::clone(&state), router.clone());
            async move { Ok::<_, Infallible>(handle(state, router, request.map(Body::new), peer, https).await) }
        });
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(io), service));
        // The library's own clock starts once it knows the protocol; this one covers a client that says nothing.
        let mut silence = pin!(async {
            if tokio::time::timeout(limit, first.notified()).await.is_ok() {
                std::future::pending::<()>().await;
            }
        });
        let mut draining = false;
        loop {
            tokio::select! {
                result = connection.as_mut() => {
                    if let Err(error) = result {
                        tracing::debug!(%peer, %error, "a connection ended");
                    }
                    return;
                }
                () = &mut silence => return tracing::debug!(%peer, "a connection sent no request in time"),
                () = self.drain.cancelled(), if !draining => {
                    draining = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = self.abort.cancelled() => return,
            }
        }
    }
}

/// Answers one request, whichever plane it is for.
pub(crate) async fn handle(
    state: State,
    router: Router,
    request: Request<Body>,
    peer: SocketAddr,
    https: bool,
) -> Response {
    let began = Instant::now();
    let id = request_id::of(request.headers());
    let method = request.method().clone();
    let path: String = request.uri().path().chars().take(256).collect();
    let span = tracing::info_span!(
        "request", request_id = %id, %method, path = %path, sandbox_id = tracing::field::Empty
    );
    let metrics = Arc::clone(&state.metrics);
    let answer = dispatch(state, router, request, peer, https);
    async {
        let (plane, mut response) = Box::pin(answer).await;
        response.headers_mut().entry(request_id::HEADER).or_insert_with(|| request_id::value(&id));
        let matched = response.extensions_mut().remove::<MatchedPath>();
        let route = match (&matched, plane) {
            (Some(matched), _) => matched.as_str(),
            (None, "guest") => "guest",
            (None, _) => "unmatched",
        };
        let (status, took) = (response.status().as_u16(), began.elapsed());
        metrics.answered(plane, route, &method, status, took);
        // Guest traffic is the sandbox's business and may be a thousand times as much.
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        if plane == "guest" {
            tracing::debug!(status, micros, "answered");
        } else {
            tracing::info!(status, micros, "answered");
        }
        response
    }
    .instrument(span)
    .await
}

async fn dispatch(
    state: State,
    router: Router,
    mut request: Request<Body>,
    peer: SocketAddr,
    https: bool,
) -> (&'static str, Response) {
    if let Some(refusal) = beyond_limits(&state, &request) {
        return ("control", refusal.into_response());
    }
    let (head, body) = request.into_parts();
    let plane = plane::decide(&head, state.options.domain.as_deref());
    request = Request::from_parts(head, body);
    let from = Peer { ip: peer.ip(), https };
    match plane {
        Ok(Plane::Guest(address)) => ("guest", state.proxy.serve(address, request, from).await),
        Ok(Plane::Signed) => ("guest", state.proxy.serve_signed(request, from).await),
        Ok(Plane::Control) => {
            request.extensions_mut().insert(ConnectInfo(peer));
            match router.oneshot(request).await {
                Ok(response) => ("control", response),
                Err(never) => match never {},
            }
        }
        Err(error) => ("guest", ApiError::invalid(error.to_string()).into_response()),
    }
}

fn beyond_limits(state: &State, request: &Request<Body>) -> Option<ApiError> {
    let limit = state.options.max_uri_bytes;
    let uri = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    if uri > limit {
        let message = format!("path and query are longer than {limit} bytes");
        return Some(ApiError::new(StatusCode::URI_TOO_LONG, ErrorCode::InvalidRequest, message));
    }
    let limit = state.options.max_header_bytes;
    let bytes: usize =
        request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    if bytes > limit {
        let message = format!("the headers are larger than {limit} bytes together");
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        return Some(ApiError::new(status, ErrorCode::InvalidRequest, message));
    }
    if request.headers().get_all(header::HOST).iter().nth(1).is_some() {
        return Some(ApiError::invalid("Host: given more than once"));
    }
    None
}
