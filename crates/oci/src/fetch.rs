//! Into an OCI layout: from a registry by our own client, from an archive by skopeo.

use crate::{
    Error, Reference,
    command::{Context, Tool},
    error::blocking,
    reference::Remote,
    registry::{self, Client, Credentials, pull},
};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::time::timeout;

/// Name of the image in the layout that [`fetch`] makes.
pub(crate) const TAG: &str = "image";
const DIRECTORY: &str = "fetched";

/// Who asks the registry.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Auth {
    /// Nobody in particular.
    #[default]
    Anonymous,
    /// A containers-auth.json(5) file, as `docker login` and `skopeo login` write it.
    File(PathBuf),
    /// Sent to the registry or the token service it is known to use, nowhere else.
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
    let layout = context.scratch.path().join(DIRECTORY);
    match reference {
        Reference::Registry(remote) => from_registry(remote, auth, deadline, context, &layout).await?,
        local => from_archive(local, deadline, context).await?,
    }
    Ok(layout)
}

async fn from_registry(
    remote: &Remote,
    auth: &Auth,
    deadline: Duration,
    context: &Context,
    layout: &Path,
) -> Result<(), Error> {
    let image = remote.to_string();
    context.progress.say(&format!("fetching {image}"));
    let (auth, name) = (auth.clone(), remote.registry.clone());
    let client = blocking(move || {
        let options =
            registry::Options { credentials: credentials(&auth, &name)?, ..registry::Options::default() };
        Client::new(options).map_err(|e| Error::Host(e.to_string()))
    })
    .await?;
    let say = |line: &str| context.progress.say(line);
    let pulled = pull::pull(&client, remote, layout, TAG, deadline, &say);
    let outcome = tokio::select! {
        () = context.cancel.cancelled() => return Err(Error::Cancelled),
        outcome = timeout(deadline, pulled) => outcome,
    };
    match outcome {
        Ok(Ok(())) => Ok(()),
        Ok(Err(pull::Failure::Registry(error))) => Err(Error::of_registry(&image, error)),
        Ok(Err(pull::Failure::File(step, source))) => Err(Error::Io { step, source }),
        Err(_) => Err(Error::TimedOut { step: format!("fetching {image}"), after: deadline }),
    }
}

/// Blocking.
fn credentials(auth: &Auth, registry: &str) -> Result<Credentials, Error> {
    match auth {
        Auth::Anonymous => Ok(Credentials::default()),
        Auth::File(path) if !path.is_file() => {
            Err(Error::Host(format!("the credentials file {} does not exist", path.display())))
        }
        Auth::File(path) => Credentials::from_file(path).map_err(|e| Error::Host(e.to_string())),
        Auth::Password { username, password } => {
            Ok(Credentials::default().with(registry, username, password))
        }
    }
}

async fn from_archive(archive: &Reference, deadline: Duration, context: &Context) -> Result<(), Error> {
    exists(archive)?;
    let tool = Tool::new("skopeo", "skopeo", deadline).command(|command| {
        // We trust what we are told to fetch: there is no signature policy to consult.
        command.args(["--insecure-policy", "--override-os", "linux", "--override-arch", architecture()]);
        command.args(["copy", "--dest-oci-accept-uncompressed-layers"]);
        command.arg(archive.to_string()).arg(format!("oci:{DIRECTORY}:{TAG}"));
    });
    context.progress.say(&format!("fetching {archive}"));
    let ended = tool.run(context, progress_of).await?;
    match (!ended.success()).then(|| explain(archive, &ended.words())).flatten() {
        Some(known) => Err(known),
        None => ended.check(),
    }
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
    if any(&["no image found in manifest list", "no image found in image index"]) {
        Some(Error::Platform { image, architecture: architecture(), reason })
    } else if any(&["not found", "no descriptor found", "does not exist in index", "no such file"]) {
        Some(Error::NotFound { image, reason })
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
    fn skopeos_words_become_errors_that_say_what_to_do() {
        let reference: Reference = "oci-archive:/x.tar:y".parse().unwrap();
        let line = |message: &str| format!("time=\"2026-11-30T00:00:00Z\" level=fatal msg=\"{message}\"");
        let kind =
            |message: &str| explain(&reference, &line(message)).map(|e| e.to_string()).unwrap_or_default();
        let table = [
            ("no descriptor found for reference \\\"y\\\"", "was not found"),
            ("open /x.tar: no such file or directory", "was not found"),
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
        assert!(kind("no descriptor found for reference \\\"y\\\"").contains("reference \"y\""));
    }

    #[test]
    fn secrets_are_not_shown() {
        let auth = Auth::Password { username: "u".to_owned(), password: "s3cret".to_owned() };
        assert!(!format!("{auth:?}").contains("s3cret"));
        let credentials = credentials(&auth, "localhost:1").unwrap();
        assert!(!format!("{credentials:?}").contains("s3cret"));
        let missing =
            super::credentials(&Auth::File("/nonexistent/auth.json".into()), "x").unwrap_err().to_string();
        assert!(missing.contains("/nonexistent/auth.json"), "{missing}");
    }
}
