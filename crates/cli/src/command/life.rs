//! `aenv info`, `pause`, `resume`, `timeout`, `rm`.

use super::{Context, confirm, list::span, pair};
use crate::{
    control::{ListFilter, known},
    error::Result,
    output,
};
use aenv_api_types::{InspectedSandbox, ListedSandbox};
use futures_util::StreamExt as _;

/// Show a sandbox.
#[derive(Debug, clap::Args)]
pub struct One {
    /// Sandbox
    id: String,
}

/// Pause a sandbox.
#[derive(Debug, clap::Args)]
pub struct PauseArgs {
    /// Sandbox
    id: String,
    /// Keep the disk only; the next resume boots anew
    #[arg(long)]
    no_memory: bool,
}

/// Resume a paused sandbox.
#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    /// Sandbox
    id: String,
    /// Seconds it lives from now
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(i64).range(1..))]
    timeout: i64,
}

/// Set how long a sandbox lives.
#[derive(Debug, clap::Args)]
pub struct TimeoutArgs {
    /// Sandbox
    id: String,
    /// Seconds from now; 0 ends its life now
    #[arg(value_parser = clap::value_parser!(i64).range(0..))]
    seconds: i64,
}

/// Remove sandboxes.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true).multiple(true).args(["ids", "all", "metadata"]))]
pub struct RemoveArgs {
    /// Sandboxes
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// All of them, paused ones too
    #[arg(long, conflicts_with = "ids")]
    all: bool,
    /// All with this label; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair, conflicts_with = "ids")]
    metadata: Vec<(String, String)>,
    /// Don't ask
    #[arg(long, short)]
    yes: bool,
}

pub(super) async fn info(context: &Context, args: One) -> Result<u8> {
    let mut value = context.control.sandbox_in_full(&args.id).await?;
    if let Some(fields) = value.as_object_mut() {
        fields.remove("envdAccessToken");
        fields.remove("trafficAccessToken");
    }
    if context.json() {
        output::json(&value)?;
        return Ok(0);
    }
    let InspectedSandbox {
        sandbox,
        lifecycle_state,
        build_id,
        image_entrypoint,
        image_cmd,
        phases,
        tombstone,
    } = known(&value)?;
    let now = jiff::Timestamp::now();
    let alias = sandbox.alias.map_or(String::new(), |alias| format!("{alias} "));
    let (cpus, memory, disk) = (sandbox.cpu_count, sandbox.memory_mb, sandbox.disk_size_mb);
    let mut rows = vec![
        ["id".to_owned(), sandbox.sandbox_id],
        ["template".to_owned(), format!("{alias}({}, build {build_id})", sandbox.template_id)],
        ["state".to_owned(), lifecycle_state],
        ["started".to_owned(), format!("{} ({} ago)", sandbox.started_at, span(sandbox.started_at, now))],
        ["ends".to_owned(), format!("{} ({} left)", sandbox.end_at, span(now, sandbox.end_at))],
        ["machine".to_owned(), format!("{cpus} CPU, {memory} MiB memory, {disk} MiB disk")],
        ["agent".to_owned(), sandbox.envd_version],
    ];
    for (name, words) in [("entrypoint", image_entrypoint), ("cmd", image_cmd)] {
        if !words.is_empty() {
            rows.push([format!("image {name}"), words.join(" ")]);
        }
    }
    rows.extend(sandbox.metadata.into_iter().map(|(k, v)| [format!("metadata {k}"), v]));
    rows.extend(phases.into_iter().map(|p| {
        let micros = p.micros;
        [format!("phase {}", p.name), format!("{}.{:03} ms", micros / 1000, micros % 1000)]
    }));
    if let Some(tombstone) = tombstone {
        let text = format!("{}: {} at {}", tombstone.cause, tombstone.detail, tombstone.at);
        rows.push(["ended".to_owned(), text]);
    }
    output::table(["FIELD", "VALUE"], rows)?;
    Ok(0)
}

pub(super) async fn pause(context: &Context, args: PauseArgs) -> Result<u8> {
    context.control.pause(&args.id, !args.no_memory).await?;
    done(context, &args.id, "paused")
}

pub(super) async fn resume(context: &Context, args: ResumeArgs) -> Result<u8> {
    let (_, resumed) = context.control.connect(&args.id, args.timeout).await?;
    if !resumed {
        output::say(&format!("{} was running already; its life was extended if that was later", args.id));
    }
    done(context, &args.id, "running")
}

pub(super) async fn timeout(context: &Context, args: TimeoutArgs) -> Result<u8> {
    context.control.set_timeout(&args.id, args.seconds).await?;
    if context.json() {
        output::json(&serde_json::json!({ "sandboxID": args.id, "timeout": args.seconds }))?;
    } else {
        output::say(&format!("{} lives for {} s from now", args.id, args.seconds));
    }
    Ok(0)
}

fn done(context: &Context, id: &str, state: &str) -> Result<u8> {
    if context.json() {
        output::json(&serde_json::json!({ "sandboxID": id, "state": state }))?;
    } else {
        output::say(&format!("{id} is {state}"));
    }
    Ok(0)
}

pub(super) async fn remove(context: &Context, args: RemoveArgs) -> Result<u8> {
    let ids = if args.ids.is_empty() {
        let filter = ListFilter { metadata: args.metadata.into_iter().collect(), ..ListFilter::default() };
        let found = context.control.sandboxes(&filter, usize::MAX).await?;
        let ids = found
            .iter()
            .map(|v| known::<ListedSandbox>(v).map(|s| s.sandbox_id))
            .collect::<Result<Vec<_>>>()?;
        if !ids.is_empty() {
            confirm(&format!("Remove {} sandboxes?", ids.len()), args.yes)?;
        }
        ids
    } else {
        args.ids
    };
    // Eight at once: a long list is removed quickly without flooding the server.
    let outcomes: Vec<(String, Result<()>)> = futures_util::stream::iter(ids)
        .map(|id| async move {
            let outcome = context.control.kill(&id).await;
            (id, outcome)
        })
        .buffered(8)
        .collect()
        .await;
    let mut code = 0;
    let mut removed = Vec::new();
    for (id, outcome) in outcomes {
        match outcome {
            Ok(()) => {
                if !context.json() {
                    output::line(&id)?;
                }
                removed.push(id);
            }
            Err(error) => {
                output::say(&format!("error: {id}: {error}"));
                code = if code == 0 {
                    error.exit_code()
                } else {
                    if code == error.exit_code() { code } else { 1 }
                };
            }
        }
    }
    if context.json() {
        output::json(&serde_json::json!({ "removed": removed }))?;
    }
    Ok(code)
}
