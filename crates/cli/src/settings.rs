//! Where the server is and how to get in: flags win over the environment, which wins over `~/.config/aenv/env`.

use crate::{
    error::{Error, Result},
    output::Format,
};
use std::{
    collections::BTreeMap,
    io::Write as _,
    path::{Path, PathBuf},
};
use url::Url;

/// Address when nothing says otherwise.
pub const DEFAULT_URL: &str = "http://127.0.0.1:8000";

/// Flags every command takes.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Global {
    /// Base URL of the API [env: AENV_API_URL, E2B_API_URL; default: http://127.0.0.1:8000]
    #[arg(long, global = true, value_name = "URL", help_heading = "Connection")]
    pub api_url: Option<String>,
    /// Base URL for traffic to sandboxes [env: AENV_SANDBOX_URL, E2B_SANDBOX_URL; default: the API's]
    #[arg(long, global = true, value_name = "URL", help_heading = "Connection")]
    pub sandbox_url: Option<String>,
    /// API key [env: AENV_API_KEY, E2B_API_KEY]. A key on the command line is visible to other users of this machine
    #[arg(long, global = true, value_name = "KEY", help_heading = "Connection")]
    pub api_key: Option<String>,
    /// How data is written [default: table on a terminal, json when piped]
    #[arg(long, global = true, value_enum, value_name = "FORMAT")]
    pub output: Option<Format>,
}

/// Resolved settings.
#[derive(Clone)]
pub struct Settings {
    /// Control plane.
    pub api_url: Url,
    /// Guest plane.
    pub sandbox_url: Url,
    /// Key, if one is known.
    pub api_key: Option<String>,
    /// Where the key came from, in words.
    pub key_source: String,
    /// Output format.
    pub format: Format,
}

impl Settings {
    /// Reads flags, environment and file.
    ///
    /// # Errors
    /// A URL that is none, or a settings file that can't be read.
    pub fn resolve(global: &Global) -> Result<Self> {
        let file = match file_path() {
            Some(path) => read_file(&path)?,
            None => BTreeMap::new(),
        };
        Self::from_sources(global, &|name| std::env::var(name).ok(), &file)
    }

    fn from_sources(
        global: &Global,
        env: &dyn Fn(&str) -> Option<String>,
        file: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let find = |flag: &Option<String>, what: &str, flag_name: &str| {
            if let Some(value) = flag {
                return Some((value.clone(), flag_name.to_owned()));
            }
            let names = [format!("AENV_{what}"), format!("E2B_{what}")];
            let from_env = names.iter().find_map(|name| {
                env(name)
                    .filter(|value| !value.is_empty())
                    .map(|value| (value, format!("environment ({name})")))
            });
            from_env.or_else(|| {
                names
                    .iter()
                    .find_map(|name| file.get(name).map(|v| (v.clone(), "~/.config/aenv/env".to_owned())))
            })
        };
        let api = find(&global.api_url, "API_URL", "--api-url");
        let api = api.unwrap_or_else(|| (DEFAULT_URL.to_owned(), "default".to_owned()));
        let api_url = parse_url(&api.0, &api.1)?;
        let sandbox_url = match find(&global.sandbox_url, "SANDBOX_URL", "--sandbox-url") {
            Some((value, source)) => parse_url(&value, &source)?,
            None => api_url.clone(),
        };
        let (api_key, key_source) = match find(&global.api_key, "API_KEY", "--api-key") {
            Some((value, source)) => (Some(value), source),
            None => (None, "nowhere".to_owned()),
        };
        let format = global.output.unwrap_or_else(Format::of_stdout);
        Ok(Self { api_url, sandbox_url, api_key, key_source, format })
    }
}

fn parse_url(text: &str, source: &str) -> Result<Url> {
    let bad = |why: &str| {
        Error::Usage(format!("'{text}' from {source} is not a usable URL ({why}); expected http://HOST:PORT"))
    };
    let url = Url::parse(text).map_err(|e| bad(&e.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(bad("the scheme must be http or https"));
    }
    if url.host_str().is_none() {
        return Err(bad("it has no host"));
    }
    Ok(url)
}

/// `$XDG_CONFIG_HOME/aenv/env`, else `~/.config/aenv/env`.
#[must_use]
pub fn file_path() -> Option<PathBuf> {
    let base = match std::env::var_os("XDG_CONFIG_HOME").filter(|v| !v.is_empty()) {
        Some(base) => PathBuf::from(base),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".config"),
    };
    Some(base.join("aenv").join("env"))
}

/// Reads `KEY=VALUE` lines; `export ` in front, quotes around the value, blank lines and `#` comments are accepted.
/// A file that isn't there is empty.
///
/// # Errors
/// A file that can't be read, or a line that is no assignment.
pub fn read_file(path: &Path) -> Result<BTreeMap<String, String>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(e) => return Err(Error::Failed(format!("can't read {}: {e}", path.display()))),
    };
    parse_lines(&text).map_err(|line| {
        Error::Usage(format!(
            "{} line {line} is not KEY=VALUE; correct it or remove the file",
            path.display()
        ))
    })
}

fn parse_lines(text: &str) -> std::result::Result<BTreeMap<String, String>, usize> {
    let mut values = BTreeMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (key, value) = line.strip_prefix("export ").unwrap_or(line).split_once('=').ok_or(index + 1)?;
        let value = value.trim();
        let bare = ['"', '\''].iter().find_map(|q| value.strip_prefix(*q)?.strip_suffix(*q)).unwrap_or(value);
        values.insert(key.trim().to_owned(), bare.to_owned());
    }
    Ok(values)
}

/// Writes settings, keeping lines for other keys. The file holds a secret: only its owner may read it.
///
/// # Errors
/// No home directory, or the file can't be written.
pub fn store(changes: &[(&str, &str)]) -> Result<PathBuf> {
    let path = file_path().ok_or_else(|| {
        Error::Failed("HOME is not set, so there is no place for ~/.config/aenv/env".to_owned())
    })?;
    let mut values = read_file(&path)?;
    for (key, value) in changes {
        values.insert((*key).to_owned(), (*value).to_owned());
    }
    // Exported, so that a shell that sources it hands it on to the SDKs.
    let lines: String =
        values.iter().map(|(key, value)| format!("export {key}={}\n", shell_word(value))).collect();
    write_secret(&path, &lines)?;
    Ok(path)
}

/// Writes a file that only its owner may read, making its folder. Renamed into place, so that a crash never leaves half
/// of it.
///
/// # Errors
/// The file can't be written.
pub fn write_secret(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    // `tempfile` makes it mode 0600.
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| Error::Failed(format!("can't write {}: {}", path.display(), e.error)))?;
    Ok(())
}

/// A value as a shell reads it back; `$PATH` stays a variable. Our own reader takes the quotes off.
fn shell_word(value: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@%+,=$".contains(c);
    if value.chars().all(plain) {
        value.to_owned()
    } else {
        format!("\"{}\"", value.replace(['"', '`', '\\'], ""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn flags_win_over_environment_and_environment_over_file() {
        let file =
            parse_lines("E2B_API_KEY=from-file\nE2B_API_URL=http://file:1\nE2B_SANDBOX_URL=http://file:2")
                .expect("parses");
        let env = |name: &str| (name == "E2B_API_URL").then(|| "http://env:1".to_owned());
        let global = Global { api_key: Some("flag".into()), ..Global::default() };
        let settings = Settings::from_sources(&global, &env, &file).expect("resolves");
        assert_eq!(settings.api_key.as_deref(), Some("flag"));
        assert_eq!(settings.api_url.as_str(), "http://env:1/");
        assert_eq!(settings.sandbox_url.as_str(), "http://file:2/");
    }

    #[test]
    fn our_own_variables_win_over_the_borrowed_names() {
        let env = |name: &str| match name {
            "AENV_API_KEY" => Some("ours".to_owned()),
            "E2B_API_KEY" => Some("theirs".to_owned()),
            _ => None,
        };
        let settings = Settings::from_sources(&Global::default(), &env, &BTreeMap::new()).expect("resolves");
        assert_eq!(settings.api_key.as_deref(), Some("ours"));
        assert_eq!(settings.key_source, "environment (AENV_API_KEY)");
    }

    #[test]
    fn sandbox_traffic_goes_to_the_api_address_unless_told_otherwise() {
        let settings = Settings::from_sources(&Global::default(), &none, &BTreeMap::new()).expect("resolves");
        assert_eq!(settings.api_url.as_str(), "http://127.0.0.1:8000/");
        assert_eq!(settings.sandbox_url, settings.api_url);
    }

    #[test]
    fn a_bad_url_names_its_source() {
        let global = Global { api_url: Some("ftp://x".into()), ..Global::default() };
        let error = Settings::from_sources(&global, &none, &BTreeMap::new()).err().expect("refused");
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--api-url"), "{error}");
    }

    #[test]
    fn a_path_with_a_space_is_one_word_for_a_shell_and_for_us() {
        assert_eq!(shell_word("http://127.0.0.1:8000"), "http://127.0.0.1:8000");
        let line = format!("export PATH={}", shell_word("/srv/a clone/target/release:$PATH"));
        assert_eq!(line, "export PATH=\"/srv/a clone/target/release:$PATH\"");
        assert_eq!(parse_lines(&line).expect("parses")["PATH"], "/srv/a clone/target/release:$PATH");
        let shell =
            std::process::Command::new("sh").args(["-c", &format!("{line}; echo \"$PATH\"")]).output();
        let said = shell.expect("a shell").stdout;
        assert!(said.starts_with(b"/srv/a clone/target/release:"));
    }

    #[test]
    fn a_settings_file_may_be_one_a_shell_sources() {
        let values =
            parse_lines("# made by aenv up\n\nexport E2B_API_KEY=\"e2b_ab\"\nX='y z'\n").expect("parses");
        assert_eq!(values["E2B_API_KEY"], "e2b_ab");
        assert_eq!(values["X"], "y z");
        assert_eq!(parse_lines("ok=1\nnonsense"), Err(2));
    }
}
