//! The life of sandboxes: create, list, look at, pause, resume, extend, end.

use super::page;
use crate::{
    api::{
        State, check,
        extract::{Json, MaybeJson, Query, SandboxPath, idempotency_key, single},
        wire,
    },
    error::{ApiError, Result},
};
use aenv_api_types as api;
use aenv_node::{
    control,
    model::{self, CreateSandbox, OnTimeout, Principal, SandboxId, SandboxQuery},
};
use axum::{Extension, extract::State as Extract, response::Response};
use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use std::collections::BTreeMap;

const DEFAULT_TTL_V1: i64 = 15;
const DEFAULT_TTL_V2: i64 = 300;
const DEFAULT_LEASE: i64 = 15;
/// The old list has no pages, so this bounds what it costs.
const MAX_UNPAGED: usize = 5_000;

type Who = Extension<Principal>;

/// Start a sandbox (first generation: 15 s by default, `secure` honoured).
#[utoipa::path(post, path = "/sandboxes", tag = "sandboxes", request_body = api::NewSandbox,
    params(("Idempotency-Key" = Option<String>, Header, description = "[a-z0-9-]{1,255}: a retry with the same key finds the sandbox made before")),
    responses((status = 201, body = api::Sandbox), (status = "4XX", body = api::ErrorBody), (status = "5XX", body = api::ErrorBody)))]
pub(in crate::api) async fn create(
    Extract(state): Extract<State>,
    who: Who,
    headers: HeaderMap,
    Json(new): Json<api::NewSandbox>,
) -> Result<(StatusCode, axum::Json<api::Sandbox>)> {
    let secure = new.secure.unwrap_or(true);
    start(&state, &who, &headers, new, DEFAULT_TTL_V1, secure).await
}

/// Start a sandbox (300 s by default, always secured).
#[utoipa::path(post, path = "/v2/sandboxes", tag = "sandboxes", request_body = api::NewSandbox,
    params(("Idempotency-Key" = Option<String>, Header, description = "[a-z0-9-]{1,255}: a retry with the same key finds the sandbox made before")),
    responses((status = 201, body = api::Sandbox), (status = "4XX", body = api::ErrorBody), (status = "5XX", body = api::ErrorBody)))]
pub(in crate::api) async fn create_v2(
    Extract(state): Extract<State>,
    who: Who,
    headers: HeaderMap,
    Json(new): Json<api::NewSandbox>,
) -> Result<(StatusCode, axum::Json<api::Sandbox>)> {
    start(&state, &who, &headers, new, DEFAULT_TTL_V2, true).await
}

async fn start(
    state: &State,
    who: &Principal,
    headers: &HeaderMap,
    new: api::NewSandbox,
    default_ttl: i64,
    secure: bool,
) -> Result<(StatusCode, axum::Json<api::Sandbox>)> {
    check::template_reference("templateID", &new.template_id)?;
    let ttl = check::ttl("timeout", new.timeout.unwrap_or(default_ttl))?;
    let metadata = new.metadata.clone().unwrap_or_default();
    check::labels("metadata", &metadata)?;
    let env_vars = new.env_vars.clone().unwrap_or_default();
    check::env_vars("envVars", &env_vars)?;
    let idempotency_key = idempotency_key(headers)?;
    // Unset is not false: nobody loses a sandbox by saying nothing.
    let on_timeout = if new.auto_pause == Some(false) { OnTimeout::Kill } else { OnTimeout::Pause };
    let auto_resume = new.auto_resume.as_ref().is_some_and(|resume| resume.enabled);
    if auto_resume && on_timeout == OnTimeout::Kill {
        return Err(ApiError::invalid("autoResume: cannot be enabled with autoPause: false"));
    }
    let network = check::network(&new, secure)?;
    check::available(&new)?;
    let request = CreateSandbox {
        template: new.template_id,
        vcpus: new.cpu_count.map(check::vcpus).transpose()?,
        memory_mib: new.memory_mb.map(check::memory).transpose()?,
        disk_mib: new.disk_size_mb.map(check::disk).transpose()?,
        ttl,
        on_timeout,
        auto_resume,
        secure,
        cold: wants_cold(headers)?,
        allow_internet_access: network.internet,
        allow_public_traffic: network.public_traffic,
        mask_request_host: network.mask_request_host,
        metadata,
        env_vars,
        idempotency_key,
    };
    let sandbox = state.control.create(who, request).await?;
    tracing::Span::current().record("sandbox_id", sandbox.id.as_str());
    Ok((StatusCode::CREATED, created(state, sandbox)))
}

/// `X-Aenv-Start: cold` asks for a restored machine instead of one that waits warm.
fn wants_cold(headers: &HeaderMap) -> Result<bool> {
    match single(headers, api::START_HEADER)?.map(axum::http::HeaderValue::as_bytes) {
        None => Ok(false),
        Some(b"cold") => Ok(true),
        Some(_) => Err(ApiError::invalid("X-Aenv-Start: the only value is 'cold'")),
    }
}

fn created(state: &State, sandbox: model::Sandbox) -> axum::Json<api::Sandbox> {
    axum::Json(wire::created(sandbox, &state.options.node_name, state.options.domain.as_deref()))
}

/// List running sandboxes, newest first, without pages.
#[utoipa::path(get, path = "/sandboxes", tag = "sandboxes",
    params(("metadata" = Option<String>, Query, description = "k=v&k=v, keys and values percent-encoded once more; all must match")),
    responses((status = 200, body = [api::ListedSandbox]), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn list(
    Extract(state): Extract<State>,
    who: Who,
    query: Query,
) -> Result<axum::Json<Vec<api::ListedSandbox>>> {
    let mut filter = SandboxQuery {
        metadata: metadata_filter(&query)?,
        states: wire::states(api::SandboxState::Running).to_vec(),
        limit: 100,
        ..SandboxQuery::default()
    };
    let mut found = Vec::new();
    loop {
        let page = state.control.list(&who, filter.clone()).await?;
        found.extend(page.items.into_iter().map(|sandbox| wire::listed(sandbox, &state.options.node_name)));
        match page.next {
            Some(_) if found.len() >= MAX_UNPAGED => {
                return Err(ApiError::invalid(format!(
                    "more than {MAX_UNPAGED} sandboxes are running; page through them with GET /v2/sandboxes"
                )));
            }
            Some(next) => filter.token = Some(next),
            None => return Ok(axum::Json(found)),
        }
    }
}

/// List sandboxes, newest first, in pages: the next page's token is in the header `x-next-token`, empty on the last.
#[utoipa::path(get, path = "/v2/sandboxes", tag = "sandboxes",
    params(
        ("metadata" = Option<String>, Query, description = "k=v&k=v, keys and values percent-encoded once more; all must match"),
        ("state" = Option<String>, Query, description = "running, paused or both, comma-separated"),
        ("order" = Option<String>, Query, description = "asc or desc (default) by start"),
        ("startedAfter" = Option<String>, Query, description = "RFC 3339, inclusive"),
        ("template" = Option<String>, Query, description = "template id or name"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 100),
        ("nextToken" = Option<String>, Query)),
    responses((status = 200, body = [api::ListedSandbox]), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn list_v2(
    Extract(state): Extract<State>,
    who: Who,
    query: Query,
) -> Result<Response> {
    let mut states = Vec::new();
    for word in query.list("state")? {
        states.extend_from_slice(match word {
            "running" => wire::states(api::SandboxState::Running),
            "paused" => wire::states(api::SandboxState::Paused),
            _ => return Err(ApiError::invalid("state: must be running, paused or both, comma-separated")),
        });
    }
    let template = query.filled("template")?;
    if let Some(template) = template {
        check::template_reference("template", template)?;
    }
    let filter = SandboxQuery {
        metadata: metadata_filter(&query)?,
        states,
        started_after: query
            .filled("startedAfter")?
            .map(|text| timestamp("startedAfter", text))
            .transpose()?,
        template: template.map(str::to_owned),
        ascending: query.word("order", &[("asc", true), ("desc", false)])?.unwrap_or(false),
        limit: query.int("limit", 1..=100)?.unwrap_or(100),
        token: next_token(&query)?,
    };
    let found = state.control.list(&who, filter).await?;
    let items: Vec<_> =
        found.items.into_iter().map(|sandbox| wire::listed(sandbox, &state.options.node_name)).collect();
    Ok(page(&items, found.next.as_deref()))
}

pub(super) fn next_token(query: &Query) -> Result<Option<String>> {
    match query.text("nextToken")? {
        Some(token) if token.len() > 1024 || !token.bytes().all(|b| b.is_ascii_graphic()) => {
            Err(ApiError::invalid("nextToken: not a token this server gave out"))
        }
        token => Ok(token.map(str::to_owned)),
    }
}

fn timestamp(field: &str, text: &str) -> Result<Timestamp> {
    // A '+' that was not percent-encoded arrives as a space.
    text.replace(' ', "+").parse().map_err(|_| {
        ApiError::invalid(format!("{field}: must be a time as in RFC 3339, 2026-01-31T12:00:00Z"))
    })
}

fn metadata_filter(query: &Query) -> Result<BTreeMap<String, String>> {
    let Some(text) = query.text("metadata")? else { return Ok(BTreeMap::new()) };
    let decode = |part: &str| {
        percent_encoding::percent_decode_str(part)
            .decode_utf8()
            .map(std::borrow::Cow::into_owned)
            .map_err(|_| ApiError::invalid("metadata: not valid UTF-8 when percent-decoded"))
    };
    if text.split('&').any(|pair| !pair.contains('=')) {
        return Err(ApiError::invalid(
            "metadata: must be key=value pairs joined by '&', all of it percent-encoded (metadata=k%3Dv)",
        ));
    }
    let mut labels = BTreeMap::new();
    for (key, value) in url::form_urlencoded::parse(text.as_bytes()) {
        if key.contains('\u{fffd}') || value.contains('\u{fffd}') {
            return Err(ApiError::invalid("metadata: not valid UTF-8 when percent-decoded"));
        }
        if labels.insert(decode(&key)?, decode(&value)?).is_some() {
            return Err(ApiError::invalid(
                "metadata: a key is given twice, and nothing has two values for one",
            ));
        }
    }
    check::labels("metadata", &labels)?;
    Ok(labels)
}

/// A live sandbox of the team; an ended one is an error that says why it ended.
pub(super) async fn live(state: &State, who: &Principal, id: &SandboxId) -> Result<model::Sandbox> {
    let sandbox = state.control.get(who, id).await?;
    if sandbox.state == model::State::Dead {
        let cause = sandbox.tombstone.as_ref().map_or_else(|| "unknown".to_owned(), wire::ended);
        return Err(control::Error::SandboxEnded { id: id.to_string(), cause }.into());
    }
    Ok(sandbox)
}

/// One sandbox.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 200, body = api::SandboxDetail), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn get(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
) -> Result<axum::Json<api::SandboxDetail>> {
    let sandbox = live(&state, &who, &id).await?;
    Ok(axum::Json(wire::detail(sandbox, &state.options.node_name, state.options.domain.as_deref())))
}

/// One sandbox with its phase timings, also after its end.
#[utoipa::path(get, path = "/aenv/v1/sandboxes/{sandboxID}", tag = "aenv", params(("sandboxID" = String, Path)),
    responses((status = 200, body = api::InspectedSandbox), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn inspect(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
) -> Result<axum::Json<api::InspectedSandbox>> {
    let sandbox = state.control.get(&who, &id).await?;
    Ok(axum::Json(wire::inspected(sandbox, &state.options.node_name, state.options.domain.as_deref())))
}

/// End a sandbox, running or paused.
#[utoipa::path(delete, path = "/sandboxes/{sandboxID}", tag = "sandboxes", params(("sandboxID" = String, Path)),
    responses((status = 204), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn kill(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode> {
    state.control.kill(&who, &id).await?;
    state.proxy.sever(&id);
    Ok(StatusCode::NO_CONTENT)
}

/// Pause a sandbox.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/pause", tag = "sandboxes", params(("sandboxID" = String, Path)),
    request_body = Option<api::PauseSandbox>,
    responses((status = 204), (status = 409, description = "already paused", body = api::ErrorBody), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn pause(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    MaybeJson(request): MaybeJson<api::PauseSandbox>,
) -> Result<StatusCode> {
    if request.require_healthy_guest == Some(true) {
        let sandbox = live(&state, &who, &id).await?;
        if sandbox.state == model::State::Running && !state.proxy.agent_answers(&id).await {
            return Err(control::Error::Conflict(format!(
                "sandbox {id} was not paused: its agent does not answer and requireHealthyGuest is set"
            ))
            .into());
        }
    }
    state.control.pause(&who, &id, request.memory.unwrap_or(true)).await?;
    state.proxy.sever(&id);
    Ok(StatusCode::NO_CONTENT)
}

/// Resume a paused sandbox; 409 when it runs.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/resume", tag = "sandboxes", params(("sandboxID" = String, Path)),
    request_body = Option<api::ResumeSandbox>,
    responses((status = 201, body = api::Sandbox), (status = 409, description = "it runs", body = api::ErrorBody), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn resume(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    MaybeJson(request): MaybeJson<api::ResumeSandbox>,
) -> Result<(StatusCode, axum::Json<api::Sandbox>)> {
    let ttl = check::ttl("timeout", request.timeout.unwrap_or(DEFAULT_TTL_V1))?;
    refuse_cold(&state, &who, &id, request.memory).await?;
    let on_timeout = request.auto_pause.map(|pause| if pause { OnTimeout::Pause } else { OnTimeout::Kill });
    let sandbox = state.control.resume(&who, &id, ttl, on_timeout).await?;
    Ok((StatusCode::CREATED, created(&state, sandbox)))
}

/// Make a sandbox running: 200 when it was, 201 when it was resumed.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/connect", tag = "sandboxes", params(("sandboxID" = String, Path)),
    request_body = api::ConnectSandbox,
    responses((status = 200, body = api::Sandbox), (status = 201, body = api::Sandbox), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn connect(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    Json(request): Json<api::ConnectSandbox>,
) -> Result<(StatusCode, axum::Json<api::Sandbox>)> {
    let timeout = request.timeout.ok_or_else(|| ApiError::invalid("timeout: is missing"))?;
    reconnect(&state, &who, &id, timeout, request.memory).await
}

/// Make a sandbox running: 200 when it was, 201 when it was resumed. The timeout defaults to 300 s.
#[utoipa::path(post, path = "/v2/sandboxes/{sandboxID}/connect", tag = "sandboxes", params(("sandboxID" = String, Path)),
    request_body = Option<api::ConnectSandbox>,
    responses((status = 200, body = api::Sandbox), (status = 201, body = api::Sandbox), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn connect_v2(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    MaybeJson(request): MaybeJson<api::ConnectSandbox>,
) -> Result<(StatusCode, axum::Json<api::Sandbox>)> {
    reconnect(&state, &who, &id, request.timeout.unwrap_or(DEFAULT_TTL_V2), request.memory).await
}

async fn reconnect(
    state: &State,
    who: &Principal,
    id: &SandboxId,
    timeout: i64,
    memory: Option<bool>,
) -> Result<(StatusCode, axum::Json<api::Sandbox>)> {
    let ttl = check::ttl("timeout", timeout)?;
    refuse_cold(state, who, id, memory).await?;
    let connected = state.control.connect(who, id, ttl).await?;
    let status = if connected.resumed { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, created(state, connected.sandbox)))
}

/// Resuming without memory is refused, never silently turned into a resume with memory.
async fn refuse_cold(state: &State, who: &Principal, id: &SandboxId, memory: Option<bool>) -> Result<()> {
    if memory == Some(false) && live(state, who, id).await?.state != model::State::Running {
        return Err(ApiError::later("resuming with memory: false"));
    }
    Ok(())
}

/// Set the end of life to now + timeout; 0 ends it now.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/timeout", tag = "sandboxes", params(("sandboxID" = String, Path)),
    request_body = api::SetTimeout, responses((status = 204), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn set_timeout(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    Json(request): Json<api::SetTimeout>,
) -> Result<StatusCode> {
    let ttl = check::ttl_or_now("timeout", request.timeout)?;
    state.control.set_timeout(&who, &id, ttl).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Extend the life to now + duration, if that is later.
#[utoipa::path(post, path = "/sandboxes/{sandboxID}/refreshes", tag = "sandboxes", params(("sandboxID" = String, Path)),
    request_body = Option<api::RefreshSandbox>, responses((status = 204), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn refresh(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    MaybeJson(request): MaybeJson<api::RefreshSandbox>,
) -> Result<StatusCode> {
    let ttl = check::lease("duration", request.duration.unwrap_or(DEFAULT_LEASE))?;
    state.control.refresh(&who, &id, ttl).await?;
    Ok(StatusCode::NO_CONTENT)
}
