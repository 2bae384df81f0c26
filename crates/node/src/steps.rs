//! Guarded steps: effects with a deadline and an undo, and the time each took.

use crate::{control, model::Phase, records::DbError, seams::Fault};
use aenv_vmm::Exit;
use futures_util::future::BoxFuture;
use std::{
    future::Future,
    time::{Duration, Instant},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Why a step did not do its work.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum StepError {
    #[error("{step} did not finish within {limit:?}")]
    Deadline { step: &'static str, limit: Duration },
    #[error("{step}: {reason}")]
    Failed { step: &'static str, reason: String },
    /// The guest is to blame, which may be lying: no fault of this node.
    #[error("{step}: {reason}")]
    Guest { step: &'static str, reason: String },
    /// What was saved can't be restored on this host; trying again won't help.
    #[error("{0}")]
    Incompatible(String),
    #[error("the machine ended during {step}: {exit}")]
    Exited { step: &'static str, exit: Exit },
    /// Something that wins (a kill) came in between.
    #[error("it was ended meanwhile")]
    Cancelled,
    #[error("{message}")]
    Full { message: String, retry_after: Duration },
}

impl StepError {
    pub(crate) fn failed(step: &'static str, reason: impl std::fmt::Display) -> Self {
        Self::Failed { step, reason: reason.to_string() }
    }

    /// What the caller is told.
    pub(crate) fn answer(&self, id: &str) -> control::Error {
        match self {
            Self::Deadline { .. } => control::Error::Timeout(format!("sandbox {id}: {self}")),
            Self::Failed { .. } | Self::Exited { .. } => {
                control::Error::Internal(format!("sandbox {id}: {self}"))
            }
            Self::Guest { .. } => control::Error::Unavailable(format!("sandbox {id}: {self}")),
            Self::Incompatible(_) => control::Error::Conflict(format!("sandbox {id}: {self}")),
            Self::Cancelled => control::Error::SandboxEnded { id: id.to_owned(), cause: "killed".to_owned() },
            Self::Full { message, retry_after } => {
                control::Error::Full { message: message.clone(), retry_after: *retry_after }
            }
        }
    }
}

/// Names the step in errors of the seams.
pub(crate) trait Named<T> {
    fn step(self, step: &'static str) -> Result<T, StepError>;
}

impl<T> Named<T> for Result<T, Fault> {
    fn step(self, step: &'static str) -> Result<T, StepError> {
        self.map_err(|error| StepError::failed(step, error))
    }
}

impl<T> Named<T> for Result<T, DbError> {
    fn step(self, step: &'static str) -> Result<T, StepError> {
        self.map_err(|error| StepError::failed(step, error))
    }
}

impl<T> Named<T> for Result<T, aenv_network::Error> {
    fn step(self, step: &'static str) -> Result<T, StepError> {
        self.map_err(|error| match error {
            aenv_network::Error::Exhausted(_) => {
                StepError::Full { message: error.to_string(), retry_after: Duration::from_secs(5) }
            }
            error => StepError::failed(step, error),
        })
    }
}

impl<T> Named<T> for Result<T, aenv_vmm::Error> {
    fn step(self, step: &'static str) -> Result<T, StepError> {
        self.map_err(|error| match error {
            aenv_vmm::Error::Exited(exit) => StepError::Exited { step, exit },
            aenv_vmm::Error::Incompatible(_) => StepError::Incompatible(error.to_string()),
            error => StepError::failed(step, error),
        })
    }
}

impl<T> Named<T> for std::io::Result<T> {
    fn step(self, step: &'static str) -> Result<T, StepError> {
        self.map_err(|error| StepError::failed(step, error))
    }
}

impl<T> Named<T> for Result<T, aenv_snapshot::manifest::Error> {
    fn step(self, step: &'static str) -> Result<T, StepError> {
        self.map_err(|error| StepError::failed(step, error))
    }
}

/// Runs an effect in a task of its own, so that nobody who stops waiting stops it half-way. When it succeeds after the
/// deadline, `late` undoes it.
pub(crate) async fn bounded<T, W, L>(
    step: &'static str,
    limit: Duration,
    work: W,
    late: L,
) -> Result<T, StepError>
where
    T: Send + 'static,
    W: Future<Output = Result<T, StepError>> + Send + 'static,
    L: FnOnce(T) -> BoxFuture<'static, ()> + Send + 'static,
{
    let mut task = tokio::spawn(work);
    match tokio::time::timeout(limit, &mut task).await {
        Ok(Ok(result)) => result,
        Ok(Err(error)) => Err(StepError::failed(step, error)),
        Err(_) => {
            tokio::spawn(async move {
                if let Ok(Ok(value)) = task.await {
                    tracing::warn!(step, "finished after its deadline and is undone");
                    late(value).await;
                }
            });
            Err(StepError::Deadline { step, limit })
        }
    }
}

/// [`bounded`] for an effect that leaves nothing to undo.
pub(crate) async fn within<T, W>(step: &'static str, limit: Duration, work: W) -> Result<T, StepError>
where
    T: Send + 'static,
    W: Future<Output = Result<T, StepError>> + Send + 'static,
{
    bounded(step, limit, work, |_| Box::pin(async {})).await
}

/// Waits for a guest: given up at the deadline, when its machine ends, or when something that wins comes.
pub(crate) async fn guest<T>(
    step: &'static str,
    limit: Duration,
    exit: &mut watch::Receiver<Option<Exit>>,
    cancel: &CancellationToken,
    work: impl Future<Output = Result<T, Fault>>,
) -> Result<T, StepError> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(StepError::Cancelled),
        result = work => result.map_err(|fault| StepError::Guest { step, reason: fault.to_string() }),
        exit = ended(exit) => Err(StepError::Exited { step, exit }),
        () = tokio::time::sleep(limit) => Err(StepError::Deadline { step, limit }),
    }
}

/// The end of a machine.
pub(crate) async fn ended(exit: &mut watch::Receiver<Option<Exit>>) -> Exit {
    loop {
        if let Some(exit) = exit.borrow_and_update().clone() {
            return exit;
        }
        if exit.changed().await.is_err() {
            // The handle that publishes is gone without a word: nothing will ever come.
            std::future::pending::<()>().await;
        }
    }
}

/// Undos of what was done so far; run newest first unless [`Undo::done`].
#[derive(Default)]
pub(crate) struct Undo {
    steps: Vec<BoxFuture<'static, ()>>,
}

impl Undo {
    pub(crate) fn push(&mut self, step: impl Future<Output = ()> + Send + 'static) {
        self.steps.push(Box::pin(step));
    }

    pub(crate) async fn run(self) {
        for step in self.steps.into_iter().rev() {
            step.await;
        }
    }

    /// Keeps what was done.
    pub(crate) fn done(self) {}
}

/// Records how long the steps of an operation took.
pub(crate) struct Clock {
    begun: Instant,
    phases: Vec<Phase>,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { begun: Instant::now(), phases: Vec::new() }
    }

    /// Times a step. Steps that run side by side are each timed on their own.
    pub(crate) async fn time<T>(&mut self, name: &str, work: impl Future<Output = T>) -> T {
        let from = Instant::now();
        let value = work.await;
        self.add(name, from.elapsed());
        value
    }

    pub(crate) fn add(&mut self, name: &str, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.phases.push(Phase { name: name.to_owned(), micros });
    }

    /// The phases, ended by `total`, the time since the start.
    pub(crate) fn finish(mut self) -> Vec<Phase> {
        self.add("total", self.begun.elapsed());
        self.phases
    }
}

/// Times a future on its own, for steps that run side by side.
pub(crate) async fn timed<T>(work: impl Future<Output = T>) -> (T, Duration) {
    let from = Instant::now();
    let value = work.await;
    (value, from.elapsed())
}
