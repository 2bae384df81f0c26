//! What an image says about running it.

use crate::Error;
use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The parts of an OCI image configuration that a sandbox uses. Source: opencontainers/image-spec, config.md.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// As OCI names it, like `amd64`.
    pub architecture: String,
    /// Name and value, in the image's order; a name occurs once.
    pub env: Vec<(String, String)>,
    /// `user`, `uid`, `user:group` or `uid:gid`; empty for root.
    pub user: String,
    /// Absolute; `/` when the image says nothing.
    pub working_dir: String,
    /// Program and first arguments; empty when there is none.
    pub entrypoint: Vec<String>,
    /// Default arguments, or the program where there is no entrypoint.
    pub cmd: Vec<String>,
    /// Free-form metadata.
    pub labels: BTreeMap<String, String>,
    /// Like `8080/tcp`.
    pub exposed_ports: Vec<String>,
    /// Like `SIGTERM`; empty when the image says nothing.
    pub stop_signal: String,
}

impl ImageConfig {
    /// Reads a configuration blob.
    ///
    /// # Errors
    /// Bytes that aren't an image configuration for Linux, or a relative working directory.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let what = "its configuration";
        let read = ImageConfiguration::from_reader(bytes).map_err(|e| Error::invalid(what, e))?;
        if read.os().to_string() != "linux" {
            return Err(Error::invalid(what, format!("it is for {}, not linux", read.os())));
        }
        let run = read.config().clone().unwrap_or_default();
        let working_dir =
            run.working_dir().clone().filter(|dir| !dir.is_empty()).unwrap_or_else(|| "/".to_owned());
        if !working_dir.starts_with('/') {
            return Err(Error::invalid(
                what,
                format!("the working directory {working_dir:?} is not absolute"),
            ));
        }
        let mut env: Vec<(String, String)> = Vec::new();
        for entry in run.env().iter().flatten() {
            let (name, value) = entry.split_once('=').unwrap_or((entry, ""));
            // Later wins, in the place of the first: what a shell would make of it.
            match env.iter_mut().find(|(known, _)| known == name) {
                Some(known) => value.clone_into(&mut known.1),
                None if name.is_empty() => {}
                None => env.push((name.to_owned(), value.to_owned())),
            }
        }
        let mut exposed_ports = run.exposed_ports().clone().unwrap_or_default();
        exposed_ports.sort();
        Ok(Self {
            architecture: read.architecture().to_string(),
            env,
            user: run.user().clone().unwrap_or_default(),
            working_dir,
            entrypoint: run.entrypoint().clone().unwrap_or_default(),
            cmd: run.cmd().clone().unwrap_or_default(),
            labels: run.labels().clone().unwrap_or_default().into_iter().collect(),
            exposed_ports,
            stop_signal: run.stop_signal().clone().unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_read_whole() {
        let json = br#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]},"config":{
            "User":"1000:1000","Env":["PATH=/bin","A=1","A=2=3","EMPTY=","BARE"],"WorkingDir":"/srv",
            "Entrypoint":["/init"],"Cmd":["a","b"],"Labels":{"x":"y"},"ExposedPorts":{"80/tcp":{},"53/udp":{}},"StopSignal":"SIGINT"}}"#;
        let config = ImageConfig::parse(json).unwrap();
        let env: Vec<_> = config.env.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        assert_eq!(env, [("PATH", "/bin"), ("A", "2=3"), ("EMPTY", ""), ("BARE", "")]);
        assert_eq!((config.user.as_str(), config.working_dir.as_str()), ("1000:1000", "/srv"));
        assert_eq!(
            (config.entrypoint, config.cmd),
            (vec!["/init".to_owned()], vec!["a".to_owned(), "b".to_owned()])
        );
        assert_eq!(config.labels["x"], "y");
        assert_eq!(config.exposed_ports, ["53/udp", "80/tcp"]);
        assert_eq!((config.stop_signal.as_str(), config.architecture.as_str()), ("SIGINT", "amd64"));
    }

    #[test]
    fn an_image_that_says_little_runs_as_root_in_the_root_directory() {
        let json = br#"{"architecture":"arm64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#;
        let config = ImageConfig::parse(json).unwrap();
        assert_eq!(
            config,
            ImageConfig {
                architecture: "arm64".to_owned(),
                working_dir: "/".to_owned(),
                ..ImageConfig::default()
            }
        );
    }

    #[test]
    fn other_systems_and_relative_directories_are_refused() {
        for (json, part) in [
            (
                r#"{"architecture":"amd64","os":"windows","rootfs":{"type":"layers","diff_ids":[]}}"#,
                "windows",
            ),
            (
                r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]},"config":{"WorkingDir":"x"}}"#,
                "absolute",
            ),
            ("[]", "configuration"),
        ] {
            let error = ImageConfig::parse(json.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
