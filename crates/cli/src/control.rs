//! Client of the control plane. Every call has a deadline; reads are retried once when the connection breaks, since
//! a server restart must not fail a script; writes are not, except a create, which carries an idempotency key.

use crate::{
    error::{Error, Result},
    settings::Settings,
};
use aenv_api_types::{
    API_KEY_HEADER, BuildInfo, ConnectSandbox, IDEMPOTENCY_KEY_HEADER, LogsV2, NEXT_TOKEN_HEADER, NewSandbox,
    NodeStats, PauseSandbox, PullAccepted, PullTemplate, SetTimeout,
};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::{collections::BTreeMap, time::Duration};
use url::Url;

const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// For answers the server gives from its records.
const READ_DEADLINE: Duration = Duration::from_secs(30);
/// For operations on a machine: start, pause, resume, delete. Larger than the server's own deadlines, so that its
/// message arrives rather than ours.
const OPERATION_DEADLINE: Duration = Duration::from_secs(180);
/// The first start from an image fetches and boots it.
const START_DEADLINE: Duration = Duration::from_secs(1800);
/// Longest answer read into memory.
const MAX_ANSWER: usize = 64 << 20;
/// What may not stand in one path segment as it is: a template is named `ns/name:tag`.
const SEGMENT: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'/')
    .add(b':')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// An HTTP client that suits `url`: no proxy towards this machine, and no certificate store where none is needed.
///
/// # Errors
/// The TLS set-up fails.
pub fn http_client(url: &Url) -> Result<Client> {
    // reqwest panics without a provider. Installing fails only when there is one already, which is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = Client::builder()
        .connect_timeout(CONNECT_DEADLINE)
        .tcp_nodelay(true)
        .pool_idle_timeout(Duration::from_secs(30))
        .user_agent(concat!("aenv-cli/", env!("CARGO_PKG_VERSION")));
    if url.scheme() == "http" {
        builder = builder.tls_certs_only([]);
    }
    let local = match url.host() {
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost",
        None => false,
    };
    if local {
        builder = builder.no_proxy();
    }
    builder.build().map_err(|e| Error::Failed(format!("can't set up the HTTP client: {e}")))
}

/// Which sandboxes to list.
#[derive(Debug, Clone, Default)]
pub struct ListFilter {
    /// All of these labels.
    pub metadata: BTreeMap<String, String>,
    /// Any of these states.
    pub states: Vec<String>,
    /// Template id or alias.
    pub template: Option<String>,
}

/// The control plane. Cheap to clone.
#[derive(Clone)]
pub struct Control {
    http: Client,
    base: Url,
    key: Option<String>,
}

impl Control {
    /// A client for the address and key of `settings`.
    ///
    /// # Errors
    /// The HTTP client can't be set up.
    pub fn new(settings: &Settings) -> Result<Self> {
        Ok(Self {
            http: http_client(&settings.api_url)?,
            base: settings.api_url.clone(),
            key: settings.api_key.clone(),
        })
    }

    fn url(&self, segments: &[&str], query: &[(&str, String)]) -> Result<Url> {
        let mut text = self.base.as_str().trim_end_matches('/').to_owned();
        for segment in segments {
            text.push('/');
            // `.` and `..` would be resolved away by the parser; no id or name is either.
            if matches!(*segment, "." | ".." | "") {
                return Err(Error::Usage(format!("'{segment}' is not a name or id")));
            }
            text.extend(utf8_percent_encode(segment, SEGMENT));
        }
        let mut url = Url::parse(&text).map_err(|e| Error::Usage(format!("{text}: {e}")))?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        Ok(url)
    }

    fn request(&self, method: Method, url: Url, deadline: Duration) -> RequestBuilder {
        let request = self.http.request(method, url).timeout(deadline);
        match &self.key {
            Some(key) => request.header(API_KEY_HEADER, key),
            None => request,
        }
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response = request.send().await.map_err(|e| Error::from_transport(&e, self.base.as_str()))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let wait = response.headers().get("retry-after").and_then(|v| v.to_str().ok()).map(str::to_owned);
        let body = read_bounded(response).await.unwrap_or_default();
        let mut message = message_of(&body, status);
        if self.key.is_none() && status == StatusCode::UNAUTHORIZED {
            message = "no API key is set (E2B_API_KEY, ~/.config/aenv/env or --api-key)".to_owned();
        }
        if let Some(wait) = wait {
            message = format!("{message} (try again in {wait} s)");
        }
        Err(Error::from_status(status, message))
    }

    async fn get(&self, segments: &[&str], query: &[(&str, String)]) -> Result<Response> {
        let url = self.url(segments, query)?;
        match self.send(self.request(Method::GET, url.clone(), READ_DEADLINE)).await {
            Err(Error::Dropped(_)) => self.send(self.request(Method::GET, url, READ_DEADLINE)).await,
            other => other,
        }
    }

    async fn post(&self, segments: &[&str], body: &impl serde::Serialize) -> Result<Response> {
        let url = self.url(segments, &[])?;
        self.send(self.request(Method::POST, url, OPERATION_DEADLINE).json(body)).await
    }

    /// Whether a server answers, and its health document if it has one.
    ///
    /// # Errors
    /// Nothing answers, or it says it isn't well.
    pub async fn health(&self) -> Result<()> {
        self.get(&["health"], &[]).await.map(drop)
    }

    /// Starts a sandbox. Sent again, under the same key, when the connection breaks before an answer.
    ///
    /// # Errors
    /// As the server says; see [`Error::from_status`].
    pub async fn create(&self, new: &NewSandbox, cold: bool) -> Result<Value> {
        let url = self.url(&["v2", "sandboxes"], &[])?;
        let key = uuid::Uuid::new_v4().to_string();
        let attempt = || {
            let request = self.request(Method::POST, url.clone(), START_DEADLINE).json(new);
            let request = request.header(IDEMPOTENCY_KEY_HEADER, &key);
            if cold { request.header(aenv_api_types::START_HEADER, "cold") } else { request }
        };
        let response = match self.send(attempt()).await {
            Err(Error::Dropped(_)) => self.send(attempt()).await?,
            other => other?,
        };
        json_of(response).await
    }

    /// A sandbox as the E2B endpoint tells it.
    ///
    /// # Errors
    /// [`Error::NotFound`] names what became of it when the server knows.
    pub async fn sandbox(&self, id: &str) -> Result<Value> {
        json_of(self.get(&["sandboxes", id], &[]).await?).await
    }

    /// A sandbox with phase timings and tombstone, from our own endpoint.
    ///
    /// # Errors
    /// As [`Control::sandbox`].
    pub async fn sandbox_in_full(&self, id: &str) -> Result<Value> {
        json_of(self.get(&["aenv", "v1", "sandboxes", id], &[]).await?).await
    }

    /// All sandboxes that match, over all pages, at most `limit`.
    ///
    /// # Errors
    /// As the server says.
    pub async fn sandboxes(&self, filter: &ListFilter, limit: usize) -> Result<Vec<Value>> {
        let mut query = Vec::new();
        if !filter.metadata.is_empty() {
            // The one value is itself a query string, so it's encoded twice on the wire.
            let inner =
                url::form_urlencoded::Serializer::new(String::new()).extend_pairs(&filter.metadata).finish();
            query.push(("metadata", inner));
        }
        if !filter.states.is_empty() {
            query.push(("state", filter.states.join(",")));
        }
        if let Some(template) = &filter.template {
            query.push(("template", template.clone()));
        }
        self.pages(&["v2", "sandboxes"], &query, limit).await
    }

    /// All templates, at most `limit`.
    ///
    /// # Errors
    /// As the server says.
    pub async fn templates(&self, limit: usize) -> Result<Vec<Value>> {
        self.pages(&["v2", "templates"], &[], limit).await
    }

    async fn pages(&self, path: &[&str], query: &[(&str, String)], limit: usize) -> Result<Vec<Value>> {
        let mut items = Vec::new();
        let mut token: Option<String> = None;
        loop {
            let mut query = query.to_vec();
            query.push(("limit", (limit - items.len()).clamp(1, 100).to_string()));
            if let Some(token) = &token {
                query.push(("nextToken", token.clone()));
            }
            let response = self.get(path, &query).await?;
            let next =
                response.headers().get(NEXT_TOKEN_HEADER).and_then(|v| v.to_str().ok()).map(str::to_owned);
            let page: Vec<Value> = match json_of::<Value>(response).await? {
                Value::Array(page) => page,
                Value::Object(mut object) => match object.remove("templates") {
                    Some(Value::Array(page)) => page,
                    _ => {
                        return Err(Error::Failed(
                            "the server sent an object where a list belongs".to_owned(),
                        ));
                    }
                },
                _ => return Err(Error::Failed("the server did not send a list".to_owned())),
            };
            let empty = page.is_empty();
            items.extend(page);
            token = next.filter(|t| !t.is_empty());
            // A server that repeats a token on an empty page must not hold us for ever.
            if token.is_none() || empty || items.len() >= limit {
                items.truncate(limit);
                return Ok(items);
            }
        }
    }

    /// Ends a sandbox.
    ///
    /// # Errors
    /// As the server says.
    pub async fn kill(&self, id: &str) -> Result<()> {
        let url = self.url(&["sandboxes", id], &[])?;
        self.send(self.request(Method::DELETE, url, OPERATION_DEADLINE)).await.map(drop)
    }

    /// Pauses a sandbox; without `memory` only its disk is kept.
    ///
    /// # Errors
    /// As the server says.
    pub async fn pause(&self, id: &str, memory: bool) -> Result<()> {
        self.post(
            &["sandboxes", id, "pause"],
            &PauseSandbox { memory: Some(memory), require_healthy_guest: None },
        )
        .await
        .map(drop)
    }

    /// Makes it running: resumes a paused one, extends a running one. The answer carries the agent's token; the flag
    /// says whether it had to be resumed.
    ///
    /// # Errors
    /// As the server says.
    pub async fn connect(&self, id: &str, timeout_s: i64) -> Result<(Value, bool)> {
        let body = ConnectSandbox { timeout: Some(timeout_s), memory: None };
        let response = self.post(&["sandboxes", id, "connect"], &body).await?;
        let resumed = response.status() == StatusCode::CREATED;
        Ok((json_of(response).await?, resumed))
    }

    /// Sets the end of life, seconds from now; 0 ends it now.
    ///
    /// # Errors
    /// As the server says.
    pub async fn set_timeout(&self, id: &str, timeout_s: i64) -> Result<()> {
        self.post(&["sandboxes", id, "timeout"], &SetTimeout { timeout: timeout_s }).await.map(drop)
    }

    /// Resource samples.
    ///
    /// # Errors
    /// As the server says.
    pub async fn metrics(&self, id: &str, from_unix: Option<i64>) -> Result<Vec<Value>> {
        let query: Vec<_> = from_unix.map(|s| ("start", s.to_string())).into_iter().collect();
        json_of(self.get(&["sandboxes", id, "metrics"], &query).await?).await
    }

    /// A page of log lines from a cursor on (ours, or milliseconds since the epoch), oldest first.
    ///
    /// # Errors
    /// As the server says.
    pub async fn logs(&self, id: &str, cursor: Option<&str>, limit: usize) -> Result<LogsV2> {
        let mut query = vec![("limit", limit.to_string()), ("direction", "forward".to_owned())];
        if let Some(cursor) = cursor {
            query.push(("cursor", cursor.to_owned()));
        }
        json_of(self.get(&["v2", "sandboxes", id, "logs"], &query).await?).await
    }

    /// Counters of the node.
    ///
    /// # Errors
    /// As the server says.
    pub async fn node(&self) -> Result<NodeStats> {
        json_of(self.get(&["aenv", "v1", "node"], &[]).await?).await
    }

    /// Begins to make a template from an image.
    ///
    /// # Errors
    /// As the server says.
    pub async fn pull(&self, pull: &PullTemplate) -> Result<PullAccepted> {
        json_of(self.post(&["aenv", "v1", "templates", "pull"], pull).await?).await
    }

    /// State of a build, with log lines from `offset`.
    ///
    /// # Errors
    /// As the server says.
    pub async fn build(&self, template: &str, build: &str, offset: usize) -> Result<BuildInfo> {
        let query = [("logsOffset", offset.to_string()), ("limit", "100".to_owned())];
        json_of(self.get(&["templates", template, "builds", build, "status"], &query).await?).await
    }

    /// A template by id or name.
    ///
    /// # Errors
    /// As the server says.
    pub async fn template(&self, reference: &str) -> Result<Value> {
        json_of(self.get(&["templates", reference], &[]).await?).await
    }

    /// Deletes a template.
    ///
    /// # Errors
    /// As the server says.
    pub async fn delete_template(&self, reference: &str) -> Result<()> {
        let url = self.url(&["templates", reference], &[])?;
        self.send(self.request(Method::DELETE, url, OPERATION_DEADLINE)).await.map(drop)
    }
}

/// The words of an error body, `{"message": …}`, else its text, else the status.
#[must_use]
pub fn message_of(body: &[u8], status: StatusCode) -> String {
    let parsed = serde_json::from_slice::<Value>(body).ok();
    let message = parsed.as_ref().and_then(|v| v.get("message")).and_then(Value::as_str).map(str::to_owned);
    let text = || {
        let text: String = String::from_utf8_lossy(body).trim().chars().take(500).collect();
        Some(text).filter(|text| !text.is_empty())
    };
    let message = message.or_else(text).unwrap_or_else(|| format!("the server answered {status}"));
    message.trim().to_owned()
}

async fn json_of<T: DeserializeOwned>(response: Response) -> Result<T> {
    let bytes = read_bounded(response).await?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::Failed(format!(
            "the server's answer isn't what this client expects ({e}); are their versions the same?"
        ))
    })
}

/// A whole body, refused beyond a bound so that no answer can fill the memory.
///
/// # Errors
/// A broken connection or too long a body.
pub async fn read_bounded(mut response: Response) -> Result<Vec<u8>> {
    let url = response.url().origin().ascii_serialization();
    let mut bytes = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(|e| Error::from_transport(&e, &url))? {
        if bytes.len() + piece.len() > MAX_ANSWER {
            return Err(Error::Failed(format!("the answer of {url} is longer than {MAX_ANSWER} bytes")));
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

/// Reads the fields this client knows out of a server's answer.
///
/// # Errors
/// The answer lacks something essential.
pub fn known<T: DeserializeOwned>(value: &Value) -> Result<T> {
    T::deserialize(value)
        .map_err(|e| Error::Failed(format!("the server's answer isn't what this client expects: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{output::Format, settings::Global};

    fn control() -> Control {
        let global = Global {
            api_url: Some("http://127.0.0.1:1/base/".into()),
            output: Some(Format::Json),
            ..Global::default()
        };
        Control::new(&Settings::resolve(&global).expect("resolves")).expect("builds")
    }

    #[test]
    fn a_template_name_is_one_path_segment() {
        let url = control().url(&["templates", "team/base:v1"], &[]).expect("fits");
        assert_eq!(url.as_str(), "http://127.0.0.1:1/base/templates/team%2Fbase%3Av1");
    }

    #[test]
    fn an_id_cant_climb_out_of_its_place() {
        assert_eq!(control().url(&["sandboxes", ".."], &[]).expect_err("refused").exit_code(), 2);
        let url = control().url(&["sandboxes", "../x?y"], &[]).expect("encoded");
        assert_eq!(url.path(), "/base/sandboxes/..%2Fx%3Fy");
    }

    #[tokio::test]
    async fn a_refused_connection_says_how_to_start_the_server() {
        let error = control().health().await.expect_err("nothing listens on port 1");
        assert!(error.to_string().contains("aenv up"), "{error}");
        assert_eq!(error.exit_code(), 1);
    }

    #[test]
    fn any_error_body_gives_words() {
        let status = StatusCode::BAD_GATEWAY;
        assert_eq!(message_of(br#"{"code":502,"message":"no"}"#, status), "no");
        assert_eq!(message_of(b"<html>oops", status), "<html>oops");
        assert_eq!(message_of(b"", status), "the server answered 502 Bad Gateway");
    }
}
