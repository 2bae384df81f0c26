//! The commands, one file each.

mod auth;
mod bench;
mod bench_report;
mod copy;
mod exec;
mod follow;
mod life;
mod list;
mod pull;
mod session;
mod size;
mod start;
mod template;
mod tree;

use crate::{
    control::Control,
    error::{Error, Result},
    output::{self, Format},
    settings::{Global, Settings},
};

/// What `aenv` can do against a server. Flattened into the binary's own commands.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Store the address and key of a server, or show which are used
    #[command(subcommand)]
    Auth(auth::Command),
    /// Make a template from a container image
    Pull(pull::Args),
    /// Start a sandbox from a template
    Start(start::Args),
    /// Run a command in a sandbox; ends with its exit code
    Exec(exec::Args),
    /// Open a shell in a sandbox (leave with `exit`, or Enter ~ . when it hangs)
    Connect(exec::ConnectArgs),
    /// List sandboxes
    Ls(list::Args),
    /// Show a sandbox, with what each step of its start took
    Info(life::One),
    /// Pause a sandbox: memory and disk are kept, the machine is freed
    Pause(life::PauseArgs),
    /// Resume a paused sandbox
    Resume(life::ResumeArgs),
    /// Set how long a sandbox lives from now on
    Timeout(life::TimeoutArgs),
    /// Remove sandboxes
    Rm(life::RemoveArgs),
    /// Copy files into or out of a sandbox
    Cp(copy::Args),
    /// Show the log of a sandbox
    Logs(follow::LogArgs),
    /// Show the resource use of a sandbox
    Metrics(follow::MetricArgs),
    /// List, show and remove templates
    #[command(subcommand)]
    Template(template::Command),
    /// Measure starts, pauses and resumes over the API
    #[command(subcommand)]
    Bench(bench::Command),
    /// Print a completion script
    Completion {
        /// For this shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Print the version
    Version,
}

/// What every command is given.
pub(crate) struct Context {
    settings: Settings,
    control: Control,
}

impl Context {
    fn json(&self) -> bool {
        self.settings.format == Format::Json
    }
}

/// Runs a command; the number is the exit code.
pub(crate) async fn dispatch(command: Command, global: Global, root: fn() -> clap::Command) -> Result<u8> {
    let settings = match &command {
        Command::Completion { shell } => return completion(*shell, root),
        // A broken settings file must not stop the command that mends it.
        Command::Auth(auth::Command::Login(args)) => return auth::login(args, &global).await,
        _ => Settings::resolve(&global)?,
    };
    let context = Context { control: Control::new(&settings)?, settings };
    let context = &context;
    match command {
        Command::Auth(_) => auth::status(context).await,
        Command::Pull(args) => pull::run(context, args).await,
        Command::Start(args) => start::run(context, args).await,
        Command::Exec(args) => Box::pin(exec::run(context, args)).await,
        Command::Connect(args) => Box::pin(exec::connect(context, args)).await,
        Command::Ls(args) => list::run(context, args).await,
        Command::Info(args) => life::info(context, args).await,
        Command::Pause(args) => life::pause(context, args).await,
        Command::Resume(args) => life::resume(context, args).await,
        Command::Timeout(args) => life::timeout(context, args).await,
        Command::Rm(args) => life::remove(context, args).await,
        Command::Cp(args) => Box::pin(copy::run(context, args)).await,
        Command::Logs(args) => follow::logs(context, args).await,
        Command::Metrics(args) => follow::metrics(context, args).await,
        Command::Template(command) => template::run(context, command).await,
        Command::Bench(command) => Box::pin(bench::run(context, command)).await,
        Command::Completion { .. } => Ok(0),
        Command::Version => {
            let version = env!("CARGO_PKG_VERSION");
            if context.json() {
                output::json(&serde_json::json!({ "version": version }))?;
            } else {
                output::line(&format!("aenv {version}"))?;
            }
            Ok(0)
        }
    }
}

fn completion(shell: clap_complete::Shell, root: fn() -> clap::Command) -> Result<u8> {
    let mut root = root();
    let name = root.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut root, name, &mut script);
    output::line(String::from_utf8_lossy(&script).trim_end())?;
    Ok(0)
}

/// `KEY=VALUE` on the command line.
pub(crate) fn pair(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("'{text}' is not KEY=VALUE")),
    }
}

/// Asks before something that can't be undone. Without a terminal to ask on, `--yes` is required.
pub(crate) fn confirm(question: &str, yes: bool) -> Result<()> {
    use std::io::IsTerminal as _;
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(Error::Usage(format!("{question} Add --yes to do it without being asked.")));
    }
    output::say(&format!("{question} [y/N]"));
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Error::Failed("not confirmed, nothing was done".to_owned())),
    }
}
