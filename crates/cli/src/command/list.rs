//! `aenv ls`.

use super::{Context, pair};
use crate::{
    control::{ListFilter, known},
    error::Result,
    output,
};
use aenv_api_types::{ListedSandbox, SandboxState};

/// List sandboxes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only with this label; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Only in this state; may be given several times
    #[arg(long, value_parser = ["running", "paused"])]
    state: Vec<String>,
    /// Only from this template
    #[arg(long)]
    template: Option<String>,
    /// At most this many
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Print ids only, one a line
    #[arg(long, short)]
    quiet: bool,
}

pub(super) async fn run(context: &Context, args: Args) -> Result<u8> {
    let filter = ListFilter {
        metadata: args.metadata.into_iter().collect(),
        states: args.state,
        template: args.template,
    };
    let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
    let found = context.control.sandboxes(&filter, limit).await?;
    let sandboxes = found.iter().map(known).collect::<Result<Vec<ListedSandbox>>>()?;
    if args.quiet {
        for sandbox in &sandboxes {
            output::line(&sandbox.sandbox_id)?;
        }
        return Ok(0);
    }
    if context.json() {
        output::json(&found)?;
        return Ok(0);
    }
    let now = jiff::Timestamp::now();
    let rows = sandboxes.into_iter().map(|s| {
        let labels: Vec<String> = s.metadata.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let (state, left) = match s.state {
            SandboxState::Running => ("running", span(now, s.end_at)),
            SandboxState::Paused => ("paused", "-".to_owned()),
        };
        [
            s.sandbox_id,
            s.alias.unwrap_or(s.template_id),
            state.to_owned(),
            span(s.started_at, now),
            left,
            s.cpu_count.to_string(),
            format!("{} MiB", s.memory_mb),
            labels.join(","),
        ]
    });
    output::table(["ID", "TEMPLATE", "STATE", "AGE", "LEFT", "CPU", "MEMORY", "METADATA"], rows)?;
    Ok(0)
}

/// Time between two moments in its two largest units; nothing for the past.
pub(super) fn span(from: jiff::Timestamp, to: jiff::Timestamp) -> String {
    let seconds = to.as_second().saturating_sub(from.as_second()).max(0);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_well() {
        let at = |s| jiff::Timestamp::from_second(s).expect("in range");
        assert_eq!(span(at(0), at(59)), "59s");
        assert_eq!(span(at(0), at(61)), "1m01s");
        assert_eq!(span(at(0), at(7260)), "2h01m");
        assert_eq!(span(at(0), at(90_000)), "1d01h");
        assert_eq!(span(at(10), at(0)), "0s");
    }
}
