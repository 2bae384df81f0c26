//! [`Control`] as the node carries it out.

mod create;
mod listing;
mod logs;

pub(crate) use logs::console_tail;

use crate::{
    builds,
    control::{Control, Error, Result, Route, Stats},
    model::{
        Ack, Build, BuildId, Connected, CreateSandbox, GuestMetrics, LogPage, LogQuery, OnTimeout, Page,
        Principal, PullTemplate, Sandbox, SandboxId, SandboxQuery, State, Template, TemplateId,
    },
    node::{Node, View},
    sandbox::{Answer, Ask, Message, in_words},
};
use async_trait::async_trait;
use jiff::Timestamp;
use std::{sync::Arc, time::Duration};
use tokio::{net::TcpStream, sync::oneshot};

/// Shortest life after waking by traffic.
const MIN_WAKE_TTL: Duration = Duration::from_secs(300);
/// Names of states in metrics.
const STATES: [(&str, State); 8] = [
    ("creating", State::Creating),
    ("running", State::Running),
    ("pausing", State::Pausing),
    ("paused", State::Paused),
    ("resuming", State::Resuming),
    ("snapshotting", State::Snapshotting),
    ("forking", State::Forking),
    ("killing", State::Killing),
];

#[async_trait]
impl Control for Node {
    async fn authenticate(&self, key_sha256: [u8; 32]) -> Result<Option<Principal>> {
        Ok(self.inner.keys.read().get(&key_sha256).map(|team| Principal { team: team.clone() }))
    }

    async fn create(&self, who: &Principal, request: CreateSandbox) -> Result<Sandbox> {
        let (inner, who) = (Arc::clone(&self.inner), who.clone());
        // In a task of its own: a caller that goes away must not stop it between two steps.
        let task = self.inner.tasks.spawn(async move { create::create(&inner, &who, request).await });
        task.await.map_err(|error| Error::Internal(format!("starting a sandbox: {error}")))?
    }

    async fn get(&self, who: &Principal, id: &SandboxId) -> Result<Sandbox> {
        Ok(self.inner.owned(who, id)?.sandbox.clone())
    }

    async fn list(&self, who: &Principal, query: SandboxQuery) -> Result<Page<Sandbox>> {
        listing::list(&self.inner, who, &query)
    }

    async fn kill(&self, who: &Principal, id: &SandboxId) -> Result<()> {
        self.inner.owned(who, id)?;
        self.ask(id, Ask::Kill).await.map(drop)
    }

    async fn pause(&self, who: &Principal, id: &SandboxId, memory: bool) -> Result<()> {
        self.inner.owned(who, id)?;
        self.ask(id, Ask::Pause { memory }).await.map(drop)
    }

    async fn connect(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<Connected> {
        self.inner.owned(who, id)?;
        self.positive(ttl)?;
        match self.ask(id, Ask::Connect { ttl }).await? {
            Answer::Connected(connected) => Ok(*connected),
            other => Err(unexpected(&other)),
        }
    }

    async fn resume(
        &self,
        who: &Principal,
        id: &SandboxId,
        ttl: Duration,
        on_timeout: Option<OnTimeout>,
    ) -> Result<Sandbox> {
        self.inner.owned(who, id)?;
        self.positive(ttl)?;
        match self.ask(id, Ask::Resume { ttl, on_timeout }).await? {
            Answer::Sandbox(sandbox) => Ok(*sandbox),
            other => Err(unexpected(&other)),
        }
    }

    async fn set_timeout(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<()> {
        self.inner.owned(who, id)?;
        self.bounded(ttl)?;
        self.ask(id, Ask::SetTimeout { ttl }).await.map(drop)
    }

    async fn refresh(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<()> {
        self.inner.owned(who, id)?;
        self.bounded(ttl)?;
        self.ask(id, Ask::Refresh { ttl }).await.map(drop)
    }

    async fn metrics(
        &self,
        who: &Principal,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<GuestMetrics>> {
        self.inner.owned(who, id)?;
        Ok(self.inner.journal.samples(id, from, to))
    }

    async fn logs(&self, who: &Principal, id: &SandboxId, query: LogQuery) -> Result<LogPage> {
        let view = self.inner.owned(who, id)?;
        let console = match view.machine_dir.clone() {
            Some(dir) => tokio::task::spawn_blocking(move || console_tail(&dir, logs::MAX_CONSOLE_LINES))
                .await
                .unwrap_or_default(),
            None => Vec::new(),
        };
        logs::logs(&self.inner, &view, console, &query)
    }

    fn route(&self, id: &SandboxId) -> Result<Route> {
        let view = self.inner.view(id).ok_or_else(|| Error::SandboxNotFound(id.to_string()))?;
        match view.sandbox.state {
            State::Killing | State::Dead => Err(ended(&view)),
            _ => Ok(view.route.clone()),
        }
    }

    async fn wake(&self, id: &SandboxId) -> Result<Route> {
        let view = self.inner.view(id).ok_or_else(|| Error::SandboxNotFound(id.to_string()))?;
        match view.sandbox.state {
            State::Running | State::Snapshotting | State::Forking => return Ok(view.route.clone()),
            State::Killing | State::Dead => return Err(ended(&view)),
            State::Creating => {}
            State::Pausing | State::Paused | State::Resuming if view.route.auto_resume => {}
            State::Pausing | State::Paused | State::Resuming => {
                return Err(Error::Unavailable(format!(
                    "sandbox {id} is paused and was not made to resume by itself; connect to it first"
                )));
            }
        }
        match self.ask(id, Ask::Wake { ttl: view.ttl.max(MIN_WAKE_TTL) }).await? {
            Answer::Route(route) => Ok(*route),
            other => Err(unexpected(&other)),
        }
    }

    async fn dial(&self, route: &Route, port: u16) -> std::io::Result<TcpStream> {
        let current = self.inner.route_of(&route.id);
        let live = current.filter(|current| current.running && current.generation == route.generation);
        match live.and_then(|route| route.slot) {
            Some(slot) => self.inner.parts.network.connect(&slot, port).await,
            None => Err(std::io::Error::new(std::io::ErrorKind::NotConnected, "the sandbox is not running")),
        }
    }

    fn envd_tokens(&self) -> Vec<(SandboxId, String)> {
        let views = self.inner.views.read();
        views
            .values()
            .filter(|view| view.sandbox.tombstone.is_none())
            .filter_map(|view| Some((view.sandbox.id.clone(), view.sandbox.envd_token.clone()?)))
            .collect()
    }

    async fn pull(&self, who: &Principal, request: PullTemplate) -> Result<Build> {
        let (inner, who) = (Arc::clone(&self.inner), who.clone());
        let task = self.inner.tasks.spawn(async move { builds::pull(&inner, &who, request).await });
        task.await.map_err(|error| Error::Internal(format!("beginning a build: {error}")))?
    }

    async fn build(
        &self,
        who: &Principal,
        template: &TemplateId,
        build: &BuildId,
        offset: usize,
        limit: usize,
    ) -> Result<Build> {
        let (found, _) = self.inner.catalog.find(&who.team, template.as_str())?;
        let record = self.inner.catalog.build(build).filter(|record| record.template == found.id);
        let record = record.ok_or_else(|| Error::BuildNotFound(build.to_string()))?;
        Ok(builds::view(&record, offset, limit.min(1000)))
    }

    async fn templates(
        &self,
        who: &Principal,
        limit: usize,
        token: Option<String>,
    ) -> Result<Page<Template>> {
        let all = self.inner.catalog.templates(&who.team);
        let after = token.as_deref().map(listing::parse_token).transpose()?;
        let place = |template: &crate::records::TemplateRecord| {
            (template.created_at.as_microsecond(), template.id.to_string())
        };
        let limit = limit.clamp(1, 100);
        let mut rest =
            all.iter().filter(|template| after.as_ref().is_none_or(|after| place(template) < *after));
        let items: Vec<_> = rest.by_ref().take(limit).collect();
        let next = rest.next().and(items.last()).map(|last| listing::token_of(&place(last)));
        Ok(Page {
            items: items.into_iter().map(|template| self.inner.catalog.view(template)).collect(),
            next,
        })
    }

    async fn template(&self, who: &Principal, reference: &str) -> Result<Template> {
        let (template, _) = self.inner.catalog.find(&who.team, reference)?;
        Ok(self.inner.catalog.view(&template))
    }

    async fn delete_template(&self, who: &Principal, reference: &str) -> Result<()> {
        let (template, _) = self.inner.catalog.find(&who.team, reference)?;
        builds::remove(&self.inner, &template.id).await
    }

    fn stats(&self) -> Stats {
        let counts = {
            let views = self.inner.views.read();
            STATES.map(|(name, state)| {
                let count = views.values().filter(|view| view.sandbox.state == state).count();
                (name, u64::try_from(count).unwrap_or(u64::MAX))
            })
        };
        let (ended, phases) = self.inner.journal.counts();
        let warm = self.inner.pool.counts();
        let (memory_promised_mib, memory_limit_mib) = self.inner.admission.promised();
        Stats {
            sandboxes: counts.to_vec(),
            ended,
            warm: warm.into_iter().map(|(build, count)| (self.inner.catalog.label(&build), count)).collect(),
            phases,
            memory_promised_mib,
            memory_limit_mib,
        }
    }

    async fn health(&self) -> Result<Ack> {
        let inner = &self.inner;
        let unavailable = |error: &dyn std::fmt::Display| Error::Unavailable(error.to_string());
        if inner.stop.is_cancelled() {
            return Err(Error::Unavailable("the server is stopping".to_owned()));
        }
        inner.db.ping().await.map_err(|error| unavailable(&error))?;
        match tokio::time::timeout(Duration::from_secs(5), inner.parts.storage.list()).await {
            Ok(Ok(_)) => Ok(Ack),
            Ok(Err(error)) => Err(unavailable(&error)),
            Err(_) => Err(Error::Unavailable("storage does not answer within 5 s".to_owned())),
        }
    }
}

impl Node {
    /// Sends a request to a sandbox's driver and waits for the answer.
    async fn ask(&self, id: &SandboxId, ask: Ask) -> Result<Answer> {
        let gone = || match self.inner.view(id) {
            Some(view) => ended(&view),
            None => Error::SandboxNotFound(id.to_string()),
        };
        let mailbox = self.inner.mailbox(id).ok_or_else(gone)?;
        send(&mailbox, ask).await.unwrap_or_else(|| Err(gone()))
    }

    fn bounded(&self, ttl: Duration) -> Result<()> {
        let most = self.inner.limits.max_ttl;
        if ttl > most {
            return Err(Error::Invalid(format!(
                "a time to live of {ttl:?} is longer than {most:?}, the most there is"
            )));
        }
        Ok(())
    }

    fn positive(&self, ttl: Duration) -> Result<()> {
        if ttl.is_zero() {
            return Err(Error::Invalid("the time to live must be more than zero seconds".to_owned()));
        }
        self.bounded(ttl)
    }
}

/// `None` when the driver has ended.
async fn send(mailbox: &tokio::sync::mpsc::Sender<Message>, ask: Ask) -> Option<Result<Answer>> {
    let (reply, answer) = oneshot::channel();
    mailbox.send(Message::Ask(ask, reply)).await.ok()?;
    answer.await.ok()
}

fn ended(view: &View) -> Error {
    let cause = view.sandbox.tombstone.as_ref().map_or_else(|| "it is being ended".to_owned(), in_words);
    Error::SandboxEnded { id: view.sandbox.id.to_string(), cause }
}

fn unexpected(answer: &Answer) -> Error {
    Error::Internal(format!("a driver gave an answer of the wrong kind: {answer:?}"))
}
