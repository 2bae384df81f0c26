//! Kernel modules of the initramfs.

use std::{ffi::CString, fs, io, path::Path};

use rustix::{io::Errno, system::init_module};

use crate::console::say;

/// One path below `/lib/modules` or absolute path a line, loaded in this order; `#` starts a comment. Parameters may
/// follow the path.
const LIST: &str = "/etc/aenv/modules";

/// Loads what [`LIST`] names. Dependencies are the list's order: there is no modprobe here.
pub(super) fn load_listed() {
    let Ok(list) = fs::read_to_string(LIST) else { return };
    for line in list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (name, parameters) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        if let Err(err) = load(name, parameters.trim()) {
            say(&format!("module {name}: {err}"));
        }
    }
}

fn load(name: &str, parameters: &str) -> io::Result<()> {
    let image = fs::read(Path::new("/lib/modules").join(name))?;
    let parameters = CString::new(parameters)?;
    match init_module(unsigned(&image), &parameters) {
        // Built in, or loaded already.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        // A kernel that insists on signatures.
        Err(Errno::KEYREJECTED | Errno::NOKEY) => Ok(init_module(&image, &parameters)?),
        Err(err) => Err(err.into()),
    }
}

/// The module without its signature. The initramfs vouches for its modules; letting an emulated processor check five
/// RSA signatures took 200 ms of a cold boot.
///
/// linux/module_signature.h: the signature, 12 bytes of which the last four are its length (big-endian), a mark.
fn unsigned(image: &[u8]) -> &[u8] {
    const MARK: &[u8] = b"~Module signature appended~\n";
    const HEADER: usize = 12;
    let cut = || {
        let rest = image.strip_suffix(MARK)?;
        let length = u32::from_be_bytes(rest.last_chunk().copied()?);
        let signature = usize::try_from(length).ok()?.checked_add(HEADER)?;
        rest.get(..rest.len().checked_sub(signature)?)
    };
    cut().unwrap_or(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_cut_off_and_nothing_else() {
        let mark = b"~Module signature appended~\n";
        let signed = [&b"module"[..], b"sig", &[0; 8], &3_u32.to_be_bytes(), mark].concat();
        assert_eq!(unsigned(&signed), b"module");
        assert_eq!(unsigned(b"module"), b"module");
        let lying = [&b"module"[..], &[0; 8], &u32::MAX.to_be_bytes(), mark].concat();
        assert_eq!(unsigned(&lying), lying);
    }
}
