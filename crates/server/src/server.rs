//! The listener: bound before anything is promised, drained before it is gone.

use crate::{
    api::{self, Shared},
    auth::Keys,
    connection::Service,
    metrics::Metrics,
    options::Options,
    proxy::Proxy,
};
use aenv_node::control::Control;
use std::{future::Future, net::SocketAddr, pin::pin, sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// For connections to notice that they have been cut.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// After accept failed for want of descriptors there is no event to wait for.
const BREATHER: Duration = Duration::from_millis(100);

/// Why the listener could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The address is taken, not ours, or a privileged port.
    #[error("cannot listen on {listen}; choose another address with --listen, or stop what has this one")]
    Listen {
        /// What was asked for.
        listen: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// The domain is not one.
    #[error("'{0}' is not a domain: expected letters, digits, '-' and '.', as in sandbox.example.com")]
    Domain(String),
}

/// A server that listens but does not answer yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    service: Service,
    connections: Arc<Semaphore>,
    drain: Duration,
}

impl Server {
    /// Opens the listener. From here on clients queue; [`Server::run`] answers them.
    ///
    /// # Errors
    /// When the address can't be listened on, or the domain is malformed.
    pub async fn bind(options: Options, control: Arc<dyn Control>) -> Result<Self, BindError> {
        let listener = listen(options.listen).await?;
        Self::on(listener, options, control)
    }

    /// Serves on a socket that listens already: whoever starts takes the address first, before anything is changed that
    /// a server at the same address would miss.
    ///
    /// # Errors
    /// When the domain is malformed.
    pub fn on(listener: TcpListener, options: Options, control: Arc<dyn Control>) -> Result<Self, BindError> {
        let mut options = options;
        if let Some(domain) = &mut options.domain {
            let plain = domain.trim_matches('.').to_ascii_lowercase();
            let labels_ok = plain.split('.').all(|label| {
                (1..=63).contains(&label.len())
                    && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            });
            if !labels_ok || plain.len() > 253 {
                return Err(BindError::Domain(domain.clone()));
            }
            *domain = plain;
        }
        let listen = options.listen;
        let address = listener.local_addr().map_err(|source| BindError::Listen { listen, source })?;
        if !address.ip().is_loopback() {
            tracing::warn!(
                %address,
                "listening beyond this machine without TLS: API keys and guest traffic can be read on the way; put a \
                 TLS proxy in front or listen on 127.0.0.1"
            );
        }
        let metrics = Arc::new(Metrics::new());
        let proxy = Proxy::new(Arc::clone(&control), &options, Arc::clone(&metrics));
        let connections = Arc::new(Semaphore::new(options.max_connections));
        let drain = options.drain;
        let state = Arc::new(Shared { control, keys: Keys::default(), options, proxy, metrics });
        let router = api::router(Arc::clone(&state));
        let service =
            Service { state, router, drain: CancellationToken::new(), abort: CancellationToken::new() };
        Ok(Self { listener, address, service, connections, drain })
    }

    /// Where it listens: the asked address with the real port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown` resolves, then takes no more connections and waits for requests under way, at most
    /// [`Options::drain`]. What is still open then is cut, and so are tunnels, which have no end of their own.
    pub async fn run(self, shutdown: impl Future<Output = ()>) {
        let Self { listener, address, service, connections, drain } = self;
        tracing::info!(%address, "listening");
        let tasks = TaskTracker::new();
        let proxy = service.state.proxy.clone();
        let sweep = tasks.spawn({
            let (proxy, abort) = (proxy.clone(), service.abort.clone());
            async move { proxy.sweep(abort).await }
        });
        let mut shutdown = pin!(shutdown);
        loop {
            let next = async {
                let place = Arc::clone(&connections).acquire_owned().await;
                (place, listener.accept().await)
            };
            let (place, accepted) = tokio::select! {
                next = next => next,
                () = &mut shutdown => break,
            };
            match accepted {
                Ok((stream, peer)) => {
                    stream.set_nodelay(true).ok();
                    keep_alive(&stream);
                    let service = service.clone();
                    let open = service.state.metrics.connections.clone();
                    tasks.spawn(async move {
                        let _place = place;
                        open.inc();
                        service.serve(stream, peer, false).await;
                        open.dec();
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(BREATHER).await;
                }
            }
        }
        drop(listener);
        tracing::info!("draining");
        service.drain.cancel();
        let deadline = tokio::time::sleep(drain);
        tokio::select! {
            () = idle(&connections, service.state.options.max_connections) => {}
            () = deadline => tracing::warn!("connections are still busy after {} s; cutting them", drain.as_secs()),
        }
        service.abort.cancel();
        proxy.sever_all();
        tasks.close();
        if tokio::time::timeout(LAST_WORDS, tasks.wait()).await.is_err() {
            tracing::warn!(left = tasks.len(), "tasks did not end");
        }
        drop(sweep);
    }
}

/// Notices clients that vanish without a word in the midst of a stream that has nothing to send: after about two
/// minutes. Without it their places would be held for ever. A system that refuses only loses that.
fn keep_alive(stream: &tokio::net::TcpStream) {
    use rustix::net::sockopt;
    let set = || -> rustix::io::Result<()> {
        sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
        sockopt::set_tcp_keepintvl(stream, Duration::from_secs(20))?;
        sockopt::set_tcp_keepcnt(stream, 3)?;
        sockopt::set_socket_keepalive(stream, true)
    };
    if let Err(error) = set() {
        tracing::debug!(%error, "TCP keep-alive is off for a connection");
    }
}

/// All places are free again.
async fn idle(connections: &Semaphore, all: usize) {
    let all = u32::try_from(all).unwrap_or(u32::MAX);
    // Fails only if the semaphore were closed, which nobody does.
    let _all = connections.acquire_many(all).await;
}

/// Takes the address; connections wait until it is served.
///
/// # Errors
/// When the address can't be listened on.
pub async fn listen(listen: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(listen).await.map_err(|source| BindError::Listen { listen, source })
}
