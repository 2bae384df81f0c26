//! `aenv start`: a sandbox from a template or an image.

use super::{Context, pair, size::Size};
use crate::{control::known, error::Result, output};
use aenv_api_types::{AutoResume, NewSandbox, Sandbox};

/// After this long a start from a template would be done.
const SLOW: std::time::Duration = std::time::Duration::from_secs(3);

/// What the end of life does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum OnTimeout {
    /// Keep it, paused.
    Pause,
    /// Remove it.
    Kill,
}

/// Start a sandbox from a template, or from an image that nobody made one of.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Template (name, name:tag or id) or image with its registry (docker.io/library/python:3.12)
    template: String,
    #[command(flatten)]
    size: Size,
    /// Seconds it lives
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(i64).range(1..))]
    timeout: i64,
    /// Label, to find it by; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Environment variable of every command; may be given several times
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// What happens at the end of its life
    #[arg(long, value_enum, default_value = "pause")]
    on_timeout: OnTimeout,
    /// Resume by itself when traffic comes while it is paused
    #[arg(long)]
    auto_resume: bool,
    /// No access to the internet
    #[arg(long)]
    no_internet: bool,
    /// Print the id only
    #[arg(long, short)]
    quiet: bool,
}

pub(super) async fn run(context: &Context, args: Args) -> Result<u8> {
    let new = NewSandbox {
        template_id: args.template,
        cpu_count: args.size.cpu,
        memory_mb: args.size.memory,
        disk_size_mb: args.size.disk,
        timeout: Some(args.timeout),
        auto_pause: Some(args.on_timeout == OnTimeout::Pause),
        auto_resume: args.auto_resume.then_some(AutoResume { enabled: true }),
        allow_internet_access: Some(!args.no_internet),
        metadata: Some(args.metadata.into_iter().collect()),
        env_vars: Some(args.env.into_iter().collect()),
        ..NewSandbox::default()
    };
    let begun = tokio::time::Instant::now();
    let mut created = {
        let creating = context.control.create(&new, false);
        tokio::pin!(creating);
        tokio::select! {
            created = creating.as_mut() => created?,
            () = tokio::time::sleep(SLOW) => {
                output::say("the first start of an image, or of a size of it, makes a template: this takes a while …");
                creating.await?
            }
        }
    };
    let took = begun.elapsed();
    let sandbox: Sandbox = known(&created)?;
    if args.quiet {
        output::line(&sandbox.sandbox_id)?;
    } else if context.json() {
        // Tokens open the sandbox to whoever reads a log of this; `aenv` fetches them itself when it needs them.
        if let Some(fields) = created.as_object_mut() {
            fields.remove("envdAccessToken");
            fields.remove("trafficAccessToken");
        }
        output::json(&created)?;
    } else {
        output::line(&sandbox.sandbox_id)?;
        output::say(&format!(
            "started in {} ms; open a shell: aenv connect {}",
            took.as_millis(),
            sandbox.sandbox_id
        ));
    }
    Ok(0)
}
