//! Templates and builds in memory, written through to the records.
//!
//! A build that is ready is immutable. A template points to its newest ready build; older ones go once no sandbox uses
//! them. A name belongs to one template of a team.

use crate::{
    control,
    model::{BuildId, BuildStatus, LogEntry, Template, TemplateId},
    records::{BuildRecord, SavedMemory, TemplateRecord},
    seams::{Layer, LayerKind},
};
use aenv_snapshot::manifest::{Guest, LayerRef, Manifest};
use jiff::Timestamp;
use parking_lot::RwLock;
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::Arc,
};

/// Log lines kept of a build.
const MAX_LOG: usize = 2000;

/// A build that sandboxes can be started from.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) template: TemplateId,
    pub(crate) build: BuildId,
    pub(crate) vcpus: u8,
    pub(crate) memory_mib: u32,
    pub(crate) disk_mib: u32,
    pub(crate) disk_size: u64,
    pub(crate) disk: Vec<Layer>,
    pub(crate) memory: SavedMemory,
    pub(crate) guest: Guest,
}

impl Ready {
    /// What a manifest of a build says. `None` when it has no memory, which no build lacks.
    pub(crate) fn new(build: &BuildRecord, manifest: &Manifest) -> Option<Self> {
        Some(Self {
            template: build.template.clone(),
            build: build.id,
            vcpus: manifest.vcpus,
            memory_mib: manifest.memory_mib,
            disk_mib: u32::try_from(manifest.disk_size >> 20).unwrap_or(u32::MAX),
            disk_size: manifest.disk_size,
            disk: layers(&manifest.disk),
            memory: saved_memory(manifest)?,
            guest: manifest.guest.clone(),
        })
    }
}

/// The memory half of a manifest.
pub(crate) fn saved_memory(manifest: &Manifest) -> Option<SavedMemory> {
    manifest.memory.as_ref().map(|memory| SavedMemory {
        made_by: memory.made_by.clone(),
        state: memory.state.path.clone(),
        layers: layers(&memory.layers),
    })
}

/// Layers of a manifest.
pub(crate) fn layers(refs: &[LayerRef]) -> Vec<Layer> {
    refs.iter()
        .map(|layer| Layer {
            kind: if layer.kind == "raw" { LayerKind::Raw } else { LayerKind::Lsmt },
            path: layer.file.path.clone(),
        })
        .collect()
}

/// Directory of a build, relative.
pub(crate) fn build_home(template: &TemplateId, build: &BuildId) -> PathBuf {
    PathBuf::from("templates").join(template.as_str()).join(build.to_string())
}

#[derive(Default)]
pub(crate) struct Catalog {
    state: RwLock<Held>,
}

#[derive(Default)]
struct Held {
    templates: BTreeMap<TemplateId, TemplateRecord>,
    builds: HashMap<BuildId, BuildRecord>,
    ready: HashMap<BuildId, Arc<Ready>>,
}

impl Catalog {
    pub(crate) fn put_template(&self, record: TemplateRecord) {
        self.state.write().templates.insert(record.id.clone(), record);
    }

    pub(crate) fn put_build(&self, record: BuildRecord) {
        self.state.write().builds.insert(record.id, record);
    }

    pub(crate) fn put_ready(&self, ready: Arc<Ready>) {
        self.state.write().ready.insert(ready.build, ready);
    }

    /// Changes a build in place; `None` when it is gone.
    pub(crate) fn change_build(
        &self,
        id: &BuildId,
        change: impl FnOnce(&mut BuildRecord),
    ) -> Option<BuildRecord> {
        let mut held = self.state.write();
        let record = held.builds.get_mut(id)?;
        change(record);
        Some(record.clone())
    }

    /// Changes a template in place; `None` when it is gone.
    pub(crate) fn change_template(
        &self,
        id: &TemplateId,
        change: impl FnOnce(&mut TemplateRecord),
    ) -> Option<TemplateRecord> {
        let mut held = self.state.write();
        let record = held.templates.get_mut(id)?;
        change(record);
        record.updated_at = Timestamp::now();
        Some(record.clone())
    }

    /// Adds a line to a build's log.
    pub(crate) fn log(&self, id: &BuildId, level: &str, message: &str, step: &str) {
        let entry = LogEntry {
            at: Timestamp::now(),
            level: level.to_owned(),
            message: message.chars().take(2000).collect(),
            fields: BTreeMap::from([("step".to_owned(), step.to_owned())]),
        };
        let full = |record: &mut BuildRecord| {
            if record.log.len() < MAX_LOG {
                record.log.push(entry);
            }
        };
        let _ = self.change_build(id, full);
    }

    pub(crate) fn build(&self, id: &BuildId) -> Option<BuildRecord> {
        self.state.read().builds.get(id).cloned()
    }

    pub(crate) fn ready(&self, id: &BuildId) -> Option<Arc<Ready>> {
        self.state.read().ready.get(id).cloned()
    }

    /// Whether new sandboxes are made from this build.
    pub(crate) fn is_current(&self, ready: &Ready) -> bool {
        let held = self.state.read();
        held.templates
            .get(&ready.template)
            .is_some_and(|template| !template.deleted && template.current == Some(ready.build))
    }

    /// The template a reference of this team means, and the name it was asked for by.
    pub(crate) fn find(
        &self,
        team: &str,
        reference: &str,
    ) -> control::Result<(TemplateRecord, Option<String>)> {
        let held = self.state.read();
        held.find(team, reference).map(|(template, name, _)| (template.clone(), name))
    }

    /// The build that a reference means for a new sandbox. `claim` runs while nothing can be collected.
    pub(crate) fn resolve<T>(
        &self,
        team: &str,
        reference: &str,
        claim: impl FnOnce(&Arc<Ready>, Option<String>) -> T,
    ) -> control::Result<T> {
        let held = self.state.read();
        let (template, name, build) = held.find(team, reference)?;
        let ready = build.or(template.current).and_then(|build| held.ready.get(&build));
        let ready = ready.ok_or_else(|| control::Error::TemplateNotFound(shown(reference)))?;
        Ok(claim(ready, name))
    }

    /// Current builds of templates that a sandbox was started from not longer ago than this.
    pub(crate) fn used_within(&self, recent: std::time::Duration) -> Vec<Arc<Ready>> {
        let held = self.state.read();
        let since = Timestamp::now().checked_sub(recent).unwrap_or(Timestamp::MIN);
        let used = held.templates.values().filter(|template| {
            !template.deleted && template.last_spawned_at.is_some_and(|spawned| spawned >= since)
        });
        used.filter_map(|template| held.ready.get(&template.current?).cloned()).collect()
    }

    /// The build that new sandboxes of a template are made from.
    pub(crate) fn current(&self, id: &TemplateId) -> Option<BuildId> {
        self.state.read().templates.get(id).and_then(|template| template.current)
    }

    /// The template a name of this team belongs to.
    pub(crate) fn named(&self, team: &str, name: &str) -> Option<TemplateRecord> {
        let held = self.state.read();
        held.templates
            .values()
            .find(|template| {
                template.team == team && !template.deleted && template.names.iter().any(|n| n == name)
            })
            .cloned()
    }

    /// Builds of a template, newest first.
    pub(crate) fn builds_of(&self, id: &TemplateId) -> Vec<BuildRecord> {
        let held = self.state.read();
        let mut builds: Vec<_> =
            held.builds.values().filter(|build| build.template == *id).cloned().collect();
        builds.sort_by_key(|build| std::cmp::Reverse(build.id));
        builds
    }

    /// All templates of a team that are not deleted, newest first.
    pub(crate) fn templates(&self, team: &str) -> Vec<TemplateRecord> {
        let held = self.state.read();
        let mut found: Vec<_> = held
            .templates
            .values()
            .filter(|template| template.team == team && !template.deleted)
            .cloned()
            .collect();
        found.sort_by(|a, b| (b.created_at, &b.id).cmp(&(a.created_at, &a.id)));
        found
    }

    /// Ids of all templates, deleted ones included.
    pub(crate) fn ids(&self) -> Vec<TemplateId> {
        self.state.read().templates.keys().cloned().collect()
    }

    /// Whether any build is under way.
    pub(crate) fn building(&self) -> bool {
        let held = self.state.read();
        held.builds.values().any(|build| matches!(build.status, BuildStatus::Waiting | BuildStatus::Building))
    }

    /// Disk layers of all ready builds.
    pub(crate) fn layers_in_use(&self) -> Vec<PathBuf> {
        let held = self.state.read();
        held.ready.values().flat_map(|ready| ready.disk.iter().map(|layer| layer.path.clone())).collect()
    }

    /// Takes out every build of a template that is over (failed, or ready but not current) and that `in_use` doesn't
    /// name, and the template itself when it is deleted and none is left.
    pub(crate) fn collect(
        &self,
        id: &TemplateId,
        in_use: impl Fn(&BuildId) -> bool,
    ) -> (Vec<BuildRecord>, Option<TemplateRecord>) {
        let mut held = self.state.write();
        let Some(template) = held.templates.get(id).cloned() else { return (Vec::new(), None) };
        // The newest build stays readable, whatever became of it, as long as the template does.
        let newest = held.builds.values().filter(|build| build.template == *id).map(|build| build.id).max();
        let over = |build: &BuildRecord| {
            let kept = !template.deleted && (template.current == Some(build.id) || newest == Some(build.id));
            let ended = matches!(build.status, BuildStatus::Ready | BuildStatus::Error);
            build.template == *id && ended && !kept && !in_use(&build.id)
        };
        let gone: Vec<_> = held.builds.values().filter(|build| over(build)).cloned().collect();
        for build in &gone {
            held.builds.remove(&build.id);
            held.ready.remove(&build.id);
        }
        let empty = !held.builds.values().any(|build| build.template == *id);
        let template = (template.deleted && empty).then(|| held.templates.remove(id)).flatten();
        (gone, template)
    }

    /// A template as the outside sees it.
    pub(crate) fn view(&self, record: &TemplateRecord) -> Template {
        let builds = self.builds_of(&record.id);
        let newest = builds.first();
        let shown = record.current.and_then(|id| builds.iter().find(|build| build.id == id)).or(newest);
        Template {
            id: record.id.clone(),
            team: record.team.clone(),
            names: record.names.clone(),
            build: record.current,
            status: newest.map_or(BuildStatus::Error, |build| build.status),
            vcpus: shown.map_or(0, |build| build.vcpus),
            memory_mib: shown.map_or(0, |build| build.memory_mib),
            disk_mib: shown.map_or(0, |build| build.disk_mib),
            created_at: record.created_at,
            updated_at: record.updated_at,
            spawn_count: record.spawn_count,
            last_spawned_at: record.last_spawned_at,
            build_count: record.build_count,
            envd_version: crate::seams::ENVD_VERSION.to_owned(),
            image: shown.map(|build| build.image.clone()).unwrap_or_default(),
        }
    }

    /// The newest name of a build's template, or its id: for metrics.
    pub(crate) fn label(&self, build: &BuildId) -> String {
        let held = self.state.read();
        let template = held.ready.get(build).and_then(|ready| held.templates.get(&ready.template));
        template.map_or_else(
            || build.to_string(),
            |template| template.names.first().cloned().unwrap_or_else(|| template.id.to_string()),
        )
    }

    /// Sandboxes started from it, for the list.
    pub(crate) fn spawned(&self, id: &TemplateId) -> Option<TemplateRecord> {
        let mut held = self.state.write();
        let record = held.templates.get_mut(id)?;
        record.spawn_count += 1;
        record.last_spawned_at = Some(Timestamp::now());
        Some(record.clone())
    }
}

impl Held {
    /// By id, `name`, `name:tag` or `ns/name`; a tag is `default`, `latest` or a build's id.
    #[allow(clippy::type_complexity)]
    fn find(
        &self,
        team: &str,
        reference: &str,
    ) -> control::Result<(&TemplateRecord, Option<String>, Option<BuildId>)> {
        let missing = || control::Error::TemplateNotFound(shown(reference));
        let (space, rest) = match reference.rsplit_once('/') {
            Some((space, rest)) => (Some(space), rest),
            None => (None, reference),
        };
        let (name, tag) = match rest.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (rest, None),
        };
        let by_id = (if space.is_none() { name } else { "" })
            .parse::<TemplateId>()
            .ok()
            .and_then(|id| self.templates.get(&id));
        let named = |template: &&TemplateRecord| {
            match space {
                // A name may hold a space of its own; else the space is the team's name.
                Some(space) => {
                    let full = format!("{space}/{name}");
                    template.names.iter().any(|n| *n == full || (space == template.team && n == name))
                }
                None => template.names.iter().any(|n| n == name),
            }
        };
        let live = || self.templates.values().filter(|template| !template.deleted);
        let template = by_id
            .filter(|template| !template.deleted)
            .or_else(|| live().filter(named).find(|template| template.team == team))
            .or_else(|| live().find(named))
            .ok_or_else(missing)?;
        if template.team != team {
            return Err(control::Error::TemplateForbidden(shown(reference)));
        }
        let build = match tag {
            None | Some("default" | "latest") => None,
            Some(tag) => {
                let build = uuid::Uuid::parse_str(tag).map(BuildId).map_err(|_| missing())?;
                let ours = self.builds.get(&build).is_some_and(|record| record.template == template.id);
                Some(ours.then_some(build).ok_or_else(missing)?)
            }
        };
        let asked = (by_id.is_none()).then(|| name.to_owned());
        Ok((template, asked, build))
    }
}

/// A reference from outside, cut to what a message should hold.
fn shown(reference: &str) -> String {
    reference.chars().take(128).collect()
}
