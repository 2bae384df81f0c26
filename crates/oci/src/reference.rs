//! What an image is called: a registry's repository, or a file or directory on this machine.
//!
//! Grammar of registry names: that of the distribution project (its reference package), with Docker's defaults (`docker.io`, `library/`,
//! `latest`). Local forms name the transport first: `oci:/dir[:tag]`, `oci-archive:/file.tar[:tag]`,
//! `docker-archive:/file.tar[:name:tag]`; their paths are absolute, because the one who reads them is the server, and
//! hold no colon, because that ends them.

use std::{fmt, net::IpAddr, path::PathBuf, str::FromStr};

const MAX_LENGTH: usize = 2048;
const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// What is wrong with a reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{input:?} is not an image reference: {problem}")]
pub struct Error {
    /// As given, cut to a readable length.
    pub input: String,
    /// What is wrong and how it should look.
    pub problem: String,
}

/// An image, by name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reference {
    /// In a registry.
    Registry(Remote),
    /// In a directory with an OCI image layout.
    Layout {
        /// Absolute, without colons.
        path: PathBuf,
        /// Which image; without it the layout must hold just one.
        tag: Option<String>,
    },
    /// In a tar file with an OCI image layout.
    OciArchive {
        /// Absolute, without colons.
        path: PathBuf,
        /// Which image; without it the archive must hold just one.
        tag: Option<String>,
    },
    /// In a tar file as `docker save` writes it.
    DockerArchive {
        /// Absolute, without colons.
        path: PathBuf,
        /// Which image; without it the archive must hold just one.
        image: Option<Remote>,
    },
}

/// A repository in a registry, and what of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Remote {
    /// Host with optional port, like `docker.io` or `localhost:5000`.
    pub registry: String,
    /// Path within the registry, like `library/debian`.
    pub repository: String,
    /// `latest` when neither tag nor digest was given.
    pub tag: Option<String>,
    /// `sha256:` and 64 lower-case hex digits. When present, it alone decides.
    pub digest: Option<String>,
}

impl Remote {
    /// Whether the registry is on this machine, and so is spoken to without TLS.
    pub fn is_loopback(&self) -> bool {
        let host = match self.registry.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
            _ => &self.registry,
        };
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (transport, path, of) = match self {
            Self::Registry(remote) => return remote.fmt(f),
            Self::Layout { path, tag } => ("oci", path, tag.clone()),
            Self::OciArchive { path, tag } => ("oci-archive", path, tag.clone()),
            Self::DockerArchive { path, image } => {
                ("docker-archive", path, image.as_ref().map(Remote::to_string))
            }
        };
        write!(f, "{transport}:{}", path.display())?;
        of.map_or(Ok(()), |of| write!(f, ":{of}"))
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(input: &str) -> Result<Self, Error> {
        parse(input).map_err(|problem| Error { input: input.chars().take(120).collect(), problem })
    }
}

fn parse(input: &str) -> Result<Reference, String> {
    if input.is_empty() {
        return Err("it is empty; write something like debian:12".to_owned());
    }
    if input.len() > MAX_LENGTH {
        return Err(format!("it is longer than {MAX_LENGTH} bytes"));
    }
    if let Some(c) = input.chars().find(|c| c.is_control() || c.is_whitespace()) {
        return Err(format!("it contains {c:?}"));
    }
    if let Some((scheme, rest)) = input.split_once("://") {
        return match scheme {
            "docker" => remote(rest).map(Reference::Registry),
            _ => Err(format!(
                "{scheme}:// is no transport; write the name alone, like registry.example/team/image:tag"
            )),
        };
    }
    match input.split_once(':') {
        Some(("oci", rest)) => local(rest)
            .and_then(|(path, of)| Ok(Reference::Layout { path, tag: of.map(layout_tag).transpose()? })),
        Some(("oci-archive", rest)) => local(rest)
            .and_then(|(path, of)| Ok(Reference::OciArchive { path, tag: of.map(layout_tag).transpose()? })),
        Some(("docker-archive", rest)) => local(rest)
            .and_then(|(path, of)| Ok(Reference::DockerArchive { path, image: of.map(remote).transpose()? })),
        Some((
            transport @ ("docker-daemon" | "dir" | "containers-storage" | "tarball" | "sif" | "ostree"),
            _,
        )) => Err(format!(
            "the transport {transport} is not supported; use a registry, oci:, oci-archive: or docker-archive:"
        )),
        _ => remote(input).map(Reference::Registry),
    }
}

fn local(rest: &str) -> Result<(PathBuf, Option<&str>), String> {
    let (path, of) = rest.split_once(':').map_or((rest, None), |(path, of)| (path, Some(of)));
    if !path.starts_with('/') {
        return Err("the path after the transport must be absolute, as the server reads it".to_owned());
    }
    Ok((path.into(), of))
}

/// A name in a layout is freer than a registry's tag, but what goes to other programs keeps to the same alphabet.
fn layout_tag(tag: &str) -> Result<String, String> {
    check_tag(tag).map(|()| tag.to_owned())
}

fn check_tag(tag: &str) -> Result<(), String> {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let good = tag.bytes().next().is_some_and(word)
        && tag.len() <= MAX_TAG
        && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-');
    if good {
        Ok(())
    } else {
        Err(format!(
            "the tag {:?} must be 1 to {MAX_TAG} letters, digits, '_', '.' and '-', not starting with '.' or '-'",
            short(tag)
        ))
    }
}

fn check_digest(digest: &str) -> Result<(), String> {
    match digest.split_once(':') {
        Some(("sha256", hex))
            if hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) =>
        {
            Ok(())
        }
        _ => Err(format!("the digest {:?} must be sha256: and 64 lower-case hex digits", short(digest))),
    }
}

fn remote(text: &str) -> Result<Remote, String> {
    let (rest, digest) = text.split_once('@').map_or((text, None), |(rest, digest)| (rest, Some(digest)));
    if let Some(digest) = digest {
        check_digest(digest)?;
    }
    // A colon after the last slash begins the tag; before it, it begins a port.
    let (name, tag) = match rest.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (rest, None),
    };
    if let Some(tag) = tag {
        check_tag(tag)?;
    }
    let (registry, repository) = match name.split_once('/') {
        Some((first, path)) if is_registry(first) => {
            check_registry(first)?;
            (first, path.to_owned())
        }
        _ => ("docker.io", name.to_owned()),
    };
    let registry = if registry == "index.docker.io" { "docker.io" } else { registry };
    let repository = match registry {
        "docker.io" if !repository.contains('/') && !repository.is_empty() => format!("library/{repository}"),
        _ => repository,
    };
    check_repository(&repository)?;
    if registry.len() + 1 + repository.len() > MAX_NAME {
        return Err(format!("its name is longer than {MAX_NAME} characters"));
    }
    let tag = match (tag, digest) {
        (None, None) => Some("latest".to_owned()),
        (tag, _) => tag.map(str::to_owned),
    };
    Ok(Remote { registry: registry.to_owned(), repository, tag, digest: digest.map(str::to_owned) })
}

/// Docker's rule: the first component is a registry if it has a dot or a port, is `localhost`, or has capitals (which
/// a repository can't have).
fn is_registry(first: &str) -> bool {
    first == "localhost" || first.contains(['.', ':']) || first.bytes().any(|b| b.is_ascii_uppercase())
}

fn check_registry(registry: &str) -> Result<(), String> {
    let bad = || {
        Err(format!(
            "{:?} is not a registry; it must be a host name or address with an optional port, like localhost:5000",
            short(registry)
        ))
    };
    let (host, port) = match registry.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((ip, "")) => (Err(ip), None),
        Some((ip, port)) => (Err(ip), port.strip_prefix(':').or(Some(""))),
        None => registry.split_once(':').map_or((Ok(registry), None), |(host, port)| (Ok(host), Some(port))),
    };
    if port.is_some_and(|port| !port.bytes().all(|b| b.is_ascii_digit()) || port.parse::<u16>().is_err()) {
        return bad();
    }
    let label = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let good = match host {
        Ok(name) => name.split('.').all(label),
        Err(ip) => ip.parse::<std::net::Ipv6Addr>().is_ok(),
    };
    if good { Ok(()) } else { bad() }
}

fn check_repository(repository: &str) -> Result<(), String> {
    if repository.is_empty() {
        return Err("it names no repository; write something like registry.example/team/image:tag".to_owned());
    }
    match repository.split('/').find(|component| !is_component(component)) {
        None => Ok(()),
        Some(component) if component.bytes().any(|b| b.is_ascii_uppercase()) => {
            Err(format!("{:?} has capital letters; repositories are lower-case", short(component)))
        }
        Some(component) => Err(format!(
            "the part {:?} must be lower-case letters and digits, with single '.', '_', '__' or dashes between them",
            short(component)
        )),
    }
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*`
fn is_component(component: &str) -> bool {
    let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    if !component.starts_with(alphanumeric) || !component.ends_with(alphanumeric) {
        return false;
    }
    component
        .split(alphanumeric)
        .all(|between| matches!(between, "" | "." | "_" | "__") || between.bytes().all(|b| b == b'-'))
}

fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DIGEST: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn references_are_read_with_dockers_defaults() {
        let with_digest = format!("debian@{DIGEST}");
        let with_both = format!("registry.example/a/b:1.2@{DIGEST}");
        let table = [
            ("debian", "docker.io/library/debian:latest".to_owned()),
            ("debian:12-slim", "docker.io/library/debian:12-slim".to_owned()),
            ("org/task", "docker.io/org/task:latest".to_owned()),
            ("docker.io/debian", "docker.io/library/debian:latest".to_owned()),
            ("index.docker.io/org/x:1", "docker.io/org/x:1".to_owned()),
            ("docker://registry.example/a/b", "registry.example/a/b:latest".to_owned()),
            ("localhost/x", "localhost/x:latest".to_owned()),
            ("localhost:5000/x/y:z", "localhost:5000/x/y:z".to_owned()),
            ("[::1]:5000/x", "[::1]:5000/x:latest".to_owned()),
            ("Registry/x", "Registry/x:latest".to_owned()),
            ("a/b--c__d.e_f", "docker.io/a/b--c__d.e_f:latest".to_owned()),
            (&with_digest, format!("docker.io/library/debian@{DIGEST}")),
            (&with_both, format!("registry.example/a/b:1.2@{DIGEST}")),
            ("oci:/srv/layout", "oci:/srv/layout".to_owned()),
            ("oci:/srv/layout:base", "oci:/srv/layout:base".to_owned()),
            ("oci-archive:/x.tar", "oci-archive:/x.tar".to_owned()),
            (
                "docker-archive:/x.tar:debian:12",
                "docker-archive:/x.tar:docker.io/library/debian:12".to_owned(),
            ),
            // A repository may be called like a transport's beginning.
            ("ocix:1", "docker.io/library/ocix:1".to_owned()),
        ];
        for (input, expected) in table {
            let read: Reference = input.parse().unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(read.to_string(), expected, "{input}");
            assert_eq!(expected.parse::<Reference>().as_ref(), Ok(&read), "{expected}");
        }
    }

    #[test]
    fn bad_references_are_refused_and_the_reason_names_the_part() {
        let long = "a".repeat(300);
        let long_tag = format!("debian:{}", "t".repeat(129));
        let table = [
            ("", "empty"),
            (" debian", "contains ' '"),
            ("deb\u{7}ian", "contains"),
            ("Debian", "capital"),
            ("debian:", "tag \"\""),
            ("debian:-x", "tag \"-x\""),
            (&long_tag, "1 to 128"),
            ("debian@sha256:abc", "digest \"sha256:abc\""),
            ("debian@", "digest \"\""),
            ("debian@md5:00", "sha256:"),
            ("https://registry.example/a/b", "https:// is no transport"),
            ("a//b", "part \"\""),
            ("/a", "part \"\""),
            ("a/", "part \"\""),
            ("a..b", "part \"a..b\""),
            ("a___b", "part \"a___b\""),
            ("../../etc/passwd", "registry"),
            ("registry.example/", "no repository"),
            ("registry.example:port/x", "registry.example:port"),
            ("registry.example:99999/x", "registry.example:99999"),
            ("-bad.io/x", "not a registry"),
            ("[::g]:1/x", "not a registry"),
            ("dé", "part \"dé\""),
            (&long, "longer than 255"),
            ("oci:relative", "absolute"),
            ("oci:", "absolute"),
            ("oci:/x:", "tag \"\""),
            ("docker-archive:/x.tar:A", "capital"),
            ("docker-daemon:x", "docker-daemon is not supported"),
        ];
        for (input, part) in table {
            let error = input.parse::<Reference>().expect_err(input).to_string();
            assert!(error.contains(part), "{input}: {error}");
        }
    }

    #[test]
    fn only_registries_on_this_machine_are_spoken_to_without_tls() {
        let remote = |text: &str| match text.parse().unwrap() {
            Reference::Registry(remote) => remote,
            other => panic!("{other}"),
        };
        for name in ["localhost/x", "localhost:5000/x", "127.0.0.1:5000/x", "127.9.9.9/x", "[::1]:1/x"] {
            assert!(remote(name).is_loopback(), "{name}");
        }
        for name in
            ["x", "registry.example/x", "10.0.0.1:5000/x", "localhost.example/x", "127.0.0.1.example:80/x"]
        {
            assert!(!remote(name).is_loopback(), "{name}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_reads_back_the_same(input in "[ -~]{0,40}") {
            if let Ok(read) = input.parse::<Reference>() {
                prop_assert_eq!(read.to_string().parse::<Reference>(), Ok(read));
            }
        }

        #[test]
        fn a_well_formed_name_is_accepted_and_kept(
            registry in "[a-z]{1,8}\\.[a-z]{2,3}(:[1-9][0-9]{0,3})?", path in "[a-z0-9]{1,8}(/[a-z0-9]{1,8}([._-][a-z0-9]{1,4})?){0,2}", tag in "[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}",
        ) {
            let Reference::Registry(remote) = format!("{registry}/{path}:{tag}").parse().unwrap() else { panic!() };
            prop_assert_eq!((remote.registry, remote.repository, remote.tag), (registry, path, Some(tag)));
        }

        #[test]
        fn nothing_makes_the_parser_panic(input in "\\PC{0,60}") {
            let _ = input.parse::<Reference>();
        }
    }
}
