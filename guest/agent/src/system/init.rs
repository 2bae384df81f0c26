//! What the node tells a guest: `POST /init`, `/aenv/sync`, `/aenv/shutdown`.

use std::{io, os::fd::AsRawFd};

use aenv_envd_proto::http::{InitRequest, MAX_ENTROPY};
use base64::{Engine, engine::general_purpose::STANDARD};
use rustix::time::{ClockId, Timespec, clock_settime};

use crate::{
    boot::etc,
    console::say,
    environment,
    guest::{Guest, Machine},
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum InitError {
    #[error("timestamp {0:?} is not RFC 3339 (2026-01-31T12:00:00Z)")]
    Timestamp(String),
    #[error("entropy is not base64 of at most {MAX_ENTROPY} bytes")]
    Entropy,
    #[error("hostname {0:?} is not 1 to 63 letters, digits and dashes")]
    Hostname(String),
    #[error("envVars: {0}")]
    Variable(#[from] environment::VariableError),
}

/// Takes over everything `request` says, or nothing. The order matters to a clone: new randomness and time come before
/// anything that could make use of them, and old streams are ended last, when their callers may come back.
pub(crate) fn apply(guest: &Guest, request: InitRequest) -> Result<(), InitError> {
    let now = request.timestamp.as_deref().map(timestamp).transpose()?;
    let entropy = request.entropy.as_deref().map(entropy).transpose()?;
    if let Some(name) = request.hostname.as_deref().filter(|name| !is_hostname(name)) {
        return Err(InitError::Hostname(name.to_owned()));
    }
    let vars = request.env_vars.iter().flatten();
    environment::check(vars.map(|(name, value)| (name.as_str(), value.as_str())))?;
    if guest.machine == Machine::Ours {
        if let Some(now) = now {
            report("set the clock", clock_settime(ClockId::Realtime, now).map_err(Into::into));
        }
        if let Some(bytes) = entropy {
            report("reseed the random pool", reseed(&bytes));
        }
        if let Some(name) = &request.hostname {
            etc::set_hostname(name);
            report("write /etc/hosts", etc::name_self(name));
        }
    }
    guest.set_identity(request.sandbox_id, request.template_id);
    guest.set_defaults(request.default_user, request.default_workdir);
    guest.set_volumes(request.volume_mounts);
    if let Some(env) = request.env_vars {
        guest.set_env(env);
    }
    if let Some(token) = &request.access_token {
        guest.set_token(token);
    }
    if let Some(generation) = request.generation {
        guest.set_generation(generation);
    }
    Ok(())
}

fn report(what: &str, result: io::Result<()>) {
    if let Err(err) = result {
        say(&format!("cannot {what}: {err}"));
    }
}

fn timestamp(text: &str) -> Result<Timespec, InitError> {
    let at: jiff::Timestamp = text.parse().map_err(|_| InitError::Timestamp(text.to_owned()))?;
    Ok(Timespec { tv_sec: at.as_second(), tv_nsec: i64::from(at.subsec_nanosecond()) })
}

fn entropy(text: &str) -> Result<Vec<u8>, InitError> {
    let bytes = STANDARD.decode(text).map_err(|_| InitError::Entropy)?;
    if bytes.len() > MAX_ENTROPY { Err(InitError::Entropy) } else { Ok(bytes) }
}

fn is_hostname(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Adds `bytes` to the pool and makes the generator start over from it, so that two clones part at once.
fn reseed(bytes: &[u8]) -> io::Result<()> {
    /// linux/random.h: `struct rand_pool_info`, with room for our largest input.
    #[repr(C)]
    struct PoolInfo {
        entropy_count: i32,
        buf_size: i32,
        buf: [u8; MAX_ENTROPY],
    }
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    let random = std::fs::OpenOptions::new().write(true).open("/dev/urandom")?;
    let size = i32::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut info = PoolInfo { entropy_count: size * 8, buf_size: size, buf: [0; MAX_ENTROPY] };
    if let Some(buf) = info.buf.get_mut(..bytes.len()) {
        buf.copy_from_slice(bytes);
    }
    // SAFETY: `info` has the layout RNDADDENTROPY reads, and `buf_size` bytes of it are there.
    if unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const info) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: RNDRESEEDCRNG takes no argument.
    match unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG, 0) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest() -> Guest {
        Guest::new(Machine::NotOurs, None)
    }

    #[test]
    fn a_bad_field_changes_nothing() {
        let guest = guest();
        let request = InitRequest {
            access_token: Some("token".into()),
            timestamp: Some("yesterday".into()),
            ..InitRequest::default()
        };
        assert!(matches!(apply(&guest, request), Err(InitError::Timestamp(_))));
        assert!(!guest.is_secured());
        for name in ["", "A=B", "A\0"] {
            let env_vars = Some([(name.to_owned(), "x".to_owned())].into());
            let request = InitRequest { env_vars, ..InitRequest::default() };
            assert!(matches!(apply(&guest, request), Err(InitError::Variable(_))), "{name:?}");
        }
    }

    #[test]
    fn what_each_field_may_hold() {
        assert!(timestamp("2026-11-30T19:00:00.25+01:00").is_ok());
        assert!(timestamp("2026-11-30").is_err());
        assert_eq!(entropy("AAEC").ok().as_deref(), Some(&[0_u8, 1, 2][..]));
        assert!(entropy("not base64").is_err());
        assert!(entropy(&STANDARD.encode([0; MAX_ENTROPY + 1])).is_err());
        assert!(is_hostname("box-1") && !is_hostname("") && !is_hostname("a b") && !is_hostname("-a"));
        assert!(!is_hostname(&"x".repeat(64)));
    }

    #[test]
    fn only_another_generation_ends_streams() {
        let guest = guest();
        let mut seen = guest.generation();
        let generation = |number| InitRequest { generation: Some(number), ..InitRequest::default() };
        apply(&guest, generation(0)).expect("valid");
        assert!(!seen.has_changed().unwrap_or(true));
        apply(&guest, generation(7)).expect("valid");
        assert!(seen.has_changed().unwrap_or(false));
        seen.mark_unchanged();
        apply(&guest, generation(7)).expect("valid");
        assert!(!seen.has_changed().unwrap_or(true));
    }
}
