//! From a registry or an archive into an OCI layout, by skopeo.

use crate::{
    Error, Reference,
    command::{Context, Tool},
    error::During as _,
    reference::Remote,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use std::{
    collections::BTreeMap,
    fs::File,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

/// Name of the image in the layout that [`fetch`] makes.
pub(crate) const TAG: &str = "image";
const DIRECTORY: &str = "fetched";
const AUTH_FILE: &str = "auth.json";

/// Who asks the registry.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Auth {
    /// Nobody in particular.
    #[default]
    Anonymous,
    /// A containers-auth.json(5) file, as `docker login` and `skopeo login` write it.
    File(PathBuf),
    /// Handed to the tool in a file that only root reads, never on a command line.
    Password {
        /// The account.
        username: String,
        /// Its password or token.
        password: String,
    },
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Anonymous => f.write_str("Anonymous"),
            Self::File(path) => write!(f, "File({path:?})"),
            Self::Password { username, .. } => write!(f, "Password {{ username: {username:?}, .. }}"),
        }
    }
}

/// The architecture of this machine as OCI names it.
pub(crate) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Copies the image into a new layout in the scratch directory, where it is called [`TAG`]; returns the layout.
pub(crate) async fn fetch(
    reference: &Reference,
    auth: &Auth,
    deadline: Duration,
    context: &Context,
) -> Result<PathBuf, Error> {
    let (source, options) = match reference {
        Reference::Registry(remote) => {
            (format!("docker://{}", wanted(remote)), registry_options(remote, auth, context)?)
        }
        local => {
            exists(local)?;
            (local.to_string(), Vec::new())
        }
    };
    let tool = Tool::new("skopeo", "skopeo", deadline).command(|command| {
        // We trust what we are told to fetch: there is no signature policy to consult.
        command.args(["--insecure-policy", "--override-os", "linux", "--override-arch", architecture()]);
        command.args(["copy", "--retry-times", "1", "--dest-oci-accept-uncompressed-layers"]);
        command.args(options).arg(source).arg(format!("oci:{DIRECTORY}:{TAG}"));
    });
    context.progress.say(&format!("fetching {reference}"));
    let ended = tool.run(context, progress_of).await?;
    // Credentials are gone as soon as they have served.
    let _ = std::fs::remove_file(context.scratch.path().join(AUTH_FILE));
    match (!ended.success()).then(|| explain(reference, &ended.words())).flatten() {
        Some(known) => return Err(known),
        None => ended.check()?,
    }
    Ok(context.scratch.path().join(DIRECTORY))
}

/// skopeo takes a tag or a digest; a digest says all.
fn wanted(remote: &Remote) -> Remote {
    let tag = remote.tag.clone().filter(|_| remote.digest.is_none());
    Remote { tag, ..remote.clone() }
}

fn registry_options(remote: &Remote, auth: &Auth, context: &Context) -> Result<Vec<String>, Error> {
    let mut options = Vec::new();
    if remote.is_loopback() {
        options.push("--src-tls-verify=false".to_owned());
    }
    match auth {
        Auth::Anonymous => options.push("--src-no-creds".to_owned()),
        Auth::File(path) if path.is_file() => options.push(format!("--src-authfile={}", path.display())),
        Auth::File(path) => {
            return Err(Error::Host(format!("the credentials file {} does not exist", path.display())));
        }
        Auth::Password { username, password } => {
            write_auth(&context.scratch.path().join(AUTH_FILE), &remote.registry, username, password)?;
            options.push(format!("--src-authfile={AUTH_FILE}"));
        }
    }
    Ok(options)
}

/// Format: containers-auth.json(5).
fn write_auth(path: &Path, registry: &str, username: &str, password: &str) -> Result<(), Error> {
    let step = || "write the credentials for skopeo".to_owned();
    let entry = BTreeMap::from([("auth", STANDARD.encode(format!("{username}:{password}")))]);
    let json = serde_json::json!({ "auths": { registry: entry } });
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path).during(step)?;
    file.write_all(json.to_string().as_bytes()).during(step)
}

fn exists(local: &Reference) -> Result<(), Error> {
    let (Reference::Layout { path, .. }
    | Reference::OciArchive { path, .. }
    | Reference::DockerArchive { path, .. }) = local
    else {
        return Ok(());
    };
    match std::fs::metadata(path) {
        Ok(_) => Ok(()),
        Err(e) => {
            Err(Error::NotFound { image: local.to_string(), reason: format!("{}: {e}", path.display()) })
        }
    }
}

/// Reads skopeo's words. `None` when they say nothing we know.
fn explain(reference: &Reference, words: &str) -> Option<Error> {
    let image = reference.to_string();
    let reason = words.lines().last().map(reason_of).unwrap_or_default();
    let lower = words.to_ascii_lowercase();
    let any = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    // Order matters: a rate limit's message may speak of authentication, a 404's of a manifest for no platform.
    if any(&["toomanyrequests", "too many requests", "429 "]) {
        Some(Error::RateLimited { image, reason })
    } else if any(&["no image found in manifest list", "no image found in image index"]) {
        Some(Error::Platform { image, architecture: architecture(), reason })
    } else if any(&[
        "unauthorized",
        "authentication required",
        "access to the resource is denied",
        "denied:",
        "403 (forbidden)",
    ]) {
        Some(Error::Unauthorized { image, reason })
    } else if any(&[
        "manifest unknown",
        "name unknown",
        "not found",
        "404 (not found)",
        "no descriptor found",
        "does not exist in index",
        "no such file",
    ]) && !any(&["no such host", "lookup "])
    {
        Some(Error::NotFound { image, reason })
    } else if any(&[
        "no such host",
        "lookup ",
        "connection refused",
        "connection reset",
        "network is unreachable",
        "no route to host",
        "i/o timeout",
        "tls handshake timeout",
        "server gave http response to https client",
        "dial tcp",
        "deadline exceeded",
    ]) {
        Some(Error::Unreachable { image, reason })
    } else {
        None
    }
}

/// A warning tells of a retry, so it is shown; the fatal line becomes the error.
fn progress_of(line: &str) -> Option<String> {
    match line {
        _ if line.contains("level=warning") => Some(reason_of(line)),
        _ if line.contains("level=") || line.trim().is_empty() => None,
        _ => Some(line.trim().to_owned()),
    }
}

/// The message within skopeo's log line: `time="…" level=fatal msg="…"`.
fn reason_of(line: &str) -> String {
    match line.split_once("msg=\"") {
        Some((_, message)) => message.strip_suffix('"').unwrap_or(message).replace("\\\"", "\""),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registrys_words_become_errors_that_say_what_to_do() {
        let reference: Reference = "registry.example/a/b:1".parse().unwrap();
        let line = |message: &str| format!("time=\"2026-11-30T00:00:00Z\" level=fatal msg=\"{message}\"");
        let kind =
            |message: &str| explain(&reference, &line(message)).map(|e| e.to_string()).unwrap_or_default();
        let table = [
            (
                "initializing source: reading manifest 1 in registry.example/a/b: manifest unknown",
                "was not found",
            ),
            ("reading manifest latest: StatusCode: 404, not found", "was not found"),
            ("requested access to the resource is denied", "refused"),
            ("unable to retrieve auth token: invalid username/password: unauthorized: x", "refused"),
            ("toomanyrequests: You have reached your unauthenticated pull rate limit", "rate limit"),
            (
                "pinging container registry x: Get \\\"https://x/v2/\\\": dial tcp: lookup x: no such host",
                "can't be reached",
            ),
            (
                "Get \\\"http://localhost:1/v2/\\\": dial tcp 127.0.0.1:1: connect: connection refused",
                "can't be reached",
            ),
            (
                "no image found in manifest list for architecture amd64, variant \\\"\\\", OS linux",
                "no variant for linux/",
            ),
            ("something else", ""),
        ];
        for (message, part) in table {
            assert!(
                kind(message).contains(part) && kind(message).is_empty() == part.is_empty(),
                "{message}: {}",
                kind(message)
            );
        }
        assert!(kind("dial tcp \\\"x\\\"").contains("dial tcp \"x\""));
    }

    #[test]
    fn secrets_are_not_shown_and_are_only_for_the_owner() {
        use std::os::unix::fs::PermissionsExt as _;
        let auth = Auth::Password { username: "u".to_owned(), password: "s3cret".to_owned() };
        assert!(!format!("{auth:?}").contains("s3cret"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("auth.json");
        write_auth(&path, "localhost:1", "u", "p").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), r#"{"auths":{"localhost:1":{"auth":"dTpw"}}}"#);
    }
}
