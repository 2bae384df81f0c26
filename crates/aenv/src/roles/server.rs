//! `aenv server`: wires the parts of a node together and serves its API.

use super::{Settings, client_env, process::PidFile, ready};
use aenv_network::{NetnsNetwork, Network, Options as NetworkOptions};
use aenv_node::{
    Lease, Node,
    options::{Kit, Options as NodeOptions, Parts},
    seams::{HttpGuests, LayerFiles, OciImages, ProcProcesses, Storaged},
};
use aenv_server::{Options as ServerOptions, Server};
use aenv_vmm::qemu::{Options as QemuOptions, Qemu};
use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};
use std::{
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::signal::unix::{SignalKind, signal};

/// How long a predecessor may take to be gone.
const PREDECESSOR: Duration = Duration::from_secs(2);

/// Serves until told to end. Machines go on without it.
pub(crate) fn run(settings: &Settings, client_env: bool) -> Result<ExitCode> {
    super::runtime(std::thread::available_parallelism().map_or(2, usize::from).max(2))?
        .block_on(serve(settings, client_env))
}

async fn serve(settings: &Settings, client_env: bool) -> Result<ExitCode> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    // Address and data directory first: a start that is refused must have changed nothing of the server that has them.
    let listener = patiently(async || aenv_server::listen(settings.listen).await).await?;
    let lease = patiently(async || Lease::take(&settings.data_dir)).await?;
    // The lock on the data directory is held from here on: the pid file is ours.
    let _pid_file = PidFile::write(&settings.server_pid_file())?;
    let network = NetnsNetwork::start(network_options(settings)?).await?;
    let started = async {
        let options = NodeOptions { lease: Some(lease), ..node_options(settings, network.clone()).await? };
        anyhow::Ok(Node::start(options).await?)
    };
    let node = match started.await {
        Ok(node) => node,
        Err(error) => {
            if let Err(left) = network.shutdown().await {
                tracing::warn!(%left, "network slots stay until the next start");
            }
            return Err(error);
        }
    };
    if client_env {
        client_env::ensure(&node, settings).await?;
    }
    let options = ServerOptions {
        listen: settings.listen,
        domain: settings.domain.clone(),
        ..ServerOptions::default()
    };
    let server = Server::on(listener, options, node.clone())?;
    ready::announce()?;
    tracing::info!(listen = %settings.listen, data_dir = %settings.data_dir.display(), "serving");
    let stop = async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
    };
    server.run(stop).await;
    node.shutdown().await;
    network.shutdown().await?;
    Ok(ExitCode::SUCCESS)
}

/// Tries again for a moment: a server that was killed holds address and lock until the last of its threads is gone, and
/// nothing tells of that.
async fn patiently<T, E>(take: impl AsyncFn() -> Result<T, E>) -> Result<T, E> {
    let until = Instant::now() + PREDECESSOR;
    loop {
        match take().await {
            Err(_) if Instant::now() < until => tokio::time::sleep(Duration::from_millis(20)).await,
            outcome => return outcome,
        }
    }
}

fn network_options(settings: &Settings) -> Result<NetworkOptions> {
    let mut options = NetworkOptions::new(settings.run_dir.join("network"), node_prefix(&settings.data_dir));
    if let Some(supernet) = &settings.network.supernet {
        let parsed = supernet.parse();
        options.supernet =
            Some(parsed.with_context(|| format!("network.supernet '{supernet}' is no IPv4 range"))?);
    }
    if let Some(slots) = settings.network.slots {
        options.slots = slots;
    }
    if let Some(prepared) = settings.network.prepared {
        options.prepared = prepared;
    }
    Ok(options)
}

/// Names of links and tables must differ between the servers of one machine, and stay the same over restarts of each.
fn node_prefix(data_dir: &Path) -> String {
    let digest = Sha256::digest(data_dir.as_os_str().as_encoded_bytes());
    hex::encode(&digest[..2])
}

async fn node_options(settings: &Settings, network: Arc<NetnsNetwork>) -> Result<NodeOptions> {
    let network: Arc<dyn Network> = network;
    let qemu = QemuOptions { qemu_binary: settings.qemu.clone(), ..QemuOptions::default() };
    let parts = Parts {
        vmm: Arc::new(Qemu::probe(qemu).await?),
        guests: Arc::new(HttpGuests::new(network.clone())),
        network,
        storage: Arc::new(Storaged::new(aenv_blocks::control::Client::new(settings.storaged_socket()))),
        images: Arc::new(OciImages::new(settings.data_dir.join("image-work"), settings.local_images)?),
        layers: Arc::new(LayerFiles),
        processes: Arc::new(ProcProcesses),
    };
    let kit = Kit {
        kernel: settings.guest_dir.join("vmlinux"),
        initramfs: settings.guest_dir.join("initramfs.cpio"),
    };
    let mut options = NodeOptions::new(settings.data_dir.clone(), settings.run_dir.join("vm"), kit, parts);
    options.limits.memory_limit_mib = settings.memory_limit_mib;
    if let Some(most) = settings.max_sandboxes {
        options.limits.max_sandboxes = most;
    }
    if let Some(size) = settings.warm {
        options.pool.size = size;
    }
    Ok(options)
}
