//! From a machine to QEMU's command line. Pure: what is decided here is decided by the arguments alone.
//!
//! Two rules carry the snapshots: the same spec gives the same devices on the same buses, at boot and at restore; and
//! only memory's sharing, the kernel and the incoming state differ between the two.

use crate::{MachineSpec, process::FIRST_PASSED_FD};
use serde_json::json;
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::Path,
};

/// What a command line depends on besides the machine.
#[derive(Debug, Clone)]
pub(super) struct Shape<'a> {
    /// Major and minor version of QEMU.
    pub(super) version: (u32, u32),
    /// `-cpu` value.
    pub(super) cpu: &'a str,
    /// Whether to confine QEMU with its own seccomp filters.
    pub(super) sandbox: bool,
    /// File the guest's console goes to.
    pub(super) console: &'a Path,
    /// For each drive, whether it is a block device rather than a file.
    pub(super) block_devices: &'a [bool],
}

/// How the machine comes to life.
#[derive(Debug, Clone, Copy)]
pub(super) enum Start<'a> {
    /// Cold, memory shared with its file.
    Boot { kernel: &'a Path, initramfs: &'a Path, words: &'a str, memory: &'a Path },
    /// From device state, memory a private view of its image.
    Restore { state: &'a Path, memory: &'a Path },
}

/// Bytes of translated code QEMU may keep, in MiB. Its default grows to 1 GiB a machine.
const TRANSLATIONS_MIB: u32 = 256;

/// How many drives a machine can have.
///
/// microvm has 24 virtio slots with a second IO-APIC, 8 without, so 0 to 7 are always there. Interrupts of slot 0 never
/// reach a guest whose kernel uses the IO-APIC (seen with QEMU 10.0.2 and Linux 6.12: a disk or NIC there hangs at its
/// first request), so it stays empty. Slot 1 is the network's. The guest finds the highest slot first, so the drives go
/// down from 7.
pub(super) const MOST_DRIVES: usize = 6;
const FIRST_DRIVE_SLOT: usize = 7;
const NETWORK_SLOT: usize = 1;

/// The arguments after the program's name. The control socket is descriptor 3; at a restore on QEMU before 8.2 the
/// device state is descriptor 4.
pub(super) fn build(spec: &MachineSpec, shape: &Shape<'_>, start: Start<'_>) -> Vec<OsString> {
    let mut line = Line(Vec::new());
    line.words(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-bios", "qboot.rom"]);
    // The directory is how a process is told to be ours when its record was lost.
    line.pair("-name", join(&[OsStr::new("guest="), &escaped(spec.dir.as_os_str())]));
    line.words(["-machine", MACHINE]);
    line.pair("-accel", format!("tcg,thread=multi,tb-size={TRANSLATIONS_MIB}"));
    line.pair("-cpu", shape.cpu);
    line.pair("-m", spec.memory_mib.to_string());
    line.pair("-smp", spec.vcpus.to_string());
    line.words(["-global", "virtio-mmio.force-legacy=false", "-global", "migration.send-configuration=off"]);
    if shape.sandbox {
        line.words(["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]);
    }
    line.pair("-object", memory(spec, shape, start));
    line.pair("-chardev", format!("socket,id=control,fd={FIRST_PASSED_FD},server=on,wait=off"));
    line.words(["-mon", "chardev=control,mode=control"]);
    line.pair(
        "-chardev",
        join(&[OsStr::new("file,id=console,append=on,path="), &escaped(shape.console.as_os_str())]),
    );
    line.words(["-serial", "chardev:console"]);
    network(&mut line, spec);
    drives(&mut line, spec, shape);
    match start {
        Start::Boot { kernel, initramfs, words, .. } => {
            line.pair("-kernel", kernel);
            line.pair("-initrd", initramfs);
            line.pair("-append", words);
        }
        Start::Restore { state, .. } => {
            let source = if takes_file(shape.version) {
                join(&[OsStr::new("file:"), &escaped(state.as_os_str())])
            } else {
                format!("fd:{}", FIRST_PASSED_FD + 1).into()
            };
            line.pair("-incoming", source);
        }
    }
    line.0
}

/// ACPI tells the guest of its virtio slots and lets it power off; the old PC parts are what its kernel keeps time with.
const MACHINE: &str =
    "microvm,acpi=on,rtc=on,pit=on,pic=on,isa-serial=on,memory-backend=ram,mem-merge=off,dump-guest-core=off";

/// Whether this QEMU reads device state from a path itself.
pub(super) fn takes_file(version: (u32, u32)) -> bool {
    version >= (8, 2)
}

fn memory(spec: &MachineSpec, shape: &Shape<'_>, start: Start<'_>) -> OsString {
    let (path, share) = match start {
        Start::Boot { memory, .. } => (memory, "share=on"),
        // The image is opened for reading only: whatever a guest makes QEMU do, its template can't change. Older
        // versions know no such mapping and open it for writing.
        Start::Restore { memory, .. } if shape.version >= (8, 2) => (memory, "share=off,readonly=on,rom=off"),
        Start::Restore { memory, .. } => (memory, "share=off"),
    };
    // reserve=off: a thousand clones of one image must not count as a thousand images against overcommit.
    let head = format!("memory-backend-file,id=ram,size={}M,{share},reserve=off,mem-path=", spec.memory_mib);
    join(&[OsStr::new(&head), &escaped(path.as_os_str())])
}

fn network(line: &mut Line, spec: &MachineSpec) {
    let Some(net) = &spec.net else { return };
    line.pair(
        "-netdev",
        join(&[
            OsStr::new("tap,id=net0,script=no,downscript=no,vhost=off,ifname="),
            &escaped(OsStr::new(&net.tap)),
        ]),
    );
    let device = format!(
        "virtio-net-device,id=nic0,netdev=net0,bus=virtio-mmio-bus.{NETWORK_SLOT},guest_announce=off,mac="
    );
    // guest_announce would have the guest send gratuitous ARP after each restore and costs it 25 ms.
    line.pair("-device", join(&[OsStr::new(&device), &escaped(OsStr::new(&net.mac))]));
}

fn drives(line: &mut Line, spec: &MachineSpec, shape: &Shape<'_>) {
    // More than MOST_DRIVES are refused before.
    for (index, drive) in spec.drives.iter().take(MOST_DRIVES).enumerate() {
        let driver = if shape.block_devices.get(index) == Some(&true) { "host_device" } else { "file" };
        let filename = drive.path.to_string_lossy();
        let node = json!({
            "driver": "raw",
            "node-name": format!("disk{index}"),
            "read-only": drive.read_only,
            "discard": "unmap",
            "detect-zeroes": if drive.read_only { "off" } else { "unmap" },
            "cache": { "direct": false, "no-flush": false },
            "file": {
                "driver": driver,
                "filename": filename,
                "aio": "threads",
                "discard": "unmap",
                "read-only": drive.read_only,
                "cache": { "direct": false, "no-flush": false },
            },
        });
        line.pair("-blockdev", node.to_string());
        // Errors are the guest's to see. By default QEMU would stop the machine when the host's disk is full.
        line.pair(
            "-device",
            format!(
                "virtio-blk-device,id=drive{index},drive=disk{index},werror=report,rerror=report,bus=virtio-mmio-bus.{}",
                FIRST_DRIVE_SLOT - index
            ),
        );
    }
}

struct Line(Vec<OsString>);

impl Line {
    fn words<const N: usize>(&mut self, words: [&str; N]) {
        self.0.extend(words.map(OsString::from));
    }

    fn pair(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.push(option.into());
        self.0.push(value.into());
    }
}

/// A comma ends a value in QEMU's option strings unless it is doubled.
pub(super) fn escaped(value: &OsStr) -> OsString {
    let mut bytes = Vec::with_capacity(value.len());
    for byte in value.as_bytes() {
        bytes.push(*byte);
        if *byte == b',' {
            bytes.push(b',');
        }
    }
    OsString::from_vec(bytes)
}

fn join(parts: &[&OsStr]) -> OsString {
    let mut whole = OsString::new();
    for part in parts {
        whole.push(part);
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Drive, NetDevice};

    fn spec() -> MachineSpec {
        MachineSpec {
            id: "m".into(),
            vcpus: 2,
            memory_mib: 512,
            drives: vec![
                Drive { path: "/d/a,b\"c".into(), read_only: false },
                Drive { path: "/dev/ublkb0".into(), read_only: true },
            ],
            net: Some(NetDevice { netns: "/n".into(), tap: "tap0".into(), mac: "02:00:00:00:00:01".into() }),
            dir: "/run/m,1".into(),
        }
    }

    fn shape(version: (u32, u32)) -> Shape<'static> {
        Shape {
            version,
            cpu: "Nehalem-v1",
            sandbox: true,
            console: Path::new("/run/m,1/console.log"),
            block_devices: &[false, true],
        }
    }

    fn text(line: &[OsString]) -> Vec<String> {
        line.iter().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    fn boot() -> Start<'static> {
        Start::Boot {
            kernel: Path::new("/k"),
            initramfs: Path::new("/i"),
            words: "quiet",
            memory: Path::new("/run/m,1/mem"),
        }
    }

    fn restore() -> Start<'static> {
        Start::Restore { state: Path::new("/s,1"), memory: Path::new("/t/mem") }
    }

    #[test]
    fn boot_and_restore_have_the_same_devices_in_the_same_order() {
        let devices = |start| {
            let line = text(&build(&spec(), &shape((10, 0)), start));
            let kept = ["-machine", "-cpu", "-m", "-smp", "-global", "-device", "-bios", "-serial"];
            line.windows(2)
                .filter(|pair| kept.contains(&pair[0].as_str()))
                .map(<[_]>::to_vec)
                .collect::<Vec<_>>()
        };
        assert_eq!(devices(boot()), devices(restore()));
        assert_eq!(devices(boot()).iter().filter(|pair| pair[0] == "-device").count(), 3);
    }

    #[test]
    fn a_restore_maps_memory_privately_and_boots_no_kernel() {
        let line = text(&build(&spec(), &shape((10, 0)), restore()));
        let memory = line.iter().find(|word| word.starts_with("memory-backend-file")).unwrap();
        assert!(memory.contains("share=off,readonly=on,rom=off"), "{memory}");
        assert!(!line.iter().any(|word| word == "-kernel"));
        assert!(line.contains(&"file:/s,,1".to_owned()));

        let old = text(&build(&spec(), &shape((7, 2)), restore()));
        assert!(old.contains(&"fd:4".to_owned()));
        assert!(!old.iter().any(|word| word.contains("rom=off")));
    }

    #[test]
    fn paths_with_commas_and_quotes_stay_whole() {
        let line = text(&build(&spec(), &shape((10, 0)), boot()));
        assert!(line.contains(&"guest=/run/m,,1".to_owned()));
        assert!(line.iter().any(|word| word.ends_with("mem-path=/run/m,,1/mem")));
        let disk = line.iter().find(|word| word.contains("\"disk0\"")).unwrap();
        let node: serde_json::Value = serde_json::from_str(disk).unwrap();
        assert_eq!(node["file"]["filename"], "/d/a,b\"c");
    }

    #[test]
    fn a_block_device_is_opened_as_one_and_read_only_stays_so() {
        let line = text(&build(&spec(), &shape((10, 0)), boot()));
        let disk = line.iter().find(|word| word.contains("\"disk1\"")).unwrap();
        let node: serde_json::Value = serde_json::from_str(disk).unwrap();
        assert_eq!(node["file"]["driver"], "host_device");
        assert_eq!(node["read-only"], true);
    }
}
