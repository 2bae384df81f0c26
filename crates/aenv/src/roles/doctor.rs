//! `aenv doctor`: examines this machine and explains.

use super::Settings;
use aenv_cli::output::{Format, line, say};
use aenv_vmm::host::{self, Status};
use anyhow::Result;
use std::process::ExitCode;

/// Prints what was found; exit code 1 when something that is needed is missing.
pub(crate) fn run(settings: &Settings, global: &aenv_cli::Global) -> Result<ExitCode> {
    let report = super::runtime(1)?.block_on(host::probe(&settings.data_dir))?;
    if global.output.unwrap_or_else(Format::of_stdout) == Format::Json {
        aenv_cli::output::json(&report)?;
    } else {
        for check in &report.checks {
            let mark = match check.status {
                Status::Ok => "ok  ",
                Status::Warn => "warn",
                Status::Fail => "fail",
            };
            line(&format!("{mark}  {:<22} {}", check.name, check.found))?;
            if let Some(remedy) = &check.remedy {
                line(&format!("      {:<22} → {remedy}", ""))?;
            }
        }
    }
    say(&report.reason);
    let failed = report.checks.iter().any(|check| check.status == Status::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
