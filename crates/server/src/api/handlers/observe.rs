//! Metrics and logs of sandboxes.

use crate::{
    api::{
        State,
        extract::{Query, SandboxPath, sandbox_id},
        wire,
    },
    error::{ApiError, Result},
};
use aenv_api_types as api;
use aenv_node::{
    control,
    model::{LogQuery, Principal},
};
use axum::{Extension, extract::State as Extract};
use futures_util::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;

/// Seconds and milliseconds of the year 9999: `jiff` represents all of it.
const MAX_SECONDS: i64 = 253_402_207_200;
const MAX_MILLIS: i64 = MAX_SECONDS * 1000;
const MAX_BATCH: usize = 100;
const MAX_LOGS: usize = 1000;

type Who = Extension<Principal>;

fn seconds(query: &Query, name: &str) -> Result<Option<Timestamp>> {
    let value = query.int(name, 0..=MAX_SECONDS)?;
    value
        .map(Timestamp::from_second)
        .transpose()
        .map_err(|_| ApiError::invalid(format!("{name}: out of range")))
}

fn millis(query: &Query, name: &str) -> Result<Option<Timestamp>> {
    let value = query.int(name, 0..=MAX_MILLIS)?;
    value
        .map(Timestamp::from_millisecond)
        .transpose()
        .map_err(|_| ApiError::invalid(format!("{name}: out of range")))
}

/// Resource samples of a sandbox, oldest first.
#[utoipa::path(get, path = "/sandboxes/{sandboxID}/metrics", tag = "sandboxes",
    params(("sandboxID" = String, Path), ("start" = Option<i64>, Query, description = "unix seconds"), ("end" = Option<i64>, Query, description = "unix seconds")),
    responses((status = 200, body = [api::SandboxMetric]), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn metrics(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    query: Query,
) -> Result<axum::Json<Vec<api::SandboxMetric>>> {
    let (from, to) = (seconds(&query, "start")?, seconds(&query, "end")?);
    if let (Some(from), Some(to)) = (from, to)
        && from > to
    {
        return Err(ApiError::invalid("start: must not be after end"));
    }
    let samples = state.control.metrics(&who, &id, from, to).await?;
    Ok(axum::Json(samples.iter().map(wire::metric).collect()))
}

/// The latest sample of each of at most 100 sandboxes; those without one are left out.
#[utoipa::path(get, path = "/sandboxes/metrics", tag = "sandboxes",
    params(("sandbox_ids" = String, Query, description = "comma-separated, at most 100")),
    responses((status = 200, body = api::MetricsBatch), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn metrics_batch(
    Extract(state): Extract<State>,
    who: Who,
    query: Query,
) -> Result<axum::Json<api::MetricsBatch>> {
    let mut ids = Vec::new();
    let listed = query.list("sandbox_ids")?;
    if listed.is_empty() {
        return Err(ApiError::invalid("sandbox_ids: is missing"));
    }
    for text in listed {
        match sandbox_id(text) {
            Ok(id) => ids.push(id),
            Err(error) if error.status == http::StatusCode::NOT_FOUND => {}
            Err(_) => return Err(ApiError::invalid("sandbox_ids: must be sandbox ids, comma-separated")),
        }
        if ids.len() > MAX_BATCH {
            return Err(ApiError::invalid(format!("sandbox_ids: at most {MAX_BATCH}")));
        }
    }
    let sandboxes = stream::iter(ids)
        .map(|id| {
            let (state, who) = (&state, &who);
            async move {
                match state.control.metrics(who, &id, None, None).await {
                    Ok(samples) => Ok(samples.last().map(|sample| (id.to_string(), wire::metric(sample)))),
                    Err(control::Error::SandboxNotFound(_) | control::Error::SandboxEnded { .. }) => Ok(None),
                    Err(error) => Err(ApiError::from(error)),
                }
            }
        })
        .buffer_unordered(8)
        .try_filter_map(|sample| std::future::ready(Ok(sample)))
        .try_collect()
        .await?;
    Ok(axum::Json(api::MetricsBatch { sandboxes }))
}

/// Log lines of a sandbox (first generation).
#[utoipa::path(get, path = "/sandboxes/{sandboxID}/logs", tag = "sandboxes",
    params(("sandboxID" = String, Path), ("start" = Option<i64>, Query, description = "unix milliseconds"), ("limit" = Option<u32>, Query, minimum = 1, maximum = 1000)),
    responses((status = 200, body = api::LogsV1), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn logs(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    query: Query,
) -> Result<axum::Json<api::LogsV1>> {
    let filter = LogQuery {
        from: millis(&query, "start")?,
        limit: query.int("limit", 1..=MAX_LOGS)?.unwrap_or(MAX_LOGS),
        ..LogQuery::default()
    };
    let page = state.control.logs(&who, &id, filter).await?;
    let log_entries: Vec<_> = page.entries.into_iter().map(wire::log_entry).collect();
    let logs = log_entries
        .iter()
        .map(|entry| api::LogLine { timestamp: entry.timestamp, line: entry.message.clone() })
        .collect();
    Ok(axum::Json(api::LogsV1 { logs, log_entries }))
}

/// Log lines of a sandbox, filtered and in pages.
#[utoipa::path(get, path = "/v2/sandboxes/{sandboxID}/logs", tag = "sandboxes",
    params(
        ("sandboxID" = String, Path),
        ("cursor" = Option<String>, Query, description = "unix milliseconds, or a nextCursor"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 1000),
        ("direction" = Option<String>, Query, description = "forward (default) or backward"),
        ("level" = Option<String>, Query, description = "at least debug, info, warn or error"),
        ("search" = Option<String>, Query, description = "only lines that contain this")),
    responses((status = 200, body = api::LogsV2), (status = "4XX", body = api::ErrorBody)))]
pub(in crate::api) async fn logs_v2(
    Extract(state): Extract<State>,
    who: Who,
    SandboxPath(id): SandboxPath,
    query: Query,
) -> Result<axum::Json<api::LogsV2>> {
    let descending = query.word("direction", &[("forward", false), ("backward", true)])?.unwrap_or(false);
    let levels = [("debug", "debug"), ("info", "info"), ("warn", "warn"), ("error", "error")];
    let level = query.word("level", &levels)?.map(str::to_owned);
    let search = query.text("search")?;
    if search.is_some_and(|text| text.len() > 1024) {
        return Err(ApiError::invalid("search: at most 1024 bytes"));
    }
    let limit = query.int("limit", 1..=MAX_LOGS)?.unwrap_or(MAX_LOGS);
    // The SDKs' cursor is a time in milliseconds, ours whatever the node gave out.
    let cursor = query.text("cursor")?;
    let at = if cursor.is_some_and(|text| text.bytes().all(|b| b.is_ascii_digit())) {
        millis(&query, "cursor")?
    } else {
        None
    };
    if cursor.is_some_and(|text| text.len() > 1024) {
        return Err(ApiError::invalid("cursor: at most 1024 bytes"));
    }
    let filter = LogQuery {
        from: at.filter(|_| !descending),
        cursor: cursor.filter(|_| at.is_none()).map(str::to_owned),
        descending,
        level,
        search: search.map(str::to_owned),
        // Read backward from a time: the node has no upper bound, so take a whole page and cut it here.
        limit: if descending && at.is_some() { MAX_LOGS } else { limit },
    };
    let page = state.control.logs(&who, &id, filter).await?;
    let before = at.filter(|_| descending);
    let logs = page
        .entries
        .into_iter()
        .filter(|entry| before.is_none_or(|before| entry.at <= before))
        .take(limit)
        .map(wire::log_entry)
        .collect();
    Ok(axum::Json(api::LogsV2 { logs, next_cursor: page.next }))
}
