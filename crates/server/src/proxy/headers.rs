//! Header rules of a proxy (RFC 9110 §7.6): what stays on this hop, what is added, what is masked.

use super::Peer;
use aenv_api_types::{API_KEY_HEADER, TRAFFIC_TOKEN_HEADER};
use axum::body::Body;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version,
    header::{
        CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
        TRANSFER_ENCODING, UPGRADE,
    },
};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// The protocol a client wants to change to, if it does. `h2c` is not one: this hop and the guest's are separate.
pub(super) fn upgrade<B>(request: &Request<B>) -> Option<HeaderValue> {
    let protocol = request.headers().get(UPGRADE)?;
    let wanted = request.version() == Version::HTTP_11
        && has_token(request.headers(), &CONNECTION, "upgrade")
        && !protocol.as_bytes().eq_ignore_ascii_case(b"h2c");
    wanted.then(|| protocol.clone())
}

/// Turns a client's request into the guest's: origin form, HTTP/1.1, end-to-end headers only.
pub(super) fn towards_guest(
    request: Request<Body>,
    port: u16,
    mask: Option<&str>,
    peer: Peer,
    upgrade: Option<&HeaderValue>,
) -> Request<Body> {
    let (mut head, body) = request.into_parts();
    let host = head
        .uri
        .authority()
        .and_then(|authority| HeaderValue::from_str(authority.as_str()).ok())
        .or_else(|| head.headers.get(HOST).cloned());
    let path = head.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    head.uri = Uri::try_from(path).unwrap_or_else(|_| Uri::from_static("/"));
    head.version = Version::HTTP_11;

    let trailers = has_token(&head.headers, &TE, "trailers");
    strip_hop(&mut head.headers);
    // The server half answers it when the guest's half begins to read the body.
    head.headers.remove(EXPECT);
    head.headers.remove(TRAFFIC_TOKEN_HEADER);
    // A control-plane key sent here by mistake must not reach a guest; a guest application's own key may.
    if head.headers.get(API_KEY_HEADER).is_some_and(|key| key.as_bytes().starts_with(b"e2b_")) {
        head.headers.remove(API_KEY_HEADER);
    }
    if trailers {
        head.headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    join_cookies(&mut head.headers);

    let masked =
        mask.and_then(|mask| HeaderValue::from_str(&mask.replace("${PORT}", &port.to_string())).ok());
    if let Some(original) = &host {
        head.headers.insert(FORWARDED_HOST, original.clone());
    }
    if let Some(host) = masked.or(host) {
        head.headers.insert(HOST, host);
    }
    if let Ok(ip) = HeaderValue::from_str(&peer.ip.to_canonical().to_string()) {
        head.headers.append(FORWARDED_FOR, ip);
    }
    let proto = if peer.https { "https" } else { "http" };
    head.headers.insert(FORWARDED_PROTO, HeaderValue::from_static(proto));
    if let Some(protocol) = upgrade {
        head.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        head.headers.insert(UPGRADE, protocol.clone());
    }
    // Nothing of this hop (the client's upgrade handle, its address) goes on.
    head.extensions = http::Extensions::new();
    Request::from_parts(head, body)
}

/// Removes what belongs to one hop.
pub(super) fn strip_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        // "Connection: content-length" is an attempt to unframe the message, not a wish.
        .filter(|name| *name != CONTENT_LENGTH && *name != HOST)
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in [CONNECTION, TE, TRANSFER_ENCODING, UPGRADE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION] {
        headers.remove(name);
    }
    for name in ["keep-alive", "proxy-connection", "http2-settings"] {
        headers.remove(name);
    }
}

/// HTTP/2 splits cookies; HTTP/1.1 servers expect one header.
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().nth(1).is_some() {
        let parts: Vec<_> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
        if let Ok(joined) = HeaderValue::from_bytes(&parts.join(&b"; "[..])) {
            headers.insert(COOKIE, joined);
        }
    }
}

fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|part| part.trim().eq_ignore_ascii_case(token))
}

/// Whether a request that got no answer may be sent again.
pub(super) fn is_safe(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> Peer {
        Peer { ip: [203, 0, 113, 9].into(), https: false }
    }

    fn sent(builder: http::request::Builder, mask: Option<&str>) -> HeaderMap {
        let request = builder.body(Body::empty()).unwrap();
        towards_guest(request, 3000, mask, peer(), None).headers().clone()
    }

    #[test]
    fn what_belongs_to_one_hop_stays_on_it() {
        let headers = sent(
            Request::get("/x")
                .header("connection", "keep-alive, X-Mine")
                .header("x-mine", "1")
                .header("keep-alive", "timeout=5")
                .header("te", "trailers, gzip")
                .header("upgrade", "h2c")
                .header("http2-settings", "AA")
                .header("proxy-authorization", "Basic x")
                .header("expect", "100-continue")
                .header("e2b-traffic-access-token", "secret")
                .header("x-api-key", "e2b_0123")
                .header("x-yours", "2"),
            None,
        );
        for gone in [
            "connection",
            "x-mine",
            "keep-alive",
            "upgrade",
            "http2-settings",
            "proxy-authorization",
            "expect",
            "e2b-traffic-access-token",
            "x-api-key",
        ] {
            assert!(!headers.contains_key(gone), "{gone}");
        }
        assert_eq!(headers["te"], "trailers");
        assert_eq!(headers["x-yours"], "2");
    }

    #[test]
    fn a_guest_applications_own_key_goes_through() {
        assert_eq!(sent(Request::get("/").header("x-api-key", "mine"), None)["x-api-key"], "mine");
    }

    #[test]
    fn the_guest_learns_who_asked_and_for_which_host() {
        let headers = sent(
            Request::get("http://3000-abc.example.com/p?q=1")
                .header("host", "other")
                .header("x-forwarded-for", "198.51.100.1")
                .header("x-forwarded-proto", "gopher"),
            None,
        );
        assert_eq!(headers["host"], "3000-abc.example.com");
        assert_eq!(headers["x-forwarded-host"], "3000-abc.example.com");
        assert_eq!(headers["x-forwarded-proto"], "http");
        let chain: Vec<_> = headers.get_all("x-forwarded-for").iter().collect();
        assert_eq!(chain, ["198.51.100.1", "203.0.113.9"]);
    }

    #[test]
    fn a_masked_host_carries_the_port() {
        let headers =
            sent(Request::get("/").header("host", "3000-abc.example.com"), Some("localhost:${PORT}"));
        assert_eq!(headers["host"], "localhost:3000");
        assert_eq!(headers["x-forwarded-host"], "3000-abc.example.com");
    }

    #[test]
    fn a_connection_header_cannot_unframe_the_message() {
        let mut headers = HeaderMap::new();
        headers.insert(CONNECTION, HeaderValue::from_static("content-length, host"));
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("5"));
        headers.insert(HOST, HeaderValue::from_static("a"));
        strip_hop(&mut headers);
        assert!(headers.contains_key(CONTENT_LENGTH) && headers.contains_key(HOST));
    }

    #[test]
    fn cookies_split_by_http2_are_joined() {
        let headers = sent(Request::get("/").header("cookie", "a=1").header("cookie", "b=2"), None);
        assert_eq!(headers.get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2"]);
    }

    #[test]
    fn only_http_1_1_with_both_headers_upgrades() {
        let ask = |connection: &str, protocol: &str| {
            Request::get("/").header("connection", connection).header("upgrade", protocol).body(()).unwrap()
        };
        assert_eq!(upgrade(&ask("keep-alive, Upgrade", "websocket")).unwrap(), "websocket");
        assert!(upgrade(&ask("keep-alive", "websocket")).is_none());
        assert!(upgrade(&ask("upgrade", "h2c")).is_none());
    }
}
