//! What the agent knows about its sandbox: token, defaults, environment, generation.
//!
//! A guest starts with nothing known: no token, user root. `/init` fills it in after boot and again after each
//! restore. All of it is memory, so it is part of a snapshot and comes back with it; it is lost only with the guest.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use aenv_envd_proto::http::VolumeMount;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use crate::{
    paths::{self, PathError},
    users::{self, UnknownUser, User},
};

/// Whether clock, name and power belong to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Machine {
    /// We are its PID 1.
    Ours,
    /// We are a process on somebody's host.
    NotOurs,
}

pub(crate) struct Guest {
    pub(crate) machine: Machine,
    /// sha256 of the secret that `/init` must carry.
    init_sha256: Option<Vec<u8>>,
    known: Mutex<Known>,
    generation: watch::Sender<u64>,
}

#[derive(Default)]
struct Known {
    access_token: Option<String>,
    default_user: Option<String>,
    default_dir: Option<String>,
    env: BTreeMap<String, String>,
    sandbox_id: Option<String>,
    template_id: Option<String>,
    volumes: Vec<VolumeMount>,
}

/// Who a request without a user is for, until `/init` says otherwise.
const FIRST_USER: &str = "root";

impl Guest {
    pub(crate) fn new(machine: Machine, init_sha256: Option<String>) -> Self {
        Self {
            machine,
            // A hash that is not hex can't be met by any secret: closed, not open.
            init_sha256: init_sha256.map(|hash| hex::decode(hash).unwrap_or_default()),
            known: Mutex::default(),
            generation: watch::Sender::new(0),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether requests must carry a token.
    pub(crate) fn is_secured(&self) -> bool {
        self.known().access_token.is_some()
    }

    /// Whether `given` is the token; any is when there is none.
    pub(crate) fn accepts_token(&self, given: Option<&[u8]>) -> bool {
        match &self.known().access_token {
            None => true,
            Some(token) => given.is_some_and(|given| bool::from(given.ct_eq(token.as_bytes()))),
        }
    }

    /// Whether a caller may use the node's routes: with the node's secret or the token. Open only where the machine
    /// came without a hash and has no token yet.
    pub(crate) fn accepts_node(&self, secret: Option<&[u8]>, token: Option<&[u8]>) -> bool {
        let by_secret = match (&self.init_sha256, secret) {
            (Some(hash), Some(secret)) => bool::from(Sha256::digest(secret).as_slice().ct_eq(hash)),
            _ => false,
        };
        if self.is_secured() {
            return by_secret || (token.is_some() && self.accepts_token(token));
        }
        by_secret || self.init_sha256.is_none()
    }

    /// Runs `sign` with the token, when there is one.
    pub(crate) fn with_token<T>(&self, sign: impl FnOnce(&str) -> T) -> Option<T> {
        self.known().access_token.as_deref().map(sign)
    }

    pub(crate) fn set_token(&self, token: &str) {
        self.known().access_token = (!token.is_empty()).then(|| token.to_owned());
    }

    pub(crate) fn set_defaults(&self, user: Option<String>, dir: Option<String>) {
        let mut known = self.known();
        if let Some(user) = user {
            known.default_user = (!user.is_empty()).then_some(user);
        }
        if let Some(dir) = dir {
            known.default_dir = (!dir.is_empty()).then_some(dir);
        }
    }

    pub(crate) fn set_env(&self, env: BTreeMap<String, String>) {
        self.known().env = env;
    }

    pub(crate) fn set_identity(&self, sandbox_id: Option<String>, template_id: Option<String>) {
        let mut known = self.known();
        if sandbox_id.is_some() {
            known.sandbox_id = sandbox_id;
        }
        if template_id.is_some() {
            known.template_id = template_id;
        }
    }

    pub(crate) fn set_volumes(&self, volumes: Vec<VolumeMount>) {
        if !volumes.is_empty() {
            self.known().volumes = volumes;
        }
    }

    /// The variables every process gets: what `/init` set, and the sandbox's own identity.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        let known = self.known();
        let mut env = BTreeMap::from([("E2B_SANDBOX".to_owned(), "true".to_owned())]);
        for (key, value) in [("E2B_SANDBOX_ID", &known.sandbox_id), ("E2B_TEMPLATE_ID", &known.template_id)] {
            if let Some(value) = value {
                env.insert(key.to_owned(), value.clone());
            }
        }
        env.extend(known.env.iter().map(|(key, value)| (key.clone(), value.clone())));
        env
    }

    /// The named user, or the default one.
    pub(crate) fn user(&self, name: Option<&str>) -> Result<User, UnknownUser> {
        match name.filter(|name| !name.is_empty()) {
            Some(name) => users::lookup(name),
            None => {
                let name = self.known().default_user.clone();
                users::lookup(name.as_deref().unwrap_or(FIRST_USER))
            }
        }
    }

    pub(crate) fn resolve(&self, path: &str, user: &User) -> Result<std::path::PathBuf, PathError> {
        let default_dir = self.known().default_dir.clone();
        paths::resolve(path, user, default_dir.as_deref())
    }

    /// Notes the generation of a restore; what was open under another one ends.
    pub(crate) fn set_generation(&self, generation: u64) {
        self.generation.send_if_modified(|current| std::mem::replace(current, generation) != generation);
    }

    /// Resolves its `changed()` when the guest has been restored again.
    pub(crate) fn generation(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_with_a_hash_takes_init_only_from_who_knows_the_secret_or_the_token() {
        let hash = hex::encode(Sha256::digest(b"secret"));
        let guest = Guest::new(Machine::NotOurs, Some(hash));
        assert!(!guest.accepts_node(None, None));
        assert!(!guest.accepts_node(Some(b"guess"), None));
        assert!(guest.accepts_node(Some(b"secret"), None));
        guest.set_token("token");
        assert!(guest.accepts_node(Some(b"secret"), None));
        assert!(guest.accepts_node(None, Some(b"token")));
        assert!(!guest.accepts_node(None, Some(b"tokens")));
    }

    #[test]
    fn a_guest_without_a_hash_is_open_until_it_has_a_token() {
        let guest = Guest::new(Machine::NotOurs, None);
        assert!(guest.accepts_node(None, None));
        guest.set_token("token");
        assert!(!guest.accepts_node(None, None));
        assert!(!guest.accepts_token(None));
        assert!(guest.accepts_token(Some(b"token")));
        guest.set_token("");
        assert!(guest.accepts_token(None));
    }

    #[test]
    fn a_hash_that_is_no_hash_closes_the_door() {
        assert!(!Guest::new(Machine::NotOurs, Some("zz".into())).accepts_node(Some(b""), None));
    }

    #[test]
    fn variables_of_init_win_over_identity_and_replace_each_other() {
        let guest = Guest::new(Machine::NotOurs, None);
        guest.set_identity(Some("abc".into()), None);
        guest.set_env(BTreeMap::from([("A".into(), "1".into())]));
        guest.set_env(BTreeMap::from([("B".into(), "2".into()), ("E2B_SANDBOX_ID".into(), "mine".into())]));
        let env = guest.env();
        assert_eq!(env.get("A"), None);
        assert_eq!(env.get("B").map(String::as_str), Some("2"));
        assert_eq!(env.get("E2B_SANDBOX_ID").map(String::as_str), Some("mine"));
        assert_eq!(env.get("E2B_SANDBOX").map(String::as_str), Some("true"));
    }
}
