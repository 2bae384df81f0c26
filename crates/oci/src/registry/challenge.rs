//! Reading `WWW-Authenticate`.
//!
//! RFC 9110 §11.6.1 lets several challenges share one header, their parameters also separated by commas, and registries
//! add their own: no blank after a comma, unquoted values with colons and slashes, several headers. What can't be read is
//! skipped: a challenge we don't understand is no reason to miss the one after it.

/// Longer headers are cut: no challenge needs them.
const MAX_HEADER: usize = 8 << 10;
const MAX_CHALLENGES: usize = 8;
const MAX_PARAMETERS: usize = 16;

/// One way to authenticate that a server offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Challenge {
    /// In lower case.
    pub(crate) scheme: String,
    /// Names in lower case.
    parameters: Vec<(String, String)>,
}

impl Challenge {
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// Reads all challenges of one header.
pub(crate) fn parse(header: &str) -> Vec<Challenge> {
    let mut end = header.len().min(MAX_HEADER);
    while !header.is_char_boundary(end) {
        end -= 1;
    }
    let mut rest = Rest(&header[..end]);
    let mut challenges: Vec<Challenge> = Vec::new();
    while !rest.0.is_empty() {
        rest.skip(|c| c == ',' || c.is_whitespace());
        let word = rest.take(|c| !c.is_whitespace() && !matches!(c, ',' | '=' | '"'));
        if word.is_empty() {
            // A stray '=' or '"'.
            rest.skip_one();
            continue;
        }
        let before = rest.0;
        rest.skip(char::is_whitespace);
        if rest.eat('=') {
            rest.skip(char::is_whitespace);
            let value = rest.value();
            if let Some(last) = challenges.last_mut().filter(|last| last.parameters.len() < MAX_PARAMETERS) {
                last.parameters.push((word.to_ascii_lowercase(), value));
            }
        } else {
            rest.0 = before;
            // A scheme, or the lone token of one like Negotiate; the latter does no harm as a scheme nobody knows.
            if challenges.len() == MAX_CHALLENGES {
                break;
            }
            challenges.push(Challenge { scheme: word.to_ascii_lowercase(), parameters: Vec::new() });
        }
    }
    challenges
}

struct Rest<'a>(&'a str);

impl<'a> Rest<'a> {
    fn take(&mut self, of: impl Fn(char) -> bool) -> &'a str {
        let end = self.0.find(|c| !of(c)).unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken
    }

    fn skip(&mut self, of: impl Fn(char) -> bool) {
        self.take(of);
    }

    fn skip_one(&mut self) {
        let mut chars = self.0.chars();
        chars.next();
        self.0 = chars.as_str();
    }

    fn eat(&mut self, c: char) -> bool {
        self.0.strip_prefix(c).map(|rest| self.0 = rest).is_some()
    }

    fn value(&mut self) -> String {
        if !self.eat('"') {
            return self.take(|c| c != ',' && !c.is_whitespace()).to_owned();
        }
        let mut value = String::new();
        let mut chars = self.0.chars();
        while let Some(c) = chars.next() {
            match c {
                '"' => break,
                '\\' => value.extend(chars.next()),
                c => value.push(c),
            }
        }
        self.0 = chars.as_str();
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(header: &str) -> Vec<(String, Vec<(String, String)>)> {
        parse(header).into_iter().map(|c| (c.scheme, c.parameters)).collect()
    }

    fn one(scheme: &str, parameters: &[(&str, &str)]) -> (String, Vec<(String, String)>) {
        let parameters = parameters.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        (scheme.to_owned(), parameters)
    }

    #[test]
    fn headers_as_real_registries_write_them_are_read() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push""#;
        let expected = one(
            "bearer",
            &[
                ("realm", "https://auth.docker.io/token"),
                ("service", "registry.docker.io"),
                ("scope", "repository:a/b:pull,push"),
            ],
        );
        assert_eq!(read(hub), [expected]);
        // Unquoted, capitals, blanks around the equals sign.
        assert_eq!(
            read("BEARER Realm = https://r.example/t , Service=x"),
            [one("bearer", &[("realm", "https://r.example/t"), ("service", "x")])]
        );
        assert_eq!(
            read(r#"Basic realm="say \"hi\", friend", Bearer realm="t""#),
            [one("basic", &[("realm", "say \"hi\", friend")]), one("bearer", &[("realm", "t")])]
        );
        // A token between that is no parameter list.
        assert_eq!(read("Negotiate, Basic realm=x")[1], one("basic", &[("realm", "x")]));
        assert_eq!(read("Basic"), [one("basic", &[])]);
        assert_eq!(read(r#"Bearer realm="never closed"#), [one("bearer", &[("realm", "never closed")])]);
        assert_eq!(read(r#"=,"",Basic realm=x"#).pop(), Some(one("basic", &[("realm", "x")])));
        assert!(read("").is_empty());
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic_or_grow_without_bound(header in "\\PC{0,200}|([ ,=\"a\\\\]{0,200})") {
            let challenges = parse(&header);
            prop_assert!(challenges.len() <= MAX_CHALLENGES);
            prop_assert!(challenges.iter().all(|c| c.parameters.len() <= MAX_PARAMETERS));
        }

        #[test]
        fn a_quoted_value_comes_back_whole(value in "[ -~]{0,60}") {
            let quoted = value.replace('\\', "\\\\").replace('"', "\\\"");
            let challenges = parse(&format!("Bearer realm=\"{quoted}\",service=s"));
            prop_assert_eq!(challenges[0].get("realm"), Some(value.as_str()));
            prop_assert_eq!(challenges[0].get("service"), Some("s"));
        }
    }
}
