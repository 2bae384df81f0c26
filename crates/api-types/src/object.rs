//! Fields that must be JSON objects.

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use std::{fmt, marker::PhantomData};

/// An optional struct, from an object or null only. Derived structs also read from arrays, by position, which would
/// take `"network": []` for an empty policy. Read in place, so that an error still knows the path of its field.
pub(crate) fn optional<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_option(Object(PhantomData))
}

struct Object<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
    type Value = Option<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or null")
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }
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
