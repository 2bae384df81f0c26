//! Where a registry may not send us.
//!
//! A redirect or a token service is a stranger's choice. It must not reach what only this machine reaches: its loopback
//! addresses and the link-local ones where clouds serve credentials. Names are judged by what they resolve to at the
//! moment of the connection, so that a name can't change its mind between the check and the use. Private networks stay
//! allowed: there stand the storages of registries at home. Behind an HTTP proxy the proxy resolves, and must judge.

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use url::{Host, Url};

/// Metadata services outside the link-local ranges: AWS over IPv6, Alibaba Cloud.
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
const METADATA_V4: Ipv4Addr = Ipv4Addr::new(100, 100, 100, 200);

/// Why an address is refused.
pub(crate) fn refusal(ip: IpAddr, loopback: bool) -> Option<&'static str> {
    match ip {
        IpAddr::V4(ip) => refusal_v4(ip, loopback),
        IpAddr::V6(ip) => match embedded(ip) {
            Some(ip) => refusal_v4(ip, loopback),
            None if ip == Ipv6Addr::LOCALHOST => (!loopback).then_some("it is a loopback address"),
            None if ip.is_unicast_link_local() => Some("it is a link-local address"),
            None if ip.is_unspecified() || ip.is_multicast() => Some("it is no host's address"),
            None if ip == METADATA_V6 => Some("it is a cloud's metadata service"),
            None => None,
        },
    }
}

fn refusal_v4(ip: Ipv4Addr, loopback: bool) -> Option<&'static str> {
    if ip.is_loopback() {
        (!loopback).then_some("it is a loopback address")
    } else if ip.is_link_local() {
        Some("it is a link-local address")
    } else if ip.octets()[0] == 0 || ip.is_multicast() || ip.is_broadcast() {
        Some("it is no host's address")
    } else if ip == METADATA_V4 {
        Some("it is a cloud's metadata service")
    } else {
        None
    }
}

/// The IPv4 address within an IPv6 address that leads to it: mapped, compatible, NAT64, 6to4.
fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let [a, b, c, d, e, f, g, h] = ip.segments();
    let join = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match (a, b, c, d, e, f) {
        (0, 0, 0, 0, 0, 0xffff) | (0x64, 0xff9b, 0, 0, 0, 0) => Some(join(g, h)),
        (0, 0, 0, 0, 0, 0) if g != 0 => Some(join(g, h)),
        (0x2002, ..) => Some(join(b, c)),
        _ => None,
    }
}

/// Judges a target before it is asked.
pub(crate) fn check(url: &Url, http: bool, loopback: bool) -> Result<(), String> {
    match url.scheme() {
        "https" => {}
        "http" if http => {}
        "http" => return Err("it would leave TLS".to_owned()),
        scheme => return Err(format!("its scheme is {scheme}")),
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("it holds credentials".to_owned());
    }
    let refused = match url.host() {
        None => Some("it names no host"),
        Some(Host::Ipv4(ip)) => refusal_v4(ip, loopback),
        Some(Host::Ipv6(ip)) => refusal(ip.into(), loopback),
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.');
            let local =
                name.eq_ignore_ascii_case("localhost") || name.to_ascii_lowercase().ends_with(".localhost");
            (local && !loopback).then_some("it is a loopback address")
        }
    };
    refused.map_or(Ok(()), |reason| Err(reason.to_owned()))
}

/// A name that leads to refused addresses only.
#[derive(Debug, thiserror::Error)]
#[error("{name} resolves to an address that is refused: {reason}")]
pub(crate) struct Refused {
    name: String,
    reason: &'static str,
}

/// Resolves names, leaving out refused addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resolver {
    pub(crate) loopback: bool,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let loopback = self.loopback;
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let (mut good, mut reason) = (Vec::new(), None);
            for address in found {
                match refusal(address.ip(), loopback) {
                    None => good.push(address),
                    Some(why) => reason = Some(why),
                }
            }
            match reason {
                Some(reason) if good.is_empty() => {
                    return Err(Refused { name: name.as_str().to_owned(), reason }.into());
                }
                _ => {}
            }
            Ok(Box::new(good.into_iter()) as Box<dyn Iterator<Item = SocketAddr> + Send> as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_spelling_of_a_local_or_metadata_address_passes() {
        let refused = [
            "https://127.0.0.1/x",
            "https://2130706433/x",
            "https://0x7f.1/x",
            "https://[::1]/x",
            "https://[::ffff:127.0.0.1]/x",
            "https://localhost/x",
            "https://LOCALHOST./x",
            "https://a.localhost/x",
            "https://169.254.169.254/latest/meta-data",
            "https://[::ffff:169.254.169.254]/",
            "https://[64:ff9b::a9fe:a9fe]/",
            "https://[2002:a9fe:a9fe::1]/",
            "https://[::a9fe:a9fe]/",
            "https://[fe80::1]/",
            "https://[fd00:ec2::254]/",
            "https://100.100.100.200/",
            "https://0.0.0.0/",
            "https://[::]/",
            "https://224.0.0.1/",
            "https://255.255.255.255/",
            "https://user:secret@storage.example/",
            "http://storage.example/",
            "file:///etc/passwd",
            "ftp://storage.example/",
            "gopher://storage.example/",
            "unix:/run/docker.sock",
        ];
        for target in refused {
            let url = Url::parse(target).unwrap();
            assert!(check(&url, false, false).is_err(), "{target}");
        }
        for target in ["https://storage.example/x?sig=1", "https://10.1.2.3:9000/", "https://[2001:db8::1]/"]
        {
            assert_eq!(check(&Url::parse(target).unwrap(), false, false), Ok(()), "{target}");
        }
    }

    #[test]
    fn a_registry_on_this_machine_may_send_us_to_this_machine_but_not_to_metadata() {
        let check = |target: &str| check(&Url::parse(target).unwrap(), true, true);
        assert!(check("http://127.0.0.1:9000/x").is_ok() && check("http://[::1]:9000/x").is_ok());
        assert!(check("http://169.254.169.254/").is_err() && check("file:///etc/passwd").is_err());
    }

    #[tokio::test]
    async fn names_are_judged_by_what_they_resolve_to() {
        let resolve = |loopback| Resolver { loopback }.resolve("localhost".parse().unwrap());
        assert!(resolve(true).await.is_ok_and(|mut found| found.all(|a| a.ip().is_loopback())));
        let error = resolve(false).await.err().unwrap().to_string();
        assert!(error.contains("loopback"), "{error}");
    }
}
