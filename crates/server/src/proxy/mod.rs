//! The guest proxy: HTTP/1.1 (and whatever a client upgrades to) to a port of a guest, streaming both ways.
//!
//! A request's way, and how each step fails:
//! 1. Address: malformed → 400; an id nobody has, an ended or a paused sandbox → 502 "The sandbox was not found".
//! 2. Agent port: only the agent's public routes; `/init`, `/freeze` and all others → 404.
//! 3. Traffic token on every other port, when traffic isn't public → 403. Before any waking: strangers wake nothing.
//! 4. In-flight bound → 429.
//! 5. Paused with auto-resume: woken once however many ask, deadline → 504.
//! 6. A pooled connection of this very generation, or a new one: port closed → 502 "… port is not open", deadline → 504.
//! 7. Forwarding: the guest hangs up before it answers → 502; later → the client's stream is cut, never ended politely.
//!
//! When a sandbox is killed or paused its streams are cut: at once if this server did it ([`Proxy::sever`]), otherwise
//! by the sweep, which compares every busy lane with [`Control::route`] a few times a second. A TCP connection to a VM
//! that is gone would not tell.

mod agent;
mod body;
mod forward;
mod headers;
mod lane;
mod reply;
mod signed;
mod wake;

use crate::{auth, metrics::Metrics, options::Options, plane::Address};
use aenv_api_types::{ENVD_PORT, TRAFFIC_TOKEN_HEADER};
use aenv_node::{
    control::{Control, Error, Route},
    model::SandboxId,
};
use axum::body::Body;
use http::{Request, Response, StatusCode};
use lane::Lanes;
use reply::Refusal;
use std::{net::IpAddr, sync::Arc, time::Duration};
use tokio_util::sync::CancellationToken;

/// How often busy lanes are compared with the node, and idle connections aged.
const SWEEP: Duration = Duration::from_millis(250);

/// Who is at the other end of the client's connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) ip: IpAddr,
    pub(crate) https: bool,
}

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Proxy {
    inner: Arc<Inner>,
}

struct Inner {
    control: Arc<dyn Control>,
    lanes: Lanes,
    wakes: wake::Wakes,
    signatures: signed::Owners,
    metrics: Arc<Metrics>,
    dial_timeout: Duration,
    wake_timeout: Duration,
}

impl Proxy {
    pub(crate) fn new(control: Arc<dyn Control>, options: &Options, metrics: Arc<Metrics>) -> Self {
        let inner = Inner {
            control,
            lanes: Lanes::new(
                options.max_in_flight_per_sandbox,
                options.max_idle_per_port,
                metrics.active.clone(),
            ),
            wakes: wake::Wakes::default(),
            signatures: signed::Owners::default(),
            metrics,
            dial_timeout: options.dial_timeout,
            wake_timeout: options.wake_timeout,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Serves one guest request. Never fails: what goes wrong becomes the answer.
    pub(crate) async fn serve(&self, address: Address, request: Request<Body>, peer: Peer) -> Response<Body> {
        tracing::Span::current().record("sandbox_id", address.written.as_str());
        let html = reply::wants_html(&request);
        match Box::pin(self.inner.attempt(&address, request, peer)).await {
            Ok(response) => response,
            Err(refusal) => refusal.into_response(&address, html),
        }
    }

    /// Serves a signed file URL that names no sandbox.
    pub(crate) async fn serve_signed(&self, request: Request<Body>, peer: Peer) -> Response<Body> {
        match self.inner.signatures.owner(&*self.inner.control, request.method(), request.uri()).await {
            Ok(Some(id)) => {
                let address = Address { written: id.to_string(), id: Some(id), port: ENVD_PORT };
                self.serve(address, request, peer).await
            }
            Ok(None) => reply::bare(
                StatusCode::UNAUTHORIZED,
                "invalid signature: no running sandbox made it, or path, user or expiration differ from what was signed",
            ),
            Err(signed::Busy) => reply::bare(StatusCode::TOO_MANY_REQUESTS, "too many signed URLs at once"),
        }
    }

    /// Cuts everything that goes through to a sandbox, because its machine is gone.
    pub(crate) fn sever(&self, id: &SandboxId) {
        self.inner.lanes.sever(id);
    }

    /// Cuts everything: the server stops.
    pub(crate) fn sever_all(&self) {
        self.inner.lanes.sever_all();
    }

    /// Whether the agent of a running sandbox answers its health check within two seconds.
    pub(crate) async fn agent_answers(&self, id: &SandboxId) -> bool {
        let Ok(route) = self.inner.control.route(id) else { return false };
        let probe = agent::probe(&*self.inner.control, &route);
        tokio::time::timeout(Duration::from_secs(2), probe).await.unwrap_or(false)
    }

    /// Until `stop`: cuts streams whose sandbox is gone or has another generation, and closes idle connections.
    pub(crate) async fn sweep(&self, stop: CancellationToken) {
        let mut tick = tokio::time::interval(SWEEP);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = tick.tick() => self.inner.lanes.sweep(|id, generation| match self.inner.control.route(id) {
                    Ok(route) => route.running && route.generation == generation,
                    Err(Error::SandboxNotFound(_) | Error::SandboxEnded { .. }) => false,
                    // A node that can't tell at the moment is no reason to break what works.
                    Err(_) => true,
                }),
                () = stop.cancelled() => return,
            }
        }
    }
}

impl Inner {
    async fn attempt(
        &self,
        address: &Address,
        request: Request<Body>,
        peer: Peer,
    ) -> Result<Response<Body>, Refusal> {
        let id = address.id.as_ref().ok_or(Refusal::NotFound(None))?;
        if request.method() == http::Method::CONNECT {
            return Err(Refusal::Method);
        }
        let mut route = self.control.route(id).map_err(refused)?;
        if address.port == ENVD_PORT {
            if !agent::is_public(request.uri().path()) {
                return Err(Refusal::Internal);
            }
        } else if let Some(expected) = &route.traffic_token {
            let given =
                request.headers().get(TRAFFIC_TOKEN_HEADER).map_or(&b""[..], http::HeaderValue::as_bytes);
            if !auth::same_secret(given, expected.as_bytes()) {
                return Err(Refusal::Token);
            }
        }
        if !route.running {
            if !route.auto_resume {
                return Err(Refusal::NotFound(Some("it is paused".to_owned())));
            }
            let wake = self.wakes.wake(&self.control, id);
            route = match tokio::time::timeout(self.wake_timeout, wake).await {
                Ok(woken) => woken.map_err(refused)?,
                Err(_) => return Err(Refusal::Slow("did not resume in time".to_owned())),
            };
        }
        self.forward(address, id, route, request, peer).await
    }

    /// A new connection to the guest, with deadline. A refused port on a machine that has just been replaced is tried
    /// once more on the new one.
    async fn dial(
        &self,
        id: &SandboxId,
        route: &mut Route,
        port: u16,
    ) -> Result<tokio::net::TcpStream, Refusal> {
        for last in [false, true] {
            let error = match tokio::time::timeout(self.dial_timeout, self.control.dial(route, port)).await {
                Ok(Ok(stream)) => {
                    // Small frames both ways: terminals, RPC. An old kernel refusing this only costs latency.
                    stream.set_nodelay(true).ok();
                    return Ok(stream);
                }
                Ok(Err(error)) => error,
                Err(_) => std::io::ErrorKind::TimedOut.into(),
            };
            let now = self.control.route(id).map_err(refused)?;
            if !now.running {
                return Err(Refusal::NotFound(Some("it was paused".to_owned())));
            }
            if now.generation != route.generation && !last {
                *route = now;
                continue;
            }
            return Err(match error.kind() {
                std::io::ErrorKind::ConnectionRefused => Refusal::Closed,
                std::io::ErrorKind::TimedOut => {
                    Refusal::Slow(format!("did not accept a connection to port {port} in time"))
                }
                _ => {
                    tracing::warn!(%error, port, "the guest could not be dialled");
                    Refusal::Broken(format!("The connection to port {port} of the sandbox failed"))
                }
            });
        }
        Err(Refusal::Closed)
    }
}

fn refused(error: Error) -> Refusal {
    match error {
        Error::SandboxNotFound(_) => Refusal::NotFound(None),
        Error::SandboxEnded { cause, .. } => Refusal::NotFound(Some(format!("it has ended: {cause}"))),
        Error::Unavailable(message) => Refusal::Unavailable(message),
        Error::Full { message, retry_after } => Refusal::Full(message, retry_after),
        Error::Timeout(message) => Refusal::Slow(message),
        Error::Conflict(message) => Refusal::Unavailable(message),
        other => {
            tracing::error!(error = %other, "the node failed on guest traffic");
            Refusal::Broken("The node failed; its log tells more".to_owned())
        }
    }
}
