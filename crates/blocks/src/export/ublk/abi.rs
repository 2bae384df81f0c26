//! The kernel's words for ublk: `include/uapi/linux/ublk_cmd.h`, as of Linux 6.12 with the flags of later ones.
//!
//! All numbers are in the machine's own byte order. Commands are ioctl-encoded (`UBLK_F_CMD_IOCTL_ENCODE`), the only
//! form that kernels without legacy opcodes take.

#![allow(clippy::cast_possible_truncation, reason = "sizes of structures of a few bytes, in constants")]

use std::mem::size_of;

/// Where devices are added and removed.
pub(super) const CONTROL: &str = "/dev/ublk-control";

const fn ioctl(direction: u32, number: u8, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number as u32
}
const READ: u32 = 2;
const READ_WRITE: u32 = 3;
const fn control(direction: u32, number: u8) -> u32 {
    ioctl(direction, number, size_of::<ControlCommand>())
}

pub(super) const ADD_DEV: u32 = control(READ_WRITE, 0x04);
pub(super) const DEL_DEV: u32 = control(READ_WRITE, 0x05);
pub(super) const START_DEV: u32 = control(READ_WRITE, 0x06);
pub(super) const STOP_DEV: u32 = control(READ_WRITE, 0x07);
pub(super) const SET_PARAMS: u32 = control(READ_WRITE, 0x08);
pub(super) const GET_PARAMS: u32 = control(READ, 0x09);
pub(super) const START_USER_RECOVERY: u32 = control(READ_WRITE, 0x10);
pub(super) const END_USER_RECOVERY: u32 = control(READ_WRITE, 0x11);
pub(super) const GET_DEV_INFO: u32 = control(READ, 0x02);
pub(super) const GET_FEATURES: u32 = control(READ, 0x13);
pub(super) const FETCH_REQ: u32 = ioctl(READ_WRITE, 0x20, size_of::<IoCommand>());
pub(super) const COMMIT_AND_FETCH_REQ: u32 = ioctl(READ_WRITE, 0x21, size_of::<IoCommand>());

/// The server may register the request's pages and hand them to another file (6.15).
pub(super) const F_ZERO_COPY: u64 = 1 << 0;
/// A device outlives its server.
pub(super) const F_USER_RECOVERY: u64 = 1 << 3;
/// What the dead server had taken is given to the next one.
pub(super) const F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// Commands are ioctl-encoded.
pub(super) const F_IOCTL: u64 = 1 << 6;
/// The server moves data by pread and pwrite on the character device (6.5).
pub(super) const F_USER_COPY: u64 = 1 << 7;

/// No server has been there.
pub(super) const STATE_DEAD: u16 = 0;
/// Its server died; requests wait for the next one.
pub(super) const STATE_QUIESCED: u16 = 2;

/// Deepest queue the kernel takes; the descriptors of queue `q` lie at `q` times so many in the mapping.
pub(super) const MAX_DEPTH: u16 = 4096;
/// Where requests' data begin in the character device.
const BUFFERS: u64 = 0x8000_0000;

/// Where the data of a request lie in the character device.
pub(super) fn buffer_position(queue: u16, tag: u16) -> u64 {
    BUFFERS + (u64::from(queue) << 41) + (u64::from(tag) << 25)
}

/// `struct ublksrv_ctrl_cmd`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct ControlCommand {
    pub(super) dev_id: u32,
    pub(super) queue_id: u16,
    pub(super) len: u16,
    pub(super) addr: u64,
    pub(super) data: u64,
    pub(super) dev_path_len: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}
const _: () = assert!(size_of::<ControlCommand>() == 32);

impl ControlCommand {
    /// As the 80 bytes that an io_uring command carries.
    pub(super) fn bytes(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[0..4].copy_from_slice(&self.dev_id.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.queue_id.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.len.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes
    }
}

/// `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) pad0: u16,
    pub(super) max_io_bytes: u32,
    pub(super) dev_id: u32,
    pub(super) server_pid: i32,
    pub(super) pad1: u32,
    pub(super) flags: u64,
    /// The server's own; the kernel keeps it unread.
    pub(super) server_flags: u64,
    pub(super) owner_uid: u32,
    pub(super) owner_gid: u32,
    pub(super) reserved: [u64; 2],
}
const _: () = assert!(size_of::<DeviceInfo>() == 64);

/// [`Parameters::types`]: the basic part is there.
pub(super) const TYPE_BASIC: u32 = 1 << 0;
/// [`Parameters::types`]: the discard part is there.
pub(super) const TYPE_DISCARD: u32 = 1 << 1;
/// [`Parameters::attributes`]: no writes.
pub(super) const ATTRIBUTE_READ_ONLY: u32 = 1 << 0;
/// [`Parameters::attributes`]: writes are durable only after a flush.
pub(super) const ATTRIBUTE_VOLATILE_CACHE: u32 = 1 << 2;
/// [`Parameters::attributes`]: single writes can be made durable.
pub(super) const ATTRIBUTE_FUA: u32 = 1 << 3;

/// `struct ublk_params` as far as its discard part.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Parameters {
    pub(super) len: u32,
    pub(super) types: u32,
    pub(super) attributes: u32,
    pub(super) logical_shift: u8,
    pub(super) physical_shift: u8,
    pub(super) io_opt_shift: u8,
    pub(super) io_min_shift: u8,
    pub(super) max_sectors: u32,
    pub(super) chunk_sectors: u32,
    pub(super) sectors: u64,
    pub(super) virt_boundary_mask: u64,
    pub(super) discard_alignment: u32,
    pub(super) discard_granularity: u32,
    pub(super) max_discard_sectors: u32,
    pub(super) max_write_zeroes_sectors: u32,
    pub(super) max_discard_segments: u16,
    pub(super) reserved: u16,
    pub(super) padding: u32,
}
const _: () = assert!(size_of::<Parameters>() == 64);

/// `struct ublksrv_io_cmd`.
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    /// Bytes done, or a negated errno.
    pub(super) result: i32,
    /// Unused where data are moved by pread and pwrite.
    _address: u64,
}
const _: () = assert!(size_of::<IoCommand>() == 16);

impl IoCommand {
    pub(super) fn new(queue: u16, tag: u16, result: i32) -> Self {
        Self { queue, tag, result, _address: 0 }
    }

    pub(super) fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        bytes
    }
}

/// `struct ublksrv_io_desc`: what a request asks.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Descriptor {
    /// Operation in the low 8 bits, flags above.
    pub(super) operation: u32,
    pub(super) sectors: u32,
    pub(super) start_sector: u64,
    pub(super) address: u64,
}
const _: () = assert!(size_of::<Descriptor>() == 24);

pub(super) const OP_READ: u32 = 0;
pub(super) const OP_WRITE: u32 = 1;
pub(super) const OP_FLUSH: u32 = 2;
pub(super) const OP_DISCARD: u32 = 3;
pub(super) const OP_WRITE_ZEROES: u32 = 5;
/// Flag of a descriptor: durable before it is answered.
pub(super) const IO_FUA: u32 = 1 << 13;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_kernel_header() {
        // _IOWR('u', 0x04, 32 bytes), _IOR('u', 0x13, 32 bytes), _IOWR('u', 0x20, 16 bytes)
        assert_eq!(ADD_DEV, 0xc020_7504);
        assert_eq!(GET_FEATURES, 0x8020_7513);
        assert_eq!(FETCH_REQ, 0xc010_7520);
        assert_eq!(buffer_position(1, 2), 0x8000_0000 + (1 << 41) + (2 << 25));
    }
}
