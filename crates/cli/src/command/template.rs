//! `aenv template`.

use super::{Context, confirm};
use crate::{control::known, error::Result, output};
use aenv_api_types::{BuildStatus, Template};

/// List, show and remove templates.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List templates
    Ls,
    /// Show a template and its builds
    Info {
        /// Name, name:tag or id
        template: String,
    },
    /// Remove a template; sandboxes made from it go on
    Rm {
        /// Name, name:tag or id
        template: String,
        /// Don't ask
        #[arg(long, short)]
        yes: bool,
    },
}

pub(super) async fn run(context: &Context, command: Command) -> Result<u8> {
    match command {
        Command::Ls => {
            let found = context.control.templates(usize::MAX).await?;
            if context.json() {
                output::json(&found)?;
                return Ok(0);
            }
            let templates = found.iter().map(known).collect::<Result<Vec<Template>>>()?;
            let rows = templates.into_iter().map(|t| {
                let name = t.names.first().or(t.aliases.first()).cloned().unwrap_or_default();
                [
                    name,
                    t.template_id,
                    status(t.build_status).to_owned(),
                    t.cpu_count.to_string(),
                    format!("{} MiB", t.memory_mb),
                    format!("{} MiB", t.disk_size_mb),
                    t.spawn_count.to_string(),
                    t.created_at.strftime("%F %R").to_string(),
                ]
            });
            output::table(["NAME", "ID", "STATUS", "CPU", "MEMORY", "DISK", "STARTS", "CREATED"], rows)?;
        }
        Command::Info { template } => {
            let value = context.control.template(&template).await?;
            if context.json() {
                output::json(&value)?;
                return Ok(0);
            }
            let fields = value.as_object().cloned().unwrap_or_default();
            let rows = fields.into_iter().map(|(name, value)| {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                [name, text]
            });
            output::table(["FIELD", "VALUE"], rows)?;
        }
        Command::Rm { template, yes } => {
            confirm(&format!("Remove template '{template}'?"), yes)?;
            context.control.delete_template(&template).await?;
            if context.json() {
                output::json(&serde_json::json!({ "removed": template }))?;
            } else {
                output::say(&format!("removed template '{template}'"));
            }
        }
    }
    Ok(0)
}

fn status(status: BuildStatus) -> &'static str {
    match status {
        BuildStatus::Waiting => "waiting",
        BuildStatus::Building => "building",
        BuildStatus::Ready => "ready",
        BuildStatus::Error => "error",
    }
}
