//! Who asks a registry.
//!
//! The file format is containers-auth.json(5), which `docker login` and `skopeo login` write. Credential helpers are
//! programs and are not run: a registry whose credentials only a helper has is refused with words, not asked as nobody.

use super::Error;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Deserialize;
use std::{collections::BTreeMap, fmt, io::Read as _, path::Path};

const MAX_FILE: u64 = 1 << 20;
/// What Docker calls its registry in such files.
const DOCKER_HUB: [&str; 4] =
    ["docker.io", "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com"];

/// Accounts by registry. Never shown by `Debug`.
#[derive(Clone, Default)]
pub struct Credentials {
    accounts: BTreeMap<String, Account>,
    /// Registries whose credentials a helper keeps.
    helpers: BTreeMap<String, String>,
    /// Keeps those of all others.
    store: Option<String>,
}

#[derive(Clone)]
pub(crate) struct Account {
    pub(crate) username: String,
    pub(crate) password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.accounts.keys()).finish()
    }
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
    #[serde(default, rename = "credHelpers")]
    helpers: BTreeMap<String, String>,
    #[serde(default, rename = "credsStore")]
    store: Option<String>,
}

#[derive(Deserialize)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
}

impl Credentials {
    /// Adds an account for `registry`, named as in references and with a path for a part of it only.
    #[must_use]
    pub fn with(mut self, registry: &str, username: &str, password: &str) -> Self {
        let account = Account { username: username.to_owned(), password: password.to_owned() };
        self.accounts.insert(key(registry), account);
        self
    }

    /// Reads a file. Blocking.
    ///
    /// # Errors
    /// It can't be read, or isn't such a file. The message holds no secret.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        let bad = |reason: &dyn fmt::Display| {
            Error::Setup(format!("the credentials file {} can't be used: {reason}", path.display()))
        };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(|e| bad(&e))?;
        file.take(MAX_FILE + 1).read_to_string(&mut text).map_err(|e| bad(&e))?;
        if text.len() as u64 > MAX_FILE {
            return Err(bad(&format!("it is larger than {MAX_FILE} bytes")));
        }
        // serde's message could quote a secret.
        let file: File = serde_json::from_str(&text)
            .map_err(|e| bad(&format!("it is not JSON as docker login writes it, line {}", e.line())))?;
        let mut credentials = Self {
            helpers: file.helpers.into_iter().map(|(registry, helper)| (key(&registry), helper)).collect(),
            store: file.store.filter(|store| !store.is_empty()),
            ..Self::default()
        };
        for (registry, entry) in file.auths {
            if let Some(account) = account(entry).map_err(|reason| bad(&format!("{registry}: {reason}")))? {
                credentials.accounts.insert(key(&registry), account);
            }
        }
        Ok(credentials)
    }

    /// The account for a repository: that of the longest path wins.
    pub(crate) fn account(&self, registry: &str, repository: &str) -> Result<Option<&Account>, Error> {
        let registry = key(registry);
        let whole = format!("{registry}/{repository}");
        let mut name = whole.as_str();
        loop {
            if let Some(account) = self.accounts.get(name) {
                return Ok(Some(account));
            }
            match name.rsplit_once('/') {
                Some((shorter, _)) => name = shorter,
                None => break,
            }
        }
        match self.helpers.get(&registry) {
            Some(helper) => Err(Error::Setup(format!(
                "the credentials of {registry} are kept by docker-credential-{helper}, which is not run here: \
                 log in without a helper, so that they are in the file's \"auths\""
            ))),
            None => Ok(None),
        }
    }

    /// Says why there is none, when a store that isn't asked may have it.
    pub(crate) fn hint(&self) -> String {
        self.store.as_ref().map_or_else(String::new, |store| {
            format!("; credentials kept by docker-credential-{store} are not read, put them in the file's \"auths\"")
        })
    }
}

/// `https://index.docker.io/v1/` and the like to the name that references use.
fn key(registry: &str) -> String {
    let bare = registry.trim_start_matches("https://").trim_start_matches("http://");
    let bare = bare.strip_suffix("/v1/").or(bare.strip_suffix("/v2/")).unwrap_or(bare).trim_end_matches('/');
    let (host, path) = bare.split_once('/').map_or((bare, None), |(host, path)| (host, Some(path)));
    let host = if DOCKER_HUB.contains(&host) { "docker.io" } else { host };
    path.map_or_else(|| host.to_owned(), |path| format!("{host}/{path}"))
}

fn account(entry: Entry) -> Result<Option<Account>, &'static str> {
    if let Some(auth) = entry.auth.filter(|auth| !auth.is_empty()) {
        let decoded = STANDARD.decode(auth.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let decoded = decoded.ok_or("\"auth\" is not base64 of text")?;
        // Docker pads with NUL.
        let decoded = decoded.trim_end_matches('\0');
        let (username, password) = decoded.split_once(':').ok_or("\"auth\" holds no colon")?;
        return Ok(Some(Account { username: username.to_owned(), password: password.to_owned() }));
    }
    Ok(entry.username.zip(entry.password).map(|(username, password)| Account { username, password }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Credentials, Error> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), json).unwrap();
        Credentials::from_file(file.path())
    }

    #[test]
    fn the_account_of_the_longest_path_wins_and_docker_hub_has_many_names() {
        let credentials = read(
            r#"{"auths": {"https://index.docker.io/v1/": {"auth": "aHViOnNlY3JldA=="},
                "r.example": {"username": "all", "password": "p"}, "r.example/team": {"auth": "dGVhbTpwOnE="}, "empty.example": {}}}"#,
        )
        .unwrap();
        let name = |registry, repository| {
            credentials
                .account(registry, repository)
                .unwrap()
                .map(|a| (a.username.as_str(), a.password.as_str()))
        };
        assert_eq!(name("docker.io", "library/debian"), Some(("hub", "secret")));
        assert_eq!(name("r.example", "team/x"), Some(("team", "p:q")));
        assert_eq!(name("r.example", "teams/x"), Some(("all", "p")));
        assert_eq!(name("r.example.evil", "team/x"), None);
        assert_eq!(name("empty.example", "x"), None);
        assert!(!format!("{credentials:?}").contains("secret"));
    }

    #[test]
    fn what_only_a_helper_has_and_bad_files_are_told() {
        let credentials = read(r#"{"credHelpers": {"r.example": "pass"}, "credsStore": "desktop"}"#).unwrap();
        let error = credentials.account("r.example", "x").err().unwrap().to_string();
        assert!(error.contains("docker-credential-pass"), "{error}");
        assert!(credentials.account("other.example", "x").unwrap().is_none());
        assert!(credentials.hint().contains("desktop"));
        for (json, part) in [
            ("{", "not JSON"),
            (r#"{"auths": {"x": {"auth": "??"}}}"#, "base64"),
            (r#"{"auths": {"x": {"auth": "eA=="}}}"#, "colon"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(Credentials::from_file(Path::new("/nonexistent/x")).is_err());
    }
}
