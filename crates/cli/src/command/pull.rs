//! `aenv pull`: a template from an image, with the build's log as progress.

use super::{Context, size::Size};
use crate::{
    error::{Error, Result},
    output,
};
use aenv_api_types::{BuildStatus, PullTemplate};
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    io::{IsTerminal as _, Read as _},
    time::Duration,
};

const POLL: Duration = Duration::from_millis(500);
/// A build that says nothing for this long is given up; it goes on at the server.
const SILENCE: Duration = Duration::from_secs(30 * 60);

/// Make a template from a container image.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Image: registry reference, oci:DIR[:TAG], oci-archive:FILE or docker-archive:FILE (paths on the server's machine)
    image: String,
    /// Name to start sandboxes by
    #[arg(long)]
    name: String,
    #[command(flatten)]
    size: Size,
    /// Make it anew even when nothing changed
    #[arg(long)]
    force: bool,
    /// Registry user
    #[arg(long, requires = "password_stdin")]
    user: Option<String>,
    /// Read the registry password from standard input
    #[arg(long, requires = "user")]
    password_stdin: bool,
}

pub(super) async fn run(context: &Context, args: Args) -> Result<u8> {
    let password = if args.password_stdin {
        let mut text = String::new();
        std::io::stdin().take(64 << 10).read_to_string(&mut text)?;
        Some(text.trim_end_matches(['\r', '\n']).to_owned())
    } else {
        None
    };
    let pull = PullTemplate {
        image: args.image,
        name: args.name,
        cpu_count: args.size.cpu,
        memory_mb: args.size.memory,
        disk_size_mb: args.size.disk,
        force: args.force.then_some(true),
        username: args.user,
        password,
    };
    let accepted = context.control.pull(&pull).await?;
    let build = accepted.build_id.to_string();
    watch(context, &accepted.template_id, &build).await?;
    if context.json() {
        output::json(&serde_json::json!({
            "templateID": accepted.template_id, "buildID": build, "name": pull.name, "status": "ready",
        }))?;
    } else {
        output::line(&accepted.template_id)?;
        output::say(&format!("template '{}' is ready: aenv start {}", pull.name, pull.name));
    }
    Ok(0)
}

async fn watch(context: &Context, template: &str, build: &str) -> Result<()> {
    let bar = if std::io::stderr().is_terminal() {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        bar
    } else {
        ProgressBar::hidden()
    };
    let result = follow(context, template, build, &bar).await;
    bar.finish_and_clear();
    result
}

async fn follow(context: &Context, template: &str, build: &str, bar: &ProgressBar) -> Result<()> {
    let mut offset = 0;
    let mut last_heard = tokio::time::Instant::now();
    loop {
        let state = context.control.build(template, build, offset).await?;
        if !state.log_entries.is_empty() {
            last_heard = tokio::time::Instant::now();
        }
        offset += state.log_entries.len();
        for entry in &state.log_entries {
            let text = output::printable(&entry.message);
            if bar.is_hidden() {
                output::say(&text);
            } else {
                bar.println(&text);
                bar.set_message(text);
            }
        }
        // Pages after the end are drained before the outcome is told.
        if state.log_entries.is_empty() {
            match state.status {
                BuildStatus::Ready => return Ok(()),
                BuildStatus::Error => {
                    let why = state.reason.map(|r| r.message).filter(|m| !m.is_empty());
                    let why = why.unwrap_or_else(|| "the log above says why".to_owned());
                    return Err(Error::Failed(format!("the template could not be made: {why}")));
                }
                BuildStatus::Waiting | BuildStatus::Building => {}
            }
            if last_heard.elapsed() > SILENCE {
                return Err(Error::Failed(format!(
                    "the build said nothing for {SILENCE:?}; it may still end well: `aenv template info {template}`"
                )));
            }
            tokio::time::sleep(POLL).await;
        }
    }
}
