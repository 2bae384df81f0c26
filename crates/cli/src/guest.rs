//! Client of the agent inside a sandbox: unary calls, streams, files.
//!
//! Requests go to the sandbox address with `E2b-Sandbox-Id` and `E2b-Sandbox-Port`, which is how the server's proxy
//! tells guest traffic from its own.

use crate::{
    control::{Control, http_client, known, message_of, read_bounded},
    envelope::{Decoder, Envelope, encode},
    error::{Error, Result},
    output,
    settings::Settings,
    wire::Entry,
};
use aenv_api_types::{
    ENVD_PORT, SANDBOX_ID_HEADER, SANDBOX_PORT_HEADER, Sandbox, SandboxDetail, SandboxState,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use reqwest::{Body, Client, RequestBuilder, Response};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::time::Duration;
use url::Url;

const UNARY_DEADLINE: Duration = Duration::from_secs(30);
/// Whole transfers are not bounded by size; they fail when nothing moves for this long.
const IDLE_DEADLINE: Duration = Duration::from_secs(60);
/// How often the agent is asked to show that it lives while a process is silent.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Life given to a paused sandbox that a command wakes up.
const WAKE_TIMEOUT_S: i64 = 300;

/// A running sandbox, and as whom to act in it.
#[derive(Clone)]
pub struct Guest {
    http: Client,
    base: Url,
    id: String,
    token: Option<String>,
    user: Option<String>,
}

impl Guest {
    /// Reaches a sandbox; a paused one is resumed, and standard error says so.
    ///
    /// # Errors
    /// The sandbox does not exist, has ended, or can't be resumed.
    pub async fn reach(
        settings: &Settings,
        control: &Control,
        id: &str,
        user: Option<String>,
    ) -> Result<Self> {
        let detail = control.sandbox(id).await?;
        let sandbox: SandboxDetail = known(&detail)?;
        let running = sandbox.state == SandboxState::Running;
        let mut token = sandbox.envd_access_token;
        if !running || token.is_none() {
            // For a running sandbox this asks for its token only: a life of one second extends nothing.
            let (connected, resumed) = control.connect(id, if running { 1 } else { WAKE_TIMEOUT_S }).await?;
            if resumed {
                output::say(&format!("{id} was paused; resumed it for {WAKE_TIMEOUT_S} s"));
            }
            token = known::<Sandbox>(&connected)?.envd_access_token;
        }
        Self::of(settings, sandbox.sandbox_id, token, user)
    }

    /// A sandbox whose token is known, from the answer to a create.
    ///
    /// # Errors
    /// The HTTP client can't be set up.
    pub fn of(settings: &Settings, id: String, token: Option<String>, user: Option<String>) -> Result<Self> {
        Ok(Self {
            http: http_client(&settings.sandbox_url)?,
            base: settings.sandbox_url.clone(),
            id,
            token,
            user,
        })
    }

    /// Sandbox id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    fn url(&self, path: &str) -> Result<Url> {
        let text = format!("{}/{path}", self.base.as_str().trim_end_matches('/'));
        Url::parse(&text).map_err(|e| Error::Usage(format!("{text}: {e}")))
    }

    fn dress(&self, request: RequestBuilder) -> RequestBuilder {
        let mut request =
            request.header(SANDBOX_ID_HEADER, &self.id).header(SANDBOX_PORT_HEADER, ENVD_PORT.to_string());
        if let Some(token) = &self.token {
            request = request.header("x-access-token", token);
        }
        request
    }

    fn as_user(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.user {
            Some(user) => {
                request.header("authorization", format!("Basic {}", STANDARD.encode(format!("{user}:"))))
            }
            None => request,
        }
    }

    /// One question, one answer.
    ///
    /// # Errors
    /// What the agent says, or [`Error::Dropped`] when it can't be reached just now.
    pub async fn unary<T: DeserializeOwned>(&self, method: &str, body: &impl Serialize) -> Result<T> {
        let request = self.dress(self.http.post(self.url(method)?)).timeout(UNARY_DEADLINE).json(body);
        let response = self.send(self.as_user(request)).await?;
        let bytes = read_bounded(response).await?;
        serde_json::from_slice(&bytes).map_err(|e| {
            Error::Failed(format!("the guest's answer to {method} isn't what this client expects: {e}"))
        })
    }

    /// Opens a stream of answers to one question. With `offset`, output is wanted from that offset on.
    ///
    /// # Errors
    /// As [`Guest::unary`].
    pub async fn stream(&self, method: &str, body: &impl Serialize, offset: u64) -> Result<Messages> {
        let json = serde_json::to_vec(body).map_err(|e| Error::Failed(e.to_string()))?;
        let framed = encode(&json).map_err(|e| Error::Usage(e.to_string()))?;
        let request = self
            .dress(self.http.post(self.url(method)?))
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("keepalive-ping-interval", KEEPALIVE.as_secs().to_string())
            .header("x-aenv-offset", offset.to_string())
            .body(framed);
        // No deadline on the whole: a command may run for days. The answer's head has one; silence has one.
        let sent = tokio::time::timeout(UNARY_DEADLINE, self.send(self.as_user(request))).await;
        let response = sent.map_err(|_| Error::Dropped(format!("no answer within {UNARY_DEADLINE:?}")))??;
        Ok(Messages { response, decoder: Decoder::default() })
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response =
            request.send().await.map_err(|e| match Error::from_transport(&e, self.base.as_str()) {
                Error::Failed(words) => Error::Dropped(words),
                other => other,
            })?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = read_bounded(response).await.unwrap_or_default();
        let message = message_of(&body, status);
        #[derive(Deserialize)]
        struct Failure {
            code: String,
        }
        // The agent names a Connect code; the proxy and the file routes give a number.
        if let Ok(failure) = serde_json::from_slice::<Failure>(&body) {
            return Err(Error::from_connect(&failure.code, &message));
        }
        match status.as_u16() {
            // The proxy's word for a sandbox that is not running: trying again brings nothing.
            502 if message.contains("was not found") => Err(Error::NotFound(format!(
                "sandbox {} is not running; `aenv info {}` says what became of it",
                self.id, self.id
            ))),
            502..=504 => Err(Error::Dropped(message)),
            _ => Err(Error::from_status(status, message)),
        }
    }

    fn files_url(&self, path: &str) -> Result<Url> {
        let mut url = self.url("files")?;
        url.query_pairs_mut().append_pair("path", path);
        if let Some(user) = &self.user {
            url.query_pairs_mut().append_pair("username", user);
        }
        Ok(url)
    }

    /// Writes a file; missing parents are made. `length` is sent when known.
    ///
    /// # Errors
    /// What the agent says; no space in the guest is [`Error::Refused`].
    pub async fn upload(&self, path: &str, body: Body, length: Option<u64>) -> Result<()> {
        let mut request = self
            .dress(self.http.post(self.files_url(path)?))
            .header("content-type", "application/octet-stream")
            .body(body);
        if let Some(length) = length {
            request = request.header("content-length", length);
        }
        self.send(request).await.map(drop)
    }

    /// Reads a file as a stream; the caller asks for the next piece with [`next_piece`].
    ///
    /// # Errors
    /// What the agent says; a directory is [`Error::Usage`].
    pub async fn download(&self, path: &str) -> Result<Response> {
        let request = self.dress(self.http.get(self.files_url(path)?));
        tokio::time::timeout(UNARY_DEADLINE, self.send(request))
            .await
            .map_err(|_| Error::Dropped(format!("no answer within {UNARY_DEADLINE:?}")))?
    }

    /// What is at a path.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn stat(&self, path: &str) -> Result<Entry> {
        #[derive(Deserialize)]
        struct Answer {
            entry: Entry,
        }
        let answer: Answer = self.unary("filesystem.Filesystem/Stat", &json!({ "path": path })).await?;
        Ok(answer.entry)
    }

    /// What is in a directory, `depth` levels down.
    ///
    /// # Errors
    /// [`Error::NotFound`], or no directory.
    pub async fn list(&self, path: &str, depth: u32) -> Result<Vec<Entry>> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Answer {
            entries: Vec<Entry>,
        }
        let request = json!({ "path": path, "depth": depth });
        Ok(self.unary::<Answer>("filesystem.Filesystem/ListDir", &request).await?.entries)
    }

    /// Makes a directory with its parents; one that is there already is as good.
    ///
    /// # Errors
    /// Something else stands in the way.
    pub async fn make_dir(&self, path: &str) -> Result<()> {
        match self.unary::<Value>("filesystem.Filesystem/MakeDir", &json!({ "path": path })).await {
            Ok(_) => Ok(()),
            Err(error) => match self.stat(path).await {
                Ok(entry) if entry.is_directory() => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Removes a file or tree; what isn't there is as good as removed.
    ///
    /// # Errors
    /// What the agent says.
    pub async fn remove(&self, path: &str) -> Result<()> {
        self.unary::<Value>("filesystem.Filesystem/Remove", &json!({ "path": path })).await.map(drop)
    }
}

/// The next piece of a download; `None` at its end.
///
/// # Errors
/// The connection broke, or nothing moved for a minute.
pub async fn next_piece(response: &mut Response) -> Result<Option<bytes::Bytes>> {
    let piece = tokio::time::timeout(IDLE_DEADLINE, response.chunk())
        .await
        .map_err(|_| Error::Dropped(format!("nothing arrived for {IDLE_DEADLINE:?}")))?;
    piece.map_err(|e| Error::Dropped(e.without_url().to_string()))
}

/// Messages of a stream.
pub struct Messages {
    response: Response,
    decoder: Decoder,
}

impl Messages {
    /// The next message; `None` when the agent ended the stream in good order.
    ///
    /// # Errors
    /// [`Error::Dropped`] when the stream broke (silence beyond three keepalives included), else what the agent says.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            match self.decoder.take().map_err(|e| Error::Failed(e.to_string()))? {
                Some(Envelope::Message(json)) => {
                    return serde_json::from_slice(&json).map(Some).map_err(|e| {
                        Error::Failed(format!("the guest sent a message this client can't read: {e}"))
                    });
                }
                Some(Envelope::End(None)) => return Ok(None),
                Some(Envelope::End(Some(failure))) => {
                    return Err(Error::from_connect(&failure.code, &failure.message));
                }
                None => {}
            }
            let piece = tokio::time::timeout(KEEPALIVE * 3, self.response.chunk())
                .await
                .map_err(|_| Error::Dropped("the guest fell silent".to_owned()))?;
            match piece {
                Ok(Some(piece)) => self.decoder.push(&piece),
                Ok(None) => return Err(Error::Dropped("the stream ended without an end".to_owned())),
                Err(e) => return Err(Error::Dropped(e.without_url().to_string())),
            }
        }
    }
}
