//! Checking a layer's sha256 once all of its blocks are here.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sha2::Digest as _;

use super::Inner;
use super::entry::{BLOCK, block_len};
use super::layer::Shared;
use super::slab::Look;
use crate::remote::{Digest, FetchError};

/// Starts the check where it is due: all blocks are here, and some came since the last one.
pub(crate) fn when_whole(cache: &Arc<Inner>, layer: &Arc<Shared>) {
    let due = cache.slab.with_rows(|rows| {
        rows.get(&layer.row).is_some_and(|row| row.present == layer.blocks && row.verified < layer.blocks)
    });
    if !due || layer.verifying.swap(true, Ordering::AcqRel) {
        return;
    }
    let (cache, layer) = (cache.clone(), layer.clone());
    let runtime = cache.runtime.clone();
    runtime.spawn(async move {
        let turn = cache.hashing.acquire().await.expect("never closed");
        let (hasher, hashed) = (cache.clone(), layer.clone());
        let _panicked = tokio::task::spawn_blocking(move || check(&hasher, &hashed)).await;
        layer.verifying.store(false, Ordering::Release);
        drop(turn);
    });
}

fn check(cache: &Inner, layer: &Shared) {
    let before = cache.slab.sequence();
    let mut hasher = sha2::Sha256::new();
    let mut buf = vec![0; BLOCK];
    for block in 0..layer.blocks {
        let len = block_len(layer.size, block).unwrap_or(0) as usize;
        // A block that is gone: the check comes again when it has come back.
        match cache.slab.read(layer.row, block, 0, &mut buf[..len], false) {
            Look::Hit => {}
            Look::Miss => return,
            Look::Damaged => {
                cache.counters.damaged.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        hasher.update(&buf[..len]);
    }
    let found = Digest(hasher.finalize().into());
    if found == layer.digest {
        if let Err(error) = cache.slab.mark_verified(layer.row, before) {
            tracing::warn!(%error, layer = %layer.digest, "could not note that a layer is verified");
        }
        return;
    }
    let error = FetchError::Damaged(format!(
        "the bytes fetched for {} are those of {found}: they were dropped; check the registry, its mirrors and \
         proxies, and start again",
        layer.digest
    ));
    tracing::error!(%error, "a layer is not what its digest says");
    let _already = layer.damaged.set(error);
    cache.slab.forget(|_, chosen| chosen.row == layer.row);
}
