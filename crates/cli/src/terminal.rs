//! The person's terminal: raw mode that is always undone, size, keys.

use crate::{
    error::{Error, Result},
    process::Size,
};
use std::io::{IsTerminal as _, Read as _, Write as _};
use tokio::sync::mpsc;

/// Modes a full-screen program may have left on when its connection broke: mouse reports, bracketed paste, a hidden
/// cursor, colours. Leaving the alternate screen is not among them: done twice, it moves the cursor.
const UNDO: &[u8] = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[0m";

/// Raw mode for as long as this lives; dropping it, a panic's unwinding included, puts the terminal back.
#[derive(Debug)]
pub struct RawMode(());

impl RawMode {
    /// Enters raw mode.
    ///
    /// # Errors
    /// Standard input is no terminal.
    pub fn enter() -> Result<Self> {
        if !std::io::stdin().is_terminal() {
            return Err(Error::Usage("standard input is not a terminal; leave out --tty".to_owned()));
        }
        crossterm::terminal::enable_raw_mode()
            .map_err(|e| Error::Failed(format!("can't switch the terminal to raw mode: {e}")))?;
        Ok(Self(()))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        let mut out = std::io::stdout().lock();
        if out.is_terminal() {
            // Nobody is left to tell when this fails.
            let _ = out.write_all(UNDO).and_then(|()| out.flush());
        }
        let _ = crossterm::terminal::disable_raw_mode();
    }
}

/// Size of the terminal, 80 × 24 when it can't be known.
#[must_use]
pub fn size() -> Size {
    match crossterm::terminal::size() {
        Ok((cols, rows)) if cols > 0 && rows > 0 => Size { cols, rows },
        _ => Size { cols: 80, rows: 24 },
    }
}

/// Standard input in pieces, bounded at 16; closed at its end.
///
/// Read by a thread of its own that is left behind when the command ends first: a read of a terminal can't be
/// interrupted, and a runtime's own standard input would hold the program until the next key.
///
/// # Errors
/// No thread can be had.
pub fn input() -> Result<mpsc::Receiver<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel(16);
    let read = move || {
        let mut piece = vec![0; 16 << 10];
        loop {
            match std::io::stdin().lock().read(&mut piece) {
                Ok(0) => return,
                Ok(count) => {
                    if sender.blocking_send(piece[..count].to_vec()).is_err() {
                        return;
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    };
    std::thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(read)
        .map_err(|e| Error::Failed(format!("can't start a thread for standard input: {e}")))?;
    Ok(receiver)
}

/// Finds `~.` at the start of a line, as in ssh: the way out when the sandbox hangs.
#[derive(Debug)]
pub struct Escape {
    state: EscapeState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EscapeState {
    LineStart,
    Tilde,
    Inside,
}

impl Default for Escape {
    fn default() -> Self {
        Self { state: EscapeState::LineStart }
    }
}

impl Escape {
    /// What of `typed` goes to the sandbox, and whether the way out was typed. A lone `~` waits for the next key.
    pub fn filter(&mut self, typed: &[u8]) -> (Vec<u8>, bool) {
        let mut pass = Vec::with_capacity(typed.len());
        for &byte in typed {
            match (self.state, byte) {
                (EscapeState::LineStart, b'~') => {
                    self.state = EscapeState::Tilde;
                    continue;
                }
                (EscapeState::Tilde, b'.') => return (pass, true),
                // `~~` is one tilde.
                (EscapeState::Tilde, b'~') => {}
                (EscapeState::Tilde, _) => pass.push(b'~'),
                _ => {}
            }
            pass.push(byte);
            self.state =
                if matches!(byte, b'\r' | b'\n') { EscapeState::LineStart } else { EscapeState::Inside };
        }
        (pass, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(pieces: &[&str]) -> (String, bool) {
        let mut escape = Escape::default();
        let mut all = Vec::new();
        for piece in pieces {
            let (pass, out) = escape.filter(piece.as_bytes());
            all.extend(pass);
            if out {
                return (String::from_utf8(all).expect("text"), true);
            }
        }
        (String::from_utf8(all).expect("text"), false)
    }

    #[test]
    fn tilde_dot_leads_out_only_at_the_start_of_a_line() {
        assert_eq!(typed(&["ls\r", "~", "."]), ("ls\r".to_owned(), true));
        assert_eq!(typed(&["~."]), (String::new(), true));
        assert_eq!(typed(&["cd ~.\r"]), ("cd ~.\r".to_owned(), false));
    }

    #[test]
    fn a_tilde_that_is_meant_arrives() {
        assert_eq!(typed(&["~/bin/x\r"]), ("~/bin/x\r".to_owned(), false));
        assert_eq!(typed(&["~~."]), ("~.".to_owned(), false));
    }
}
