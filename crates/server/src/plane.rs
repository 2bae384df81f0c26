//! Which plane a request belongs to, decided from its head alone.
//!
//! A request with an `E2b-Sandbox-Id` header, or with a Host of the form `{port}-{id}[-anything].{domain}`, is guest
//! traffic whatever its path. The header wins over the Host: a client that sends both says what it means by the header.

use aenv_api_types::{ENVD_PORT, SANDBOX_ID_HEADER, SANDBOX_PORT_HEADER};
use aenv_node::model::SandboxId;
use http::{HeaderMap, request::Parts};

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Plane {
    /// To a port of a sandbox.
    Guest(Address),
    /// To a file of whichever sandbox signed the URL.
    Signed,
    /// To our own API.
    Control,
}

/// A port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// `None`: well-formed, but no id this server gives out.
    pub(crate) id: Option<SandboxId>,
    /// The id as the client wrote it, for the answer.
    pub(crate) written: String,
    pub(crate) port: u16,
}

/// Why guest traffic can't be addressed; always the client's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressError {
    #[error("{header} is given more than once; send it once")]
    Repeated { header: &'static str },
    #[error("{SANDBOX_ID_HEADER} must be lower-case letters and digits")]
    Id,
    #[error("{0} must be a port number from 1 to 65535")]
    Port(&'static str),
}

/// Decides. `domain` is the configured base domain without a leading dot.
pub(crate) fn decide(head: &Parts, domain: Option<&str>) -> Result<Plane, AddressError> {
    if let Some(id) = single(&head.headers, SANDBOX_ID_HEADER)? {
        let port = match single(&head.headers, SANDBOX_PORT_HEADER)? {
            Some(text) => port(std::str::from_utf8(text).unwrap_or(""))
                .ok_or(AddressError::Port(SANDBOX_PORT_HEADER))?,
            None => ENVD_PORT,
        };
        let (id, written) =
            sandbox_id(std::str::from_utf8(id).map_err(|_| AddressError::Id)?).ok_or(AddressError::Id)?;
        return Ok(Plane::Guest(Address { id, written, port }));
    }
    if let Some(domain) = domain
        && let Some(host) = host(head)
        && let Some(address) = by_host(&host, domain)?
    {
        return Ok(Plane::Guest(address));
    }
    let signed = head.uri.path() == "/files"
        && head.uri.query().is_some_and(|query| query.split('&').any(|pair| pair.starts_with("signature=")));
    Ok(if signed { Plane::Signed } else { Plane::Control })
}

/// An id in a path or header: `^[a-z0-9]+$`, with anything after a `-` ignored as old clients send `{id}-{client}`.
/// `None`: malformed. `(None, _)`: well-formed, but not the form this server gives out, so nobody has it.
pub(crate) fn sandbox_id(text: &str) -> Option<(Option<SandboxId>, String)> {
    let (id, rest) = text.split_once('-').unwrap_or((text, ""));
    let id_ok =
        (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let rest_ok = rest.len() <= 64 && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    (id_ok && rest_ok).then(|| (id.parse().ok(), id.to_owned()))
}

fn single<'h>(headers: &'h HeaderMap, name: &'static str) -> Result<Option<&'h [u8]>, AddressError> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    match values.next() {
        Some(_) => Err(AddressError::Repeated { header: name }),
        None => Ok(first.map(|value| value.as_bytes().trim_ascii())),
    }
}

fn port(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.len() <= 5 && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten().filter(|&port| port != 0)
}

/// Host without its port, lower-case. HTTP/2 has it in the URI.
fn host(head: &Parts) -> Option<String> {
    let authority = match head.uri.authority() {
        Some(authority) => authority.as_str(),
        None => head.headers.get(http::header::HOST)?.to_str().ok()?,
    };
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => authority,
    };
    Some(host.trim_end_matches('.').to_ascii_lowercase())
}

fn by_host(host: &str, domain: &str) -> Result<Option<Address>, AddressError> {
    let Some(label) = host.strip_suffix(domain).and_then(|rest| rest.strip_suffix('.')) else {
        return Ok(None);
    };
    // `api.{domain}` and the like are the control plane; `{port}-{id}` begins with a digit and is one label.
    let Some((port_text, id)) = label.split_once('-') else { return Ok(None) };
    if label.contains('.') || port_text.is_empty() || !port_text.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(None);
    }
    let port = port(port_text).ok_or(AddressError::Port("the first part of the Host"))?;
    let (id, written) = sandbox_id(id).ok_or(AddressError::Id)?;
    Ok(Some(Address { id, written, port }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    const ID: &str = "abcdefghij0123456789";

    fn decided(uri: &str, headers: &[(&str, &str)]) -> Result<Plane, AddressError> {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        decide(&request.body(()).unwrap().into_parts().0, Some("sandbox.example.com"))
    }

    fn guest(port: u16) -> Result<Plane, AddressError> {
        Ok(Plane::Guest(Address { id: ID.parse().ok(), written: ID.to_owned(), port }))
    }

    #[test]
    fn the_header_makes_any_path_guest_traffic() {
        for path in ["/", "/health", "/sandboxes", "/files?path=x&signature=v1_a", "/openapi.json"] {
            assert_eq!(decided(path, &[("e2b-sandbox-id", ID)]), guest(49983), "{path}");
            assert_eq!(
                decided(path, &[("e2b-sandbox-id", ID), ("e2b-sandbox-port", "8080")]),
                guest(8080),
                "{path}"
            );
        }
    }

    #[test]
    fn the_host_makes_any_path_guest_traffic() {
        for host in [
            format!("3000-{ID}.sandbox.example.com"),
            format!("3000-{ID}.SANDBOX.example.com:8000"),
            format!("3000-{ID}-6532622b.sandbox.example.com."),
        ] {
            assert_eq!(decided("/sandboxes", &[("host", &host)]), guest(3000), "{host}");
        }
    }

    #[test]
    fn other_hosts_are_the_control_plane() {
        for host in [
            "api.sandbox.example.com".to_owned(),
            "sandbox.example.com".to_owned(),
            "127.0.0.1:8000".to_owned(),
            "[::1]:8000".to_owned(),
            format!("3000-{ID}.evil.com"),
            format!("3000-{ID}.evilsandbox.example.com"),
            format!("3000-{ID}.x.sandbox.example.com"),
            format!("x-{ID}.sandbox.example.com"),
        ] {
            assert_eq!(decided("/sandboxes", &[("host", &host)]), Ok(Plane::Control), "{host}");
        }
    }

    #[test]
    fn a_signed_file_url_names_no_sandbox() {
        assert_eq!(decided("/files?path=a&signature=v1_x", &[("host", "127.0.0.1")]), Ok(Plane::Signed));
        assert_eq!(decided("/files?path=signature", &[("host", "127.0.0.1")]), Ok(Plane::Control));
        assert_eq!(decided("/filesx?signature=v1_x", &[("host", "127.0.0.1")]), Ok(Plane::Control));
    }

    #[test]
    fn bad_addresses_are_refused_not_guessed() {
        for id in ["", "ABC", "a/b", "../x", "a b", "ä", &"a".repeat(65), "-abc", "a-b/c"] {
            assert_eq!(decided("/", &[("e2b-sandbox-id", id)]), Err(AddressError::Id), "{id}");
        }
        for port in ["0", "65536", "-1", "80 80", "8080x", "+80", "", "999999999999"] {
            let got = decided("/", &[("e2b-sandbox-id", ID), ("e2b-sandbox-port", port)]);
            assert_eq!(got, Err(AddressError::Port(SANDBOX_PORT_HEADER)), "{port}");
        }
        let twice = decided("/", &[("e2b-sandbox-id", ID), ("e2b-sandbox-id", ID)]);
        assert!(matches!(twice, Err(AddressError::Repeated { .. })));
    }

    #[test]
    fn a_well_formed_id_nobody_has_is_addressed_to_nobody() {
        let Ok(Plane::Guest(address)) = decided("/", &[("e2b-sandbox-id", "short1")]) else { panic!() };
        assert_eq!((address.id, address.written.as_str()), (None, "short1"));
    }
}
