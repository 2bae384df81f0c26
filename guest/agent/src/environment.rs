//! What an environment variable may be. One that a program could not be given is refused by name, wherever it comes
//! from: left out in silence, it would be missed much later.

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum VariableError {
    #[error("a variable has an empty name: give it one or leave it out")]
    Unnamed,
    #[error("the name {0:?} contains '=' or a NUL byte: choose another")]
    Name(String),
    #[error("the value of {0:?} contains a NUL byte: encode it, in base64 for example")]
    Value(String),
}

/// Longest part of a name that an error repeats.
const SHOWN: usize = 64;

/// Whether a program can be started with all of `variables`.
pub(crate) fn check<'a>(variables: impl Iterator<Item = (&'a str, &'a str)>) -> Result<(), VariableError> {
    for (name, value) in variables {
        let shown = || name.chars().take(SHOWN).collect();
        if name.is_empty() {
            return Err(VariableError::Unnamed);
        }
        if name.contains(['=', '\0']) {
            return Err(VariableError::Name(shown()));
        }
        if value.contains('\0') {
            return Err(VariableError::Value(shown()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_cannot_be_given_is_named() {
        let one = |name: &'static str, value: &'static str| check([(name, value)].into_iter());
        assert_eq!(one("A", "b=c"), Ok(()));
        assert_eq!(one("ÄÖ.-x", ""), Ok(()));
        assert_eq!(one("", "x"), Err(VariableError::Unnamed));
        assert_eq!(one("A=B", "x"), Err(VariableError::Name("A=B".into())));
        assert_eq!(one("A\0", "x"), Err(VariableError::Name("A\0".into())));
        assert_eq!(one("A", "\0"), Err(VariableError::Value("A".into())));
    }
}
