//! Proving who we are to one endpoint.
//!
//! ```text
//! Unknown ──401──→ Basic      the account's name and password go along
//!    └─────401──→ Bearer     a token per repository, from the service that the challenge names
//! ```
//!
//! A token is asked for by whoever needs it first; the others wait for that answer, be it a token or a failure. It is
//! replaced before it expires, and once when it is refused nevertheless. If its asker goes away, the next one asks.
//!
//! A password goes to the endpoint's own host, or to a token service on the same host or on one that settings or the
//! well-known registries' rules name for it. A challenge that names another gets no password: whoever can forge a 401
//! could collect it. Tokens for the public are asked for anywhere the guard allows.

use super::{
    Credentials, Error, Place,
    challenge::Challenge,
    credentials::Account,
    error::words,
    guard,
    transport::{Reach, Transport, bare},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use parking_lot::Mutex;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue};
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use url::Url;

const MAX_ANSWER: usize = 256 << 10;
const MAX_TOKEN: usize = 32 << 10;
/// Repositories with a token at a time.
const MAX_SLOTS: usize = 1024;
/// What a token lives when its service doesn't say (Docker's token specification).
const LIFETIME: Duration = Duration::from_secs(60);
const MAX_LIFETIME: Duration = Duration::from_secs(24 * 3600);
const MAX_SCOPE: usize = 512;

/// What one endpoint wants and has been given.
pub(crate) struct Auth {
    /// As credentials name it.
    registry: String,
    base: Url,
    loopback: bool,
    token_hosts: Vec<String>,
    credentials: Credentials,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    scheme: Scheme,
    /// By repository.
    slots: HashMap<String, Slot>,
}

#[derive(Clone, Default, PartialEq, Eq)]
enum Scheme {
    #[default]
    Unknown,
    Basic,
    Bearer(Arc<Service>),
}

/// Who gives tokens.
#[derive(PartialEq, Eq)]
struct Service {
    realm: Url,
    name: Option<String>,
    /// A scope of another kind than a repository's, which some registries want.
    scope: Option<String>,
}

/// Async, because it is held while a token is asked for: that is what makes the others wait.
type Slot = Arc<tokio::sync::Mutex<Held>>;

#[derive(Default)]
struct Held {
    token: Option<Token>,
    failed: Option<(Instant, Error)>,
}

struct Token {
    header: HeaderValue,
    until: Instant,
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Auth").field("registry", &self.registry).finish_non_exhaustive()
    }
}

impl Auth {
    pub(crate) fn new(
        registry: &str,
        base: Url,
        loopback: bool,
        token_hosts: Vec<String>,
        credentials: Credentials,
    ) -> Self {
        Self {
            registry: registry.to_owned(),
            base,
            loopback,
            token_hosts,
            credentials,
            state: Mutex::default(),
        }
    }

    /// The header for a request about `repository`, as far as it is known that one is needed.
    pub(crate) async fn authorize(
        &self,
        transport: &Transport,
        place: &Arc<Place>,
        repository: &str,
    ) -> Result<Option<HeaderValue>, Error> {
        let scheme = self.state.lock().scheme.clone();
        match scheme {
            Scheme::Unknown => Ok(None),
            Scheme::Basic => match self.credentials.account(&self.registry, repository)? {
                Some(account) => basic(account).map(Some),
                // Perhaps this repository is public.
                None => Ok(None),
            },
            Scheme::Bearer(service) => self.token(transport, place, repository, &service).await.map(Some),
        }
    }

    /// Learns from a 401. `used` is what the refused request carried.
    ///
    /// # Errors
    /// [`Error::Unauthorized`] when there is nothing better to try.
    pub(crate) async fn challenged(
        &self,
        place: &Arc<Place>,
        repository: &str,
        offers: &[Challenge],
        used: Option<&HeaderValue>,
    ) -> Result<(), Error> {
        let refuse = |reason: String| Error::Unauthorized { place: Arc::clone(place), reason };
        let bearer = offers.iter().find_map(|offer| {
            offer.get("realm").filter(|_| offer.scheme == "bearer").map(|realm| (offer, realm))
        });
        if let Some((offer, realm)) = bearer {
            let service = Arc::new(self.service(place, offer, realm)?);
            let slot = {
                let mut state = self.state.lock();
                if state.scheme != Scheme::Bearer(Arc::clone(&service)) {
                    state.slots.clear();
                    state.scheme = Scheme::Bearer(service);
                }
                state.slots.get(repository).cloned()
            };
            // Of those who were refused with the same token, the first drops it.
            if let (Some(slot), Some(used)) = (slot, used) {
                let mut held = slot.lock().await;
                if held.token.as_ref().is_some_and(|token| token.header == *used) {
                    held.token = None;
                }
            }
            return Ok(());
        }
        if !offers.iter().any(|offer| offer.scheme == "basic") {
            return Err(refuse("it offers no way to log in that is known here".to_owned()));
        }
        if self.credentials.account(&self.registry, repository)?.is_none() {
            return Err(refuse(format!(
                "there are no credentials for {}{}",
                self.registry,
                self.credentials.hint()
            )));
        }
        let mut state = self.state.lock();
        if state.scheme == Scheme::Basic && used.is_some() {
            return Err(refuse(format!("it refused the name or password for {}", self.registry)));
        }
        state.scheme = Scheme::Basic;
        Ok(())
    }

    fn service(&self, place: &Arc<Place>, offer: &Challenge, realm: &str) -> Result<Service, Error> {
        let url = self.base.join(realm).map_err(|e| {
            Error::protocol(
                place,
                "a token",
                format!("its token service {:?} is no address: {e}", words(realm)),
            )
        })?;
        guard::check(&url, self.base.scheme() == "http", self.loopback)
            .map_err(|reason| Error::Redirect { place: Arc::clone(place), target: bare(&url), reason })?;
        // Never the challenge's word about repositories: a token for others would be shown to this registry.
        let scope = offer
            .get("scope")
            .filter(|scope| (1..=MAX_SCOPE).contains(&scope.len()) && !scope.contains("repository"));
        Ok(Service {
            realm: url,
            name: offer.get("service").map(str::to_owned),
            scope: scope.map(str::to_owned),
        })
    }

    async fn token(
        &self,
        transport: &Transport,
        place: &Arc<Place>,
        repository: &str,
        service: &Service,
    ) -> Result<HeaderValue, Error> {
        let slot = {
            let mut state = self.state.lock();
            if state.slots.len() >= MAX_SLOTS && !state.slots.contains_key(repository) {
                // Those in use live on in their users' hands; the next request asks anew.
                state.slots.clear();
            }
            Arc::clone(state.slots.entry(repository.to_owned()).or_default())
        };
        let began = Instant::now();
        let mut held = slot.lock().await;
        if let Some(token) = held.token.as_ref().filter(|token| Instant::now() < token.until) {
            return Ok(token.header.clone());
        }
        if let Some((_, error)) = held.failed.as_ref().filter(|(at, _)| *at >= began) {
            return Err(error.clone());
        }
        match self.request(transport, place, repository, service).await {
            Ok(token) => {
                let header = token.header.clone();
                *held = Held { token: Some(token), failed: None };
                Ok(header)
            }
            Err(error) => {
                *held = Held { token: None, failed: Some((Instant::now(), error.clone())) };
                Err(error)
            }
        }
    }

    async fn request(
        &self,
        transport: &Transport,
        place: &Arc<Place>,
        repository: &str,
        service: &Service,
    ) -> Result<Token, Error> {
        let mut url = service.realm.clone();
        {
            let mut query = url.query_pairs_mut();
            if let Some(name) = &service.name {
                query.append_pair("service", name);
            }
            query.append_pair("scope", &format!("repository:{repository}:pull"));
            if let Some(scope) = &service.scope {
                query.append_pair("scope", scope);
            }
        }
        let mut headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static("application/json"))]);
        if let Some(account) = self.credentials.account(&self.registry, repository)? {
            if !self.trusts(&url) {
                return Err(Error::Redirect {
                    place: Arc::clone(place),
                    target: bare(&url),
                    reason: format!(
                        "it asks that the credentials for {} go to another host; if that is its token service, name \
                         the host in the registry's token_hosts",
                        self.registry
                    ),
                });
            }
            headers.insert(AUTHORIZATION, basic(account)?);
        }
        let host = url.port().map_or_else(
            || url.host_str().unwrap_or_default().to_owned(),
            |port| format!("{}:{port}", url.host_str().unwrap_or_default()),
        );
        let token_place = Arc::new(Place { host, repository: place.repository.clone() });
        let reach = match () {
            () if self.loopback => Reach::Local,
            () if url.host() == self.base.host() => Reach::Named,
            () => Reach::Foreign,
        };
        let asked = Instant::now();
        let answer = transport.get(reach, &url, headers, &token_place, "a token").await?;
        if answer.status() != 200 {
            // Its 401 is about the account, 403 as well.
            return Err(match answer.refusal().await {
                Error::Forbidden { place, reason } => Error::Unauthorized { place, reason },
                other => other,
            });
        }
        read(&answer.document(MAX_ANSWER).await?, asked)
            .map_err(|reason| Error::protocol(&token_place, "a token", reason))
    }

    /// Whether the password may go there.
    fn trusts(&self, realm: &Url) -> bool {
        // Over HTTP only where the endpoint itself is; the guard has seen to it. A host, whatever its port.
        let Some(host) = realm.host_str() else { return false };
        let with_port = realm.port_or_known_default().map(|port| format!("{host}:{port}"));
        self.base.host_str() == Some(host)
            || self.token_hosts.iter().any(|known| known == host || Some(known) == with_port.as_ref())
    }
}

fn basic(account: &Account) -> Result<HeaderValue, Error> {
    let text = format!("Basic {}", STANDARD.encode(format!("{}:{}", account.username, account.password)));
    secret(&text).ok_or_else(|| Error::Setup("the account's name or password can't be sent".to_owned()))
}

/// A header that is not shown.
fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Reads a token service's answer.
fn read(body: &[u8], asked: Instant) -> Result<Token, &'static str> {
    #[derive(serde::Deserialize)]
    struct Answer {
        token: Option<String>,
        access_token: Option<String>,
        expires_in: Option<f64>,
    }
    let answer: Answer = serde_json::from_slice(body).map_err(|_| "it is not a token in JSON")?;
    let given = |token: Option<String>| token.filter(|token| !token.is_empty());
    let token = given(answer.token).or_else(|| given(answer.access_token)).ok_or("it holds no token")?;
    if token.len() > MAX_TOKEN {
        return Err("the token is too long");
    }
    let header = secret(&format!("Bearer {token}")).ok_or("the token holds characters that can't be sent")?;
    let lifetime = answer.expires_in.map_or(LIFETIME, |seconds| {
        Duration::try_from_secs_f64(seconds).map_or(LIFETIME, |lifetime| lifetime.min(MAX_LIFETIME))
    });
    Ok(Token { header, until: asked + usable(lifetime) })
}

/// How long a token is used: not to its last moment, since a request takes time and clocks differ. Counted from when it
/// was asked for by our own clock, so `issued_at` doesn't matter.
fn usable(lifetime: Duration) -> Duration {
    lifetime - (lifetime / 5).min(Duration::from_secs(30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_replaced_before_it_expires() {
        let seconds = |lifetime| usable(Duration::from_secs(lifetime)).as_secs();
        assert_eq!((seconds(60), seconds(300), seconds(3600), seconds(0)), (48, 270, 3570, 0));
        let asked = Instant::now();
        let until = |json: &str| read(json.as_bytes(), asked).map(|token| (token.until - asked).as_secs());
        assert_eq!(until(r#"{"token":"a","expires_in":300}"#), Ok(270));
        assert_eq!(until(r#"{"access_token":"a"}"#), Ok(48));
        assert_eq!(until(r#"{"token":"","access_token":"a","expires_in":-5}"#), Ok(48));
        assert_eq!(until(r#"{"token":"a","expires_in":1e300}"#), Ok(48));
        assert_eq!(until(r#"{"expires_in":300}"#), Err("it holds no token"));
        assert!(until("<html>").is_err() && until(r#"{"token":"a\nb"}"#).is_err());
        let token = read(br#"{"token":"s3cret"}"#, asked).unwrap();
        assert!(!format!("{:?}", token.header).contains("s3cret"));
    }

    #[test]
    fn passwords_go_to_the_registrys_own_host_or_one_that_is_named() {
        let auth = |base: &str, hosts: &[&str]| {
            let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            Auth::new("r.example", base.parse().unwrap(), false, hosts, Credentials::default())
        };
        let plain = auth("https://r.example:5000/v2/", &[]);
        let trusts = |auth: &Auth, realm: &str| auth.trusts(&realm.parse().unwrap());
        assert!(trusts(&plain, "https://r.example/token") && trusts(&plain, "https://r.example:5000/token"));
        for other in [
            "https://example/t",
            "https://a.r.example/t",
            "https://evil.example/t",
            "https://r.example.evil/t",
        ] {
            assert!(!trusts(&plain, other), "{other}");
        }
        let named = auth("https://r.example/v2/", &["auth.example", "x.example:8443"]);
        assert!(trusts(&named, "https://auth.example/t") && trusts(&named, "https://x.example:8443/t"));
        assert!(!trusts(&named, "https://x.example/t"));
    }
}
