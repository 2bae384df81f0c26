//! The backend's own words on the guest kernel's command line. Pure.

/// Self-tests and subsystems of Debian's kernel that no sandbox uses and that cost an emulated CPU 5 to 125 ms each,
/// as measured with `initcall_debug`.
const SKIPPED: &[&str] = &[
    "jent_mod_init",
    "load_system_certificate_list",
    "bpf_tcp_ca_kfunc_init",
    "bpf_dummy_struct_ops_init",
    "crypto_kdf108_init",
    "blake2s_mod_init",
    "init_encrypted",
    "init_ima",
    "init_evm",
    "udmabuf_dev_init",
];

const WORDS: &[&str] = &[
    // Messages only at level 3 and worse: each character costs a trap.
    "console=ttyS0",
    "quiet",
    // A panic must end the machine: triple fault at once, which -no-reboot turns into an exit.
    "reboot=t",
    "panic=-1",
    // The counter is the host's; nothing here could calibrate it, and watching it costs.
    "tsc=reliable",
    "no_timer_check",
    // Guards against hardware that isn't there.
    "mitigations=off",
    "pci=off",
    "nowatchdog",
    "nosoftlockup",
    // With randomised layouts an emulated fork+exec is up to four times slower: translated code isn't reused.
    "norandmaps",
    // Pages are zeroed when they reach a process; zeroing them for the kernel's own use as well costs every exec.
    "init_on_alloc=0",
    "nokaslr",
    "cryptomgr.notests",
    // Checks at every copy, switch and system call that guard one guest process from another's kernel bugs.
    "hardened_usercopy=off",
    "randomize_kstack_offset=off",
    "psi=0",
    // RDRAND is the host's generator here, so /dev/random works from the first read.
    "random.trust_cpu=on",
    "audit=0",
    "lsm=capability",
];

/// The whole command line: the backend's words, then the caller's.
pub(super) fn line(tsc_khz: u64, callers: &[String]) -> String {
    let mut words: Vec<String> = WORDS.iter().map(|word| (*word).to_owned()).collect();
    if tsc_khz > 0 {
        words.push(format!("tsc_early_khz={tsc_khz}"));
    }
    words.push(format!("initcall_blacklist={}", SKIPPED.join(",")));
    words.extend(callers.iter().cloned());
    words.join(" ")
}

/// x86's COMMAND_LINE_SIZE with its NUL: the kernel cuts off the rest without a word.
pub(super) const LONGEST: usize = 2047;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_callers_words_come_last_and_there_is_room_for_them() {
        let line = line(2_300_000, &["aenv.root=/dev/vda".into()]);
        assert!(line.ends_with(" aenv.root=/dev/vda"));
        assert!(line.contains(" tsc_early_khz=2300000 "));
        assert!(line.len() < LONGEST / 2, "{} bytes", line.len());
    }
}
