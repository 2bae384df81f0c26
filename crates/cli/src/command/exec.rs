//! `aenv exec` and `aenv connect`.

use super::{Context, pair, session};
use crate::{
    error::{Error, Result},
    guest::Guest,
    output,
    process::{Process, Spec},
    terminal,
};

/// Run a command in a sandbox.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox
    id: String,
    /// As this user
    #[arg(long, short)]
    user: Option<String>,
    /// In this directory
    #[arg(long, short = 'w')]
    cwd: Option<String>,
    /// Environment variable; may be given several times
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = pair)]
    env: Vec<(String, String)>,
    /// With a terminal
    #[arg(long, short)]
    tty: bool,
    /// Forward standard input
    #[arg(long, short)]
    interactive: bool,
    /// Leave it running and print its process id
    #[arg(long, short, conflicts_with_all = ["tty", "interactive", "attach"])]
    detach: bool,
    /// Watch a process that runs already instead of starting one
    #[arg(long, value_name = "PID", conflicts_with_all = ["tty", "cwd", "env", "command"])]
    attach: Option<u32>,
    /// The command and its arguments; no shell is involved unless you name one
    #[arg(last = true, required_unless_present = "attach", value_name = "CMD")]
    command: Vec<String>,
}

/// Open a shell in a sandbox.
#[derive(Debug, clap::Args)]
pub struct ConnectArgs {
    /// Sandbox; a paused one is resumed
    id: String,
    /// As this user
    #[arg(long, short)]
    user: Option<String>,
    /// In this directory
    #[arg(long, short = 'w')]
    cwd: Option<String>,
}

pub(super) async fn run(context: &Context, args: Args) -> Result<u8> {
    let guest = Guest::reach(&context.settings, &context.control, &args.id, args.user).await?;
    if let Some(pid) = args.attach {
        let process = Process::attach(&guest, pid).await?;
        return session::plain(process, args.interactive).await;
    }
    let Some((cmd, rest)) = args.command.split_first() else {
        return Err(Error::Usage("no command given; write it after --".to_owned()));
    };
    let mut spec = Spec {
        cmd: cmd.clone(),
        args: rest.to_vec(),
        envs: args.env.into_iter().collect(),
        cwd: args.cwd,
        pty: None,
        stdin: args.interactive,
    };
    if args.tty {
        return with_terminal(&guest, spec).await;
    }
    let process = Process::start(&guest, &spec).await?;
    spec.args.clear();
    if args.detach {
        let pid = process.pid().unwrap_or_default();
        if context.json() {
            output::json(&serde_json::json!({ "sandboxID": args.id, "pid": pid }))?;
        } else {
            output::line(&pid.to_string())?;
            output::say(&format!("watch it: aenv exec {} --attach {pid}", args.id));
        }
        return Ok(0);
    }
    session::plain(process, args.interactive).await
}

pub(super) async fn connect(context: &Context, args: ConnectArgs) -> Result<u8> {
    let guest = Guest::reach(&context.settings, &context.control, &args.id, args.user).await?;
    // bash where there is one, else whatever /bin/sh is: small images have nothing else.
    let script = "if command -v bash >/dev/null 2>&1; then exec bash -il; else exec sh -il; fi";
    let spec = Spec {
        cmd: "/bin/sh".to_owned(),
        args: vec!["-c".to_owned(), script.to_owned()],
        cwd: args.cwd,
        ..Spec::default()
    };
    with_terminal(&guest, spec).await
}

async fn with_terminal(guest: &Guest, mut spec: Spec) -> Result<u8> {
    spec.pty = Some(terminal::size());
    spec.stdin = true;
    let term =
        std::env::var("TERM").ok().filter(|t| !t.is_empty()).unwrap_or_else(|| "xterm-256color".to_owned());
    spec.envs.entry("TERM".to_owned()).or_insert(term);
    // Before the process starts: without a terminal here nothing is left running there.
    let raw = terminal::RawMode::enter()?;
    let process = match Process::start(guest, &spec).await {
        Ok(process) => process,
        Err(error) => {
            drop(raw);
            return Err(error);
        }
    };
    let outcome = session::in_terminal(process).await;
    drop(raw);
    match outcome? {
        session::Left::Ended(code) => Ok(code),
        session::Left::ByKey => {
            output::say("left; what runs in the sandbox goes on");
            Ok(0)
        }
    }
}
