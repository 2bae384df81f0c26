//! `aenv logs` and `aenv metrics`, once or followed.
//!
//! Followed by polling with the time of the last line: the API has no push for either. A line is told once even
//! when several share a millisecond.

use super::Context;
use crate::{
    control::known,
    error::{Error, Result},
    output,
};
use aenv_api_types::{LogEntry, SandboxMetric};
use std::{collections::HashSet, time::Duration};

const LOG_POLL: Duration = Duration::from_millis(500);
const METRIC_POLL: Duration = Duration::from_secs(2);
const PAGE: usize = 1000;

/// Show the log of a sandbox.
#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// Sandbox
    id: String,
    /// Go on as lines come, until the sandbox ends
    #[arg(long, short)]
    follow: bool,
}

/// Show the resource use of a sandbox.
#[derive(Debug, clap::Args)]
pub struct MetricArgs {
    /// Sandbox
    id: String,
    /// Go on as samples come, until the sandbox ends
    #[arg(long, short)]
    follow: bool,
}

pub(super) async fn logs(context: &Context, args: LogArgs) -> Result<u8> {
    let mut cursor: Option<String> = None;
    // Lines already told of the newest moment: a cursor may include it again.
    let mut told: HashSet<(jiff::Timestamp, String)> = HashSet::new();
    let mut newest = None;
    let mut all = Vec::new();
    let mut idle = false;
    loop {
        // Asked before the page is read: what was written until the end is in that page.
        let over = args.follow && idle && has_ended(context, &args.id).await?;
        let page = match context.control.logs(&args.id, cursor.as_deref(), PAGE).await {
            Err(Error::NotFound(_)) if args.follow && newest.is_some() => return Ok(0),
            other => other?,
        };
        let full = page.logs.len() >= PAGE;
        let mut fresh = 0;
        // A cursor in milliseconds may lead back to lines before the newest one.
        let floor = newest;
        for entry in page.logs {
            if floor <= Some(entry.timestamp) && !told.contains(&(entry.timestamp, entry.message.clone())) {
                fresh += 1;
                if newest < Some(entry.timestamp) {
                    told.clear();
                    newest = Some(entry.timestamp);
                }
                told.insert((entry.timestamp, entry.message.clone()));
                if context.json() && !args.follow {
                    all.push(entry);
                } else {
                    tell(context, &entry)?;
                }
            }
        }
        cursor = page.next_cursor.or_else(|| newest.map(|t| t.as_millisecond().to_string()));
        if !args.follow && (!full || fresh == 0) {
            break;
        }
        idle = fresh == 0;
        if over && idle {
            return Ok(0);
        }
        if !full {
            tokio::time::sleep(LOG_POLL).await;
        }
    }
    if context.json() {
        output::json(&all)?;
    }
    Ok(0)
}

fn tell(context: &Context, entry: &LogEntry) -> Result<()> {
    if context.json() {
        return output::json_line(entry);
    }
    let LogEntry { timestamp, level, message, .. } = entry;
    output::line(&format!("{timestamp} {level:<5} {}", output::printable(message)))
}

pub(super) async fn metrics(context: &Context, args: MetricArgs) -> Result<u8> {
    if !args.follow {
        let found = context.control.metrics(&args.id, None).await?;
        if context.json() {
            output::json(&found)?;
            return Ok(0);
        }
        let samples = found.iter().map(known).collect::<Result<Vec<SandboxMetric>>>()?;
        output::table(["TIME", "CPU", "MEMORY", "DISK"], samples.iter().map(cells))?;
        return Ok(0);
    }
    let mut from = None;
    let mut idle = false;
    loop {
        let over = idle && has_ended(context, &args.id).await?;
        let found = match context.control.metrics(&args.id, from).await {
            Err(Error::NotFound(_)) if from.is_some() => return Ok(0),
            other => other?,
        };
        idle = true;
        for value in &found {
            let sample: SandboxMetric = known(value)?;
            if from.is_some_and(|from| sample.timestamp_unix < from) {
                continue;
            }
            from = Some(sample.timestamp_unix + 1);
            idle = false;
            if context.json() {
                output::json_line(value)?;
            } else {
                output::line(&cells(&sample).join("  "))?;
            }
        }
        if over && idle {
            return Ok(0);
        }
        tokio::time::sleep(METRIC_POLL).await;
    }
}

/// Logs and metrics of a sandbox stay readable for a day after its end; following them must still end.
async fn has_ended(context: &Context, id: &str) -> Result<bool> {
    match context.control.sandbox_in_full(id).await {
        Ok(value) => Ok(value.get("lifecycleState").and_then(serde_json::Value::as_str) == Some("dead")),
        Err(Error::NotFound(_)) => Ok(true),
        Err(other) => Err(other),
    }
}

fn cells(sample: &SandboxMetric) -> [String; 4] {
    let share = |used, total| format!("{} of {}", output::bytes(used), output::bytes(total));
    [
        sample.timestamp.to_string(),
        format!("{:.1} % of {}", sample.cpu_used_pct, sample.cpu_count),
        share(sample.mem_used, sample.mem_total),
        share(sample.disk_used, sample.disk_total),
    ]
}
