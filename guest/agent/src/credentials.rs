//! What a request says about its sender: the access token and the user.

use aenv_envd_proto::http::ACCESS_TOKEN;
use base64::{Engine, engine::general_purpose::STANDARD};
use connectrpc::ConnectError;
use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};

use crate::{guest::Guest, users::User};

pub(crate) fn token(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(ACCESS_TOKEN).map(http::HeaderValue::as_bytes)
}

/// The user an RPC acts as: HTTP Basic without a password, else the default user.
pub(crate) fn user(headers: &HeaderMap, guest: &Guest) -> Result<User, ConnectError> {
    let name = named(headers)?;
    guest.user(name.as_deref()).map_err(|err| ConnectError::unauthenticated(err.to_string()))
}

/// The name in HTTP Basic. Other schemes are as good as none, as with E2B's agent: they are between the caller and
/// whatever stands before it. A broken Basic header is an error: its sender meant somebody, and would act as another.
pub(crate) fn named(headers: &HeaderMap) -> Result<Option<String>, ConnectError> {
    let mut values = headers.get_all(AUTHORIZATION).iter().map(HeaderValue::as_bytes);
    let name = values.next().map_or(Ok(None), basic);
    match name {
        Ok(_) if values.next().is_some() => {
            Err(ConnectError::unauthenticated("Authorization is given more than once: send it once"))
        }
        Ok(name) => Ok(name),
        Err(why) => Err(ConnectError::unauthenticated(format!(
            "Authorization: {why}: send 'Basic ' and the base64 of 'USER:', or leave it out for the default user"
        ))),
    }
}

fn basic(value: &[u8]) -> Result<Option<String>, &'static str> {
    let (scheme, encoded) = match value.iter().position(|byte| *byte == b' ') {
        Some(space) => value.split_at(space),
        None => (value, &b""[..]),
    };
    if !scheme.eq_ignore_ascii_case(b"basic") {
        return Ok(None);
    }
    let pair = STANDARD.decode(encoded.trim_ascii()).map_err(|_| "what follows Basic is not base64")?;
    let pair = String::from_utf8(pair).map_err(|_| "the decoded text is not UTF-8")?;
    let (name, _) = pair.split_once(':').ok_or("the decoded text has no colon")?;
    Ok(Some(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_well_formed_basic_header_names_a_user() {
        assert_eq!(basic(b"Basic dXNlcjo="), Ok(Some("user".into())));
        assert_eq!(basic(b"basic cm9vdDpwdw=="), Ok(Some("root".into())));
        assert_eq!(basic(b"Bearer x"), Ok(None));
        for broken in [
            &b"Basic dXNlcg=="[..],
            b"Basic !!!",
            b"Basic ***",
            b"Basic",
            b"Basic ",
            b"Basic /zo=",
            b"Basic \xff",
        ] {
            assert!(basic(broken).is_err(), "{}", String::from_utf8_lossy(broken));
        }
    }

    #[test]
    fn a_user_is_named_once() {
        let mut headers = HeaderMap::new();
        assert!(matches!(named(&headers), Ok(None)));
        headers.append(AUTHORIZATION, HeaderValue::from_static("Basic dXNlcjo="));
        assert!(matches!(named(&headers), Ok(Some(name)) if name == "user"));
        headers.append(AUTHORIZATION, HeaderValue::from_static("Basic cm9vdDo="));
        assert!(named(&headers).is_err());
    }
}
