//! Shapes and ranges of request values. Pure; every refusal begins with the field's name.

use crate::error::{ApiError, Result};
use aenv_api_types::{NetworkConfig, NewSandbox};
use std::{collections::BTreeMap, time::Duration};

/// No sandbox is promised more than a day at a time; clients extend.
pub(super) const MAX_TTL_SECONDS: i64 = 86_400;
/// `refreshes` is a lease: an hour at a time.
pub(super) const MAX_REFRESH_SECONDS: i64 = 3_600;
const MAX_LABELS: usize = 128;
const MAX_LABEL_KEY: usize = 256;
const MAX_LABEL_VALUE: usize = 4 << 10;
const MAX_LABELS_BYTES: usize = 32 << 10;
const MAX_ENV_BYTES: usize = 256 << 10;
const MAX_REFERENCE: usize = 512;

/// Seconds to live: more than zero, at most a day.
pub(super) fn ttl(field: &str, seconds: i64) -> Result<Duration> {
    within(field, seconds, 1, MAX_TTL_SECONDS, "seconds")
}

/// Like [`ttl`], but zero means "now".
pub(super) fn ttl_or_now(field: &str, seconds: i64) -> Result<Duration> {
    within(field, seconds, 0, MAX_TTL_SECONDS, "seconds")
}

/// A lease of at most an hour.
pub(super) fn lease(field: &str, seconds: i64) -> Result<Duration> {
    within(field, seconds, 0, MAX_REFRESH_SECONDS, "seconds")
}

fn within(field: &str, value: i64, low: i64, high: i64, unit: &str) -> Result<Duration> {
    match u64::try_from(value) {
        Ok(seconds) if (low..=high).contains(&value) => Ok(Duration::from_secs(seconds)),
        _ => Err(ApiError::invalid(format!("{field}: must be from {low} to {high} {unit}, not {value}"))),
    }
}

/// A number in a range, as the type the node wants.
pub(super) fn number<T: TryFrom<i64>>(field: &str, value: i64, low: i64, high: i64) -> Result<T> {
    let refused = || ApiError::invalid(format!("{field}: must be from {low} to {high}, not {value}"));
    if !(low..=high).contains(&value) {
        return Err(refused());
    }
    T::try_from(value).map_err(|_| refused())
}

/// Virtual CPUs of a machine.
pub(super) fn vcpus(value: i64) -> Result<u8> {
    number("cpuCount", value, 1, 32)
}

/// Disk of a machine, MiB.
pub(super) fn disk(value: i64) -> Result<u32> {
    number("diskSizeMB", value, 256, 1 << 20)
}

/// Memory of a machine, MiB.
pub(super) fn memory(value: i64) -> Result<u32> {
    let memory: u32 = number("memoryMB", value, 128, 65_536)?;
    if memory.is_multiple_of(2) { Ok(memory) } else { Err(ApiError::invalid("memoryMB: must be even")) }
}

/// Template id, alias, `name:tag`, `ns/name`, or an image reference.
pub(super) fn template_reference(field: &str, text: &str) -> Result<()> {
    let shape = (1..=MAX_REFERENCE).contains(&text.len())
        && text.as_bytes()[0].is_ascii_alphanumeric()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/:@".contains(&b))
        && !text.split('/').any(|part| part.is_empty() || part == "." || part == "..");
    if shape {
        return Ok(());
    }
    Err(ApiError::invalid(format!(
        "{field}: must be a template id, name, 'name:tag' or 'namespace/name' of letters, digits and . _ - / : @ (at most {MAX_REFERENCE})"
    )))
}

/// Name of a template that is to be made.
pub(super) fn template_name(field: &str, text: &str) -> Result<()> {
    let ok = (1..=128).contains(&text.len())
        && text.as_bytes()[0].is_ascii_alphanumeric()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    if ok {
        return Ok(());
    }
    Err(ApiError::invalid(format!(
        "{field}: must begin with a letter or digit and hold only letters, digits and . _ - (at most 128)"
    )))
}

/// Labels of a sandbox, or the labels a list is filtered by.
pub(super) fn labels(field: &str, labels: &BTreeMap<String, String>) -> Result<()> {
    if labels.len() > MAX_LABELS {
        return Err(ApiError::invalid(format!(
            "{field}: at most {MAX_LABELS} entries, not {}",
            labels.len()
        )));
    }
    let mut total = 0;
    for (key, value) in labels {
        if key.is_empty() || key.len() > MAX_LABEL_KEY {
            return Err(ApiError::invalid(format!("{field}: keys must have 1 to {MAX_LABEL_KEY} bytes")));
        }
        if value.len() > MAX_LABEL_VALUE {
            let key = printable(key);
            return Err(ApiError::invalid(format!("{field}.{key}: at most {MAX_LABEL_VALUE} bytes")));
        }
        if key.contains('\0') || value.contains('\0') {
            return Err(ApiError::invalid(format!("{field}.{}: must not contain NUL", printable(key))));
        }
        total += key.len() + value.len();
    }
    if total > MAX_LABELS_BYTES {
        return Err(ApiError::invalid(format!(
            "{field}: at most {MAX_LABELS_BYTES} bytes in all, not {total}"
        )));
    }
    Ok(())
}

/// Environment variables: what a process can be started with.
pub(super) fn env_vars(field: &str, vars: &BTreeMap<String, String>) -> Result<()> {
    let mut total = 0;
    for (key, value) in vars {
        if key.is_empty() || key.contains(['=', '\0']) {
            let key = printable(key);
            return Err(ApiError::invalid(format!(
                "{field}.{key}: names must not be empty or contain '=' or NUL"
            )));
        }
        if value.contains('\0') {
            return Err(ApiError::invalid(format!("{field}.{}: must not contain NUL", printable(key))));
        }
        total += key.len() + value.len();
    }
    if total > MAX_ENV_BYTES {
        return Err(ApiError::invalid(format!("{field}: at most {MAX_ENV_BYTES} bytes in all, not {total}")));
    }
    Ok(())
}

fn printable(key: &str) -> String {
    key.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// What is left of a network request in this version.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Network {
    pub(super) internet: bool,
    pub(super) public_traffic: bool,
    pub(super) mask_request_host: Option<String>,
}

/// Everything or nothing may be allowed out; finer policies come later. They are refused rather than dropped: a
/// sandbox that reaches more than its maker asked for is worse than none.
pub(super) fn network(new: &NewSandbox, secure: bool) -> Result<Network> {
    let none = NetworkConfig::default();
    let asked = new.network.as_ref().unwrap_or(&none);
    let is_all = |list: &[String]| list.iter().all(|entry| entry == "0.0.0.0/0" || entry == "::/0");
    let allow = asked.allow_out.as_deref().unwrap_or_default();
    let deny = asked.deny_out.as_deref().unwrap_or_default();
    if !is_all(allow) {
        return Err(ApiError::later("network.allowOut with anything but 0.0.0.0/0"));
    }
    if !is_all(deny) {
        return Err(ApiError::later("network.denyOut with anything but 0.0.0.0/0"));
    }
    for (field, given) in [
        ("network.rules", asked.rules.as_ref().is_some_and(|rules| !rules.is_empty())),
        ("network.egressProxy", asked.egress_proxy.is_some()),
        ("network.dnsServers", asked.dns_servers.as_ref().is_some_and(|list| !list.is_empty())),
        ("network.httpsPorts", asked.https_ports.as_ref().is_some_and(|list| !list.is_empty())),
    ] {
        if given {
            return Err(ApiError::later(field));
        }
    }
    let public_traffic = asked.allow_public_traffic.unwrap_or(true);
    if !public_traffic && !secure {
        return Err(ApiError::invalid(
            "network.allowPublicTraffic: false needs a secured sandbox (secure: true)",
        ));
    }
    if let Some(host) = &asked.mask_request_host {
        let plain = host.replace("${PORT}", "65535");
        let ok = (1..=255).contains(&plain.len())
            && plain.bytes().all(|b| b.is_ascii_alphanumeric() || b".-:[]".contains(&b));
        if !ok {
            return Err(ApiError::invalid(
                "network.maskRequestHost: must be a host, with an optional port, where ${PORT} stands for the port",
            ));
        }
    }
    // allowOut wins over denyOut.
    let internet = new.allow_internet_access.unwrap_or(true) && (deny.is_empty() || !allow.is_empty());
    Ok(Network { internet, public_traffic, mask_request_host: asked.mask_request_host.clone() })
}

/// Parts of a create that this version does not have.
pub(super) fn available(new: &NewSandbox) -> Result<()> {
    for (field, given) in [
        ("mcp", new.mcp.is_some()),
        ("iam", new.iam.as_ref().is_some_and(|iam| !iam.is_empty())),
        ("volumeMounts", new.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty())),
        ("autoPauseMemory: false", new.auto_pause_memory == Some(false) && new.auto_pause != Some(false)),
    ] {
        if given {
            return Err(ApiError::later(field));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::StatusCode;

    #[test]
    fn times_to_live_are_bounded_on_both_sides() {
        assert_eq!(ttl("timeout", 1).unwrap(), Duration::from_secs(1));
        assert_eq!(ttl("timeout", 86_400).unwrap(), Duration::from_secs(86_400));
        for bad in [0, -1, 86_401, i64::MAX, i64::MIN] {
            assert!(ttl("timeout", bad).unwrap_err().message.starts_with("timeout: "), "{bad}");
        }
        assert_eq!(ttl_or_now("timeout", 0).unwrap(), Duration::ZERO);
        assert!(lease("duration", 3601).is_err());
    }

    #[test]
    fn references_cannot_walk_or_smuggle() {
        for good in ["base", "a:b", "ns/name", "ns/name:tag", "docker.io/library/python:3.12", "x@sha256:ab"]
        {
            template_reference("templateID", good).unwrap();
        }
        for bad in
            ["", "../x", "a/../b", "a//b", "a b", "/etc", "a\0", "ä", "a/", ".", "a?b", &"a".repeat(513)]
        {
            assert!(template_reference("templateID", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn labels_and_variables_are_bounded() {
        let one = |k: &str, v: &str| BTreeMap::from([(k.to_owned(), v.to_owned())]);
        labels("metadata", &one("k", "v")).unwrap();
        assert!(labels("metadata", &one("", "v")).is_err());
        assert!(labels("metadata", &one("k", &"v".repeat(5000))).is_err());
        assert!(labels("metadata", &(0..200).map(|i| (i.to_string(), String::new())).collect()).is_err());
        env_vars("envVars", &one("A", "b=c")).unwrap();
        for (k, v) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "\0")] {
            assert!(env_vars("envVars", &one(k, v)).is_err(), "{k:?}");
        }
    }

    #[test]
    fn only_all_or_nothing_goes_out_and_finer_policies_are_refused_not_dropped() {
        let asked = |allow: &[&str], deny: &[&str]| NewSandbox {
            network: Some(NetworkConfig {
                allow_out: Some(allow.iter().map(|s| (*s).to_owned()).collect()),
                deny_out: Some(deny.iter().map(|s| (*s).to_owned()).collect()),
                ..NetworkConfig::default()
            }),
            ..NewSandbox::default()
        };
        assert!(network(&asked(&[], &[]), true).unwrap().internet);
        assert!(!network(&asked(&[], &["0.0.0.0/0"]), true).unwrap().internet);
        assert!(network(&asked(&["0.0.0.0/0"], &["0.0.0.0/0"]), true).unwrap().internet);
        for (allow, deny) in [(&["pypi.org"][..], &["0.0.0.0/0"][..]), (&[], &["8.8.8.8"])] {
            let refused = network(&asked(allow, deny), true).unwrap_err();
            assert_eq!(refused.status, StatusCode::NOT_IMPLEMENTED);
        }
    }

    #[test]
    fn private_traffic_needs_a_secured_sandbox() {
        let new = NewSandbox {
            network: Some(NetworkConfig { allow_public_traffic: Some(false), ..NetworkConfig::default() }),
            ..NewSandbox::default()
        };
        assert!(!network(&new, true).unwrap().public_traffic);
        assert_eq!(network(&new, false).unwrap_err().status, StatusCode::BAD_REQUEST);
    }

    #[test]
    fn a_mask_cannot_smuggle_a_header() {
        let with = |host: &str| NewSandbox {
            network: Some(NetworkConfig {
                mask_request_host: Some(host.to_owned()),
                ..NetworkConfig::default()
            }),
            ..NewSandbox::default()
        };
        assert!(network(&with("localhost:${PORT}"), true).is_ok());
        for bad in ["", "a b", "a\r\nX: y", "a/b", "${HOST}"] {
            assert!(network(&with(bad), true).is_err(), "{bad:?}");
        }
    }
}
