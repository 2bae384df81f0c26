//! The host's package sources, as far as a base image may use them: pure text work.
//!
//! Of all that `/etc/apt/sources.list` and `sources.list.d` name, only entries for the host's own release count (the
//! release itself, its updates and its security archive). Other publishers' archives would need their keys and could
//! bring their versions of our packages.

/// The release and its companions.
fn is_own_suite(suite: &str, release: &str) -> bool {
    suite == release
        || suite
            .strip_prefix(release)
            .is_some_and(|rest| matches!(rest, "-updates" | "-security" | "/updates"))
}

/// Entries of a one-line-style file (sources.list(5)) that count, as lines.
pub(crate) fn from_list(text: &str, release: &str) -> Vec<String> {
    let counts = |line: &&str| {
        let line = line.split('#').next().unwrap_or_default();
        let mut words = line.split_ascii_whitespace();
        if words.next() != Some("deb") {
            return false;
        }
        // Options stand in brackets between the type and the address.
        let mut rest: Vec<&str> = words.collect();
        if rest.first().is_some_and(|word| word.starts_with('[')) {
            let end = rest.iter().position(|word| word.ends_with(']')).map_or(rest.len(), |end| end + 1);
            rest.drain(..end);
        }
        rest.get(1).is_some_and(|suite| is_own_suite(suite, release))
            && rest.get(2..).is_some_and(|c| c.contains(&"main"))
    };
    text.lines().filter(counts).map(|line| line.trim().to_owned()).collect()
}

/// Stanzas of a deb822-style file that count, with the suites that don't removed.
pub(crate) fn from_deb822(text: &str, release: &str) -> Vec<String> {
    let mut stanzas = vec![Vec::new()];
    for line in text.lines() {
        match (line.trim().is_empty(), line.starts_with('#')) {
            (true, _) => stanzas.push(Vec::new()),
            (_, true) => {}
            _ => stanzas.last_mut().into_iter().for_each(|stanza: &mut Vec<&str>| stanza.push(line)),
        }
    }
    stanzas.iter().filter_map(|stanza| own_stanza(stanza, release)).collect()
}

fn own_stanza(lines: &[&str], release: &str) -> Option<String> {
    let field = |name: &str| {
        let line = lines.iter().find(|line| {
            line.split_once(':').is_some_and(|(field, _)| field.trim().eq_ignore_ascii_case(name))
        })?;
        Some(line.split_once(':')?.1.split_ascii_whitespace().collect::<Vec<_>>())
    };
    let disabled =
        field("Enabled").is_some_and(|value| matches!(value.first(), Some(&("no" | "false" | "0"))));
    let usable = field("Types")?.contains(&"deb") && field("Components")?.contains(&"main") && !disabled;
    let suites: Vec<&str> =
        field("Suites")?.into_iter().filter(|suite| is_own_suite(suite, release)).collect();
    if !usable || suites.is_empty() {
        return None;
    }
    let rewritten = lines.iter().map(|line| match line.split_once(':') {
        Some((field, _)) if field.trim().eq_ignore_ascii_case("Suites") => {
            format!("Suites: {}\n", suites.join(" "))
        }
        Some((field, _)) if field.trim().eq_ignore_ascii_case("Types") => "Types: deb\n".to_owned(),
        _ => format!("{line}\n"),
    });
    Some(rewritten.collect())
}

/// The release's code name in os-release(5).
pub(crate) fn release(os_release: &str) -> Option<&str> {
    let value =
        os_release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="))?.trim().trim_matches('"');
    let plain = value.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    (plain && !value.is_empty()).then_some(value)
}

/// Settings of `apt-config dump` that a base image's build needs, too: proxies and what the mirror requires.
pub(crate) fn apt_settings(dump: &str) -> String {
    let wanted = |line: &&str| {
        let name = line.split_ascii_whitespace().next().unwrap_or_default().to_ascii_lowercase();
        let proxy = name.starts_with("acquire::") && name.contains("::proxy") && !name.contains("proxy-auto");
        proxy || name == "acquire::check-valid-until" || name == "acquire::check-date"
    };
    dump.lines().filter(wanted).map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_hosts_own_release_counts() {
        let list = "# deb http://a trixie main\n\
                    deb http://a trixie main contrib\n\
                    deb-src http://a trixie main\n\
                    deb [arch=amd64 signed-by=/k] http://a trixie-security main\n\
                    deb http://a trixie-backports main\n\
                    deb http://b cloud-trixie main\n\
                    deb http://a trixie contrib\n\
                    deb http://a\n";
        assert_eq!(
            from_list(list, "trixie"),
            [
                "deb http://a trixie main contrib",
                "deb [arch=amd64 signed-by=/k] http://a trixie-security main"
            ]
        );
    }

    #[test]
    fn stanzas_keep_their_fields_and_lose_foreign_suites() {
        let text = "# comment\nTypes: deb deb-src\nURIs: http://a\nSuites: trixie trixie-backports trixie-updates\nComponents: main\nSigned-By:\n -----BEGIN\n .\n\n\
                    Types: deb\nURIs: http://b\nSuites: nodistro\nComponents: main\n\n\
                    Types: deb\nURIs: http://c\nSuites: trixie\nComponents: main\nEnabled: no\n\n\
                    Types: deb-src\nURIs: http://d\nSuites: trixie\nComponents: main\n";
        assert_eq!(
            from_deb822(text, "trixie"),
            [
                "Types: deb\nURIs: http://a\nSuites: trixie trixie-updates\nComponents: main\nSigned-By:\n -----BEGIN\n .\n"
            ]
        );
    }

    #[test]
    fn release_and_settings_are_read_from_what_the_host_says() {
        assert_eq!(release("ID=debian\nVERSION_CODENAME=trixie\n"), Some("trixie"));
        assert_eq!(release("VERSION_CODENAME=\"noble\"\n"), Some("noble"));
        assert_eq!(release("ID=arch\n"), None);
        assert_eq!(release("VERSION_CODENAME=a;b\n"), None);
        let dump = "APT \"\";\nAcquire::http::Proxy \"http://p:1\";\nAcquire::Check-Valid-Until \"false\";\nDir \"/\";\n";
        assert_eq!(
            apt_settings(dump),
            "Acquire::http::Proxy \"http://p:1\";\nAcquire::Check-Valid-Until \"false\";\n"
        );
    }
}
