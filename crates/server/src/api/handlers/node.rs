//! The node itself: health, teams, nodes, counters, the document.

use crate::{
    api::State,
    error::{ApiError, Result},
};
use aenv_api_types as api;
use aenv_node::{control::Stats, model::Principal};
use axum::{
    Extension,
    extract::{ConnectInfo, Path, Request, State as Extract},
    response::{IntoResponse, Response},
};
use http::{StatusCode, header};
use std::net::SocketAddr;

const VERSION: &str = env!("CARGO_PKG_VERSION");
type Who = Extension<Principal>;

/// Whether the node can serve. Needs no key.
#[utoipa::path(get, path = "/health", tag = "node", security(()),
    responses((status = 200, body = api::Health), (status = 503, body = api::ErrorBody)))]
pub(in crate::api) async fn health(Extract(state): Extract<State>) -> Result<axum::Json<api::Health>> {
    match state.control.health().await {
        Ok(_) => Ok(axum::Json(api::Health { status: "ok".to_owned(), version: VERSION.to_owned() })),
        Err(error) => Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            api::ErrorCode::SandboxUnavailable,
            format!("the node can't serve: {error}"),
        )),
    }
}

/// The team of this key.
#[utoipa::path(get, path = "/teams", tag = "node", responses((status = 200, body = [api::Team]), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn teams(who: Who) -> axum::Json<Vec<api::Team>> {
    let name = who.0.team;
    axum::Json(vec![api::Team { team_id: name.clone(), name, is_default: true, api_key: String::new() }])
}

async fn summary(state: &State) -> api::NodeSummary {
    let stats = state.control.stats();
    let of = |names: &[&str]| {
        stats.sandboxes.iter().filter(|(name, _)| names.contains(name)).map(|(_, count)| count).sum()
    };
    api::NodeSummary {
        node_id: state.options.node_name.clone(),
        status: if state.control.health().await.is_ok() { "ready" } else { "unhealthy" }.to_owned(),
        version: VERSION.to_owned(),
        sandbox_count: of(&["creating", "running", "pausing", "resuming", "snapshotting", "forking"]),
        sandbox_starting_count: of(&["creating", "resuming"]),
    }
}

/// The nodes: this one.
#[utoipa::path(get, path = "/nodes", tag = "node", responses((status = 200, body = [api::NodeSummary]), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn nodes(Extract(state): Extract<State>) -> axum::Json<Vec<api::NodeSummary>> {
    axum::Json(vec![summary(&state).await])
}

/// One node.
#[utoipa::path(get, path = "/nodes/{nodeID}", tag = "node", params(("nodeID" = String, Path)),
    responses((status = 200, body = api::NodeSummary), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn node(
    Extract(state): Extract<State>,
    id: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Result<axum::Json<api::NodeSummary>> {
    match id {
        Ok(Path(id)) if id == state.options.node_name => Ok(axum::Json(summary(&state).await)),
        _ => Err(ApiError::new(
            StatusCode::NOT_FOUND,
            api::ErrorCode::RouteNotFound,
            format!("no such node; this server is '{}'", state.options.node_name),
        )),
    }
}

/// Counters of this node.
#[utoipa::path(get, path = "/aenv/v1/node", tag = "aenv", responses((status = 200, body = api::NodeStats), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn stats(Extract(state): Extract<State>) -> axum::Json<api::NodeStats> {
    let Stats { sandboxes, ended, warm, phases, memory_promised_mib, memory_limit_mib } =
        state.control.stats();
    axum::Json(api::NodeStats {
        node_id: state.options.node_name.clone(),
        version: VERSION.to_owned(),
        sandboxes: sandboxes.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        ended: ended.into_iter().collect(),
        warm: warm.into_iter().collect(),
        memory_promised_mb: memory_promised_mib,
        memory_limit_mb: memory_limit_mib,
        phases: phases
            .into_iter()
            .map(|phase| api::PhaseTotal {
                operation: phase.operation.to_owned(),
                phase: phase.phase.to_owned(),
                count: phase.count,
                sum_seconds: phase.sum,
            })
            .collect(),
    })
}

/// The OpenAPI document.
#[utoipa::path(get, path = "/openapi.json", tag = "node", security(()), responses((status = 200, description = "this document")))]
pub(in crate::api) async fn openapi() -> Response {
    axum::Json(crate::openapi()).into_response()
}

/// Prometheus metrics. From this machine without a key, from elsewhere with one: they name templates and tell load.
#[utoipa::path(get, path = "/metrics", tag = "node", security((), ("apiKey" = [])),
    responses((status = 200, description = "OpenMetrics text"), (status = 401, body = api::ErrorBody)))]
pub(in crate::api) async fn metrics(Extract(state): Extract<State>, request: Request) -> Result<Response> {
    let local = request
        .extensions()
        .get::<ConnectInfo<SocketAddr>>()
        .is_some_and(|ConnectInfo(peer)| peer.ip().to_canonical().is_loopback());
    // A proxy on this machine speaks for others.
    let forwarded =
        request.headers().contains_key("x-forwarded-for") || request.headers().contains_key("forwarded");
    if !local || forwarded {
        state.keys.authenticate(&*state.control, request.headers()).await?;
    }
    let text = state.metrics.encode(&state.control.stats()).map_err(|error| {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            api::ErrorCode::InternalServerError,
            error.to_string(),
        )
    })?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
