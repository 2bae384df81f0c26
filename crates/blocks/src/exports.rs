//! The exports of one process: what each name stands for, who holds it, and the operations on them.
//!
//! ```text
//!   (none) ──open──► exported ──close by the last holder──► (none)
//!                      │  ▲
//!                      └──┘ open again (same spec: one more holder) · flush · seal (writable)
//! ```
//! Every operation may be repeated with the same result, so that a caller that lost an answer just asks again:
//! holders are a set, closing what is closed is fine, and a seal to the path of the last seal answers as it did.
//! Operations on one name run one after the other; different names don't wait for each other.
//!
//! All calls block. A failed open leaves nothing behind. A failed close (someone has the device open) changes
//! nothing. A failed seal leaves the old upper in use; see [`upper_dir`](crate::upper_dir) for crashes.

mod error;
mod messages;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aenv_overlaybd::{Stack, WritableStack};
use parking_lot::Mutex;

pub use self::error::Error;
pub use self::messages::{ExportInfo, OpenRequest, Opened, SealedLayer};
use crate::device::{Device, ReadOnlyDevice, WritableDevice};
use crate::export::Exporter;
use crate::source::{LayerError, OpenedLayers, Sources, open_layers};
use crate::spec::{LayerKind, LayerSpec, Mode, StackSpec};
use crate::upper_dir::{UpperDir, UpperError};

/// Most exports of one process.
pub const MAX_EXPORTS: usize = 16_384;
/// Most holders of one export.
pub const MAX_HOLDERS: usize = 16_384;
/// Locks that names are spread over.
const LANES: usize = 64;
/// How long a close waits for the kernel to tell that a dead VMM's handles are closed.
const CLOSE_PATIENCE: Duration = Duration::from_secs(3);

/// The table of exports.
pub struct Exports {
    sources: Arc<dyn Sources>,
    exporter: Arc<dyn Exporter>,
    table: Mutex<BTreeMap<String, Arc<Export>>>,
    ending: AtomicBool,
    lanes: [Mutex<()>; LANES],
}

struct Export {
    name: String,
    path: PathBuf,
    mode: Mode,
    body: Body,
    state: Mutex<State>,
}

struct State {
    stack: StackSpec,
    holders: BTreeSet<String>,
}

enum Body {
    ReadOnly(Arc<ReadOnlyDevice>),
    Writable(Arc<Writable>),
}

/// A writable device with the directory of its upper: flushing it makes names durable too.
struct Writable {
    device: WritableDevice,
    dir: UpperDir,
}

impl Exports {
    /// An empty table.
    pub fn new(sources: Arc<dyn Sources>, exporter: Arc<dyn Exporter>) -> Self {
        let lanes = std::array::from_fn(|_| Mutex::new(()));
        Self { sources, exporter, table: Mutex::default(), ending: AtomicBool::new(false), lanes }
    }

    /// Opens an export, or adds a holder to the one that is open with the same stack and mode.
    pub fn open(&self, request: OpenRequest) -> Result<Opened, Error> {
        check_name(&request.name)?;
        check_paths(&request)?;
        let _lane = self.lane(&request.name).lock();
        if self.ending.load(Ordering::Acquire) {
            return Err(Error::Ending);
        }
        if let Some(export) = self.find(&request.name) {
            return export.join(&request);
        }
        if self.table.lock().len() >= MAX_EXPORTS {
            return Err(Error::TooMany(format!(
                "{MAX_EXPORTS} exports are open, the most allowed; close some"
            )));
        }
        let body = self.build(&request)?;
        let device: Arc<dyn Device> = match &body {
            Body::ReadOnly(device) => device.clone(),
            Body::Writable(writable) => writable.clone(),
        };
        let size = device.size();
        let path = self.exporter.publish(&request.name, device)?;
        let state = State { stack: request.stack, holders: BTreeSet::from([request.holder]) };
        let export = Export {
            name: request.name.clone(),
            path: path.clone(),
            mode: request.mode,
            body,
            state: Mutex::new(state),
        };
        self.table.lock().insert(request.name, Arc::new(export));
        Ok(Opened { path, size })
    }

    /// Makes the upper of `name` the immutable layer file `to` (absolute, free, on the same file system) and goes on
    /// with an empty one. The caller has the VM paused. With `durable` the layer survives a power loss when this
    /// returns, otherwise from the next flush on.
    pub fn seal(&self, name: &str, to: &Path, durable: bool) -> Result<SealedLayer, Error> {
        let _lane = self.lane(name).lock();
        let export = self.get(name)?;
        let Body::Writable(writable) = &export.body else { return Err(Error::ReadOnly(name.into())) };
        if !to.is_absolute() {
            return Err(Error::BadRequest(format!("{} must be an absolute path", to.display())));
        }
        let layer = if export.state.lock().stack.layers.last().is_some_and(|top| top.path == to) {
            // Asked again: the layer is in place already.
            sealed_before(to)?
        } else {
            let layer = writable.seal(to, durable).map_err(|source| match source {
                SealError::Upper(error) => Error::Upper(error),
                SealError::Stack(source) => Error::Stack { name: name.into(), source },
            })?;
            export.state.lock().stack.layers.push(LayerSpec::lsmt(to));
            layer
        };
        if durable {
            writable.flush().map_err(|source| Error::Flush { name: name.into(), source })?;
        }
        Ok(layer)
    }

    /// Makes all acknowledged writes of `name` durable.
    pub fn flush(&self, name: &str) -> Result<(), Error> {
        let export = self.get(name)?;
        export.flush()
    }

    /// Takes `holder` away from `name`; the last one ends the export, after making its writes durable. Fine when
    /// there is no such export or holder. A writable export that is still open somewhere is refused.
    pub fn close(&self, name: &str, holder: &str) -> Result<(), Error> {
        let _lane = self.lane(name).lock();
        let Some(export) = self.find(name) else { return Ok(()) };
        let remaining = {
            let state = export.state.lock();
            state.holders.iter().filter(|other| *other != holder).count()
        };
        if remaining == 0 {
            if let Body::Writable(_) = &export.body {
                self.exporter.drain(name, CLOSE_PATIENCE)?;
            }
            // A flush that fails must not keep the name for ever; its caller is told.
            let flushed = export.flush();
            self.exporter.withdraw(name);
            self.table.lock().remove(name);
            return flushed;
        }
        export.state.lock().holders.remove(holder);
        Ok(())
    }

    /// The device behind `name`, for users in this process.
    pub fn device(&self, name: &str) -> Result<Arc<dyn Device>, Error> {
        Ok(match &self.get(name)?.body {
            Body::ReadOnly(device) => device.clone(),
            Body::Writable(writable) => writable.clone(),
        })
    }

    /// All exports by name.
    pub fn list(&self) -> Vec<ExportInfo> {
        let exports: Vec<_> = self.table.lock().values().cloned().collect();
        exports.iter().map(|export| self.info(export)).collect()
    }

    /// One export.
    pub fn stat(&self, name: &str) -> Result<ExportInfo, Error> {
        Ok(self.info(&*self.get(name)?))
    }

    /// Names of the exports that some process has open.
    pub fn busy(&self) -> Vec<String> {
        let names: Vec<_> = self.table.lock().keys().cloned().collect();
        names.into_iter().filter(|name| self.exporter.handles(name) > 0).collect()
    }

    /// From now on no export is opened.
    pub fn end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Like [`end`](Self::end), but refused while some process has an export open.
    pub fn end_if_idle(&self) -> Result<(), Error> {
        self.end();
        let busy = self.busy();
        if busy.is_empty() {
            return Ok(());
        }
        self.ending.store(false, Ordering::Release);
        Err(Error::Busy(busy))
    }

    /// Makes everything durable; the first failure is returned, the rest is tried all the same.
    pub fn flush_all(&self) -> Result<(), Error> {
        let exports: Vec<_> = self.table.lock().values().cloned().collect();
        exports.iter().map(|export| export.flush()).fold(Ok(()), Result::and)
    }

    fn build(&self, request: &OpenRequest) -> Result<Body, Error> {
        let (layers, virtual_size) = (&request.stack.layers, request.stack.virtual_size);
        let stack_error = |source| Error::Stack { name: request.name.clone(), source };
        match &request.mode {
            Mode::ReadOnly => {
                let opened = open_layers(&*self.sources, layers)?;
                let local = whole_file(&opened, layers, virtual_size);
                let stack = Stack::new(opened.layers, virtual_size).map_err(stack_error)?;
                Ok(Body::ReadOnly(Arc::new(ReadOnlyDevice::new(stack, local))))
            }
            Mode::Writable { dir } => {
                // The directory comes first: it may have to mend a layer before that can be opened.
                let dir = UpperDir::lock(dir, layers)?;
                let opened = open_layers(&*self.sources, layers)?;
                let below = opened.layers.last().map_or(uuid::Uuid::nil(), |top| top.info().uuid);
                let upper = dir.open_upper(below, virtual_size)?;
                let lower = Stack::new(opened.layers, virtual_size).map_err(stack_error)?;
                let stack = WritableStack::new(lower, upper).map_err(stack_error)?;
                Ok(Body::Writable(Arc::new(Writable { device: WritableDevice::new(stack), dir })))
            }
        }
    }

    fn info(&self, export: &Export) -> ExportInfo {
        let (upper_bytes, traffic) = match &export.body {
            Body::ReadOnly(device) => (0, device.traffic().stat()),
            Body::Writable(writable) => (writable.device.upper_bytes(), writable.traffic().stat()),
        };
        let state = export.state.lock();
        ExportInfo {
            name: export.name.clone(),
            path: export.path.clone(),
            stack: state.stack.clone(),
            mode: export.mode.clone(),
            holders: state.holders.iter().cloned().collect(),
            handles: self.exporter.handles(&export.name),
            upper_bytes,
            traffic,
        }
    }

    fn find(&self, name: &str) -> Option<Arc<Export>> {
        self.table.lock().get(name).cloned()
    }

    fn get(&self, name: &str) -> Result<Arc<Export>, Error> {
        self.find(name).ok_or_else(|| Error::Unknown(name.into()))
    }

    fn lane(&self, name: &str) -> &Mutex<()> {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        let lanes = u64::try_from(LANES).expect("a small number");
        &self.lanes[usize::try_from(hasher.finish() % lanes).expect("below LANES")]
    }
}

impl Export {
    fn join(&self, request: &OpenRequest) -> Result<Opened, Error> {
        let different = |what| Err(Error::Different { name: self.name.clone(), what });
        let mut state = self.state.lock();
        if request.mode != self.mode {
            return different("mode");
        }
        if request.stack != state.stack {
            return different("stack");
        }
        if state.holders.len() >= MAX_HOLDERS && !state.holders.contains(&request.holder) {
            return Err(Error::TooMany(format!("export {} has {MAX_HOLDERS} holders", self.name)));
        }
        state.holders.insert(request.holder.clone());
        Ok(Opened { path: self.path.clone(), size: state.stack.virtual_size })
    }

    fn flush(&self) -> Result<(), Error> {
        match &self.body {
            Body::ReadOnly(_) => Ok(()),
            Body::Writable(writable) => {
                writable.flush().map_err(|source| Error::Flush { name: self.name.clone(), source })
            }
        }
    }
}

enum SealError {
    Upper(UpperError),
    Stack(aenv_overlaybd::Error),
}

impl Writable {
    fn seal(&self, to: &Path, durable: bool) -> Result<SealedLayer, SealError> {
        let uuid = self.device.upper_uuid();
        let next = self.dir.prepare_next(uuid, self.device.size()).map_err(SealError::Upper)?;
        let sealed = self
            .device
            .seal(next, durable, || self.dir.commit_seal(to, durable))
            .inspect_err(|_| self.dir.discard_next())
            .map_err(SealError::Stack)?;
        Ok(SealedLayer { path: to.to_owned(), uuid, bytes: sealed.file_bytes, blocks: sealed.stored_sectors })
    }
}

/// What the seal that made `path` answered.
fn sealed_before(path: &Path) -> Result<SealedLayer, Error> {
    let bytes = |source| LayerError::Bytes { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(bytes)?;
    let len = file.metadata().map_err(bytes)?.len();
    let layer = aenv_overlaybd::Layer::open(Arc::new(file))
        .map_err(|source| LayerError::Format { path: path.to_owned(), source })?;
    let (uuid, blocks) = (layer.info().uuid, layer.index().stored_sectors());
    Ok(SealedLayer { path: path.to_owned(), uuid, bytes: len, blocks })
}

impl Device for Writable {
    fn size(&self) -> u64 {
        self.device.size()
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.device.read_at(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> std::io::Result<()> {
        self.device.write_at(buf, offset)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.device.write_zeroes(offset, len)
    }

    fn flush(&self) -> std::io::Result<()> {
        self.device.flush()?;
        self.dir.flush()
    }

    fn next_data(&self, offset: u64) -> Option<u64> {
        self.device.next_data(offset)
    }

    fn next_hole(&self, offset: u64) -> u64 {
        self.device.next_hole(offset)
    }

    fn local_file(&self) -> Option<&std::fs::File> {
        None
    }

    fn traffic(&self) -> &crate::device::Traffic {
        self.device.traffic()
    }
}

/// The file that is the whole stack, byte for byte.
fn whole_file(opened: &OpenedLayers, specs: &[LayerSpec], virtual_size: u64) -> Option<Arc<std::fs::File>> {
    let ([layer], [LayerSpec { kind: LayerKind::Raw, .. }]) = (&opened.layers[..], specs) else {
        return None;
    };
    opened.local[0].clone().filter(|_| layer.info().virtual_size == virtual_size)
}

fn check_name(name: &str) -> Result<(), Error> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if (1..=128).contains(&name.len()) && name.bytes().all(fine) && !name.starts_with('.') {
        return Ok(());
    }
    Err(Error::BadName(name.chars().take(140).collect()))
}

fn check_paths(request: &OpenRequest) -> Result<(), Error> {
    if let Mode::Writable { dir } = &request.mode
        && !dir.is_absolute()
    {
        return Err(Error::BadRequest(format!("the upper's directory {} must be absolute", dir.display())));
    }
    if request.holder.is_empty() || request.holder.len() > 256 {
        return Err(Error::BadRequest("a holder is a word of 1 to 256 bytes".into()));
    }
    Ok(())
}
