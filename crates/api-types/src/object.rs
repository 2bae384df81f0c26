//! Fields that must be JSON objects.

use serde::{Deserialize, Deserializer, de::DeserializeOwned, de::Error as _};

/// An optional struct, from an object or null only. Derived structs also read from arrays, by position, which would
/// take `"network": []` for an empty policy.
pub(crate) fn optional<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: DeserializeOwned,
    D: Deserializer<'de>,
{
    let object = Option::<serde_json::Map<String, serde_json::Value>>::deserialize(deserializer)?;
    object.map(|object| serde_json::from_value(object.into())).transpose().map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use crate::NewSandbox;

    #[test]
    fn an_array_is_not_taken_for_an_object() {
        for field in ["network", "autoResume"] {
            let text = format!(r#"{{"templateID":"base","{field}":[]}}"#);
            assert!(serde_json::from_str::<NewSandbox>(&text).is_err(), "{field}");
        }
        let null = r#"{"templateID":"base","network":null,"autoResume":{"enabled":true}}"#;
        let new: NewSandbox = serde_json::from_str(null).unwrap();
        assert!(new.network.is_none() && new.auto_resume.unwrap().enabled);
    }
}
