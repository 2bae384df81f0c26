//! The port: connections, and what happens to them when the guest becomes another one.
//!
//! One thread serves everything; what may block (files, starting programs) goes to a bounded pool. A guest has one or
//! two processors, and under emulation a thread that is woken costs more than the work it does.
//!
//! A connection ends when its peer closes it, when it says nothing for [`FIRST_BYTE`] at its start or [`IDLE`] later,
//! or, within [`LINGER`], when the guest's generation changes: the peers from before a snapshot are gone, or are
//! somebody else's.

pub(crate) mod answer;
mod body;
pub(crate) mod connect;
mod route;
mod rpc;

pub(crate) use body::collect;

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::{Notify, Semaphore},
};

use crate::{
    boot::{Phases, shutdown},
    console::say,
    guest::{Guest, Machine},
};
use route::App;

/// Connections at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 1024;
/// How long a new connection may stay silent.
const FIRST_BYTE: Duration = Duration::from_secs(30);
/// How long a connection may wait for its next request: longer than any proxy's pool keeps one, so that it is the proxy
/// that closes it and no request meets a closing connection. E2B's agent has the same figure.
const IDLE: Duration = Duration::from_secs(640);
/// How long answers under way may take to leave once the generation has changed.
const LINGER: Duration = Duration::from_secs(2);
/// Threads for work that blocks.
const BLOCKING_THREADS: usize = 64;

/// Serves on the first of `addresses` that can be had, until the machine is shut down (or, on a host, SIGTERM).
/// `ready` runs on a thread of its own once the port is open.
pub(crate) fn run(
    guest: Guest,
    addresses: &[SocketAddr],
    phases: &Phases,
    ready: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        // Address space only: what is not touched is not there.
        .thread_stack_size(1 << 20)
        // A thread that stays is part of the snapshot: a restored guest starts its first command without making one.
        .thread_keep_alive(Duration::from_secs(24 * 3600))
        .build()?;
    runtime.block_on(async {
        let listener = listen(addresses)?;
        let guest = Arc::new(guest);
        let stop = Arc::new(Notify::new());
        let app = Arc::new(App::new(Arc::clone(&guest), Arc::clone(&stop))?);
        say_ready(&guest, &listener, phases);
        let settled = tokio::task::spawn_blocking(ready);
        tokio::select! {
            () = accept(listener, app) => {}
            () = asked_to_stop(stop) => {}
        }
        // What `ready` does may be half done.
        let _ = tokio::time::timeout(LINGER, settled).await;
        if guest.machine == Machine::Ours {
            end_processes().await;
        }
        Ok(())
    })
}

fn listen(addresses: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut last = io::Error::other("no address to listen on");
    for address in addresses {
        let bound =
            if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }.and_then(|socket| {
                socket.set_reuseaddr(true)?;
                socket.bind(*address)?;
                socket.listen(1024)
            });
        match bound {
            Ok(listener) => return Ok(listener),
            Err(err) => last = io::Error::new(err.kind(), format!("{address}: {err}")),
        }
    }
    Err(last)
}

/// The one line that tells how long it took. On a host the address too, because tests let the kernel choose the port.
fn say_ready(guest: &Guest, listener: &TcpListener, phases: &Phases) {
    let took = phases.describe();
    match (guest.machine, listener.local_addr()) {
        (Machine::NotOurs, Ok(address)) => say(&format!("ready in {took} on {address}")),
        _ => {
            let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            say(&format!(
                "ready in {took}, {} ms after the kernel",
                up.tv_sec * 1000 + up.tv_nsec / 1_000_000
            ));
        }
    }
}

async fn asked_to_stop(stop: Arc<Notify>) {
    let kinds = [
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::user_defined1(),
        SignalKind::user_defined2(),
    ];
    let signals: Vec<_> = kinds
        .into_iter()
        .filter_map(|kind| signal(kind).ok())
        .map(|mut signal| Box::pin(async move { signal.recv().await }))
        .collect();
    tokio::select! {
        () = stop.notified() => {}
        _ = futures_util::future::select_all(signals) => {}
    }
}

/// SIGTERM, a moment, SIGKILL. The reaper runs meanwhile.
async fn end_processes() {
    for (signal, patience) in [(libc::SIGTERM, shutdown::GRACE), (libc::SIGKILL, shutdown::DEATH)] {
        let deadline = Instant::now() + patience;
        shutdown::signal_all(signal);
        while shutdown::anyone_left() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

async fn accept(listener: TcpListener, app: Arc<App>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                app.connected();
                let app = Arc::clone(&app);
                tokio::spawn(async move {
                    serve(stream, app).await;
                    drop(place);
                });
            }
            Err(err) => {
                say(&format!("cannot accept a connection: {err}"));
                // Out of descriptors or memory: what is under way must end first.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, app: Arc<App>) {
    let mut generation = app.guest().generation();
    // Small answers must not wait for the acknowledgement of the one before.
    let _ = stream.set_nodelay(true);
    if !matches!(tokio::time::timeout(FIRST_BYTE, stream.readable()).await, Ok(Ok(()))) {
        return;
    }
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE).max_buf_size(256 << 10);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(256).adaptive_window(true);
    let service = hyper::service::service_fn(move |request| {
        let app = Arc::clone(&app);
        async move { Ok::<_, std::convert::Infallible>(app.answer(request).await) }
    });
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        // How a peer leaves is its own affair.
        _ = connection.as_mut() => return,
        _ = generation.changed() => connection.as_mut().graceful_shutdown(),
    }
    let _ = tokio::time::timeout(LINGER, connection).await;
}
