//! Templates: lists, names, builds, and making one from an image.

use super::{page, sandboxes::next_token};
use crate::{
    api::{
        State, check,
        extract::{BuildPath, Json, Query, TemplatePath},
        wire,
    },
    error::{ApiError, Result},
};
use aenv_api_types as api;
use aenv_node::model::{
    Build, BuildId, DEFAULT_DISK_MIB, DEFAULT_MEMORY_MIB, DEFAULT_VCPUS, Principal, PullTemplate, TemplateId,
};
use axum::{Extension, extract::State as Extract, response::Response};
use http::StatusCode;

const MAX_UNPAGED: usize = 5_000;
const MAX_BUILD_LOGS: usize = 100;
/// Registries give out tokens of some kilobytes as passwords.
const MAX_CREDENTIAL: usize = 16 << 10;

type Who = Extension<Principal>;

/// List templates, newest first, without pages.
#[utoipa::path(get, path = "/templates", tag = "templates",
    params(("teamID" = Option<String>, Query, description = "ignored: a key belongs to one team")),
    responses((status = 200, body = [api::Template]), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn list(
    Extract(state): Extract<State>,
    who: Who,
) -> Result<axum::Json<Vec<api::Template>>> {
    let mut found = Vec::new();
    let mut token = None;
    loop {
        let page = state.control.templates(&who, 100, token).await?;
        found.extend(page.items.into_iter().map(wire::template));
        match page.next {
            Some(_) if found.len() >= MAX_UNPAGED => {
                return Err(ApiError::invalid(format!(
                    "there are more than {MAX_UNPAGED} templates; page through them with GET /v2/templates"
                )));
            }
            Some(next) => token = Some(next),
            None => return Ok(axum::Json(found)),
        }
    }
}

/// List templates, newest first, in pages.
#[utoipa::path(get, path = "/v2/templates", tag = "templates",
    params(("limit" = Option<u32>, Query, minimum = 1, maximum = 100), ("nextToken" = Option<String>, Query)),
    responses((status = 200, body = [api::Template]), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn list_v2(
    Extract(state): Extract<State>,
    who: Who,
    query: Query,
) -> Result<Response> {
    let limit = query.int("limit", 1..=100)?.unwrap_or(100);
    let found = state.control.templates(&who, limit, next_token(&query)?).await?;
    let items: Vec<_> = found.items.into_iter().map(wire::template).collect();
    Ok(page(&items, found.next.as_deref()))
}

/// One template with its build.
#[utoipa::path(get, path = "/templates/{templateID}", tag = "templates",
    params(("templateID" = String, Path, description = "id, name, name:tag or ns/name, percent-encoded in one segment")),
    responses((status = 200, body = api::TemplateDetail), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn get(
    Extract(state): Extract<State>,
    who: Who,
    TemplatePath(reference): TemplatePath,
) -> Result<axum::Json<api::TemplateDetail>> {
    Ok(axum::Json(wire::template_detail(state.control.template(&who, &reference).await?)))
}

/// Delete a template. Running sandboxes are not disturbed.
#[utoipa::path(delete, path = "/templates/{templateID}", tag = "templates",
    params(("templateID" = String, Path, description = "id, name, name:tag or ns/name, percent-encoded in one segment")),
    responses((status = 204), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn delete(
    Extract(state): Extract<State>,
    who: Who,
    TemplatePath(reference): TemplatePath,
) -> Result<StatusCode> {
    state.control.delete_template(&who, &reference).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The template a name stands for; 403 when it is another team's.
#[utoipa::path(get, path = "/templates/aliases/{alias}", tag = "templates", params(("alias" = String, Path)),
    responses((status = 200, body = api::TemplateAlias), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn alias(
    Extract(state): Extract<State>,
    who: Who,
    TemplatePath(alias): TemplatePath,
) -> Result<axum::Json<api::TemplateAlias>> {
    let template = state.control.template(&who, &alias).await?;
    Ok(axum::Json(api::TemplateAlias { template_id: template.id.into(), public: false }))
}

/// State of a build with its log from an offset.
#[utoipa::path(get, path = "/templates/{templateID}/builds/{buildID}/status", tag = "templates",
    params(
        ("templateID" = String, Path), ("buildID" = String, Path),
        ("logsOffset" = Option<u32>, Query), ("limit" = Option<u32>, Query, minimum = 1, maximum = 100),
        ("level" = Option<String>, Query, description = "at least debug, info, warn or error")),
    responses((status = 200, body = api::BuildInfo), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn build_status(
    Extract(state): Extract<State>,
    who: Who,
    BuildPath(template, build): BuildPath,
    query: Query,
) -> Result<axum::Json<api::BuildInfo>> {
    let offset = query.int("logsOffset", 0..=usize::MAX >> 1)?.unwrap_or(0);
    let limit = query.int("limit", 1..=MAX_BUILD_LOGS)?.unwrap_or(MAX_BUILD_LOGS);
    let least = level(&query)?;
    let build = find(&state, &who, &template, &build, offset, limit).await?;
    Ok(axum::Json(wire::build_info(build, least)))
}

/// Log of a build.
#[utoipa::path(get, path = "/templates/{templateID}/builds/{buildID}/logs", tag = "templates",
    params(
        ("templateID" = String, Path), ("buildID" = String, Path),
        ("cursor" = Option<i64>, Query, description = "unix milliseconds"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100),
        ("direction" = Option<String>, Query, description = "forward (default) or backward"),
        ("level" = Option<String>, Query, description = "at least debug, info, warn or error"),
        ("source" = Option<String>, Query, description = "temporary or persistent; both are the same here")),
    responses((status = 200, body = api::BuildLogs), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn build_logs(
    Extract(state): Extract<State>,
    who: Who,
    BuildPath(template, build): BuildPath,
    query: Query,
) -> Result<axum::Json<api::BuildLogs>> {
    /// The node keeps no more lines of a build than this.
    const ALL: usize = 10_000;
    let limit = query.int("limit", 1..=MAX_BUILD_LOGS)?.unwrap_or(MAX_BUILD_LOGS);
    let cursor = query.int("cursor", 0..=i64::MAX)?;
    let backward = query.word("direction", &[("forward", false), ("backward", true)])?.unwrap_or(false);
    let least = level(&query)?;
    query.word("source", &[("temporary", ()), ("persistent", ())])?;
    let build = find(&state, &who, &template, &build, 0, ALL).await?;
    let wanted = build.log.iter().filter(|entry| wire::rank(&entry.level) >= least).filter(|entry| {
        let at = entry.at.as_millisecond();
        cursor.is_none_or(|cursor| if backward { at <= cursor } else { at >= cursor })
    });
    let logs = if backward {
        wanted.rev().take(limit).map(wire::build_log_entry).collect()
    } else {
        wanted.take(limit).map(wire::build_log_entry).collect()
    };
    Ok(axum::Json(api::BuildLogs { logs }))
}

fn level(query: &Query) -> Result<u8> {
    let levels = [("debug", 0), ("info", 1), ("warn", 2), ("error", 3)];
    Ok(query.word("level", &levels)?.unwrap_or(0))
}

async fn find(
    state: &State,
    who: &Principal,
    template: &str,
    build: &BuildId,
    offset: usize,
    limit: usize,
) -> Result<Build> {
    let id: TemplateId = match template.parse() {
        Ok(id) => id,
        Err(_) => state.control.template(who, template).await?.id,
    };
    Ok(state.control.build(who, &id, build, offset, limit).await?)
}

/// Make a template from an image. Follow it at `/templates/{templateID}/builds/{buildID}/status`.
#[utoipa::path(post, path = "/aenv/v1/templates/pull", tag = "aenv", request_body = api::PullTemplate,
    responses((status = 202, body = api::PullAccepted), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn pull(
    Extract(state): Extract<State>,
    who: Who,
    Json(request): Json<api::PullTemplate>,
) -> Result<(StatusCode, axum::Json<api::PullAccepted>)> {
    let image = request.image;
    let image_ok =
        (1..=4096).contains(&image.len()) && !image.chars().any(|c| c.is_control() || c.is_whitespace());
    if !image_ok {
        return Err(ApiError::invalid(
            "image: must be an image reference (registry/name:tag, oci:DIR, oci-archive:FILE, docker-archive:FILE)",
        ));
    }
    check::template_name("name", &request.name)?;
    let memory_mib = request.memory_mb.map_or(Ok(DEFAULT_MEMORY_MIB), check::memory)?;
    let credential_ok = |text: &Option<String>| {
        text.as_ref()
            .is_none_or(|text| (1..=MAX_CREDENTIAL).contains(&text.len()) && !text.contains(char::is_control))
    };
    if !credential_ok(&request.username) || !credential_ok(&request.password) {
        return Err(ApiError::invalid(format!(
            "username: it and the password must each have 1 to {MAX_CREDENTIAL} bytes without control characters"
        )));
    }
    let credentials = match (request.username, request.password) {
        (Some(username), Some(password)) => Some((username, password)),
        (None, None) => None,
        _ => return Err(ApiError::invalid("username: give both username and password, or neither")),
    };
    let build = state
        .control
        .pull(
            &who,
            PullTemplate {
                image,
                name: request.name.clone(),
                vcpus: request.cpu_count.map_or(Ok(DEFAULT_VCPUS), check::vcpus)?,
                memory_mib,
                disk_mib: request.disk_size_mb.map_or(Ok(DEFAULT_DISK_MIB), check::disk)?,
                force: request.force.unwrap_or(false),
                credentials,
            },
        )
        .await?;
    let accepted = api::PullAccepted {
        template_id: build.template.into(),
        build_id: build.id.0,
        status: wire::build_status(build.status),
        name: request.name,
    };
    Ok((StatusCode::ACCEPTED, axum::Json(accepted)))
}
