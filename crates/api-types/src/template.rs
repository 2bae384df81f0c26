//! Templates, their builds, and making one from an image.

use crate::BuildLogEntry;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// Where a build is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = TemplateBuildStatus)]
pub enum BuildStatus {
    /// Accepted.
    Waiting,
    /// Under way.
    Building,
    /// Usable.
    Ready,
    /// Failed.
    Error,
}

/// A template in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Its id.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Build that new sandboxes use; the nil UUID before one is ready.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// Virtual CPUs.
    pub cpu_count: u32,
    /// Memory, MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Virtual disk, MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u32,
    /// Whether other teams may use it.
    pub public: bool,
    /// Names without namespace.
    pub aliases: Vec<String>,
    /// Names, with namespace where they have one.
    pub names: Vec<String>,
    /// Begun.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// Last changed.
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Timestamp,
    /// Always null: keys belong to teams. The Python SDK insists on the field.
    #[schema(value_type = Option<Object>)]
    pub created_by: Option<serde_json::Value>,
    /// Last start.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub last_spawned_at: Option<Timestamp>,
    /// Sandboxes started from it.
    pub spawn_count: u64,
    /// Builds so far.
    pub build_count: u32,
    /// Version its guest agent advertises.
    pub envd_version: String,
    /// State of the newest build.
    pub build_status: BuildStatus,
    /// Image it came from (an addition of ours).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
}

/// A template with its builds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TemplateDetail {
    /// The template.
    #[serde(flatten)]
    pub template: Template,
    /// Its builds, newest first.
    pub builds: Vec<TemplateBuild>,
}

/// A build in a template's detail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateBuild {
    /// Its id.
    #[serde(rename = "buildID")]
    #[schema(value_type = String, format = "uuid")]
    pub build_id: Uuid,
    /// State.
    pub status: BuildStatus,
    /// Begun.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// Last changed.
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Timestamp,
    /// Ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Timestamp>,
    /// Virtual CPUs.
    pub cpu_count: u32,
    /// Memory, MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Virtual disk, MiB.
    #[serde(rename = "diskSizeMB", default, skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<u32>,
    /// Version its guest agent advertises.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_version: Option<String>,
}

/// `GET /templates/aliases/{alias}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TemplateAlias {
    /// The template it names.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Whether other teams may use it.
    pub public: bool,
}

/// `GET /templates/{templateID}/builds/{buildID}/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = TemplateBuildInfo)]
pub struct BuildInfo {
    /// Template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// State.
    pub status: BuildStatus,
    /// Lines from the asked offset.
    pub logs: Vec<String>,
    /// The same, structured.
    pub log_entries: Vec<BuildLogEntry>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<BuildReason>,
}

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = BuildStatusReason)]
pub struct BuildReason {
    /// In words.
    pub message: String,
    /// Step it failed in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Lines that show it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log_entries: Vec<BuildLogEntry>,
}

/// `GET /templates/{templateID}/builds/{buildID}/logs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = TemplateBuildLogs)]
pub struct BuildLogs {
    /// Lines.
    pub logs: Vec<BuildLogEntry>,
}

/// `POST /aenv/v1/templates/pull`: make a template from an image.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PullTemplate {
    /// Image reference: registry, `oci:DIR[:tag]`, `oci-archive:FILE`, `docker-archive:FILE`.
    pub image: String,
    /// Name under which sandboxes are made from it.
    pub name: String,
    /// Virtual CPUs, 1–32. Default 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_count: Option<i64>,
    /// Memory in MiB, 128–65536, even. Default 512.
    #[serde(rename = "memoryMB", default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<i64>,
    /// Virtual disk in MiB, 256–1048576. Default 10240.
    #[serde(rename = "diskSizeMB", default, skip_serializing_if = "Option::is_none")]
    pub disk_size_mb: Option<i64>,
    /// Make it anew although the same image was pulled under this name before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
    /// Registry user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Registry password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
}

/// Written by hand so that a password never reaches a log.
impl std::fmt::Debug for PullTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PullTemplate")
            .field("image", &self.image)
            .field("name", &self.name)
            .field("cpu_count", &self.cpu_count)
            .field("memory_mb", &self.memory_mb)
            .field("disk_size_mb", &self.disk_size_mb)
            .field("force", &self.force)
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

/// Answer to a pull: follow it at `/templates/{templateID}/builds/{buildID}/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PullAccepted {
    /// Template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Build.
    #[serde(rename = "buildID")]
    #[schema(value_type = String, format = "uuid")]
    pub build_id: Uuid,
    /// State; `ready` when the same image was pulled under this name before.
    pub status: BuildStatus,
    /// Name it was asked for by.
    pub name: String,
}
