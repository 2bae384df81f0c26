//! PID 1 of the guests in these tests: obeys commands left in a mailbox on /dev/vda, so that no network and no root is
//! needed to drive it. Compiled by the tests with `rustc`, static; put over the kit's own /init.
//!
//! Mailbox: block 0 holds `<number> <verb> [argument]\n`, block 1 gets `<number> <answer>\n` (4 KiB each, NUL-padded).

use std::{
    ffi::{CString, c_char, c_int, c_long, c_ulong, c_void},
    fs::File,
    io::Write,
    os::fd::AsRawFd,
    time::Duration,
};

unsafe extern "C" {
    fn mount(source: *const c_char, target: *const c_char, kind: *const c_char, flags: c_ulong, data: *const c_void) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn reboot(how: c_int) -> c_int;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn pread(fd: c_int, buffer: *mut u8, length: usize, offset: i64) -> isize;
    fn pwrite(fd: c_int, buffer: *const u8, length: usize, offset: i64) -> isize;
}

const FINIT_MODULE: c_long = 313;
const POWER_OFF: c_int = 0x4321_fedc;
const RESTART: c_int = 0x0123_4567;
const READ_WRITE_DIRECT: c_int = 0o2 | 0o40000;
const BLOCK: usize = 4096;

/// O_DIRECT wants aligned memory.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

fn main() {
    let mounted = |source: &str, target: &str, kind: &str| {
        let word = |text: &str| CString::new(text).unwrap();
        let (source, target, kind) = (word(source), word(target), word(kind));
        // SAFETY: all pointers are to live strings.
        unsafe { mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    };
    mounted("dev", "/dev", "devtmpfs");
    mounted("proc", "/proc", "proc");
    mounted("sys", "/sys", "sysfs");
    for name in std::fs::read_to_string("/etc/aenv/modules").unwrap_or_default().lines() {
        if let Ok(module) = File::open(format!("/lib/modules/{name}")) {
            // SAFETY: an open descriptor and a literal.
            unsafe { syscall(FINIT_MODULE, module.as_raw_fd(), c"".as_ptr(), 0) };
        }
    }
    println!("mailbox guest is up");
    let mailbox = CString::new("/dev/vda").unwrap();
    // SAFETY: a live string.
    let mailbox = unsafe { open(mailbox.as_ptr(), READ_WRITE_DIRECT) };
    let (mut memory, mut last) = (String::from("nothing"), 0);
    let mut ballast = Vec::new();
    loop {
        let mut block = Block([0; BLOCK]);
        // SAFETY: the buffer has BLOCK bytes.
        unsafe { pread(mailbox, block.0.as_mut_ptr(), BLOCK, 0) };
        let text = String::from_utf8_lossy(&block.0);
        let line = text.lines().next().unwrap_or("").trim_end_matches('\0');
        let mut words = line.splitn(3, ' ');
        let number: u64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        let (verb, argument) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        if number == last {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        }
        last = number;
        let answer = match verb {
            "remember" => {
                memory = argument.to_owned();
                "ok".to_owned()
            }
            "recall" => memory.clone(),
            "print" => {
                println!("{argument}");
                "ok".to_owned()
            }
            "flood" => {
                let line = [b'z'; 1024];
                for _ in 0..argument.parse().unwrap_or(0) {
                    std::io::stdout().write_all(&line).unwrap();
                }
                "ok".to_owned()
            }
            "dirty" => {
                ballast.push(vec![0xa5_u8; argument.parse::<usize>().unwrap() << 20]);
                "ok".to_owned()
            }
            "cmdline" => std::fs::read_to_string("/proc/cmdline").unwrap(),
            "drives" => {
                let mut found = Vec::new();
                for letter in 'a'..='z' {
                    let size = std::fs::read_to_string(format!("/sys/block/vd{letter}/size"));
                    let read_only = std::fs::read_to_string(format!("/sys/block/vd{letter}/ro"));
                    if let (Ok(size), Ok(read_only)) = (size, read_only) {
                        found.push(format!("{}:{}", size.trim(), read_only.trim()));
                    }
                }
                found.join(",")
            }
            "random" => format!("{:?}", std::collections::hash_map::RandomState::new()).len().to_string(),
            // SAFETY: no memory is involved.
            "poweroff" => unsafe { reboot(POWER_OFF).to_string() },
            // SAFETY: no memory is involved.
            "reboot" => unsafe { reboot(RESTART).to_string() },
            // The end of PID 1 is the kernel's panic.
            "panic" => std::process::exit(1),
            other => format!("unknown verb {other}"),
        };
        let mut block = Block([0; BLOCK]);
        let text = format!("{number} {answer}\n");
        block.0[..text.len()].copy_from_slice(text.as_bytes());
        // SAFETY: the buffer has BLOCK bytes.
        unsafe { pwrite(mailbox, block.0.as_ptr(), BLOCK, BLOCK as i64) };
    }
}
