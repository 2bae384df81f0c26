//! Signed URLs: one file, one operation, without the token.
//!
//! `signature = "v1_" + base64(sha256("{path}:{read|write}:{username}:{token}[:{expiration}]"))`, base64 without
//! padding, the username empty when the URL has none. The format is E2B's.

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::query::Query;
use crate::{guest::Guest, server::answer::Refusal};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
}

/// Lets a request pass that has the token or a valid signature, and any when the guest has no token. `now` is in
/// seconds since the epoch.
pub(super) fn check(
    guest: &Guest,
    token: Option<&[u8]>,
    query: &Query,
    operation: Operation,
    now: i64,
) -> Result<(), Refusal> {
    if !guest.is_secured() {
        return Ok(());
    }
    if token.is_some_and(|token| !token.is_empty()) {
        return if guest.accepts_token(token) {
            Ok(())
        } else {
            Err(Refusal::unauthorized("access token present in header but does not match"))
        };
    }
    let given = query
        .signature
        .as_deref()
        .ok_or_else(|| Refusal::unauthorized("missing signature query parameter"))?;
    // A `+` of base64 that nobody escaped reads as a space.
    let given = given.replace(' ', "+");
    let expected = guest.with_token(|token| sign(query, operation, token)).unwrap_or_default();
    if !bool::from(given.as_bytes().ct_eq(expected.as_bytes())) {
        return Err(Refusal::unauthorized("invalid signature"));
    }
    if query.signature_expiration.is_some_and(|expiration| expiration < now) {
        return Err(Refusal::unauthorized("signature is already expired"));
    }
    Ok(())
}

fn sign(query: &Query, operation: Operation, token: &str) -> String {
    let path = query.path.as_deref().unwrap_or_default();
    let user = query.username.as_deref().unwrap_or_default();
    let operation = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let mut text = format!("{path}:{operation}:{user}:{token}");
    if let Some(expiration) = query.signature_expiration {
        text.push_str(&format!(":{expiration}"));
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::Machine;

    fn secured() -> Guest {
        let guest = Guest::new(Machine::NotOurs, None);
        guest.set_token("secret");
        guest
    }

    fn signed(expiration: Option<i64>) -> Query {
        let mut query = Query {
            path: Some("/tmp/a".into()),
            username: Some("user".into()),
            signature: None,
            signature_expiration: expiration,
        };
        query.signature = Some(sign(&query, Operation::Read, "secret"));
        query
    }

    #[test]
    fn the_signature_is_the_one_e2b_clients_make() {
        // echo -n "/tmp/a:read:user:secret" | openssl dgst -sha256 -binary | base64
        let expected = "v1_cggvCTz5NFcD31MGup9dfc6bI+j03yDok1VpYt2y3sY";
        assert_eq!(signed(None).signature.as_deref(), Some(expected));
    }

    #[test]
    fn a_signature_opens_one_operation_until_it_expires() {
        let guest = secured();
        assert_eq!(check(&guest, None, &signed(None), Operation::Read, 1000), Ok(()));
        assert!(check(&guest, None, &signed(None), Operation::Write, 1000).is_err());
        assert_eq!(check(&guest, None, &signed(Some(1000)), Operation::Read, 1000), Ok(()));
        let late = check(&guest, None, &signed(Some(999)), Operation::Read, 1000);
        assert_eq!(late.map_err(|refusal| refusal.message), Err("signature is already expired".into()));
    }

    #[test]
    fn a_moved_expiration_breaks_the_signature() {
        let mut query = signed(Some(1000));
        query.signature_expiration = Some(2000);
        assert!(check(&secured(), None, &query, Operation::Read, 1).is_err());
    }

    #[test]
    fn the_token_needs_no_signature_and_a_wrong_one_is_not_helped_by_one() {
        let guest = secured();
        assert_eq!(check(&guest, Some(b"secret"), &Query::default(), Operation::Write, 1), Ok(()));
        assert!(check(&guest, Some(b"wrong"), &signed(None), Operation::Read, 1).is_err());
        assert!(check(&guest, None, &Query::default(), Operation::Read, 1).is_err());
    }
}
