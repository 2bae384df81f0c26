//! A node in memory that injects faults, and a server in front of it.

use crate::guest::Guest;
use aenv_node::{
    control::{Control, Error, Result, Route, Stats},
    model::{
        Ack, Build, BuildId, BuildStatus, Connected, CreateSandbox, EndCause, GuestMetrics, LogEntry,
        LogPage, LogQuery, OnTimeout, Page, Principal, PullTemplate, Sandbox, SandboxId, SandboxQuery, State,
        Template, TemplateId, Tombstone,
    },
};
use aenv_server::{Options, Server};
use async_trait::async_trait;
use jiff::Timestamp;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{net::TcpStream, sync::Notify, task::JoinHandle};

pub(crate) const KEY: &str = "e2b_00112233445566778899aabbccddeeff00112233";
pub(crate) const OTHER_KEY: &str = "e2b_ffffffffffffffffffffffffffffffffffffffff";
pub(crate) const DOMAIN: &str = "box.test";

pub(crate) struct Entry {
    pub(crate) sandbox: Sandbox,
    pub(crate) generation: u64,
    pub(crate) mask: Option<String>,
    pub(crate) asked: CreateSandbox,
}

/// The node.
#[derive(Default)]
pub(crate) struct Fake {
    pub(crate) sandboxes: Mutex<BTreeMap<String, Entry>>,
    /// Guest port → where it really listens, for every sandbox.
    pub(crate) ports: Mutex<HashMap<u16, SocketAddr>>,
    /// Operation → what it answers instead of doing anything, until taken away.
    pub(crate) faults: Mutex<HashMap<&'static str, Error>>,
    pub(crate) dials: AtomicUsize,
    pub(crate) wakes: AtomicUsize,
    pub(crate) authentications: AtomicUsize,
    /// When set, `wake` and `create` wait for it.
    pub(crate) gate: Mutex<Option<Arc<Notify>>>,
    pub(crate) pulls: Mutex<Vec<PullTemplate>>,
    pub(crate) calls: Mutex<Vec<String>>,
    clock: AtomicU64,
}

impl Fake {
    fn fault(&self, operation: &'static str) -> Result<()> {
        self.calls.lock().push(operation.to_owned());
        self.faults.lock().get(operation).cloned().map_or(Ok(()), Err)
    }

    pub(crate) fn fail(&self, operation: &'static str, error: Error) {
        self.faults.lock().insert(operation, error);
    }

    async fn pass_gate(&self) {
        let gate = self.gate.lock().clone();
        if let Some(gate) = gate {
            gate.notified().await;
        }
    }

    /// A running sandbox without going through the API.
    pub(crate) fn add(&self, change: impl FnOnce(&mut Entry)) -> SandboxId {
        let id = SandboxId::random();
        // Strictly increasing starts make the order of lists certain.
        let n = i64::try_from(self.clock.fetch_add(1, SeqCst)).unwrap();
        let started_at = Timestamp::from_second(1_800_000_000 + n).unwrap();
        let asked = CreateSandbox {
            template: "base".into(),
            vcpus: None,
            memory_mib: None,
            disk_mib: None,
            ttl: Duration::from_secs(300),
            on_timeout: OnTimeout::Pause,
            auto_resume: false,
            secure: true,
            allow_internet_access: true,
            cold: false,
            allow_public_traffic: true,
            mask_request_host: None,
            metadata: BTreeMap::new(),
            env_vars: BTreeMap::new(),
            idempotency_key: None,
        };
        let sandbox = Sandbox {
            id: id.clone(),
            team: "default".into(),
            template: template_id(),
            build: build_id(),
            alias: Some("base".into()),
            state: State::Running,
            started_at,
            end_at: started_at + jiff::SignedDuration::from_secs(300),
            on_timeout: OnTimeout::Pause,
            auto_resume: false,
            metadata: BTreeMap::new(),
            vcpus: 2,
            memory_mib: 512,
            disk_mib: 10_240,
            envd_version: "0.6.13".into(),
            envd_token: Some(format!("envd-{id}")),
            traffic_token: None,
            allow_internet_access: true,
            image_command: aenv_node::model::ImageCommand::default(),
            phases: vec![aenv_node::model::Phase { name: "restore".into(), micros: 42_000 }],
            tombstone: None,
        };
        let mut entry = Entry { sandbox, generation: 1, mask: None, asked };
        change(&mut entry);
        self.sandboxes.lock().insert(id.to_string(), entry);
        id
    }

    pub(crate) fn change<T>(&self, id: &SandboxId, change: impl FnOnce(&mut Entry) -> T) -> T {
        change(self.sandboxes.lock().get_mut(id.as_str()).unwrap())
    }

    fn with<T>(
        &self,
        who: &Principal,
        id: &SandboxId,
        act: impl FnOnce(&mut Entry) -> Result<T>,
    ) -> Result<T> {
        let mut sandboxes = self.sandboxes.lock();
        let entry = sandboxes
            .get_mut(id.as_str())
            .filter(|entry| entry.sandbox.team == who.team)
            .ok_or_else(|| Error::SandboxNotFound(id.to_string()))?;
        act(entry)
    }

    fn living<T>(
        &self,
        who: &Principal,
        id: &SandboxId,
        act: impl FnOnce(&mut Entry) -> Result<T>,
    ) -> Result<T> {
        self.with(who, id, |entry| match &entry.sandbox.tombstone {
            Some(tombstone) => {
                Err(Error::SandboxEnded { id: id.to_string(), cause: tombstone.detail.clone() })
            }
            None => act(entry),
        })
    }

    /// The machine goes without a word: connections to it stay open, as those to a lost VM do.
    pub(crate) fn vanish(&self, id: &SandboxId, cause: EndCause) {
        self.change(id, |entry| {
            entry.sandbox.state = State::Dead;
            entry.sandbox.tombstone = Some(Tombstone {
                cause,
                detail: format!("{cause:?}"),
                at: Timestamp::from_second(1_800_000_500).unwrap(),
                last_state: State::Running,
            });
        });
    }
}

pub(crate) fn template_id() -> TemplateId {
    "template000000000000".parse().unwrap()
}

pub(crate) fn build_id() -> BuildId {
    BuildId("01890a5d-ac96-774b-bcce-b302099a8057".parse().unwrap())
}

fn template() -> Template {
    let at = Timestamp::from_second(1_800_000_000).unwrap();
    Template {
        id: template_id(),
        team: "default".into(),
        names: vec!["base".into()],
        build: Some(build_id()),
        status: BuildStatus::Ready,
        vcpus: 2,
        memory_mib: 512,
        disk_mib: 10_240,
        created_at: at,
        updated_at: at,
        spawn_count: 7,
        last_spawned_at: Some(at),
        build_count: 1,
        envd_version: "0.6.13".into(),
        image: "docker.io/library/debian:12".into(),
    }
}

fn extend(entry: &mut Entry, ttl: Duration) {
    let wanted =
        Timestamp::from_second(1_800_000_000).unwrap() + jiff::SignedDuration::try_from(ttl).unwrap();
    entry.sandbox.end_at = entry.sandbox.end_at.max(wanted);
}

#[async_trait]
impl Control for Fake {
    async fn authenticate(&self, key: [u8; 32]) -> Result<Option<Principal>> {
        self.fault("authenticate")?;
        self.authentications.fetch_add(1, SeqCst);
        let team = |name: &str| Some(Principal { team: name.into() });
        Ok(match key {
            key if key[..] == Sha256::digest(KEY)[..] => team("default"),
            key if key[..] == Sha256::digest(OTHER_KEY)[..] => team("other"),
            _ => None,
        })
    }

    async fn create(&self, who: &Principal, request: CreateSandbox) -> Result<Sandbox> {
        self.fault("create")?;
        self.pass_gate().await;
        if request.template != "base" && request.template != template_id().as_str() {
            return Err(Error::TemplateNotFound(request.template));
        }
        if let Some(key) = &request.idempotency_key {
            let sandboxes = self.sandboxes.lock();
            let made = sandboxes.values().find(|e| e.asked.idempotency_key.as_ref() == Some(key));
            if let Some(entry) = made {
                return Ok(entry.sandbox.clone());
            }
        }
        let id = self.add(|entry| {
            let sandbox = &mut entry.sandbox;
            sandbox.team = who.team.clone();
            sandbox.metadata = request.metadata.clone();
            sandbox.on_timeout = request.on_timeout;
            sandbox.auto_resume = request.auto_resume;
            sandbox.allow_internet_access = request.allow_internet_access;
            if !request.secure {
                sandbox.envd_token = None;
            }
            if !request.allow_public_traffic {
                sandbox.traffic_token = Some("traffic-secret".into());
            }
            entry.mask = request.mask_request_host.clone();
            entry.asked = request;
        });
        Ok(self.change(&id, |entry| entry.sandbox.clone()))
    }

    async fn get(&self, who: &Principal, id: &SandboxId) -> Result<Sandbox> {
        self.fault("get")?;
        self.with(who, id, |entry| Ok(entry.sandbox.clone()))
    }

    async fn list(&self, who: &Principal, query: SandboxQuery) -> Result<Page<Sandbox>> {
        self.fault("list")?;
        let after: usize = match &query.token {
            Some(token) => token.parse().map_err(|_| Error::Invalid("nextToken: not one of ours".into()))?,
            None => 0,
        };
        let sandboxes = self.sandboxes.lock();
        let mut all: Vec<_> = sandboxes
            .values()
            .map(|entry| &entry.sandbox)
            .filter(|s| s.team == who.team && s.state != State::Dead)
            .filter(|s| query.states.is_empty() || query.states.contains(&s.state))
            .filter(|s| query.metadata.iter().all(|(k, v)| s.metadata.get(k) == Some(v)))
            .filter(|s| query.started_after.is_none_or(|after| s.started_at >= after))
            .cloned()
            .collect();
        all.sort_by_key(|s| std::cmp::Reverse(s.started_at));
        if query.ascending {
            all.reverse();
        }
        let more = all.len() > after + query.limit;
        let items = all.into_iter().skip(after).take(query.limit).collect();
        Ok(Page { items, next: more.then(|| (after + query.limit).to_string()) })
    }

    async fn kill(&self, who: &Principal, id: &SandboxId) -> Result<()> {
        self.fault("kill")?;
        self.living(who, id, |_| Ok(()))?;
        self.vanish(id, EndCause::Killed);
        Ok(())
    }

    async fn pause(&self, who: &Principal, id: &SandboxId, memory: bool) -> Result<()> {
        self.fault("pause")?;
        self.calls.lock().push(format!("pause memory={memory}"));
        self.living(who, id, |entry| match entry.sandbox.state {
            State::Paused => Err(Error::Conflict(format!("sandbox {id} is already paused"))),
            _ => {
                entry.sandbox.state = State::Paused;
                Ok(())
            }
        })
    }

    async fn connect(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<Connected> {
        self.fault("connect")?;
        self.living(who, id, |entry| {
            let resumed = entry.sandbox.state == State::Paused;
            if resumed {
                entry.sandbox.state = State::Running;
                entry.generation += 1;
            }
            extend(entry, ttl);
            Ok(Connected { sandbox: entry.sandbox.clone(), resumed })
        })
    }

    async fn resume(
        &self,
        who: &Principal,
        id: &SandboxId,
        ttl: Duration,
        on_timeout: Option<OnTimeout>,
    ) -> Result<Sandbox> {
        self.fault("resume")?;
        self.living(who, id, |entry| {
            if entry.sandbox.state != State::Paused {
                return Err(Error::Conflict(format!("sandbox {id} is running")));
            }
            entry.sandbox.state = State::Running;
            entry.generation += 1;
            entry.sandbox.on_timeout = on_timeout.unwrap_or(entry.sandbox.on_timeout);
            extend(entry, ttl);
            Ok(entry.sandbox.clone())
        })
    }

    async fn set_timeout(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<()> {
        self.fault("set_timeout")?;
        self.calls.lock().push(format!("set_timeout {}", ttl.as_secs()));
        self.living(who, id, |_| Ok(()))
    }

    async fn refresh(&self, who: &Principal, id: &SandboxId, ttl: Duration) -> Result<()> {
        self.fault("refresh")?;
        self.calls.lock().push(format!("refresh {}", ttl.as_secs()));
        self.living(who, id, |_| Ok(()))
    }

    async fn metrics(
        &self,
        who: &Principal,
        id: &SandboxId,
        _: Option<Timestamp>,
        _: Option<Timestamp>,
    ) -> Result<Vec<GuestMetrics>> {
        self.fault("metrics")?;
        self.living(who, id, |entry| {
            Ok(vec![GuestMetrics {
                at: entry.sandbox.started_at,
                cpu_count: 2,
                cpu_used_pct: 12.5,
                mem_used: 1 << 28,
                mem_total: 1 << 29,
                mem_cache: 1 << 20,
                disk_used: 1 << 30,
                disk_total: 1 << 33,
            }])
        })
    }

    async fn logs(&self, who: &Principal, id: &SandboxId, query: LogQuery) -> Result<LogPage> {
        self.fault("logs")?;
        self.with(who, id, |entry| {
            let mut entries: Vec<_> = (0..20)
                .map(|n| LogEntry {
                    at: entry.sandbox.started_at + jiff::SignedDuration::from_secs(n),
                    level: if n % 2 == 0 { "info" } else { "notice" }.into(),
                    message: format!("line {n}"),
                    fields: BTreeMap::new(),
                })
                .filter(|line| query.from.is_none_or(|from| line.at >= from))
                .filter(|line| query.search.as_ref().is_none_or(|text| line.message.contains(text)))
                .collect();
            if query.descending {
                entries.reverse();
            }
            entries.truncate(query.limit);
            Ok(LogPage { entries, next: None })
        })
    }

    fn route(&self, id: &SandboxId) -> Result<Route> {
        if let Some(error) = self.faults.lock().get("route") {
            return Err(error.clone());
        }
        let sandboxes = self.sandboxes.lock();
        let entry = sandboxes.get(id.as_str()).ok_or_else(|| Error::SandboxNotFound(id.to_string()))?;
        if let Some(tombstone) = &entry.sandbox.tombstone {
            return Err(Error::SandboxEnded { id: id.to_string(), cause: tombstone.detail.clone() });
        }
        Ok(Route {
            id: id.clone(),
            generation: entry.generation,
            running: entry.sandbox.state == State::Running,
            auto_resume: entry.sandbox.auto_resume,
            envd_token: entry.sandbox.envd_token.clone(),
            traffic_token: entry.sandbox.traffic_token.clone(),
            mask_request_host: entry.mask.clone(),
            slot: None,
        })
    }

    async fn wake(&self, id: &SandboxId) -> Result<Route> {
        self.wakes.fetch_add(1, SeqCst);
        self.fault("wake")?;
        self.pass_gate().await;
        self.change(id, |entry| {
            entry.sandbox.state = State::Running;
            entry.generation += 1;
        });
        self.route(id)
    }

    async fn dial(&self, route: &Route, port: u16) -> std::io::Result<TcpStream> {
        self.dials.fetch_add(1, SeqCst);
        let now = self.route(&route.id).map_err(|_| std::io::ErrorKind::NotConnected)?;
        if now.generation != route.generation {
            return Err(std::io::ErrorKind::HostUnreachable.into());
        }
        if self.faults.lock().contains_key("dial") {
            std::future::pending::<()>().await;
        }
        let address = self.ports.lock().get(&port).copied();
        match address {
            Some(address) => TcpStream::connect(address).await,
            None => Err(std::io::ErrorKind::ConnectionRefused.into()),
        }
    }

    fn envd_tokens(&self) -> Vec<(SandboxId, String)> {
        let sandboxes = self.sandboxes.lock();
        let live = sandboxes.values().filter(|entry| entry.sandbox.state == State::Running);
        live.filter_map(|e| Some((e.sandbox.id.clone(), e.sandbox.envd_token.clone()?))).collect()
    }

    async fn pull(&self, _: &Principal, request: PullTemplate) -> Result<Build> {
        self.fault("pull")?;
        self.pulls.lock().push(request);
        self.build(&Principal { team: "default".into() }, &template_id(), &build_id(), 0, 100).await
    }

    async fn build(
        &self,
        _: &Principal,
        template: &TemplateId,
        build: &BuildId,
        offset: usize,
        limit: usize,
    ) -> Result<Build> {
        self.fault("build")?;
        if *template != template_id() || *build != build_id() {
            return Err(Error::BuildNotFound(build.to_string()));
        }
        let at = Timestamp::from_second(1_800_000_000).unwrap();
        let log = (0..5).map(|n| LogEntry {
            at: at + jiff::SignedDuration::from_secs(n),
            level: if n == 4 { "error" } else { "info" }.into(),
            message: format!("step {n}"),
            fields: BTreeMap::from([("step".to_owned(), "base".to_owned())]),
        });
        Ok(Build {
            template: template.clone(),
            id: *build,
            status: BuildStatus::Building,
            log: log.skip(offset).take(limit).collect(),
            reason: None,
            created_at: at,
            finished_at: None,
        })
    }

    async fn templates(&self, who: &Principal, _: usize, _: Option<String>) -> Result<Page<Template>> {
        self.fault("templates")?;
        let items = if who.team == "default" { vec![template()] } else { vec![] };
        Ok(Page { items, next: None })
    }

    async fn template(&self, who: &Principal, reference: &str) -> Result<Template> {
        self.fault("template")?;
        let known = ["base", "ns/base:v1", template_id().as_str()].contains(&reference);
        match known {
            true if who.team == "default" => Ok(template()),
            true => Err(Error::TemplateForbidden(reference.into())),
            false => Err(Error::TemplateNotFound(reference.into())),
        }
    }

    async fn delete_template(&self, who: &Principal, reference: &str) -> Result<()> {
        self.fault("delete_template")?;
        self.calls.lock().push(format!("delete_template {reference}"));
        self.template(who, reference).await.map(|_| ())
    }

    fn stats(&self) -> Stats {
        let running = self.sandboxes.lock().values().filter(|e| e.sandbox.state == State::Running).count();
        Stats {
            sandboxes: vec![("running", running as u64), ("paused", 0)],
            ended: vec![("killed".into(), 1)],
            warm: vec![("base".into(), 2)],
            phases: Vec::new(),
            memory_promised_mib: 1024,
            memory_limit_mib: 8192,
        }
    }

    async fn health(&self) -> Result<Ack> {
        self.fault("health")?;
        Ok(Ack)
    }
}

/// A server with its node and a guest on ports 49983 and 3000.
pub(crate) struct World {
    pub(crate) node: Arc<Fake>,
    pub(crate) guest: Guest,
    pub(crate) address: SocketAddr,
    pub(crate) stop: Arc<Notify>,
    pub(crate) running: JoinHandle<()>,
}

pub(crate) async fn world() -> World {
    world_with(|_| ()).await
}

pub(crate) async fn world_with(change: impl FnOnce(&mut Options)) -> World {
    let node = Arc::new(Fake::default());
    let guest = Guest::start().await;
    node.ports.lock().extend([(49983, guest.address), (3000, guest.address)]);
    let mut options = Options {
        listen: "127.0.0.1:0".parse().unwrap(),
        domain: Some(DOMAIN.into()),
        drain: Duration::from_secs(2),
        ..Options::default()
    };
    change(&mut options);
    let server = Server::bind(options, node.clone()).await.unwrap();
    let address = server.local_addr();
    let stop = Arc::new(Notify::new());
    let stopped = stop.clone();
    let running = tokio::spawn(server.run(async move { stopped.notified().await }));
    World { node, guest, address, stop, running }
}
