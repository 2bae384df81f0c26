//! Signed file URLs on the bare address: whose token made the signature?
//!
//! `signature = "v1_" + base64(sha256("{path}:{read|write}:{username}:{token}[:{expiration}]"))`, unpadded. Only the
//! owner is found here; expiry and the file are the agent's to judge.

use crate::auth;
use aenv_node::{control::Control, model::SandboxId};
use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use http::{Method, Uri};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;

/// Searches at a time. Anyone may ask, and each costs a hash per sandbox.
const SEARCHES: usize = 4;
/// Searches that may wait; further ones are refused.
const QUEUE: usize = 64;

/// Too many searches at once.
#[derive(Debug)]
pub(super) struct Busy;

/// Finds owners.
#[derive(Debug)]
pub(super) struct Owners {
    running: Semaphore,
    queued: Semaphore,
}

impl Default for Owners {
    fn default() -> Self {
        Self { running: Semaphore::new(SEARCHES), queued: Semaphore::new(QUEUE) }
    }
}

impl Owners {
    /// The sandbox whose token signed this URL.
    pub(super) async fn owner(
        &self,
        control: &dyn Control,
        method: &Method,
        uri: &Uri,
    ) -> Result<Option<SandboxId>, Busy> {
        let Some(claim) = Claim::of(method, uri.query().unwrap_or("")) else { return Ok(None) };
        let _place = self.queued.try_acquire().map_err(|_| Busy)?;
        let _turn = self.running.acquire().await.map_err(|_| Busy)?;
        let tokens = control.envd_tokens();
        let search = move || tokens.into_iter().find(|(_, token)| claim.made_with(token)).map(|(id, _)| id);
        // Hashing for thousands of sandboxes would hold up the other requests of this worker.
        Ok(tokio::task::spawn_blocking(search).await.unwrap_or(None))
    }
}

struct Claim {
    path: String,
    operation: &'static str,
    username: String,
    expiration: Option<String>,
    signature: String,
}

impl Claim {
    fn of(method: &Method, query: &str) -> Option<Self> {
        let operation = match *method {
            Method::GET | Method::HEAD => "read",
            Method::POST | Method::PUT => "write",
            _ => return None,
        };
        let mut claim = Self {
            path: String::new(),
            operation,
            username: String::new(),
            expiration: None,
            signature: String::new(),
        };
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "path" => claim.path = value.into_owned(),
                "username" => claim.username = value.into_owned(),
                "signature_expiration" => claim.expiration = Some(value.into_owned()),
                "signature" => claim.signature = value.into_owned(),
                _ => {}
            }
        }
        claim.signature.starts_with("v1_").then_some(claim)
    }

    fn made_with(&self, token: &str) -> bool {
        let mut hash = Sha256::new();
        let parts = [self.path.as_str(), ":", self.operation, ":", &self.username, ":", token];
        parts.iter().for_each(|part| hash.update(part));
        if let Some(expiration) = &self.expiration {
            hash.update(":");
            hash.update(expiration);
        }
        let expected = format!("v1_{}", STANDARD_NO_PAD.encode(hash.finalize()));
        auth::same_secret(expected.as_bytes(), self.signature.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by the Python SDK's `get_signature` (2.63) with these arguments.
    #[test]
    fn signatures_of_the_official_sdk_are_recognised() {
        for (query, method) in GOLDEN {
            let claim = Claim::of(method, query).unwrap();
            assert!(claim.made_with("tok123"), "{query}");
            assert!(!claim.made_with("tok124"), "{query}");
        }
    }

    const GOLDEN: &[(&str, &Method)] = &[
        ("path=a.txt&signature=v1_bpTAo3zQPfgZ%2FQ18%2FPKbUXC4njwhHadZON8x0Kv4xhc", &Method::GET),
        (
            "path=%2Fhome%2Fuser%2Fx+y.txt&username=root&signature=v1_vi9TzRoa1321W54v9lqDNBxyS%2BhHj7fIgsMvGrySHXI&signature_expiration=1800000000",
            &Method::POST,
        ),
    ];
}
