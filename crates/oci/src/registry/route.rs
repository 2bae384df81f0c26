//! One question to whoever can answer it: mirrors in order, then the registry, and again after a pause.

use super::{Error, endpoint::Endpoint, retry, transport::Transport};
use std::{future::Future, sync::Arc, time::Duration};
use tokio::time::{Instant, timeout_at};

/// A question that may be put several times. What an attempt got before it failed, the question may keep.
pub(crate) trait Ask: Sync {
    type Answer: Send;

    /// For messages.
    fn what(&self) -> String;

    fn repository(&self) -> &str;

    fn put(
        &self,
        transport: &Transport,
        endpoint: &Endpoint,
        index: usize,
    ) -> impl Future<Output = Result<Self::Answer, Error>> + Send;
}

/// How long and how often.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) deadline: Duration,
    pub(crate) attempts: u32,
    /// Endpoints that the first round leaves out, because they are known not to have it.
    pub(crate) skip: usize,
}

/// Asks until there is an answer. Returns it with the index of the endpoint that gave it.
///
/// The registry's own failure is the one reported: a mirror is a convenience, what it says is logged.
pub(crate) async fn route<A: Ask>(
    transport: &Transport,
    endpoints: &[Arc<Endpoint>],
    plan: Plan,
    ask: &A,
) -> Result<(usize, A::Answer), Error> {
    let deadline = Instant::now() + plan.deadline;
    let Some(last) = endpoints.len().checked_sub(1) else {
        return Err(Error::Setup("there is no registry to ask".to_owned()));
    };
    let mut known: Option<Error> = None;
    let late = |known: Option<Error>| {
        known.unwrap_or_else(|| Error::TimedOut {
            place: endpoints[last].place(ask.repository()),
            what: ask.what(),
            after: plan.deadline,
        })
    };
    for round in 0..plan.attempts.max(1) {
        let skip = if round == 0 { plan.skip.min(last) } else { 0 };
        for (index, endpoint) in endpoints.iter().enumerate().skip(skip) {
            if index < last && endpoint.is_resting() {
                continue;
            }
            let error = match timeout_at(deadline, ask.put(transport, endpoint, index)).await {
                Ok(Ok(answer)) => return Ok((index, answer)),
                Ok(Err(error)) => error,
                Err(_) => return Err(late(known)),
            };
            if index < last {
                if error.blames_host() {
                    endpoint.rest();
                }
                tracing::debug!(%error, "a mirror did not answer; asking the next");
            } else {
                known = Some(error);
            }
        }
        let Some(error) = known.as_ref().filter(|error| error.is_passing()) else { break };
        let pause = retry::pause(round).max(error.retry_after().unwrap_or_default());
        if round + 1 >= plan.attempts || Instant::now() + pause >= deadline {
            break;
        }
        tracing::debug!(%error, ?pause, "asking a registry again");
        tokio::time::sleep(pause).await;
    }
    Err(late(known))
}
