//! The lab's kernel: the guest kit's, with the modules of a host.

use crate::guest;
use anyhow::Result;
use std::path::{Path, PathBuf};

/// Without these it is no lab.
const REQUIRED: &[&str] = &["ublk_drv", "virtio_blk", "virtio_net", "tun", "irqbypass", "kvm", "kvm_amd"];
/// What the node and its tests use where it is not built in.
const OPTIONAL: &[&str] = &[
    "loop",
    "overlay",
    "virtio_rng",
    "veth",
    "nf_tables",
    "nft_ct",
    "nft_nat",
    "nft_masq",
    "nft_chain_nat",
    "nft_reject_inet",
    "nft_limit",
    "nft_counter",
    "vhost_vsock",
];

/// A kernel with its modules.
pub(super) struct Kernel {
    pub(super) release: String,
    pub(super) vmlinux: PathBuf,
    /// Names and files, in load order.
    pub(super) modules: Vec<(String, PathBuf)>,
}

pub(super) fn obtain(workspace: &Path) -> Result<Kernel> {
    let (release, vmlinux, modules) =
        guest::kernel_with(&workspace.join("target/guest-cache"), "lab1", REQUIRED, OPTIONAL)?;
    Ok(Kernel { release, vmlinux, modules })
}
