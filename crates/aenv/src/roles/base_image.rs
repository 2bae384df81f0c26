//! `aenv base-image`: the image behind the `base` template, on machines that reach no image registry.

use aenv_cli::output::say;
use aenv_oci::Progress;
use anyhow::Result;
use clap::Args;
use std::{path::PathBuf, process::ExitCode};
use tokio::signal::ctrl_c;
use tokio_util::sync::CancellationToken;

/// Arguments of `aenv base-image`.
#[derive(Args)]
pub(crate) struct BaseImage {
    /// Directory of the OCI image layout to make; the image is tagged `base`
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Builds it. Ctrl-C stops it and leaves nothing behind.
pub(crate) fn run(arguments: &BaseImage) -> Result<ExitCode> {
    let out = std::path::absolute(&arguments.out)?;
    super::runtime(1)?.block_on(async {
        let cancel = CancellationToken::new();
        let interrupted = cancel.clone();
        tokio::spawn(async move {
            if ctrl_c().await.is_ok() {
                interrupted.cancel();
            }
        });
        aenv_oci::base::build(&out, Progress::new(say), cancel).await
    })?;
    say(&format!("made; use it with: aenv pull oci:{}:base --name base", out.display()));
    Ok(ExitCode::SUCCESS)
}
