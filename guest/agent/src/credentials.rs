//! What a request says about its sender: the access token and the user.

use aenv_envd_proto::http::ACCESS_TOKEN;
use base64::{Engine, engine::general_purpose::STANDARD};
use connectrpc::ConnectError;
use http::{HeaderMap, header::AUTHORIZATION};

use crate::{guest::Guest, users::User};

pub(crate) fn token(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(ACCESS_TOKEN).map(http::HeaderValue::as_bytes)
}

/// The user an RPC acts as: HTTP Basic without a password, else the default user. Anything else in the header is as
/// good as none, because not every call needs a user.
pub(crate) fn user(headers: &HeaderMap, guest: &Guest) -> Result<User, ConnectError> {
    let name = headers.get(AUTHORIZATION).and_then(|value| basic(value.to_str().ok()?));
    guest.user(name.as_deref()).map_err(|err| ConnectError::unauthenticated(err.to_string()))
}

fn basic(value: &str) -> Option<String> {
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    pair.split_once(':').map(|(name, _)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_well_formed_basic_header_names_a_user() {
        assert_eq!(basic("Basic dXNlcjo=").as_deref(), Some("user"));
        assert_eq!(basic("basic cm9vdDpwdw==").as_deref(), Some("root"));
        assert_eq!(basic("Basic dXNlcg=="), None);
        assert_eq!(basic("Basic !!!"), None);
        assert_eq!(basic("Bearer x"), None);
    }
}
