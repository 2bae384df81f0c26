//! One host that is asked: a registry, or a mirror of it.

use super::{Credentials, Error, Mirror, Place, Settings, Transport, auth::Auth, transport::Reach};
use crate::reference::Remote;
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use url::Url;

/// How long a mirror that is down is passed over, so that not every block of a layer waits for it.
const REST: Duration = Duration::from_secs(30);

/// A host with what is known about it.
#[derive(Debug)]
pub(crate) struct Endpoint {
    /// `https://host/v2/`.
    base: Url,
    /// Goes before each repository; empty or with a slash at its end.
    prefix: String,
    /// Host with port, for messages.
    host: String,
    loopback: bool,
    pub(crate) auth: Auth,
    resting: Mutex<Option<Instant>>,
}

impl Endpoint {
    /// All hosts to ask for a registry's repositories: its mirrors, then itself.
    pub(crate) fn all(
        registry: &str,
        settings: &Settings,
        credentials: &Credentials,
    ) -> Result<Arc<[Arc<Self>]>, Error> {
        let mirrors = settings.mirrors.iter().map(|mirror| Self::mirror(mirror, credentials));
        let own = Self::new(registry, settings.transport, &settings.token_hosts, credentials);
        mirrors.chain([own]).map(|endpoint| endpoint.map(Arc::new)).collect()
    }

    fn mirror(mirror: &Mirror, credentials: &Credentials) -> Result<Self, Error> {
        let location = mirror.location.trim_end_matches('/');
        let (host, path) = location.split_once('/').map_or((location, ""), |(host, path)| (host, path));
        if host.contains(':') && path.starts_with('/') {
            return Err(Error::Setup(format!(
                "the mirror {location} must be a host with an optional port and path, without https://"
            )));
        }
        let mut endpoint = Self::new(host, mirror.transport, &mirror.token_hosts, credentials)?;
        if !path.is_empty() {
            endpoint.prefix = format!("{path}/");
        }
        Ok(endpoint)
    }

    fn new(
        registry: &str,
        transport: Transport,
        token_hosts: &[String],
        credentials: &Credentials,
    ) -> Result<Self, Error> {
        let host = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
        let named = Remote { registry: host.to_owned(), repository: String::new(), tag: None, digest: None };
        let loopback = named.is_loopback();
        let scheme = match transport {
            Transport::Auto if loopback => "http",
            Transport::Http => "http",
            Transport::Auto | Transport::Https => "https",
        };
        let base = Url::parse(&format!("{scheme}://{host}/v2/"))
            .ok()
            .filter(|url| url.path() == "/v2/" && url.username().is_empty() && url.password().is_none())
            .ok_or_else(|| {
                Error::Setup(format!("{registry:?} is not a registry; write a host with an optional port"))
            })?;
        // Also a registry that a user names must not be a metadata service; loopback is theirs to name.
        super::guard::check(&base, true, true)
            .map_err(|reason| Error::Setup(format!("the registry {registry} is refused: {reason}")))?;
        let known: &[&str] = match registry {
            "docker.io" => &["auth.docker.io"],
            "registry.gitlab.com" => &["gitlab.com"],
            _ => &[],
        };
        let token_hosts =
            known.iter().map(|host| (*host).to_owned()).chain(token_hosts.iter().cloned()).collect();
        let auth = Auth::new(registry, base.clone(), loopback, token_hosts, credentials.clone());
        Ok(Self {
            base,
            prefix: String::new(),
            host: host.to_owned(),
            loopback,
            auth,
            resting: Mutex::default(),
        })
    }

    /// Of `manifests/latest` and the like. The path's parts are checked where references are read.
    pub(crate) fn url(&self, repository: &str, path: &str) -> Url {
        let mut url = self.base.clone();
        url.set_path(&format!("/v2/{}{repository}/{path}", self.prefix));
        url
    }

    /// The repository as this host calls it: tokens are asked for under that name.
    pub(crate) fn repository(&self, repository: &str) -> String {
        format!("{}{repository}", self.prefix)
    }

    pub(crate) fn place(&self, repository: &str) -> Arc<Place> {
        Arc::new(Place { host: self.host.clone(), repository: repository.to_owned() })
    }

    /// Whether our `Authorization` may go there: same scheme, host and port.
    pub(crate) fn owns(&self, url: &Url) -> bool {
        url.origin() == self.base.origin()
    }

    pub(crate) fn reach(&self, url: &Url) -> Reach {
        if self.loopback {
            Reach::Local
        } else if url.host() == self.base.host() {
            Reach::Named
        } else {
            Reach::Foreign
        }
    }

    /// Judges where it sends us.
    pub(crate) fn check(&self, url: &Url) -> Result<(), String> {
        super::guard::check(url, self.base.scheme() == "http", self.loopback)
    }

    pub(crate) fn rest(&self) {
        *self.resting.lock() = Some(Instant::now() + REST);
    }

    pub(crate) fn is_resting(&self) -> bool {
        self.resting.lock().is_some_and(|until| Instant::now() < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(registry: &str, settings: &Settings) -> Result<Vec<String>, String> {
        let all = Endpoint::all(registry, settings, &Credentials::default()).map_err(|e| e.to_string())?;
        Ok(all.iter().map(|e| e.url("team/x", "manifests/1").to_string()).collect())
    }

    #[test]
    fn names_become_addresses_and_http_is_for_this_machine_or_who_is_named() {
        let plain = Settings::default();
        let one = |registry: &str| endpoints(registry, &plain).unwrap().remove(0);
        assert_eq!(one("docker.io"), "https://registry-1.docker.io/v2/team/x/manifests/1");
        assert_eq!(one("r.example:5000"), "https://r.example:5000/v2/team/x/manifests/1");
        assert_eq!(one("127.0.0.1:5000"), "http://127.0.0.1:5000/v2/team/x/manifests/1");
        assert_eq!(one("10.0.0.1:5000"), "https://10.0.0.1:5000/v2/team/x/manifests/1");
        let settings = Settings {
            transport: Transport::Http,
            mirrors: vec![
                Mirror { location: "m.example/hub/".to_owned(), ..Mirror::default() },
                Mirror {
                    location: "[::1]:5000".to_owned(),
                    transport: Transport::Https,
                    ..Mirror::default()
                },
            ],
            ..Settings::default()
        };
        assert_eq!(
            endpoints("r.example", &settings).unwrap(),
            [
                "https://m.example/v2/hub/team/x/manifests/1",
                "https://[::1]:5000/v2/team/x/manifests/1",
                "http://r.example/v2/team/x/manifests/1"
            ]
        );
        assert!(endpoints("169.254.169.254:80", &settings).unwrap_err().contains("link-local"));
        let bad = Mirror { location: "https://m.example".to_owned(), ..Mirror::default() };
        let settings = Settings { mirrors: vec![bad], ..Settings::default() };
        assert!(endpoints("r.example", &settings).unwrap_err().contains("without https://"));
    }
}
