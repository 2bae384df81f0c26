//! Does KVM run a kernel here? A throwaway machine is made and tried, in a child that is killed when it takes too long:
//! a KVM that emulates (a foreign PVM without hardware behind it) can hang for ever in a guest of four instructions.
//!
//! ```text
//!   real mode: out 1 ─► long mode, ring 0: count down, out 2 ─► iretq ─► ring 3: count down, out 3
//! ```
//!
//! A stock kernel needs all three at speed: a host where ring 0 runs at less than 20 million instructions a second, or
//! ring 3 is never reached, can't boot one in a useful time. Numbers and layouts are those of the kernel's
//! Documentation/virt/kvm/api.rst and arch/x86/include/uapi/asm/kvm.h.

use super::Check;
use std::{
    fs, io,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

const LIMIT: Duration = Duration::from_secs(3);
/// Rounds of the two-instruction loop.
const ROUNDS: u32 = 1_000_000;
/// Instructions a microsecond below which ring 0 is not run but emulated.
const SLOWEST: u64 = 20;

/// What was found.
#[derive(Debug, Clone)]
pub(super) struct Kvm {
    /// `kvm_intel`, `kvm_amd`, `kvm_pvm` or nothing known.
    module: Option<&'static str>,
    hardware: bool,
    outcome: Outcome,
}

#[derive(Debug, Clone)]
enum Outcome {
    Absent(String),
    /// The last stage that was reached, and why it went no further.
    Stuck(u64, String),
    /// Nanoseconds for the loops in ring 0 and in ring 3.
    Ran {
        kernel: u64,
        user: u64,
    },
}

impl Kvm {
    #[cfg(test)]
    pub(super) fn absent() -> Self {
        Self { module: None, hardware: false, outcome: Outcome::Absent("no /dev/kvm".to_owned()) }
    }

    /// Whether a stock kernel would run.
    pub(super) fn usable(&self) -> bool {
        matches!(self.outcome, Outcome::Ran { kernel, .. } if speed(kernel) >= SLOWEST)
    }

    pub(super) fn check(&self) -> Check {
        let name = "kvm";
        let kind = match (self.hardware, self.module) {
            (_, Some("kvm_pvm")) => "PVM (kvm_pvm)".to_owned(),
            (false, module) => {
                format!(
                    "no vmx or svm in the CPU's flags, so not hardware KVM but likely a PVM ({})",
                    module.unwrap_or("module unknown")
                )
            }
            (true, module) => format!("hardware KVM ({})", module.unwrap_or("built in")),
        };
        let remedy = "nothing needs to be done: guests are emulated by QEMU (TCG), compute is 3 to 17 times slower. For \
                      speed use a machine with hardware virtualisation, bare metal or with nested virtualisation on";
        match &self.outcome {
            Outcome::Absent(why) => Check::warn(name, why.clone(), remedy),
            Outcome::Stuck(stage, why) => {
                let reached = match stage {
                    0..=4 => "it makes no virtual machine",
                    5 => "it runs no instruction in real mode",
                    6 => "it doesn't run kernel code in long mode",
                    _ => "it never starts user mode",
                };
                Check::warn(name, format!("/dev/kvm is there, but {reached} ({why}): {kind}"), remedy)
            }
            Outcome::Ran { kernel, user } => {
                let speeds = format!("kernel mode at {}, user mode at {}", shown(*kernel), shown(*user));
                if self.usable() {
                    Check::ok(name, format!("runs a guest's kernel and user mode, {speeds}; {kind}"))
                } else {
                    Check::warn(name, format!("too slow for a stock kernel: {speeds}; {kind}"), remedy)
                }
            }
        }
    }
}

/// Millions of instructions a second.
fn speed(nanoseconds: u64) -> u64 {
    u64::from(ROUNDS) * 2 * 1000 / nanoseconds.max(1)
}

fn shown(nanoseconds: u64) -> String {
    match speed(nanoseconds) {
        0 => "less than a million instructions a second".to_owned(),
        millions => format!("{millions} million instructions a second"),
    }
}

/// Looks and tries. Blocks for up to 3 s.
pub(super) fn examine() -> Kvm {
    let module = ["kvm_pvm", "kvm_intel", "kvm_amd"]
        .into_iter()
        .find(|name| std::path::Path::new("/sys/module").join(name).exists());
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let hardware = flags
        .lines()
        .find(|line| line.starts_with("flags"))
        .is_some_and(|line| line.split_whitespace().any(|flag| flag == "vmx" || flag == "svm"));
    let outcome = match fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => attempt(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Outcome::Absent("no /dev/kvm".to_owned()),
        Err(error) => Outcome::Absent(format!("/dev/kvm can't be opened: {error}")),
    };
    Kvm { module, hardware, outcome }
}

/// What child and parent share: written by the child as it goes, read when it ended or was killed.
#[repr(C)]
struct Progress {
    stage: AtomicU64,
    errno: AtomicU64,
    exit_reason: AtomicU64,
    kernel: AtomicU64,
    user: AtomicU64,
}

#[cfg(not(target_arch = "x86_64"))]
fn attempt() -> Outcome {
    Outcome::Absent("only examined on x86_64".to_owned())
}

#[cfg(target_arch = "x86_64")]
fn attempt() -> Outcome {
    use rustix::{
        mm::{MapFlags, ProtFlags, mmap_anonymous, munmap},
        process::{Pid, Signal, WaitOptions, kill_process, waitpid},
    };
    let size = size_of::<Progress>();
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let shared = match unsafe {
        mmap_anonymous(std::ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)
    } {
        Ok(shared) => shared,
        Err(error) => return Outcome::Stuck(0, error.to_string()),
    };
    // SAFETY: the mapping is large and aligned enough, zeroed, made of atomics only, and unmapped after the last use.
    let progress = unsafe { &*shared.cast::<Progress>() };
    // SAFETY: the child calls nothing that allocates or takes a lock (machine::run is system calls on its own stack and
    // mappings), and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        machine::run(progress);
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let outcome = match Pid::from_raw(child).filter(|_| child > 0) {
        None => Outcome::Stuck(0, io::Error::last_os_error().to_string()),
        Some(pid) => {
            let begin = Instant::now();
            let mut ended = false;
            while !ended && begin.elapsed() < LIMIT {
                ended = !matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None));
                if !ended {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            if !ended {
                // KVM_RUN returns for a deadly signal, so the wait is short.
                let _ = kill_process(pid, Signal::KILL);
                let _ = waitpid(Some(pid), WaitOptions::empty());
            }
            told(progress, ended)
        }
    };
    // SAFETY: exactly the mapping made above; `progress` is not used any more.
    let _ = unsafe { munmap(shared, size) };
    outcome
}

fn told(progress: &Progress, ended: bool) -> Outcome {
    let get = |number: &AtomicU64| number.load(Ordering::Acquire);
    let stage = get(&progress.stage);
    if stage > 7 {
        return Outcome::Ran { kernel: get(&progress.kernel), user: get(&progress.user) };
    }
    let why = match (ended, get(&progress.errno), get(&progress.exit_reason)) {
        (false, _, _) => format!("given up after {LIMIT:?}"),
        (true, 0, reason) => format!("KVM exit reason {reason}"),
        (true, errno, _) => io::Error::from_raw_os_error(i32::try_from(errno).unwrap_or(0)).to_string(),
    };
    Outcome::Stuck(stage, why)
}

#[cfg(target_arch = "x86_64")]
mod machine {
    //! The throwaway machine. No allocation, no locks: this runs in a fork of a program with threads.

    use super::{Progress, ROUNDS};
    use std::{
        ptr,
        sync::atomic::{AtomicU64, Ordering},
    };

    const CREATE_VM: u64 = 0xae01;
    const GET_VCPU_MMAP_SIZE: u64 = 0xae04;
    const CREATE_VCPU: u64 = 0xae41;
    const SET_TSS_ADDR: u64 = 0xae47;
    const SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
    const RUN: u64 = 0xae80;
    const SET_REGS: u64 = 0x4090_ae82;
    const GET_SREGS: u64 = 0x8138_ae83;
    const SET_SREGS: u64 = 0x4138_ae84;
    const EXIT_IO: u32 = 2;
    const PORT: u8 = 0x10;

    const MEMORY: usize = 64 << 10;
    const TABLES: u64 = 0x1000;
    const GDT: u64 = 0x4000;
    const REAL: u64 = 0x5000;
    const KERNEL: u64 = 0x5100;
    const USER: u64 = 0x6000;
    const KERNEL_STACK: u64 = 0x8000;

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Segment {
        base: u64,
        limit: u32,
        selector: u16,
        kind: u8,
        present: u8,
        dpl: u8,
        db: u8,
        s: u8,
        l: u8,
        g: u8,
        avl: u8,
        unusable: u8,
        padding: u8,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Table {
        base: u64,
        limit: u16,
        padding: [u16; 3],
    }

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct SpecialRegisters {
        cs: Segment,
        data: [Segment; 5], // ds es fs gs ss
        tr: Segment,
        ldt: Segment,
        gdt: Table,
        idt: Table,
        cr0: u64,
        cr2: u64,
        cr3: u64,
        cr4: u64,
        cr8: u64,
        efer: u64,
        apic_base: u64,
        interrupts: [u64; 4],
    }

    #[repr(C)]
    #[derive(Default)]
    struct Registers {
        general: [u64; 16], // rax rbx rcx rdx rsi rdi rsp rbp r8..r15
        rip: u64,
        rflags: u64,
    }

    #[repr(C)]
    struct MemoryRegion {
        slot: u32,
        flags: u32,
        guest: u64,
        size: u64,
        host: u64,
    }

    const _: () = assert!(size_of::<SpecialRegisters>() == 0x138 && size_of::<Registers>() == 0x90);

    /// Makes and runs the machine, noting each stage before it begins.
    pub(super) fn run(progress: &Progress) {
        if let Err(errno) = stages(progress) {
            progress.errno.store(u64::from(errno.unsigned_abs()), Ordering::Release);
        }
    }

    fn stages(progress: &Progress) -> Result<(), i32> {
        let at = |stage| progress.stage.store(stage, Ordering::Release);
        at(1);
        // SAFETY: a literal path.
        let kvm =
            checked(i64::from(unsafe { libc::open(c"/dev/kvm".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) }))?;
        at(2);
        let vm = ioctl(kvm, CREATE_VM, 0)?;
        at(3);
        // Only Intel's real mode needs it; elsewhere it may be refused.
        let _ = ioctl(vm, SET_TSS_ADDR, 0xfffb_d000);
        let memory = map(-1, MEMORY)?;
        fill(memory);
        let region = MemoryRegion { slot: 0, flags: 0, guest: 0, size: MEMORY as u64, host: memory as u64 };
        ioctl(vm, SET_USER_MEMORY_REGION, ptr::from_ref(&region) as u64)?;
        at(4);
        let cpu = ioctl(vm, CREATE_VCPU, 0)?;
        let run_size = usize::try_from(ioctl(kvm, GET_VCPU_MMAP_SIZE, 0)?).unwrap_or(4096);
        let shared = map(cpu, run_size)?;
        let mut special = SpecialRegisters::default();
        ioctl(cpu, GET_SREGS, ptr::from_mut(&mut special) as u64)?;

        at(5);
        special.cs.base = 0;
        special.cs.selector = 0;
        start(cpu, &special, REAL)?;
        out(cpu, shared, 1, progress)?;

        at(6);
        long_mode(&mut special);
        start(cpu, &special, KERNEL)?;
        timed(&progress.kernel, || out(cpu, shared, 2, progress))?;
        at(7);
        timed(&progress.user, || out(cpu, shared, 3, progress))?;
        at(8);
        Ok(())
    }

    fn start(cpu: i32, special: &SpecialRegisters, rip: u64) -> Result<(), i32> {
        ioctl(cpu, SET_SREGS, ptr::from_ref(special) as u64)?;
        let mut registers = Registers { rip, rflags: 2, ..Registers::default() };
        registers.general[6] = KERNEL_STACK;
        ioctl(cpu, SET_REGS, ptr::from_ref(&registers) as u64).map(drop)
    }

    fn long_mode(special: &mut SpecialRegisters) {
        let segment = Segment { limit: u32::MAX, present: 1, s: 1, g: 1, ..Segment::default() };
        special.cs = Segment { selector: 0x08, kind: 0xb, l: 1, ..segment };
        special.data = [Segment { selector: 0x10, kind: 0x3, db: 1, ..segment }; 5];
        special.gdt = Table { base: GDT, limit: 5 * 8 - 1, padding: [0; 3] };
        special.cr3 = TABLES;
        special.cr4 |= 1 << 5; // PAE
        special.cr0 |= 1 << 31 | 1; // PG, PE
        special.efer |= 1 << 8 | 1 << 10; // LME, LMA
    }

    fn fill(memory: *mut u8) {
        let put = |at: u64, bytes: &[u8]| {
            let offset = usize::try_from(at).unwrap_or(0);
            // SAFETY: every offset and length below lies within MEMORY bytes.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), memory.add(offset), bytes.len()) };
        };
        // Present, writable, for user mode too; the last level is one 2 MiB page at 0.
        put(TABLES, &(0x2000_u64 | 7).to_le_bytes());
        put(0x2000, &(0x3000_u64 | 7).to_le_bytes());
        put(0x3000, &(7_u64 | 1 << 7).to_le_bytes());
        for (index, descriptor) in [
            0,
            0x00af_9a00_0000_ffff,
            0x00cf_9200_0000_ffff,
            0x00af_fa00_0000_ffff,
            0x00cf_f200_0000_ffff_u64,
        ]
        .iter()
        .enumerate()
        {
            put(GDT + 8 * index as u64, &descriptor.to_le_bytes());
        }
        let [r0, r1, r2, r3] = ROUNDS.to_le_bytes();
        // mov al, 1; out PORT, al; hlt
        put(REAL, &[0xb0, 1, 0xe6, PORT, 0xf4]);
        // mov ecx, ROUNDS; dec ecx; jnz -4; mov al, 2; out PORT, al
        put(KERNEL, &[0xb9, r0, r1, r2, r3, 0xff, 0xc9, 0x75, 0xfc, 0xb0, 2, 0xe6, PORT]);
        // push 0x23; push 0x7000; push 0x3002 (IOPL 3); push 0x1b; push USER; iretq
        put(
            KERNEL + 13,
            &[
                0x6a, 0x23, 0x68, 0, 0x70, 0, 0, 0x68, 2, 0x30, 0, 0, 0x6a, 0x1b, 0x68, 0, 0x60, 0, 0, 0x48,
                0xcf,
            ],
        );
        // The same loop; mov al, 3; out PORT, al; jmp to itself
        put(USER, &[0xb9, r0, r1, r2, r3, 0xff, 0xc9, 0x75, 0xfc, 0xb0, 3, 0xe6, PORT, 0xeb, 0xfe]);
    }

    /// Runs until the guest writes `expected` to the port; any other exit ends the trial.
    fn out(cpu: i32, shared: *const u8, expected: u8, progress: &Progress) -> Result<(), i32> {
        loop {
            match ioctl(cpu, RUN, 0) {
                Err(libc::EINTR) => continue,
                done => done?,
            };
            // SAFETY: struct kvm_run is at least a page; exit_reason is the u32 at 8, the io union begins at 32 with its
            // data offset at 40 (within the mapping, as the kernel promises).
            let (reason, port, value) = unsafe {
                let reason = shared.add(8).cast::<u32>().read_volatile();
                let port = shared.add(34).cast::<u16>().read_volatile();
                let data = shared.add(40).cast::<u64>().read_volatile();
                let value = if reason == EXIT_IO {
                    shared.add(usize::try_from(data).unwrap_or(0)).read_volatile()
                } else {
                    0
                };
                (reason, port, value)
            };
            progress.exit_reason.store(u64::from(reason), Ordering::Release);
            return if reason == EXIT_IO && port == u16::from(PORT) && value == expected {
                Ok(())
            } else {
                Err(0)
            };
        }
    }

    fn timed(into: &AtomicU64, step: impl FnOnce() -> Result<(), i32>) -> Result<(), i32> {
        let begin = std::time::Instant::now();
        step()?;
        into.store(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
        Ok(())
    }

    fn map(fd: i32, size: usize) -> Result<*mut u8, i32> {
        let flags = if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS } else { libc::MAP_SHARED };
        // SAFETY: a fresh mapping at an address of the kernel's choice; this process keeps it until it ends.
        let at =
            unsafe { libc::mmap(ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
        if at == libc::MAP_FAILED { Err(errno()) } else { Ok(at.cast()) }
    }

    fn ioctl(fd: i32, request: u64, argument: u64) -> Result<i32, i32> {
        // SAFETY: every request used takes a number or a pointer to the struct built for it, alive during the call.
        checked(i64::from(unsafe { libc::ioctl(fd, request, argument) }))
    }

    fn checked(result: i64) -> Result<i32, i32> {
        match i32::try_from(result) {
            Ok(value) if value >= 0 => Ok(value),
            _ => Err(errno()),
        }
    }

    fn errno() -> i32 {
        std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_is_judged_by_what_it_ran() {
        let kvm = |outcome| Kvm { module: Some("kvm_intel"), hardware: true, outcome };
        assert!(kvm(Outcome::Ran { kernel: 1_000_000, user: 1_000_000 }).usable());
        // 2 million instructions in 2 s: emulated.
        assert!(!kvm(Outcome::Ran { kernel: 2_000_000_000, user: 1_000_000 }).usable());
        let stuck = kvm(Outcome::Stuck(7, "given up".into()));
        assert!(!stuck.usable());
        assert!(stuck.check().found.contains("never starts user mode"));
    }

    #[test]
    fn the_trial_ends_in_time_on_any_host() {
        let begin = Instant::now();
        let found = examine();
        assert!(begin.elapsed() < LIMIT * 2);
        assert!(!found.check().found.is_empty());
    }
}
