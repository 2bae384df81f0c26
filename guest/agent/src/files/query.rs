//! The query of `/files`.

use percent_encoding::percent_decode_str;

use crate::server::answer::Refusal;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) path: Option<String>,
    pub(super) username: Option<String>,
    pub(super) signature: Option<String>,
    pub(super) signature_expiration: Option<i64>,
}

impl Query {
    /// Unknown keys are passed over; a key that counts may be given once.
    pub(super) fn parse(query: &str) -> Result<Self, Refusal> {
        let mut parsed = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let place = match key {
                "path" => &mut parsed.path,
                "username" => &mut parsed.username,
                "signature" => &mut parsed.signature,
                "signature_expiration" => {
                    let value = decode(key, value)?;
                    let seconds = value.parse().map_err(|_| {
                        Refusal::bad_request(format!(
                            "signature_expiration {value:?} is not a number of seconds"
                        ))
                    })?;
                    if parsed.signature_expiration.replace(seconds).is_some() {
                        return Err(repeated(key));
                    }
                    continue;
                }
                _ => continue,
            };
            let value = decode(key, value)?;
            if place.replace(value).is_some() {
                return Err(repeated(key));
            }
        }
        Ok(parsed)
    }
}

fn repeated(key: &str) -> Refusal {
    Refusal::bad_request(format!("the parameter {key} is given more than once: give it once"))
}

fn decode(key: &str, value: &str) -> Result<String, Refusal> {
    let mut after = value.split('%').skip(1).map(str::as_bytes);
    if !after.all(|rest| rest.len() >= 2 && rest.iter().take(2).all(u8::is_ascii_hexdigit)) {
        return Err(Refusal::bad_request(format!(
            "the parameter {key} has a '%' without two hexadecimal digits: write %25 for '%' itself"
        )));
    }
    let value = value.replace('+', " ");
    percent_decode_str(&value)
        .decode_utf8()
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| Refusal::bad_request(format!("the parameter {key} is not UTF-8")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_decoded_as_forms_are() {
        let query = Query::parse("path=%2Ftmp%2Fa+b%C3%A9&username=root&x=1&x=2").expect("well-formed");
        assert_eq!(query.path.as_deref(), Some("/tmp/a bé"));
        assert_eq!(query.username.as_deref(), Some("root"));
    }

    #[test]
    fn what_is_not_text_or_number_is_refused() {
        for bad in [
            "path=%ff",
            "path=%zz",
            "path=100%",
            "path=a&path=b",
            "signature_expiration=1&signature_expiration=1",
        ] {
            assert!(Query::parse(bad).is_err(), "{bad}");
        }
        assert!(Query::parse("signature_expiration=soon").is_err());
        assert!(Query::parse("signature_expiration=99999999999999999999").is_err());
    }
}
