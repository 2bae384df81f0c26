//! One ublk device from its making to its end; see the states in the parent module.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Options;
use super::abi::{self, DeviceInfo, Parameters};
use super::control::Control;
use super::queue::{Queue, Setup};
use crate::device::Device;

/// What a driver must have.
pub(super) const FLAGS: u64 =
    abi::F_USER_RECOVERY | abi::F_USER_RECOVERY_REISSUE | abi::F_IOCTL | abi::F_USER_COPY;
/// How long a killed process may take to leave its devices.
const LEAVING: Duration = Duration::from_secs(20);
const RETRY: Duration = Duration::from_millis(10);
/// Upper half of a stamp.
const STAMP: u64 = 0x4145_4e56;

/// A device with its threads.
pub(super) struct Served {
    pub(super) id: u32,
    queues: Mutex<Vec<Queue>>,
}

impl Served {
    pub(super) fn start(
        control: &Control,
        dir: &Path,
        options: Options,
        name: &str,
        device: &Arc<dyn Device>,
    ) -> io::Result<Self> {
        let parameters = parameters(&**device, options)?;
        let info = control.add(DeviceInfo {
            queues: options.queues,
            depth: options.depth,
            max_io_bytes: options.max_io_bytes,
            dev_id: u32::MAX,
            flags: FLAGS,
            server_flags: stamp(dir),
            ..DeviceInfo::default()
        })?;
        let start = || {
            control.set_parameters(info.dev_id, parameters)?;
            let queues = queues(info, options, name, device)?;
            control.start(info.dev_id).map(|()| queues)
        };
        match start() {
            Ok(queues) => Ok(Self { id: info.dev_id, queues: Mutex::new(queues) }),
            Err(error) => {
                // Its queue threads end when it stops; nobody has seen it.
                if let Err(also) = remove(control, info.dev_id) {
                    tracing::warn!(error = %also, id = info.dev_id, "a ublk device that did not start could not be deleted");
                }
                Err(error)
            }
        }
    }

    pub(super) fn recover(
        control: &Control,
        dir: &Path,
        options: Options,
        name: &str,
        id: u32,
        device: &Arc<dyn Device>,
    ) -> io::Result<Self> {
        let refuse = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let info = control.info(id)?;
        if info.server_flags != stamp(dir) {
            return Err(refuse(format!("ublk device {id} was made for another directory")));
        }
        let had = control.parameters(id)?;
        let wanted = parameters(&**device, options)?;
        if had.sectors != wanted.sectors || had.attributes != wanted.attributes {
            return Err(refuse(format!(
                "ublk device {id} has {} sectors and attributes {:#x}, the export {} and {:#x}",
                had.sectors, had.attributes, wanted.sectors, wanted.attributes
            )));
        }
        let deadline = Instant::now() + LEAVING;
        while let Err(error) = control.start_recovery(id) {
            // The dead process is still being taken apart.
            if error.raw_os_error() != Some(libc::EBUSY) || Instant::now() > deadline {
                return Err(error);
            }
            std::thread::sleep(RETRY);
        }
        let queues = queues(info, options, name, device)?;
        control.end_recovery(id)?;
        Ok(Self { id, queues: Mutex::new(queues) })
    }

    /// The block device.
    pub(super) fn node(&self) -> PathBuf {
        node(self.id)
    }

    /// Stops it and waits for its threads. Whoever has it open gets errors from now on.
    pub(super) fn end(&self, control: &Control) {
        let end = || -> io::Result<()> {
            control.stop(self.id)?;
            // The character device closes with the last of them, which the deletion waits for.
            self.queues.lock().drain(..).for_each(Queue::join);
            control.delete(self.id)
        };
        if let Err(error) = end() {
            tracing::error!(%error, id = self.id, "a ublk device could not be deleted; it is deleted at the next start");
        }
    }
}

fn queues(
    info: DeviceInfo,
    options: Options,
    name: &str,
    device: &Arc<dyn Device>,
) -> io::Result<Vec<Queue>> {
    let path = format!("/dev/ublkc{}", info.dev_id);
    let character = Arc::new(File::options().read(true).write(true).open(path)?);
    (0..info.queues)
        .map(|queue| {
            Queue::start(Setup {
                name: name.to_owned(),
                device: device.clone(),
                character: character.clone(),
                queue,
                depth: info.depth,
                workers: options.workers,
                max_io_bytes: info.max_io_bytes,
            })
        })
        .collect()
}

fn parameters(device: &dyn Device, options: Options) -> io::Result<Parameters> {
    let size = device.size();
    if size == 0 || !size.is_multiple_of(options.block_bytes.into()) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a size of {size} bytes is no multiple of the block size {}", options.block_bytes),
        ));
    }
    let sectors = options.max_io_bytes / 512;
    let writable = device.is_writable();
    let mut parameters = Parameters {
        len: 64,
        types: abi::TYPE_BASIC,
        attributes: abi::ATTRIBUTE_READ_ONLY,
        logical_shift: if options.block_bytes == 512 { 9 } else { 12 },
        physical_shift: 12,
        io_opt_shift: 12,
        io_min_shift: 12,
        max_sectors: sectors,
        sectors: size / 512,
        ..Parameters::default()
    };
    if writable {
        parameters.types |= abi::TYPE_DISCARD;
        parameters.attributes = abi::ATTRIBUTE_VOLATILE_CACHE | abi::ATTRIBUTE_FUA;
        parameters.discard_granularity = 4096;
        // They carry no data; 1 GiB bounds what one request can keep a worker at.
        parameters.max_discard_sectors = 1 << 21;
        parameters.max_write_zeroes_sectors = 1 << 21;
        parameters.max_discard_segments = 1;
    }
    Ok(parameters)
}

/// Devices made for `dir` whose maker is dead.
pub(super) fn stamped(control: &Control, dir: &Path) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/dev")? {
        let Some(id) = entry?.file_name().to_str().and_then(|n| n.strip_prefix("ublkc")?.parse().ok()) else {
            continue;
        };
        // One that is deleted meanwhile is none of ours any more.
        let Ok(info) = control.info(id) else { continue };
        let dead = info.state == abi::STATE_DEAD || info.state == abi::STATE_QUIESCED;
        let maker = Path::new("/proc").join(info.server_pid.to_string());
        if info.server_flags == stamp(dir) && (dead || !maker.exists()) {
            found.push(id);
        }
    }
    Ok(found)
}

/// Stops and deletes a device that nobody serves.
pub(super) fn remove(control: &Control, id: u32) -> io::Result<()> {
    control.stop(id)?;
    control.delete(id)
}

fn node(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// The number in the name of a block device of ours.
pub(super) fn id_of(node: &Path) -> Option<u32> {
    node.to_str()?.strip_prefix("/dev/ublkb")?.parse().ok()
}

/// Says which directory a device was made for. It has to be the same in the next process, of another build too:
/// SipHash with the standard library's fixed keys is.
fn stamp(dir: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    dir.as_os_str().as_encoded_bytes().hash(&mut hasher);
    STAMP << 32 | hasher.finish() >> 32
}
