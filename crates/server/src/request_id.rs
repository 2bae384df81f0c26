//! The id under which a request is found in the log: the client's own when it is harmless to print, else a new one.

use http::{HeaderMap, HeaderName, HeaderValue};

pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// Letters, digits, `-` and `_`, at most 64: anything else could forge log lines or bloat them.
pub(crate) fn of(headers: &HeaderMap) -> String {
    headers
        .get(&HEADER)
        .and_then(|value| value.to_str().ok())
        .filter(|text| {
            (1..=64).contains(&text.len())
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        })
        .map_or_else(|| uuid::Uuid::now_v7().to_string(), str::to_owned)
}

/// As a header; ids made by [`of`] always fit.
pub(crate) fn value(id: &str) -> HeaderValue {
    HeaderValue::from_str(id).unwrap_or_else(|_| HeaderValue::from_static("invalid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_harmless_id_is_kept_and_any_other_replaced() {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, HeaderValue::from_static("abc-1_2"));
        assert_eq!(of(&headers), "abc-1_2");
        for bad in ["", "a b", "a\tb", &"x".repeat(65)] {
            headers.insert(HEADER, HeaderValue::from_str(bad).unwrap());
            assert_ne!(of(&headers), bad);
            assert_eq!(of(&headers).len(), 36);
        }
    }
}
