//! [`Control`] as the node carries it out.

use crate::{
    builds,
    catalog::Ready,
    control::{Control, Error, Result, Route, Stats},
    image_start,
    model::{
        Ack, Build, BuildId, Connected, CreateSandbox, GuestMetrics, LogEntry, LogPage, LogQuery, OnTimeout,
        Page, Principal, PullTemplate, Sandbox, SandboxId, SandboxQuery, State, Template, TemplateId,
    },
    node::{Inner, Node, View},
    records::Record,
    sandbox::{Answer, Ask, Begin, Message, Source, in_words},
};
use async_trait::async_trait;
use jiff::Timestamp;
use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};
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
        let task = self.inner.tasks.spawn(async move { create(&inner, &who, request).await });
        task.await.map_err(|error| Error::Internal(format!("starting a sandbox: {error}")))?
    }

    async fn get(&self, who: &Principal, id: &SandboxId) -> Result<Sandbox> {
        Ok(self.inner.owned(who, id)?.sandbox.clone())
    }

    async fn list(&self, who: &Principal, query: SandboxQuery) -> Result<Page<Sandbox>> {
        list(&self.inner, who, &query)
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
            Some(dir) => tokio::task::spawn_blocking(move || console_tail(&dir, MAX_CONSOLE_LINES))
                .await
                .unwrap_or_default(),
            None => Vec::new(),
        };
        logs(&self.inner, &view, console, &query)
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
        let after = token.as_deref().map(parse_token).transpose()?;
        let place = |template: &crate::records::TemplateRecord| {
            (template.created_at.as_microsecond(), template.id.to_string())
        };
        let limit = limit.clamp(1, 100);
        let mut rest =
            all.iter().filter(|template| after.as_ref().is_none_or(|after| place(template) < *after));
        let items: Vec<_> = rest.by_ref().take(limit).collect();
        let next = rest.next().and(items.last()).map(|last| token_of(&place(last)));
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

/// Labels, variables and their sizes: bounded, because every record holds them.
fn check(inner: &Inner, request: &CreateSandbox) -> Result<()> {
    let invalid = |text: String| Err(Error::Invalid(text));
    if request.ttl.is_zero() || request.ttl > inner.limits.max_ttl {
        return invalid(format!(
            "a time to live of {:?}: more than 0 and at most {:?}",
            request.ttl, inner.limits.max_ttl
        ));
    }
    let size = |map: &BTreeMap<String, String>| {
        map.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
    };
    if size(&request.metadata) > 64 << 10 {
        return invalid("metadata may be 64 KiB in all".to_owned());
    }
    if size(&request.env_vars) > 256 << 10 {
        return invalid("environment variables may be 256 KiB in all".to_owned());
    }
    if let Some(name) = request.env_vars.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
        let name: String = name.chars().take(64).collect();
        return invalid(format!("'{name}' is not the name of an environment variable"));
    }
    if request.env_vars.values().any(|value| value.contains('\0')) {
        return invalid("environment variables can't hold a NUL character".to_owned());
    }
    Ok(())
}

async fn create(inner: &Arc<Inner>, who: &Principal, request: CreateSandbox) -> Result<Sandbox> {
    check(inner, &request)?;
    let template = image_start::template_for(inner, who, &request).await?;
    let key = request.idempotency_key.clone().map(|key| (who.team.clone(), key));
    // Known before anything is taken, so that a repeated request costs nothing.
    let ready = inner.catalog.resolve(&who.team, &template, |ready, _| Arc::clone(ready))?;
    if let Some(key) = &key
        && let Some(made) = repeated(inner, key).await
    {
        return made;
    }
    let warm = if request.cold { None } else { inner.pool.take(&ready) };
    let (id, source) = match warm {
        Some(warm) => (warm.id, Source::Warm(warm.machine)),
        None => {
            let room = inner.admit(ready.memory_mib).await.map_err(|error| error.answer("(new)"))?;
            (SandboxId::random(), Source::Template { memory: ready.memory.clone(), room })
        }
    };
    // The claim and the first showing are one step to whoever collects builds.
    let claimed = inner.catalog.resolve(&who.team, &template, |current, name| {
        let same = current.build == ready.build;
        let name =
            if image_start::is_image(&request.template) { Some(request.template.clone()) } else { name };
        let record = record(who, &request, id.clone(), &ready, name, &source);
        if same {
            inner.publish(&record, None);
        }
        same.then_some(record)
    });
    let record = match claimed {
        Ok(Some(record)) => record,
        other => {
            abandon(inner, &id, source).await;
            return Err(match other {
                Err(error) => error,
                Ok(_) => Error::Unavailable(format!("template '{template}' was just built anew; try again")),
            });
        }
    };
    // The key is taken by whoever comes first.
    if let Some(key) = &key {
        let first = {
            let mut idempotent = inner.idempotent.lock();
            let taken = idempotent.contains_key(key);
            if !taken {
                idempotent.insert(key.clone(), id.clone());
            }
            !taken
        };
        if !first {
            inner.views.write().remove(&id);
            abandon(inner, &id, source).await;
            return repeated(inner, key).await.unwrap_or_else(|| {
                Err(Error::Conflict(
                    "another request with this Idempotency-Key is under way; try again".to_owned(),
                ))
            });
        }
    }
    if let Err(error) = inner.db.save(&record).await {
        inner.views.write().remove(&id);
        if let Some(key) = &key {
            inner.idempotent.lock().remove(key);
        }
        abandon(inner, &id, source).await;
        return Err(Error::Internal(error.to_string()));
    }
    let mailbox = inner.drive(record, Begin::Create(source));
    let (answered, ()) = tokio::join!(send(&mailbox, Ask::Create), count(inner, &ready));
    match answered {
        Some(Ok(Answer::Sandbox(sandbox))) => Ok(*sandbox),
        Some(Ok(other)) => Err(unexpected(&other)),
        Some(Err(error)) => Err(error),
        None => Err(Error::SandboxNotFound(id.to_string())),
    }
}

/// Gives back what was taken for a sandbox that is not to be.
async fn abandon(inner: &Arc<Inner>, id: &SandboxId, source: Source) {
    if let Source::Warm(machine) = source {
        inner.end_machine(machine).await;
        inner.remove_home(id).await;
    }
}

async fn count(inner: &Arc<Inner>, ready: &Ready) {
    if let Some(template) = inner.catalog.spawned(&ready.template)
        && let Err(error) = inner.db.touch_template(&template).await
    {
        tracing::debug!(%error, "a use of a template is not counted");
    }
}

/// What a create with this key made before.
async fn repeated(inner: &Arc<Inner>, key: &(String, String)) -> Option<Result<Sandbox>> {
    let id = inner.idempotent.lock().get(key).cloned()?;
    if let Some(mailbox) = inner.mailbox(&id)
        && let Some(answer) = send(&mailbox, Ask::Create).await
    {
        return Some(match answer {
            Ok(Answer::Sandbox(sandbox)) => Ok(*sandbox),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => Err(error),
        });
    }
    // It has ended: said so, rather than made again.
    inner.view(&id).map(|view| Err(ended(&view)))
}

fn record(
    who: &Principal,
    request: &CreateSandbox,
    id: SandboxId,
    ready: &Ready,
    alias: Option<String>,
    source: &Source,
) -> Record {
    let token = || hex::encode(rand::random::<[u8; 32]>());
    let now = Timestamp::now();
    Record {
        sandbox: Sandbox {
            id,
            team: who.team.clone(),
            template: ready.template.clone(),
            build: ready.build,
            alias,
            state: State::Creating,
            started_at: now,
            end_at: now.checked_add(request.ttl).unwrap_or(Timestamp::MAX),
            on_timeout: request.on_timeout,
            auto_resume: request.auto_resume,
            metadata: request.metadata.clone(),
            vcpus: ready.vcpus,
            memory_mib: ready.memory_mib,
            disk_mib: ready.disk_mib,
            envd_version: crate::seams::ENVD_VERSION.to_owned(),
            envd_token: request.secure.then(token),
            traffic_token: (!request.allow_public_traffic).then(token),
            allow_internet_access: request.allow_internet_access,
            phases: Vec::new(),
            tombstone: None,
        },
        ttl: request.ttl.as_secs().max(1),
        env_vars: request.env_vars.clone(),
        mask_request_host: request.mask_request_host.clone(),
        idempotency_key: request.idempotency_key.clone(),
        generation: 1,
        sequence: 0,
        guest: ready.guest.clone(),
        disk_size: ready.disk_size,
        disk: ready.disk.clone(),
        saved: None,
        machine: match source {
            Source::Warm(machine) => Some(machine.record.clone()),
            Source::Template { .. } => None,
        },
        garbage: Vec::new(),
    }
}

fn token_of((micros, id): &(i64, String)) -> String {
    format!("{micros}-{id}")
}

fn parse_token(token: &str) -> Result<(i64, String)> {
    token
        .split_once('-')
        .and_then(|(micros, id)| Some((micros.parse().ok()?, id.to_owned())))
        .ok_or_else(|| Error::Invalid("the page token is not one that a list returned".to_owned()))
}

fn list(inner: &Inner, who: &Principal, query: &SandboxQuery) -> Result<Page<Sandbox>> {
    let template = match &query.template {
        Some(reference) => match inner.catalog.find(&who.team, reference) {
            Ok((template, _)) => Some(template.id),
            // A filter that nothing can match is an empty list, not an error.
            Err(Error::TemplateNotFound(_) | Error::TemplateForbidden(_)) => {
                return Ok(Page { items: Vec::new(), next: None });
            }
            Err(error) => return Err(error),
        },
        None => None,
    };
    let after = query.token.as_deref().map(parse_token).transpose()?;
    let wanted = |sandbox: &Sandbox| {
        let states: &[State] =
            if query.states.is_empty() { &[State::Running, State::Paused] } else { query.states.as_slice() };
        sandbox.team == who.team
            && states.contains(&outward(sandbox.state))
            && template.as_ref().is_none_or(|template| sandbox.template == *template)
            && query.started_after.is_none_or(|after| sandbox.started_at >= after)
            && query.metadata.iter().all(|(key, value)| sandbox.metadata.get(key) == Some(value))
    };
    let place = |sandbox: &Sandbox| (sandbox.started_at.as_microsecond(), sandbox.id.to_string());
    let mut found: Vec<Arc<View>> =
        inner.views.read().values().filter(|view| wanted(&view.sandbox)).cloned().collect();
    found.sort_by_key(|view| place(&view.sandbox));
    if !query.ascending {
        found.reverse();
    }
    let beyond = |view: &&Arc<View>| {
        after.as_ref().is_none_or(|after| {
            let place = place(&view.sandbox);
            if query.ascending { place > *after } else { place < *after }
        })
    };
    let mut rest = found.iter().filter(beyond);
    let items: Vec<_> = rest.by_ref().take(query.limit.clamp(1, 100)).collect();
    let next = rest.next().and(items.last()).map(|last| token_of(&place(&last.sandbox)));
    let shown = |view: &Arc<View>| Sandbox { state: outward(view.sandbox.state), ..view.sandbox.clone() };
    Ok(Page { items: items.into_iter().map(shown).collect(), next })
}

/// The state a list shows: those of operations count as what they lead from or to.
fn outward(state: State) -> State {
    match state {
        State::Snapshotting | State::Forking | State::Pausing => State::Running,
        State::Resuming => State::Paused,
        state => state,
    }
}

/// Console lines shown with the log.
const MAX_CONSOLE_LINES: usize = 200;
/// Bytes of the console that are looked at.
const CONSOLE_TAIL: u64 = 64 << 10;

/// The last lines of a machine's console. Blocks.
pub(crate) fn console_tail(dir: &Path, lines: usize) -> Vec<String> {
    use std::io::{Read, Seek, SeekFrom};
    let Ok(mut file) = std::fs::File::open(dir.join("console.log")) else { return Vec::new() };
    let len = file.metadata().map(|meta| meta.len()).unwrap_or(0);
    if file.seek(SeekFrom::Start(len.saturating_sub(CONSOLE_TAIL))).is_err() {
        return Vec::new();
    }
    let mut bytes = Vec::new();
    if file.take(CONSOLE_TAIL).read_to_end(&mut bytes).is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&bytes);
    let printable = |line: &str| -> String { line.chars().filter(|c| !c.is_control()).take(500).collect() };
    let all: Vec<String> = text.lines().map(printable).filter(|line| !line.trim().is_empty()).collect();
    all[all.len().saturating_sub(lines)..].to_vec()
}

fn rank(level: &str) -> Option<usize> {
    ["debug", "info", "warn", "error"].into_iter().position(|known| known == level)
}

fn logs(inner: &Inner, view: &View, console: Vec<String>, query: &LogQuery) -> Result<LogPage> {
    let least = match &query.level {
        Some(level) => rank(level)
            .ok_or_else(|| Error::Invalid("the level must be debug, info, warn or error".to_owned()))?,
        None => 0,
    };
    // The console tells no times: its lines stand at the time the sandbox started.
    let console = console.into_iter().map(|message| LogEntry {
        at: view.sandbox.started_at,
        level: "info".to_owned(),
        message,
        fields: BTreeMap::from([("source".to_owned(), "console".to_owned())]),
    });
    let mut all: Vec<LogEntry> = console.chain(inner.journal.lines(&view.sandbox.id)).collect();
    all.sort_by_key(|entry| entry.at);
    let wanted = |entry: &LogEntry| {
        query.from.is_none_or(|from| entry.at >= from)
            && rank(&entry.level).unwrap_or(0) >= least
            && query.search.as_ref().is_none_or(|search| entry.message.contains(search.as_str()))
    };
    all.retain(wanted);
    if query.descending {
        all.reverse();
    }
    let skip: usize = match &query.cursor {
        Some(cursor) => cursor
            .parse()
            .map_err(|_| Error::Invalid("the cursor is not one that a log read returned".to_owned()))?,
        None => 0,
    };
    let limit = query.limit.clamp(1, 1000);
    let entries: Vec<_> = all.iter().skip(skip).take(limit).cloned().collect();
    let next = (skip + entries.len() < all.len()).then(|| (skip + entries.len()).to_string());
    Ok(LogPage { entries, next })
}
