//! The real [`Storage`]: storaged over its socket.

use super::{Export, Fault, LayerKind, Mode, Result, Stack, Storage};
use aenv_blocks::{
    control::Client,
    exports::OpenRequest,
    spec::{LayerSpec, Mode as BlocksMode, StackSpec},
};
use async_trait::async_trait;
use std::path::Path;

/// The holder this node names itself to storaged.
const HOLDER: &str = "node";

/// storaged, as the node uses it.
pub struct Storaged {
    client: Client,
}

impl Storaged {
    /// Speaks through this client.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }
}

#[async_trait]
impl Storage for Storaged {
    async fn open(&self, name: &str, stack: &Stack, mode: &Mode) -> Result<Export> {
        let layers = stack
            .layers
            .iter()
            .map(|layer| match layer.kind {
                LayerKind::Raw => LayerSpec::raw(&layer.path),
                LayerKind::Lsmt => LayerSpec::lsmt(&layer.path),
            })
            .collect();
        let request = OpenRequest {
            name: name.to_owned(),
            stack: StackSpec { virtual_size: stack.virtual_size, layers },
            mode: match mode {
                Mode::ReadOnly => BlocksMode::ReadOnly,
                Mode::Writable { dir } => BlocksMode::Writable { dir: dir.clone() },
            },
            holder: HOLDER.to_owned(),
        };
        let opened = self.client.open(request).await.map_err(|error| fault(&error))?;
        Ok(Export { path: opened.path, size: opened.size })
    }

    async fn seal(&self, name: &str, to: &Path) -> Result<()> {
        self.client.seal(name, to, true).await.map(drop).map_err(|error| fault(&error))
    }

    async fn close(&self, name: &str) -> Result<()> {
        self.client.close(name, HOLDER).await.map_err(|error| fault(&error))
    }

    async fn list(&self) -> Result<Vec<String>> {
        let exports = self.client.list().await.map_err(|error| fault(&error))?;
        Ok(exports.into_iter().map(|export| export.name).collect())
    }
}

fn fault(error: &dyn std::fmt::Display) -> Fault {
    Fault::new(error.to_string())
}
