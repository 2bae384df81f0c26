//! The node's words in those of the wire.

use aenv_api_types as api;
use aenv_node::model::{self, State};

pub(super) fn created(sandbox: model::Sandbox, node: &str, domain: Option<&str>) -> api::Sandbox {
    api::Sandbox {
        template_id: sandbox.template.into(),
        sandbox_id: sandbox.id.into(),
        client_id: node.to_owned(),
        envd_version: sandbox.envd_version,
        alias: sandbox.alias,
        envd_access_token: sandbox.envd_token,
        traffic_access_token: sandbox.traffic_token,
        domain: domain.map(str::to_owned),
    }
}

/// The wire has two states. Whatever holds a machine, or soon will, runs.
pub(super) fn state(state: State) -> api::SandboxState {
    match state {
        State::Pausing | State::Paused | State::Dead => api::SandboxState::Paused,
        _ => api::SandboxState::Running,
    }
}

/// The node's states behind a wire state, for filters.
pub(super) fn states(state: api::SandboxState) -> &'static [State] {
    match state {
        api::SandboxState::Running => &[State::Running, State::Resuming, State::Snapshotting, State::Forking],
        api::SandboxState::Paused => &[State::Pausing, State::Paused],
    }
}

pub(super) fn detail(sandbox: model::Sandbox, node: &str, domain: Option<&str>) -> api::SandboxDetail {
    let network = sandbox
        .traffic_token
        .is_some()
        .then(|| api::NetworkConfig { allow_public_traffic: Some(false), ..api::NetworkConfig::default() });
    api::SandboxDetail {
        template_id: sandbox.template.into(),
        sandbox_id: sandbox.id.into(),
        client_id: node.to_owned(),
        started_at: sandbox.started_at,
        end_at: sandbox.end_at,
        envd_version: sandbox.envd_version,
        cpu_count: sandbox.vcpus.into(),
        memory_mb: sandbox.memory_mib,
        disk_size_mb: sandbox.disk_mib,
        state: state(sandbox.state),
        alias: sandbox.alias,
        envd_access_token: sandbox.envd_token,
        allow_internet_access: Some(sandbox.allow_internet_access),
        domain: domain.map(str::to_owned),
        metadata: sandbox.metadata,
        network,
        lifecycle: Some(api::Lifecycle {
            auto_resume: sandbox.auto_resume,
            on_timeout: match sandbox.on_timeout {
                model::OnTimeout::Pause => api::OnTimeout::Pause,
                model::OnTimeout::Kill => api::OnTimeout::Kill,
            },
        }),
        volume_mounts: Vec::new(),
    }
}

pub(super) fn listed(sandbox: model::Sandbox, node: &str) -> api::ListedSandbox {
    api::ListedSandbox {
        template_id: sandbox.template.into(),
        sandbox_id: sandbox.id.into(),
        client_id: node.to_owned(),
        started_at: sandbox.started_at,
        end_at: sandbox.end_at,
        cpu_count: sandbox.vcpus.into(),
        memory_mb: sandbox.memory_mib,
        disk_size_mb: sandbox.disk_mib,
        state: state(sandbox.state),
        envd_version: sandbox.envd_version,
        alias: sandbox.alias,
        metadata: sandbox.metadata,
        volume_mounts: Vec::new(),
    }
}

pub(super) fn inspected(
    mut sandbox: model::Sandbox,
    node: &str,
    domain: Option<&str>,
) -> api::InspectedSandbox {
    let phases = std::mem::take(&mut sandbox.phases);
    let image = std::mem::take(&mut sandbox.image_command);
    api::InspectedSandbox {
        image_entrypoint: image.entrypoint,
        image_cmd: image.cmd,
        lifecycle_state: snake(sandbox.state),
        build_id: sandbox.build.to_string(),
        phases: phases
            .into_iter()
            .map(|phase| api::PhaseTiming { name: phase.name, micros: phase.micros })
            .collect(),
        tombstone: sandbox.tombstone.take().map(|tombstone| api::Tombstone {
            cause: snake(tombstone.cause),
            detail: tombstone.detail,
            at: tombstone.at,
            last_state: snake(tombstone.last_state),
        }),
        sandbox: detail(sandbox, node, domain),
    }
}

/// Why a sandbox ended, in one line.
pub(super) fn ended(tombstone: &model::Tombstone) -> String {
    format!("{} at {} ({})", snake(tombstone.cause), tombstone.at, tombstone.detail)
}

/// Unit variants serialise as their snake-case names; the node's words are the API's.
fn snake(variant: impl serde::Serialize) -> String {
    match serde_json::to_value(variant) {
        Ok(serde_json::Value::String(name)) => name,
        _ => "unknown".to_owned(),
    }
}

pub(super) fn metric(sample: &model::GuestMetrics) -> api::SandboxMetric {
    api::SandboxMetric {
        timestamp: sample.at,
        timestamp_unix: sample.at.as_second(),
        cpu_count: sample.cpu_count,
        cpu_used_pct: if sample.cpu_used_pct.is_finite() { sample.cpu_used_pct } else { 0.0 },
        mem_used: sample.mem_used,
        mem_total: sample.mem_total,
        mem_cache: sample.mem_cache,
        disk_used: sample.disk_used,
        disk_total: sample.disk_total,
    }
}

/// The SDKs know four levels and refuse others.
fn level(text: &str) -> String {
    match text {
        "debug" | "info" | "warn" | "error" => text.to_owned(),
        "trace" => "debug".to_owned(),
        "warning" => "warn".to_owned(),
        "fatal" | "critical" => "error".to_owned(),
        _ => "info".to_owned(),
    }
}

pub(super) fn log_entry(entry: model::LogEntry) -> api::LogEntry {
    api::LogEntry {
        timestamp: entry.at,
        level: level(&entry.level),
        message: entry.message,
        fields: entry.fields,
    }
}

pub(super) fn build_log_entry(entry: &model::LogEntry) -> api::BuildLogEntry {
    api::BuildLogEntry {
        timestamp: entry.at,
        message: entry.message.clone(),
        level: level(&entry.level),
        step: entry.fields.get("step").cloned(),
    }
}

/// Levels in order, for "at least".
pub(super) fn rank(level: &str) -> u8 {
    match level {
        "debug" | "trace" => 0,
        "warn" | "warning" => 2,
        "error" | "fatal" | "critical" => 3,
        _ => 1,
    }
}

pub(super) fn build_status(status: model::BuildStatus) -> api::BuildStatus {
    match status {
        model::BuildStatus::Waiting => api::BuildStatus::Waiting,
        model::BuildStatus::Building => api::BuildStatus::Building,
        model::BuildStatus::Ready => api::BuildStatus::Ready,
        model::BuildStatus::Error => api::BuildStatus::Error,
    }
}

pub(super) fn template(template: model::Template) -> api::Template {
    let build = template.build.map_or_else(|| uuid::Uuid::nil().to_string(), |build| build.to_string());
    api::Template {
        template_id: template.id.into(),
        build_id: build,
        cpu_count: template.vcpus.into(),
        memory_mb: template.memory_mib,
        disk_size_mb: template.disk_mib,
        public: false,
        aliases: template.names.clone(),
        names: template.names,
        created_at: template.created_at,
        updated_at: template.updated_at,
        created_by: None,
        last_spawned_at: template.last_spawned_at,
        spawn_count: template.spawn_count,
        build_count: template.build_count,
        envd_version: template.envd_version,
        build_status: build_status(template.status),
        image: Some(template.image).filter(|image| !image.is_empty()),
    }
}

/// With the one build the node tells of: the one in use.
pub(super) fn template_detail(found: model::Template) -> api::TemplateDetail {
    let builds = found.build.map(|build| api::TemplateBuild {
        build_id: build.0,
        status: api::BuildStatus::Ready,
        created_at: found.created_at,
        updated_at: found.updated_at,
        finished_at: Some(found.updated_at),
        cpu_count: found.vcpus.into(),
        memory_mb: found.memory_mib,
        disk_size_mb: Some(found.disk_mib),
        envd_version: Some(found.envd_version.clone()),
    });
    api::TemplateDetail { builds: builds.into_iter().collect(), template: template(found) }
}

pub(super) fn build_info(build: model::Build, least: u8) -> api::BuildInfo {
    let entries: Vec<_> =
        build.log.iter().filter(|entry| rank(&entry.level) >= least).map(build_log_entry).collect();
    api::BuildInfo {
        template_id: build.template.into(),
        build_id: build.id.to_string(),
        status: build_status(build.status),
        logs: entries.iter().map(|entry| entry.message.clone()).collect(),
        reason: build.reason.map(|message| api::BuildReason {
            message,
            step: None,
            log_entries: entries.iter().filter(|entry| entry.level == "error").cloned().collect(),
        }),
        log_entries: entries,
    }
}
