//! The file with which clients find this server: `~/.config/aenv/env`, made so that a shell can source it.
//!
//! The server's own machine has a key of its own, `<data dir>/local.key`, which only root reads: `aenv down` needs no other,
//! and `aenv up` can write the clients' file anew when it was lost or names another server.

use super::Settings;
use aenv_cli::control::{Control, ListFilter};
use aenv_node::{Node, control::Control as _};
use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};
use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
};

const TEAM: &str = "default";
/// Longer than any key.
const MAX_KEY: u64 = 256;

/// Makes sure the file names this server and a key that it accepts. A key that works is kept.
pub(crate) async fn ensure(node: &Node, settings: &Settings) -> Result<()> {
    let local = match local_key(settings) {
        Some(key) => key,
        None => make_local_key(settings)?,
    };
    node.add_key(&local, TEAM, "this machine").await?;
    let accepted = match known()? {
        Some(key) => node.authenticate(Sha256::digest(key.as_bytes()).into()).await?.map(|_| key),
        None => None,
    };
    store(settings, &accepted.unwrap_or(local))
}

/// The same for a server that runs already. Nothing to do where its machine's key can't be read.
pub(crate) async fn renew(settings: &Settings) -> Result<()> {
    let Some(local) = local_key(settings) else { return Ok(()) };
    let url = format!("http://{}", settings.reachable());
    let works = match known()? {
        Some(key) => {
            let global =
                aenv_cli::Global { api_url: Some(url), api_key: Some(key.clone()), ..Default::default() };
            let control = Control::new(&aenv_cli::settings::Settings::resolve(&global)?)?;
            control.sandboxes(&ListFilter::default(), 1).await.is_ok().then_some(key)
        }
        None => None,
    };
    store(settings, &works.unwrap_or(local))
}

/// The key of the server's own machine, if this process may read it.
pub(crate) fn local_key(settings: &Settings) -> Option<String> {
    let mut key = String::new();
    File::open(key_path(&settings.data_dir)).ok()?.take(MAX_KEY).read_to_string(&mut key).ok()?;
    Some(key.trim().to_owned()).filter(|key| !key.is_empty())
}

fn key_path(data_dir: &Path) -> PathBuf {
    data_dir.join("local.key")
}

fn make_local_key(settings: &Settings) -> Result<String> {
    let key = Node::new_key();
    aenv_cli::settings::write_secret(&key_path(&settings.data_dir), &format!("{key}\n"))?;
    Ok(key)
}

/// The key in the clients' file.
fn known() -> Result<Option<String>> {
    let path = aenv_cli::settings::file_path()
        .context("HOME is not set, so there is no ~/.config/aenv/env to write")?;
    Ok(aenv_cli::settings::read_file(&path)?.remove("E2B_API_KEY"))
}

fn store(settings: &Settings, key: &str) -> Result<()> {
    let url = format!("http://{}", settings.reachable());
    let mut values =
        vec![("E2B_API_URL", url.as_str()), ("E2B_SANDBOX_URL", url.as_str()), ("E2B_API_KEY", key)];
    if let Some(domain) = &settings.domain {
        values.push(("E2B_DOMAIN", domain));
    }
    let program = std::env::current_exe()?;
    let path_line = program.parent().map(|dir| format!("{}:$PATH", dir.display()));
    if let Some(line) = &path_line {
        values.push(("PATH", line));
    }
    let path = aenv_cli::settings::store(&values)?;
    tracing::info!(path = %path.display(), "client settings written");
    Ok(())
}
