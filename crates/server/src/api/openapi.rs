//! The OpenAPI document, made from the handlers' annotations and the table of what comes later.

use super::{
    handlers::{node, observe, sandboxes, templates},
    table,
};
use aenv_api_types as api;
use http::Method;
use utoipa::{
    Modify, OpenApi,
    openapi::{
        self, HttpMethod, RefOr, ResponseBuilder,
        path::{OperationBuilder, ParameterBuilder, ParameterIn, PathItem},
        security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};

#[derive(OpenApi)]
#[openapi(
    info(title = "AgentENV", description = "Control plane of an AgentENV node: E2B-compatible sandboxes and templates. Guest traffic (any path with the header E2b-Sandbox-Id, or a Host {port}-{id}.{domain}) is not described here."),
    paths(
        sandboxes::create, sandboxes::list, sandboxes::create_v2, sandboxes::list_v2, sandboxes::get,
        sandboxes::kill, sandboxes::pause, sandboxes::resume, sandboxes::connect, sandboxes::connect_v2,
        sandboxes::set_timeout, sandboxes::refresh, sandboxes::inspect,
        observe::metrics, observe::metrics_batch, observe::logs, observe::logs_v2,
        templates::list, templates::list_v2, templates::get, templates::delete, templates::alias,
        templates::build_status, templates::build_logs, templates::pull,
        node::health, node::teams, node::nodes, node::node, node::stats, node::openapi, node::metrics,
    ),
    components(schemas(api::ErrorBody, api::GuestErrorBody)),
    modifiers(&Keys, &Later),
    security(("apiKey" = []), ("bearer" = [])),
)]
struct Document;

struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut openapi::OpenApi) {
        let components = document.components.get_or_insert_with(Default::default);
        components.add_security_scheme(
            "apiKey",
            SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key"))),
        );
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
    }
}

struct Later;

impl Modify for Later {
    fn modify(&self, document: &mut openapi::OpenApi) {
        for (method, path, what) in table::LATER {
            let mut operation = OperationBuilder::new()
                .tag("later")
                .summary(Some(format!("Not available in this version: {what}")))
                .response("501", ResponseBuilder::new().description("not available in this version").build());
            for name in path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')) {
                let string = openapi::ObjectBuilder::new().schema_type(openapi::schema::Type::String).build();
                operation = operation.parameter(
                    ParameterBuilder::new()
                        .name(name)
                        .parameter_in(ParameterIn::Path)
                        .required(openapi::Required::True)
                        .schema(Some(RefOr::T(openapi::Schema::Object(string)))),
                );
            }
            let item = PathItem::new(as_document(method), operation.build());
            match document.paths.paths.get_mut(*path) {
                Some(there) => there.merge_operations(item),
                None => {
                    document.paths.paths.insert((*path).to_owned(), item);
                }
            }
        }
    }
}

fn as_document(method: &Method) -> HttpMethod {
    match *method {
        Method::GET => HttpMethod::Get,
        Method::PUT => HttpMethod::Put,
        Method::PATCH => HttpMethod::Patch,
        Method::DELETE => HttpMethod::Delete,
        _ => HttpMethod::Post,
    }
}

/// The document.
pub(crate) fn document() -> openapi::OpenApi {
    Document::openapi()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_document_and_the_router_name_the_same_routes() {
        let routed: BTreeSet<(String, String)> = table::keyed()
            .iter()
            .chain(&table::open())
            .map(|route| (route.method.as_str().to_lowercase(), route.path.to_owned()))
            .chain(table::LATER.iter().map(|(m, path, _)| (m.as_str().to_lowercase(), (*path).to_owned())))
            .collect();
        let json = serde_json::to_value(document()).unwrap();
        let documented: BTreeSet<(String, String)> = json["paths"]
            .as_object()
            .unwrap()
            .iter()
            .flat_map(|(path, item)| {
                item.as_object().unwrap().keys().map(move |method| (method.clone(), path.clone()))
            })
            .collect();
        let missing: Vec<_> = routed.difference(&documented).collect();
        let invented: Vec<_> = documented.difference(&routed).collect();
        assert!(missing.is_empty() && invented.is_empty(), "missing {missing:?}, invented {invented:?}");
    }
}
