//! The guest agent's port: what of it is public, and whether it answers.

use aenv_api_types::ENVD_PORT;
use aenv_node::control::{Control, Route};
use http_body_util::Empty;
use hyper_util::rt::TokioIo;

/// Whether a path on the agent's port is for clients. A list of what is, because a list of what isn't forgets
/// spellings: anything that needs decoding or normalising first is not on it.
pub(super) fn is_public(path: &str) -> bool {
    matches!(path, "/health" | "/metrics" | "/envs" | "/files" | "/files/compose")
        || ["/process.Process/", "/filesystem.Filesystem/"].iter().any(|service| {
            path.strip_prefix(service)
                .is_some_and(|method| !method.is_empty() && method.bytes().all(|b| b.is_ascii_alphanumeric()))
        })
}

/// Asks the agent's health check on a connection of its own.
pub(super) async fn probe(control: &dyn Control, route: &Route) -> bool {
    let Ok(stream) = control.dial(route, ENVD_PORT).await else { return false };
    let Ok((mut sender, connection)) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await
    else {
        return false;
    };
    let Ok(request) =
        http::Request::builder().uri("/health").header("host", "sandbox").body(Empty::<bytes::Bytes>::new())
    else {
        return false;
    };
    let answered =
        async { sender.send_request(request).await.is_ok_and(|response| response.status().is_success()) };
    tokio::select! {
        answered = answered => answered,
        _ = connection => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_reach_what_the_contract_names() {
        for path in [
            "/health",
            "/files",
            "/files/compose",
            "/envs",
            "/metrics",
            "/process.Process/Start",
            "/filesystem.Filesystem/WatchDir",
        ] {
            assert!(is_public(path), "{path}");
        }
    }

    #[test]
    fn no_spelling_reaches_an_internal_route() {
        for path in [
            "/init",
            "/init/",
            "//init",
            "/INIT",
            "/%69nit",
            "/./init",
            "/files/../init",
            "/files/%2e%2e/init",
            "/freeze",
            "/aenv/x",
            "/aenv",
            "/health/../init",
            "/process.Process/../../init",
            "/process.Process/",
            "/process.Process/%2e%2e",
            "/",
            "",
            "*",
            "/debug/pprof",
            "/init;x",
            "/health;/../init",
        ] {
            assert!(!is_public(path), "{path}");
        }
    }
}
