//! The control plane.

use super::{KEY, State};
use axum::{
    Json, Router,
    extract::{Path, Query, Request, State as Shared},
    http::{HeaderMap, StatusCode},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{delete, get, post},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, collections::HashMap, sync::Arc};

type App = Shared<Arc<State>>;

pub fn routes(state: Arc<State>) -> Router {
    Router::new()
        .route("/v2/sandboxes", post(create).get(list))
        .route("/sandboxes/{id}", delete(kill).get(detail))
        .route("/aenv/v1/sandboxes/{id}", get(detail))
        .route("/sandboxes/{id}/pause", post(pause))
        .route("/sandboxes/{id}/connect", post(connect))
        .route("/sandboxes/{id}/timeout", post(timeout))
        .route("/sandboxes/{id}/metrics", get(metrics))
        .route("/v2/sandboxes/{id}/logs", get(logs))
        .route("/v2/templates", get(templates))
        .route("/templates/{id}", get(template).delete(template))
        .route("/templates/{id}/builds/{build}/status", get(build))
        .route("/aenv/v1/templates/pull", post(pull))
        .layer(middleware::from_fn_with_state(state.clone(), door))
        .with_state(state)
}

async fn door(Shared(state): App, request: Request, next: Next) -> Response {
    state.seen.lock().expect("lock").push(format!("{} {}", request.method(), request.uri()));
    if let Some((status, message)) = *state.refuse.lock().expect("lock") {
        let headers = [("retry-after", "7")];
        return (StatusCode::from_u16(status).expect("a status"), headers, error(status, message))
            .into_response();
    }
    if request.headers().get("x-api-key").is_none_or(|key| key != KEY) {
        return (StatusCode::UNAUTHORIZED, error(401, "the key is not known")).into_response();
    }
    next.run(request).await
}

fn error(code: u16, message: &str) -> Json<Value> {
    Json(json!({ "code": code, "message": message }))
}

fn not_found(id: &str) -> Response {
    (StatusCode::NOT_FOUND, error(404, &format!("sandbox {id} was not found"))).into_response()
}

fn full(id: &str, state: &str, labels: &BTreeMap<String, String>) -> Value {
    json!({
        "sandboxID": id, "templateID": "tttttttttttttttttttt", "alias": "base", "clientID": "here", "state": state,
        "startedAt": "2026-01-02T03:04:05Z", "endAt": "2126-01-02T03:04:05Z", "envdVersion": "0.6.13", "cpuCount": 2,
        "memoryMB": 512, "diskSizeMB": 1024, "metadata": labels, "envdAccessToken": format!("token-{id}"),
        "lifecycleState": state, "buildID": "0199", "phases": [{"name": "restore", "micros": 1234}],
    })
}

async fn create(Shared(state): App, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    if body["templateID"] == "missing" {
        return (StatusCode::NOT_FOUND, error(404, "template 'missing' does not exist")).into_response();
    }
    assert!(headers.contains_key("idempotency-key"));
    let mut sandboxes = state.sandboxes.lock().expect("lock");
    let id = format!("new{:017}", sandboxes.len());
    let labels = serde_json::from_value(body["metadata"].clone()).unwrap_or_default();
    let answer = full(&id, "running", &labels);
    sandboxes.insert(id, ("running".into(), labels));
    *state.created.lock().expect("lock") = body;
    (StatusCode::CREATED, Json(answer)).into_response()
}

/// Two to a page; labels in the doubly encoded query.
async fn list(Shared(state): App, Query(query): Query<HashMap<String, String>>) -> Response {
    let wanted: Vec<(String, String)> = query
        .get("metadata")
        .map_or_else(Vec::new, |inner| url::form_urlencoded::parse(inner.as_bytes()).into_owned().collect());
    let states = query.get("state").cloned().unwrap_or_else(|| "running,paused".to_owned());
    let sandboxes = state.sandboxes.lock().expect("lock");
    let matching: Vec<Value> = sandboxes
        .iter()
        .filter(|(_, (state, _))| states.split(',').any(|s| s == state))
        .filter(|(_, (_, labels))| wanted.iter().all(|(k, v)| labels.get(k) == Some(v)))
        .map(|(id, (state, labels))| full(id, state, labels))
        .collect();
    let from: usize = query.get("nextToken").and_then(|t| t.parse().ok()).unwrap_or(0);
    let page: Vec<Value> = matching.iter().skip(from).take(2).cloned().collect();
    let next = if from + 2 < matching.len() { (from + 2).to_string() } else { String::new() };
    ([("x-next-token", next)], Json(page)).into_response()
}

async fn detail(Shared(state): App, Path(id): Path<String>) -> Response {
    match state.sandboxes.lock().expect("lock").get(&id) {
        Some((state, labels)) => Json(full(&id, state, labels)).into_response(),
        None => not_found(&id),
    }
}

async fn kill(Shared(state): App, Path(id): Path<String>) -> Response {
    match state.sandboxes.lock().expect("lock").remove(&id) {
        Some(_) => StatusCode::NO_CONTENT.into_response(),
        None => not_found(&id),
    }
}

async fn pause(Shared(state): App, Path(id): Path<String>) -> Response {
    match state.sandboxes.lock().expect("lock").get_mut(&id) {
        Some((state, _)) if state == "paused" => {
            (StatusCode::CONFLICT, error(409, "the sandbox is already paused")).into_response()
        }
        Some((state, _)) => {
            *state = "paused".into();
            StatusCode::NO_CONTENT.into_response()
        }
        None => not_found(&id),
    }
}

async fn connect(Shared(state): App, Path(id): Path<String>) -> Response {
    match state.sandboxes.lock().expect("lock").get_mut(&id) {
        Some((state, labels)) => {
            let status = if state == "paused" { StatusCode::CREATED } else { StatusCode::OK };
            *state = "running".into();
            (status, Json(full(&id, "running", labels))).into_response()
        }
        None => not_found(&id),
    }
}

async fn timeout(Shared(state): App, Path(id): Path<String>) -> Response {
    match state.sandboxes.lock().expect("lock").contains_key(&id) {
        true => StatusCode::NO_CONTENT.into_response(),
        false => not_found(&id),
    }
}

async fn metrics(Shared(state): App, Path(id): Path<String>) -> Response {
    if !state.sandboxes.lock().expect("lock").contains_key(&id) {
        return not_found(&id);
    }
    Json(json!([{"timestamp": "2026-01-02T03:04:05Z", "timestampUnix": 1_767_323_045, "cpuCount": 2, "cpuUsedPct": 12.5,
        "memUsed": 1024, "memTotal": 4096, "memCache": 0, "diskUsed": 1, "diskTotal": 2}]))
    .into_response()
}

/// Three lines, two of them of one moment; they stay the same however often they are asked for.
async fn logs(Shared(state): App, Path(id): Path<String>) -> Response {
    if !state.sandboxes.lock().expect("lock").contains_key(&id) {
        return not_found(&id);
    }
    let line = |second: u8, text: &str| json!({"timestamp": format!("2026-01-02T03:04:0{second}Z"), "level": "info", "message": text, "fields": {}});
    Json(json!({ "logs": [line(5, "one"), line(6, "two"), line(6, "three\u{1b}[2J")] })).into_response()
}

async fn templates() -> Json<Value> {
    Json(json!([one_template()]))
}

fn one_template() -> Value {
    json!({"templateID": "tttttttttttttttttttt", "buildID": "0199", "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024,
        "public": false, "aliases": ["base"], "names": ["base"], "createdAt": "2026-01-02T03:04:05Z",
        "updatedAt": "2026-01-02T03:04:05Z", "createdBy": null, "lastSpawnedAt": null, "spawnCount": 3, "buildCount": 1,
        "envdVersion": "0.6.13", "buildStatus": "ready"})
}

async fn template(Path(id): Path<String>, request: Request) -> Response {
    match (id.as_str(), request.method().as_str()) {
        ("team/base:v1" | "base", "DELETE") => StatusCode::NO_CONTENT.into_response(),
        ("team/base:v1" | "base", _) => Json(one_template()).into_response(),
        _ => (StatusCode::NOT_FOUND, error(404, "no such template")).into_response(),
    }
}

async fn pull(Json(body): Json<Value>) -> Response {
    let accepted = json!({"templateID": "tttttttttttttttttttt", "buildID": "01990000-0000-7000-8000-000000000000",
        "status": "waiting", "name": body["name"]});
    (StatusCode::ACCEPTED, Json(accepted)).into_response()
}

/// One line a page; the outcome only after the last.
async fn build(Shared(state): App, Query(query): Query<HashMap<String, String>>) -> Json<Value> {
    let (lines, failure) = state.build.lock().expect("lock").clone();
    let offset: usize = query.get("logsOffset").and_then(|o| o.parse().ok()).unwrap_or(0);
    let page: Vec<Value> = lines
        .iter()
        .skip(offset)
        .take(1)
        .map(|text| json!({"timestamp": "2026-01-02T03:04:05Z", "level": "info", "message": text}))
        .collect();
    let status = match (offset + 1 >= lines.len(), failure) {
        (false, _) => "building",
        (true, None) => "ready",
        (true, Some(_)) => "error",
    };
    Json(json!({"templateID": "tttttttttttttttttttt", "buildID": "01990000-0000-7000-8000-000000000000",
        "status": status, "logs": [], "logEntries": page, "reason": failure.map(|why| json!({ "message": why }))}))
}
