//! Which request goes where, who may send it, and what every answer carries.

use std::{io, sync::Arc};

use aenv_envd_proto::{
    filesystem::FILESYSTEM_SERVICE_NAME,
    http::{INIT_SECRET, InitRequest},
    process::PROCESS_SERVICE_NAME,
};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Version, header, request::Parts};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::sync::Notify;

use super::{
    answer::{Answer, Refusal, json, status},
    body::drain,
    collect,
    rpc::Rpc,
};
use crate::{
    credentials, files,
    guest::{Guest, Machine},
    process::Processes,
    system::{init, metrics::Meter},
};

/// Largest body of `/init` and `/files/compose`.
const MAX_BODY: usize = 1 << 20;

/// Headers a browser may read: Connect's, and those of downloads.
const EXPOSED: &str = "Accept-Encoding,Content-Encoding,Content-Disposition,Content-Range,Connect-Accept-Encoding,\
Connect-Content-Encoding,Grpc-Status,Grpc-Message,Grpc-Status-Details-Bin,Location,Cache-Control,\
X-Content-Type-Options";

/// Everything a connection needs.
pub(crate) struct App {
    guest: Arc<Guest>,
    processes: Arc<Processes>,
    rpc: Rpc,
    meter: Arc<Meter>,
    stop: Arc<Notify>,
}

/// Whether a request is for one of the two RPC services.
fn is_call(head: &Parts) -> bool {
    let service = head.uri.path().strip_prefix('/').and_then(|path| path.split_once('/'));
    matches!(service, Some((PROCESS_SERVICE_NAME | FILESYSTEM_SERVICE_NAME, _)))
}

/// An answer that pages of any origin may read.
fn readable(mut answer: Answer) -> Answer {
    let headers = answer.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    answer
}

impl App {
    pub(super) fn new(guest: Arc<Guest>, stop: Arc<Notify>) -> io::Result<Self> {
        let processes = Processes::start(Arc::clone(&guest))?;
        let rpc = Rpc::new(&guest, &processes);
        Ok(Self { guest, processes, rpc, meter: Arc::default(), stop })
    }

    /// Somebody has connected; the first after a restore is the node, whose words take a while to be read.
    pub(super) fn connected(&self) {
        self.processes.rehearse_if_armed();
    }

    pub(super) fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }

    pub(super) async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (head, mut body) = request.into_parts();
        let call = is_call(&head);
        let outcome = if head.method == Method::OPTIONS {
            Ok(preflight(&head.headers))
        } else if call {
            match self.check_token(&head.headers) {
                Ok(()) => return readable(self.rpc.answer(Request::from_parts(head, body)).await),
                Err(refusal) => Err(refusal),
            }
        } else {
            self.dispatch(&head, &mut body).await
        };
        readable(match outcome {
            Ok(answer) => answer,
            Err(refusal) => {
                let mut answer = refusal.answer();
                // A call's body may be a stream that never ends.
                let whole = body.is_end_stream() || (!call && drain(&mut body).await);
                if !whole && head.version < Version::HTTP_2 {
                    // Said so, or the proxy sends its next request into a connection that ends.
                    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                answer
            }
        })
    }

    async fn dispatch(&self, head: &Parts, body: &mut Incoming) -> Result<Answer, Refusal> {
        let path = head.uri.path();
        let route = Route::of(path)
            .ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, format!("there is no {path:?} here")))?;
        let method = &head.method;
        let allowed = route.allowed();
        if !allowed.contains(method) {
            return Err(Refusal::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!(
                    "{path} takes {}, not {method}",
                    allowed.iter().map(Method::as_str).collect::<Vec<_>>().join(" or ")
                ),
            ));
        }
        match route {
            Route::Health => Ok(status(StatusCode::NO_CONTENT)),
            Route::Files => files::serve(&self.guest, head, body).await,
            Route::Compose => {
                self.check_token(&head.headers)?;
                let body = collect(body, MAX_BODY).await?;
                files::compose(&self.guest, &body).await
            }
            Route::Envs => {
                self.check_token(&head.headers)?;
                Ok(json(StatusCode::OK, &self.guest.env()))
            }
            Route::Metrics => {
                self.check_token(&head.headers)?;
                let meter = Arc::clone(&self.meter);
                let metrics = blocking(move || meter.measure()).await?;
                Ok(json(StatusCode::OK, &metrics))
            }
            Route::Init => {
                self.check_node(&head.headers)?;
                let body = collect(body, MAX_BODY).await?;
                let body: InitRequest = match body.trim_ascii_start().first() {
                    None => InitRequest::default(),
                    // A list would be taken for the fields in order.
                    Some(b'{') => serde_json::from_slice(&body)
                        .map_err(|err| Refusal::bad_request(format!("the body of /init: {err}")))?,
                    Some(_) => return Err(Refusal::bad_request("the body of /init is not a JSON object")),
                };
                init::apply(&self.guest, body).map_err(|err| Refusal::bad_request(err.to_string()))?;
                Ok(status(StatusCode::NO_CONTENT))
            }
            Route::Sync => {
                self.check_node(&head.headers)?;
                blocking(rustix::fs::sync).await?;
                // A snapshot follows: who wakes from it starts with untranslated code.
                self.processes.arm_rehearsal();
                Ok(status(StatusCode::NO_CONTENT))
            }
            Route::Shutdown => {
                self.check_node(&head.headers)?;
                if self.guest.machine == Machine::Ours {
                    blocking(rustix::fs::sync).await?;
                }
                self.stop.notify_one();
                Ok(status(StatusCode::NO_CONTENT))
            }
        }
    }

    fn check_token(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        if self.guest.accepts_token(credentials::token(headers)) {
            return Ok(());
        }
        Err(Refusal::unauthorized(
            "unauthorized access, please provide a valid access token or method signing if supported",
        ))
    }

    fn check_node(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let secret = headers.get(INIT_SECRET).map(HeaderValue::as_bytes);
        if self.guest.accepts_node(secret, credentials::token(headers)) {
            return Ok(());
        }
        Err(Refusal::unauthorized(format!(
            "only the node may do this: its secret belongs into {INIT_SECRET}"
        )))
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|err| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, err.to_string()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    Health,
    Files,
    Compose,
    Envs,
    Metrics,
    Init,
    Sync,
    Shutdown,
}

impl Route {
    fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/health" => Self::Health,
            "/files" => Self::Files,
            "/files/compose" => Self::Compose,
            "/envs" => Self::Envs,
            "/metrics" => Self::Metrics,
            "/init" => Self::Init,
            "/aenv/sync" => Self::Sync,
            "/aenv/shutdown" => Self::Shutdown,
            _ => return None,
        })
    }

    fn allowed(self) -> &'static [Method] {
        const READ: &[Method] = &[Method::GET, Method::HEAD];
        const WRITE: &[Method] = &[Method::POST];
        const BOTH: &[Method] = &[Method::GET, Method::HEAD, Method::POST];
        match self {
            Self::Health | Self::Envs | Self::Metrics => READ,
            Self::Files => BOTH,
            Self::Compose | Self::Init | Self::Sync | Self::Shutdown => WRITE,
        }
    }
}

fn preflight(asked: &HeaderMap) -> Answer {
    let mut answer = status(StatusCode::NO_CONTENT);
    let headers = answer.headers_mut();
    // `*` does not cover Authorization in browsers; naming what was asked for does.
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or(HeaderValue::from_static("*")));
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("HEAD,GET,POST,PUT,PATCH,DELETE"),
    );
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("7200"));
    answer
}
