//! Every route, once. The router is made from this table and the OpenAPI document is checked against it.

use super::{
    State,
    handlers::{node, observe, sandboxes, templates},
};
use crate::{auth, error::ApiError};
use aenv_api_types::{API_KEY_HEADER, ErrorCode, IDEMPOTENCY_KEY_HEADER, NEXT_TOKEN_HEADER};
use axum::{
    Router,
    extract::MatchedPath,
    middleware,
    response::{IntoResponse, Response},
    routing::{self, MethodRouter},
};
use http::{HeaderName, Method, StatusCode, header};
use std::time::Duration;
use tower_http::{catch_panic::CatchPanicLayer, cors};

/// A route: method, template, handler.
pub(super) struct Route {
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the handler knows it; the test of the document can't ask it")
    )]
    pub(super) method: Method,
    pub(super) path: &'static str,
    handler: MethodRouter<State>,
}

macro_rules! routes {
    ($($verb:ident $method:ident $path:literal => $handler:path;)*) => {
        vec![$(Route { method: Method::$method, path: $path, handler: routing::$verb($handler) }),*]
    };
}

/// Routes that need a key.
pub(super) fn keyed() -> Vec<Route> {
    routes! {
        post POST "/sandboxes" => sandboxes::create;
        get GET "/sandboxes" => sandboxes::list;
        post POST "/v2/sandboxes" => sandboxes::create_v2;
        get GET "/v2/sandboxes" => sandboxes::list_v2;
        get GET "/sandboxes/metrics" => observe::metrics_batch;
        get GET "/sandboxes/{sandboxID}" => sandboxes::get;
        delete DELETE "/sandboxes/{sandboxID}" => sandboxes::kill;
        post POST "/sandboxes/{sandboxID}/pause" => sandboxes::pause;
        post POST "/sandboxes/{sandboxID}/resume" => sandboxes::resume;
        post POST "/sandboxes/{sandboxID}/connect" => sandboxes::connect;
        post POST "/v2/sandboxes/{sandboxID}/connect" => sandboxes::connect_v2;
        post POST "/sandboxes/{sandboxID}/timeout" => sandboxes::set_timeout;
        post POST "/sandboxes/{sandboxID}/refreshes" => sandboxes::refresh;
        get GET "/sandboxes/{sandboxID}/metrics" => observe::metrics;
        get GET "/sandboxes/{sandboxID}/logs" => observe::logs;
        get GET "/v2/sandboxes/{sandboxID}/logs" => observe::logs_v2;
        get GET "/templates" => templates::list;
        get GET "/v2/templates" => templates::list_v2;
        get GET "/templates/{templateID}" => templates::get;
        delete DELETE "/templates/{templateID}" => templates::delete;
        get GET "/templates/aliases/{alias}" => templates::alias;
        get GET "/templates/{templateID}/builds/{buildID}/status" => templates::build_status;
        get GET "/templates/{templateID}/builds/{buildID}/logs" => templates::build_logs;
        get GET "/teams" => node::teams;
        get GET "/nodes" => node::nodes;
        get GET "/nodes/{nodeID}" => node::node;
        post POST "/aenv/v1/templates/pull" => templates::pull;
        get GET "/aenv/v1/sandboxes/{sandboxID}" => sandboxes::inspect;
        get GET "/aenv/v1/node" => node::stats;
    }
}

/// Routes that anyone may ask (`/metrics` decides for itself).
pub(super) fn open() -> Vec<Route> {
    routes! {
        get GET "/health" => node::health;
        get GET "/openapi.json" => node::openapi;
        get GET "/metrics" => node::metrics;
    }
}

/// Parts of the contract that come later: they answer 501 and name what is missing, so that a client can tell
/// "not yet" from "wrong address".
pub(super) const LATER: &[(Method, &str, &str)] = &[
    (Method::POST, "/sandboxes/{sandboxID}/fork", "forking a sandbox"),
    (Method::PUT, "/sandboxes/{sandboxID}/network", "changing a sandbox's network policy"),
    (Method::POST, "/sandboxes/{sandboxID}/snapshots", "taking a snapshot"),
    (Method::GET, "/snapshots", "listing snapshots"),
    (
        Method::POST,
        "/v3/templates",
        "building a template from steps (make one from an image with `aenv pull`)",
    ),
    (
        Method::POST,
        "/v2/templates",
        "building a template from steps (make one from an image with `aenv pull`)",
    ),
    (
        Method::POST,
        "/templates",
        "building a template from a Dockerfile (make one from an image with `aenv pull`)",
    ),
    (Method::POST, "/templates/{templateID}", "rebuilding a template"),
    (Method::PATCH, "/templates/{templateID}", "changing a template's visibility"),
    (Method::PATCH, "/v2/templates/{templateID}", "changing a template's visibility"),
    (Method::GET, "/templates/{templateID}/files/{hash}", "uploading files for a template build"),
    (Method::POST, "/templates/{templateID}/builds/{buildID}", "starting a template build"),
    (Method::POST, "/v2/templates/{templateID}/builds/{buildID}", "starting a template build"),
    (Method::POST, "/templates/tags", "tagging a template"),
    (Method::DELETE, "/templates/tags", "removing tags of a template"),
    (Method::GET, "/templates/{templateID}/tags", "listing a template's tags"),
    (Method::GET, "/templates/{templateID}/tags/count", "counting a template's tags"),
    (Method::GET, "/templates/{templateID}/tags/exists", "looking up a template's tag"),
    (Method::GET, "/templates/{templateID}/tags/groups", "listing a template's tags"),
    (Method::GET, "/templates/{templateID}/tags/{tag}/assignments", "the history of a template's tag"),
    (Method::GET, "/default-templates", "listing default templates"),
    (Method::GET, "/volumes", "volumes"),
    (Method::POST, "/volumes", "volumes"),
    (Method::GET, "/volumes/{volumeID}", "volumes"),
    (Method::DELETE, "/volumes/{volumeID}", "volumes"),
    (Method::GET, "/volumecontent/{volumeID}/path", "volumes"),
    (Method::PATCH, "/volumecontent/{volumeID}/path", "volumes"),
    (Method::DELETE, "/volumecontent/{volumeID}/path", "volumes"),
    (Method::GET, "/volumecontent/{volumeID}/dir", "volumes"),
    (Method::POST, "/volumecontent/{volumeID}/dir", "volumes"),
    (Method::GET, "/volumecontent/{volumeID}/file", "volumes"),
    (Method::PUT, "/volumecontent/{volumeID}/file", "volumes"),
    (Method::GET, "/secrets", "secrets"),
    (Method::POST, "/secrets", "secrets"),
    (Method::GET, "/secrets/{secretID}", "secrets"),
    (Method::POST, "/secrets/{secretID}", "secrets"),
    (Method::DELETE, "/secrets/{secretID}", "secrets"),
    (Method::GET, "/teams/{teamID}/metrics", "team metrics"),
    (Method::GET, "/teams/{teamID}/metrics/max", "team metrics"),
    (Method::GET, "/api-keys", "managing API keys over the API (use `aenv auth` on the server)"),
    (Method::POST, "/api-keys", "managing API keys over the API (use `aenv auth` on the server)"),
    (Method::PATCH, "/api-keys/{apiKeyID}", "managing API keys over the API (use `aenv auth` on the server)"),
    (
        Method::DELETE,
        "/api-keys/{apiKeyID}",
        "managing API keys over the API (use `aenv auth` on the server)",
    ),
];

/// The control plane as a service.
pub(crate) fn router(state: State) -> Router {
    let mut keyed_routes = Router::new();
    for route in keyed() {
        keyed_routes = keyed_routes.route(route.path, route.handler);
    }
    for (method, path, what) in LATER {
        keyed_routes = keyed_routes.route(path, later(method, what));
    }
    keyed_routes = keyed_routes.route_layer(middleware::from_fn_with_state(state.clone(), auth::require_key));
    let mut open_routes = Router::new();
    for route in open() {
        open_routes = open_routes.route(route.path, route.handler);
    }
    keyed_routes
        .merge(open_routes)
        .route_layer(middleware::from_fn(name_route))
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_route)
        // A bug must not take the connection's other requests with it.
        .layer(CatchPanicLayer::custom(panicked))
        // Outermost, because a browser's preflight carries no key. Open to any origin, as E2B's is: what is behind it
        // needs a key in a header, which no page has by itself.
        .layer(cors_layer())
        .with_state(state)
}

/// Tells the metrics which template a request matched.
async fn name_route(request: axum::extract::Request, next: middleware::Next) -> Response {
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let mut response = next.run(request).await;
    if let Some(matched) = matched {
        response.extensions_mut().insert(matched);
    }
    response
}

fn later(method: &Method, what: &'static str) -> MethodRouter<State> {
    let answer = move || std::future::ready(ApiError::later(what).into_response());
    match *method {
        Method::GET => routing::get(answer),
        Method::PUT => routing::put(answer),
        Method::PATCH => routing::patch(answer),
        Method::DELETE => routing::delete(answer),
        _ => routing::post(answer),
    }
}

fn cors_layer() -> cors::CorsLayer {
    let exposed = [NEXT_TOKEN_HEADER, "x-request-id", "retry-after"].map(HeaderName::from_static);
    let accepted = [
        header::CONTENT_TYPE,
        header::AUTHORIZATION,
        HeaderName::from_static(API_KEY_HEADER),
        HeaderName::from_static(IDEMPOTENCY_KEY_HEADER),
    ];
    cors::CorsLayer::new()
        .allow_origin(cors::Any)
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE])
        // The SDKs add headers of their own (browser, lang, package_version, …): mirror what is asked for.
        .allow_headers(cors::AllowHeaders::mirror_request())
        .expose_headers(exposed)
        .max_age(Duration::from_secs(600))
        .vary(accepted)
}

async fn no_route(request: axum::extract::Request) -> ApiError {
    let path: String = request.uri().path().chars().take(128).collect();
    let hint = if path == "/files" || path.starts_with("/process.") || path.starts_with("/filesystem.") {
        "; traffic for a sandbox needs the header E2b-Sandbox-Id"
    } else {
        "; GET /openapi.json lists the routes"
    };
    ApiError::new(
        StatusCode::NOT_FOUND,
        ErrorCode::RouteNotFound,
        format!("no route {} {path}{hint}", request.method()),
    )
}

async fn wrong_method(request: axum::extract::Request) -> ApiError {
    let path: String = request.uri().path().chars().take(128).collect();
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        ErrorCode::MethodNotAllowed,
        format!("{path} does not take {}; GET /openapi.json lists the methods", request.method()),
    )
}

#[expect(clippy::needless_pass_by_value, reason = "the signature tower-http asks for")]
fn panicked(payload: Box<dyn std::any::Any + Send>) -> Response {
    let what = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    tracing::error!("a handler panicked: {what}");
    ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        ErrorCode::InternalServerError,
        "a fault in the server; the log has it under the x-request-id of this answer",
    )
    .into_response()
}
