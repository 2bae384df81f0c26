//! A process and this terminal, joined until one of them ends.
//!
//! Output has the main task to itself; input, signals and size changes have tasks of their own, so that a slow call
//! never holds up output. Signals without a terminal: the first Ctrl-C asks the remote process to end (SIGTERM), the
//! second kills it, the third leaves it alone and ends this client. With a terminal, Ctrl-C is a key like any other.

use crate::{
    error::{Error, Result},
    output,
    process::{Event, Handle, Process, Signal, shell_code},
    terminal::{self, Escape},
};
use tokio::{
    io::AsyncWriteExt as _,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    task::JoinHandle,
};

/// Code of a client ended by Ctrl-C, as shells have it.
const INTERRUPTED: u8 = 130;

/// How a terminal session ended.
pub(super) enum Left {
    /// The remote process ended.
    Ended(u8),
    /// The person left it.
    ByKey,
}

/// Ends its task when dropped.
struct Helper(JoinHandle<()>);

impl Drop for Helper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Why the side tasks ask the main one to stop.
enum Stop {
    Interrupted,
    ByKey,
    Terminated,
}

pub(super) async fn plain(mut process: Process, forward_input: bool) -> Result<u8> {
    let (stop_sender, mut stop) = mpsc::channel(1);
    let _signals = Helper(tokio::spawn(pass_signals(process.control(), stop_sender)?));
    let _input = match forward_input {
        true => Some(Helper(tokio::spawn(pass_input(process.control(), terminal::input()?)))),
        false => None,
    };
    loop {
        let event = tokio::select! {
            event = process.next() => event?,
            Some(_) = stop.recv() => return Ok(INTERRUPTED),
        };
        match event {
            None => return Err(Error::Failed("the process ended without an exit code".to_owned())),
            Some(Event::Ended(end)) => {
                // The agent repeats its status as an error whenever a command fails; only other words are news.
                let news = end.error.as_deref().filter(|words| !words.is_empty() && *words != end.status);
                if let Some(words) = news {
                    output::say(&output::printable(words));
                }
                return Ok(shell_code(&end));
            }
            Some(event) => {
                if !write(event).await? {
                    // Nobody reads any more: like a pipe that broke here, and the process learns of it.
                    let _ = process.control().signal(Signal::Kill).await;
                    return Ok(128 + 13);
                }
            }
        }
    }
}

/// Writes output; `false` when its reader has gone.
async fn write(event: Event) -> Result<bool> {
    let wrote = match event {
        Event::Stdout(bytes) | Event::Pty(bytes) => {
            let mut out = tokio::io::stdout();
            match out.write_all(&bytes).await {
                Ok(()) => out.flush().await,
                Err(e) => Err(e),
            }
        }
        Event::Stderr(bytes) => {
            let mut out = tokio::io::stderr();
            match out.write_all(&bytes).await {
                Ok(()) => out.flush().await,
                Err(e) => Err(e),
            }
        }
        Event::Lost(count) => {
            output::say(&format!("warning: {count} bytes of output came while nobody listened and are gone"));
            Ok(())
        }
        Event::Began | Event::Ended(_) => Ok(()),
    };
    match wrote {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Error::Failed(format!("can't write output: {e}"))),
    }
}

fn pass_signals(handle: Handle, stop: mpsc::Sender<Stop>) -> Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        for kind in [Signal::Term, Signal::Kill] {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            let words = match kind {
                Signal::Term => "asking the command to end; once more kills it",
                Signal::Kill => "killing the command; once more leaves without it",
            };
            output::say(words);
            let handle = handle.clone();
            // Not waited for: the next Ctrl-C must not hang on this one.
            tokio::spawn(async move {
                if let Err(error) = handle.signal(kind).await {
                    output::say(&format!("warning: the signal did not arrive: {error}"));
                }
            });
        }
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        let _ = stop.send(Stop::Interrupted).await;
    })
}

async fn pass_input(handle: Handle, mut input: mpsc::Receiver<Vec<u8>>) {
    while let Some(piece) = input.recv().await {
        match handle.input(&piece, false).await {
            Ok(()) => {}
            // It ended or closed its input; its exit code tells the rest.
            Err(Error::NotFound(_) | Error::Usage(_)) => return,
            Err(error) => {
                output::say(&format!("warning: input could not be delivered: {error}"));
                return;
            }
        }
    }
    match handle.close_input().await {
        Ok(()) | Err(Error::NotFound(_) | Error::Usage(_)) => {}
        Err(error) => output::say(&format!("warning: the end of input could not be delivered: {error}")),
    }
}

/// Joins a process that has a terminal with ours, which is in raw mode already.
pub(super) async fn in_terminal(mut process: Process) -> Result<Left> {
    let (stop_sender, mut stop) = mpsc::channel(1);
    let input = terminal::input()?;
    let _keys = Helper(tokio::spawn(pass_keys(process.control(), input, stop_sender)?));
    loop {
        let event = tokio::select! {
            event = process.next() => event?,
            Some(why) = stop.recv() => return match why {
                Stop::ByKey => Ok(Left::ByKey),
                Stop::Interrupted | Stop::Terminated => Ok(Left::Ended(128 + 15)),
            },
        };
        match event {
            None => return Err(Error::Failed("the shell ended without an exit code".to_owned())),
            Some(Event::Ended(end)) => return Ok(Left::Ended(shell_code(&end))),
            Some(event) => {
                if !write(event).await? {
                    return Ok(Left::Ended(128 + 13));
                }
            }
        }
    }
}

fn pass_keys(
    handle: Handle,
    mut input: mpsc::Receiver<Vec<u8>>,
    stop: mpsc::Sender<Stop>,
) -> Result<impl Future<Output = ()>> {
    let mut resized = signal(SignalKind::window_change())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        // Keys are sent by a task of their own, bounded like the input, so that `~.` is seen while a call hangs.
        let (sender, mut keys) = mpsc::channel::<Vec<u8>>(64);
        let sending = handle.clone();
        let _sender_task = Helper(tokio::spawn(async move {
            while let Some(mut piece) = keys.recv().await {
                while let Ok(more) = keys.try_recv() {
                    piece.extend(more);
                }
                // A key that can't be delivered is like one typed into a dead line: the stream tells what is wrong.
                let _ = sending.input(&piece, true).await;
            }
        }));
        let mut escape = Escape::default();
        let mut open = true;
        loop {
            tokio::select! {
                piece = input.recv(), if open => {
                    let Some(piece) = piece else {
                        open = false;
                        continue;
                    };
                    let (pass, leave) = escape.filter(&piece);
                    if leave {
                        let _ = stop.send(Stop::ByKey).await;
                        return;
                    }
                    // Full means the line is dead for 64 pieces: dropping beats a client that can't be left.
                    let _ = sender.try_send(pass);
                }
                _ = resized.recv() => {
                    let handle = handle.clone();
                    tokio::spawn(async move { handle.resize(terminal::size()).await });
                }
                _ = terminate.recv() => {
                    let _ = stop.send(Stop::Terminated).await;
                    return;
                }
                _ = hangup.recv() => {
                    let _ = stop.send(Stop::Terminated).await;
                    return;
                }
            }
        }
    })
}
