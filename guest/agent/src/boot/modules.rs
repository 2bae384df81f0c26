//! Kernel modules of the initramfs.

use std::{fs::File, io, path::Path};

use crate::console::say;

/// One path below `/lib/modules` or absolute path a line, loaded in this order; `#` starts a comment. Parameters may
/// follow the path.
const LIST: &str = "/etc/aenv/modules";

/// Loads what [`LIST`] names. Dependencies are the list's order: there is no modprobe here.
pub(super) fn load_listed() {
    let Ok(list) = std::fs::read_to_string(LIST) else { return };
    for line in list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (name, parameters) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        if let Err(err) = load(name, parameters.trim()) {
            say(&format!("module {name}: {err}"));
        }
    }
}

fn load(name: &str, parameters: &str) -> io::Result<()> {
    let path = Path::new("/lib/modules").join(name);
    let parameters = std::ffi::CString::new(parameters)?;
    match rustix::system::finit_module(File::open(path)?, &parameters, 0) {
        // Built in, or loaded already.
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(err) => Err(err.into()),
    }
}
