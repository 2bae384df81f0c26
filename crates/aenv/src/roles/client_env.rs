//! The file with which clients find this server: `~/.config/aenv/env`, made so that a shell can source it.

use aenv_node::{Node, control::Control as _};
use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};
use std::net::SocketAddr;

const TEAM: &str = "default";

/// Makes sure the file names this server and a key that it accepts. A key that works is kept.
pub(crate) async fn ensure(node: &Node, address: SocketAddr, domain: Option<&str>) -> Result<()> {
    let path = aenv_cli::settings::file_path()
        .context("HOME is not set, so there is no ~/.config/aenv/env to write")?;
    let known = aenv_cli::settings::read_file(&path)?.remove("E2B_API_KEY");
    let accepted = match &known {
        Some(key) => node.authenticate(Sha256::digest(key.as_bytes()).into()).await?.is_some(),
        None => false,
    };
    let key = match known {
        Some(key) if accepted => key,
        _ => node.create_key(TEAM, "made by aenv up").await?,
    };
    let url = format!("http://{address}");
    let mut values =
        vec![("E2B_API_URL", url.as_str()), ("E2B_SANDBOX_URL", url.as_str()), ("E2B_API_KEY", &key)];
    if let Some(domain) = domain {
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
