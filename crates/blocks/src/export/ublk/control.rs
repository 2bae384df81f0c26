//! Commands to `/dev/ublk-control`. Each blocks, with a deadline, on a ring of its own: they are rare.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use super::abi::{self, ControlCommand, DeviceInfo, Parameters};

/// Longest a command may take. START_DEV reads the partition table through the device, which may be far away.
const DEADLINE: Duration = Duration::from_secs(60);

/// The open control device.
pub(super) struct Control {
    device: File,
}

impl Control {
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self { device: File::options().read(true).write(true).open(abi::CONTROL)? })
    }

    /// `UBLK_F_*` that the driver knows.
    pub(super) fn features(&self) -> io::Result<u64> {
        // -1 stands for "no device".
        self.with_buffer(abi::GET_FEATURES, u32::MAX, 0u64)
    }

    /// Adds a device; what the kernel made of the wish comes back.
    pub(super) fn add(&self, wish: DeviceInfo) -> io::Result<DeviceInfo> {
        self.with_buffer(abi::ADD_DEV, wish.dev_id, wish)
    }

    pub(super) fn info(&self, id: u32) -> io::Result<DeviceInfo> {
        self.with_buffer(abi::GET_DEV_INFO, id, DeviceInfo::default())
    }

    pub(super) fn parameters(&self, id: u32) -> io::Result<Parameters> {
        self.with_buffer(abi::GET_PARAMS, id, Parameters { len: 64, ..Parameters::default() })
    }

    pub(super) fn set_parameters(&self, id: u32, parameters: Parameters) -> io::Result<()> {
        self.with_buffer(abi::SET_PARAMS, id, parameters).map(drop)
    }

    /// Makes the disk appear; returns when every queue serves.
    pub(super) fn start(&self, id: u32) -> io::Result<()> {
        self.plain(abi::START_DEV, id, std::process::id())
    }

    /// Takes the disk away, whoever has it open.
    pub(super) fn stop(&self, id: u32) -> io::Result<()> {
        self.plain(abi::STOP_DEV, id, 0)
    }

    /// Forgets the device; waits until its character device is closed.
    pub(super) fn delete(&self, id: u32) -> io::Result<()> {
        self.plain(abi::DEL_DEV, id, 0)
    }

    /// `EBUSY` while the dead server is not quite gone.
    pub(super) fn start_recovery(&self, id: u32) -> io::Result<()> {
        self.plain(abi::START_USER_RECOVERY, id, 0)
    }

    /// Lets the waiting requests go to this process; returns when every queue serves.
    pub(super) fn end_recovery(&self, id: u32) -> io::Result<()> {
        self.plain(abi::END_USER_RECOVERY, id, std::process::id())
    }

    fn plain(&self, operation: u32, dev_id: u32, data: u32) -> io::Result<()> {
        self.run(operation, ControlCommand { dev_id, data: data.into(), ..ControlCommand::default() })
    }

    fn with_buffer<T: Copy>(&self, operation: u32, dev_id: u32, content: T) -> io::Result<T> {
        let mut buffer = Box::new(content);
        let len = u16::try_from(size_of::<T>()).map_err(io::Error::other)?;
        let addr = (&raw mut *buffer).expose_provenance();
        let command = ControlCommand { dev_id, len, addr: addr as u64, ..ControlCommand::default() };
        match self.run(operation, command) {
            Ok(()) => Ok(*buffer),
            Err(error) => {
                // A command that is still under way may write to it yet.
                if error.kind() == io::ErrorKind::TimedOut {
                    std::mem::forget(buffer);
                }
                Err(error)
            }
        }
    }

    fn run(&self, operation: u32, command: ControlCommand) -> io::Result<()> {
        let queue_id = u16::MAX;
        let command = ControlCommand { queue_id, ..command };
        let mut ring: IoUring<squeue::Entry128, cqueue::Entry> = IoUring::builder().build(2)?;
        let entry =
            opcode::UringCmd80::new(Fd(self.device.as_raw_fd()), operation).cmd(command.bytes()).build();
        // SAFETY: the entry points to nothing but the buffer of `with_buffer`, which outlives the command.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
        let patience = Timespec::new().sec(DEADLINE.as_secs());
        let waited = loop {
            match ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&patience)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        match ring.completion().next() {
            Some(done) if done.result() < 0 => Err(io::Error::from_raw_os_error(-done.result())),
            Some(_) => Ok(()),
            None => {
                Err(waited.err().filter(|error| error.raw_os_error() != Some(libc::ETIME)).unwrap_or_else(
                    || io::Error::new(io::ErrorKind::TimedOut, "the ublk driver did not answer within 60 s"),
                ))
            }
        }
    }
}
