//! `aenv auth`: which server, which key.

use super::Context;
use crate::{
    control::{Control, ListFilter},
    error::{Error, Result},
    output::{self, Format},
    settings::{self, Global, Settings},
};
use std::io::{IsTerminal as _, Read as _};

/// Store the address and key of a server, or show which are used.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Check an API key and store it with the address in ~/.config/aenv/env
    Login(LoginArgs),
    /// Show which server and key are used and whether they work
    Status,
}

/// The address and key come from --api-url and --api-key, or are asked for.
#[derive(Debug, clap::Args)]
pub struct LoginArgs {
    /// Store without asking the server whether the key is good
    #[arg(long)]
    no_check: bool,
}

pub(super) async fn login(args: &LoginArgs, global: &Global) -> Result<u8> {
    let key = match &global.api_key {
        Some(key) => key.clone(),
        None => read_key()?,
    };
    let key = key.trim();
    if !key
        .strip_prefix("e2b_")
        .is_some_and(|hex| !hex.is_empty() && hex.bytes().all(|b| b.is_ascii_hexdigit()))
    {
        return Err(Error::Usage("an API key looks like e2b_ followed by hexadecimal digits".to_owned()));
    }
    let with_key = Global { api_key: Some(key.to_owned()), ..global.clone() };
    let settings = Settings::resolve(&with_key)?;
    if !args.no_check {
        check(&settings).await?;
    }
    let api = settings.api_url.as_str().trim_end_matches('/');
    let sandbox = settings.sandbox_url.as_str().trim_end_matches('/');
    let path = settings::store(&[("E2B_API_URL", api), ("E2B_SANDBOX_URL", sandbox), ("E2B_API_KEY", key)])?;
    output::say(&format!("stored in {}", path.display()));
    Ok(0)
}

fn read_key() -> Result<String> {
    let mut key = String::new();
    if std::io::stdin().is_terminal() {
        output::say("API key:");
        std::io::stdin().read_line(&mut key)?;
    } else {
        std::io::stdin().take(4096).read_to_string(&mut key)?;
    }
    Ok(key)
}

/// A listing of one is the cheapest call that needs a good key.
async fn check(settings: &Settings) -> Result<()> {
    Control::new(settings)?.sandboxes(&ListFilter::default(), 1).await.map(drop)
}

pub(super) async fn status(context: &Context) -> Result<u8> {
    let settings = &context.settings;
    let outcome = check(settings).await;
    let key = settings.api_key.as_deref().map_or("none".to_owned(), masked);
    let verdict = match &outcome {
        Ok(()) => "works".to_owned(),
        Err(error) => error.to_string(),
    };
    if settings.format == Format::Json {
        output::json(&serde_json::json!({
            "apiUrl": settings.api_url.as_str(), "sandboxUrl": settings.sandbox_url.as_str(),
            "apiKey": key, "source": settings.key_source, "ok": outcome.is_ok(), "detail": verdict,
        }))?;
    } else {
        let rows = [
            ["API".to_owned(), settings.api_url.to_string()],
            ["SANDBOXES".to_owned(), settings.sandbox_url.to_string()],
            ["KEY".to_owned(), format!("{key} from {}", settings.key_source)],
            ["STATUS".to_owned(), verdict],
        ];
        output::table(["SETTING", "VALUE"], rows)?;
    }
    Ok(outcome.err().map_or(0, |error| error.exit_code()))
}

/// Enough to tell keys apart, too little to use.
fn masked(key: &str) -> String {
    let head: String = key.chars().take(8).collect();
    format!("{head}…")
}
