//! Sending a request to the guest and its answer back; tunnels after an upgrade.

use super::{
    Inner, Peer,
    body::{Download, Taken, Upload},
    headers,
    lane::Ticket,
    reply::Refusal,
};
use crate::plane::Address;
use aenv_node::{control::Route, model::SandboxId};
use axum::body::Body;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body::Body as _;
use hyper::{
    body::Incoming,
    client::conn::http1::{self, SendRequest},
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tracing::Instrument;

/// Pooled connections tried before a new one is made.
const MAX_REUSE_ATTEMPTS: usize = 2;
/// Both sides have agreed to upgrade; the client's half follows as soon as the 101 is written.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(10);
/// A guest's response head can't make us hold more.
const MAX_GUEST_BUFFER: usize = 256 << 10;

impl Inner {
    pub(super) async fn forward(
        &self,
        address: &Address,
        id: &SandboxId,
        mut route: Route,
        mut request: Request<Body>,
        peer: Peer,
    ) -> Result<Response<Body>, Refusal> {
        let mut ticket = self.lanes.enter(id, route.generation).map_err(Refusal::Busy)?;
        let port = address.port;
        let protocol = headers::upgrade(&request);
        let client = protocol.is_some().then(|| hyper::upgrade::on(&mut request));
        let mask = route.mask_request_host.clone();
        let request = headers::towards_guest(request, port, mask.as_deref(), peer, protocol.as_ref());
        let taken = Taken::default();
        let mut request = request.map(|body| Upload::wrap(body, self.metrics.up.clone(), taken.clone()));

        // A tunnel needs a connection of its own: afterwards it can't be reused.
        let mut reuse = if client.is_some() { 0 } else { MAX_REUSE_ATTEMPTS };
        loop {
            let pooled = if reuse > 0 { ticket.take(port) } else { None };
            let reused = pooled.is_some();
            reuse = reuse.saturating_sub(1);
            let mut sender = match pooled {
                Some(sender) => sender,
                None => {
                    let sender = self.connect(id, &mut route, port, client.is_some()).await?;
                    if ticket.generation() != route.generation {
                        ticket = self.lanes.enter(id, route.generation).map_err(Refusal::Busy)?;
                    }
                    sender
                }
            };
            let replay = if reused { replayable(&request) } else { None };
            let cut = ticket.cut().clone();
            let sent = tokio::select! {
                sent = sender.try_send_request(request) => sent,
                () = cut.cancelled() => return Err(Refusal::NotFound(Some("its machine is gone".to_owned()))),
            };
            match sent {
                Ok(response) => {
                    let answer = self.answer(response, sender, ticket, port, client, protocol)?;
                    return Ok(ends_with(answer, &taken));
                }
                // Closed by the guest between two requests. What was never sent may be sent again, and so may what
                // can't have done anything.
                Err(mut failed) => match failed.take_message().or(replay) {
                    Some(again) if reused => request = again,
                    _ => return Err(self.broken(id, &route, &failed.into_error())),
                },
            }
        }
    }

    async fn connect(
        &self,
        id: &SandboxId,
        route: &mut Route,
        port: u16,
        upgradable: bool,
    ) -> Result<SendRequest<Body>, Refusal> {
        let stream = self.dial(id, route, port).await?;
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(MAX_GUEST_BUFFER)
            .handshake::<_, Body>(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(id, route, &error))?;
        // Ends when the sender and the last response are dropped, or the guest hangs up.
        let span = tracing::Span::current();
        let log = |result: hyper::Result<()>| {
            if let Err(error) = result {
                tracing::debug!(%error, "a guest connection ended");
            }
        };
        if upgradable {
            tokio::spawn(async move { log(connection.with_upgrades().await) }.instrument(span));
        } else {
            tokio::spawn(async move { log(connection.await) }.instrument(span));
        }
        Ok(sender)
    }

    fn answer(
        &self,
        mut response: Response<Incoming>,
        sender: SendRequest<Body>,
        ticket: Ticket,
        port: u16,
        client: Option<OnUpgrade>,
        protocol: Option<HeaderValue>,
    ) -> Result<Response<Body>, Refusal> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let (Some(client), Some(protocol)) = (client, protocol) else {
                return Err(Refusal::Broken("The sandbox changed protocols though nobody asked".to_owned()));
            };
            let guest = hyper::upgrade::on(&mut response);
            let agreed = response.headers().get(header::UPGRADE).cloned().unwrap_or(protocol);
            let (mut head, _) = response.into_parts();
            headers::strip_hop(&mut head.headers);
            head.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            head.headers.insert(header::UPGRADE, agreed);
            head.extensions = http::Extensions::new();
            self.tunnel(client, guest, ticket);
            return Ok(Response::from_parts(head, Body::empty()));
        }
        if client.is_none() {
            ticket.put(port, sender);
        }
        let (mut head, body) = response.into_parts();
        headers::strip_hop(&mut head.headers);
        head.extensions = http::Extensions::new();
        Ok(Response::from_parts(head, Download::wrap(body, ticket, self.metrics.down.clone())))
    }

    /// Copies both ways until both have ended, each end passed on by itself, or the machine is gone.
    fn tunnel(&self, client: OnUpgrade, guest: OnUpgrade, ticket: Ticket) {
        let (up, down) = (self.metrics.up.clone(), self.metrics.down.clone());
        let work = async move {
            let both = futures_util::future::try_join(client, guest);
            let (client, guest) = match tokio::time::timeout(UPGRADE_TIMEOUT, both).await {
                Ok(Ok(both)) => both,
                Ok(Err(error)) => return tracing::debug!(%error, "an upgrade was not completed"),
                Err(_) => return tracing::debug!("an upgrade was not completed in time"),
            };
            let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
            tokio::select! {
                copied = tokio::io::copy_bidirectional(&mut client, &mut guest) => match copied {
                    Ok((sent, received)) => {
                        up.add(usize::try_from(sent).unwrap_or(usize::MAX));
                        down.add(usize::try_from(received).unwrap_or(usize::MAX));
                    }
                    Err(error) => tracing::debug!(%error, "a tunnel broke"),
                },
                () = ticket.cut().cancelled() => tracing::debug!("a tunnel was cut: the machine is gone"),
            }
        };
        tokio::spawn(work.in_current_span());
    }

    /// The guest hung up. If that is because its machine is gone, say so.
    fn broken(&self, id: &SandboxId, route: &Route, error: &hyper::Error) -> Refusal {
        match self.control.route(id) {
            Err(error) => super::refused(error),
            Ok(now) if !now.running || now.generation != route.generation => {
                Refusal::NotFound(Some("its machine is gone".to_owned()))
            }
            Ok(_) => {
                Refusal::Broken(format!("The sandbox closed the connection without a valid answer: {error}"))
            }
        }
    }
}

/// The guest answered before it had the whole body: what is left of it can't be told from a next request, so the client's
/// connection ends with this answer. Said in time, no client sends a next request into a closing connection.
fn ends_with(mut answer: Response<Body>, taken: &Taken) -> Response<Body> {
    if !taken.whole() && answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// A copy of a request that may be sent twice: a safe method without a body.
fn replayable(request: &Request<Body>) -> Option<Request<Body>> {
    if !headers::is_safe(request.method()) || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = Request::new(Body::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    Some(copy)
}
