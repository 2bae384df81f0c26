//! Which kernel modules the guest needs, and in which order they load.
//!
//! A package carries no `modules.dep` (depmod writes it at installation, which we never do), so the `depends=` words
//! of each module's `.modinfo` section are followed. A module that the kernel has built in needs no file.

use anyhow::{Context, Result, bail, ensure};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read,
    path::{Path, PathBuf},
};

/// Without these no guest of ours runs.
const REQUIRED: &[&str] = &["virtio_mmio", "virtio_blk", "virtio_net", "overlay"];
/// Useful where the kernel has them. vsock is how a guest on Firecracker is reached.
const OPTIONAL: &[&str] = &[
    "virtio_console",
    "virtio_rng",
    "virtio_balloon",
    "vsock",
    "vmw_vsock_virtio_transport_common",
    "vmw_vsock_virtio_transport",
];
/// A module larger than this is damaged or hostile.
const LARGEST: u64 = 64 << 20;

/// One module, unpacked.
pub(super) struct Module {
    /// Its name as the kernel knows it: underscores, no suffix.
    pub(super) name: String,
    /// The ELF object.
    pub(super) content: Vec<u8>,
}

/// The modules under `tree` (a kernel's `lib/modules/<release>`), dependencies first.
pub(super) fn collect(tree: &Path) -> Result<Vec<Module>> {
    chosen(tree, REQUIRED, OPTIONAL)
}

/// The modules of these names under `tree`, dependencies first; what is built in needs none.
pub(super) fn chosen(tree: &Path, required: &[&str], optional: &[&str]) -> Result<Vec<Module>> {
    let files = files(tree)?;
    let built_in = built_in(tree);
    let mut chosen =
        Selection { files: &files, built_in: &built_in, seen: BTreeSet::new(), order: Vec::new() };
    for name in required {
        ensure!(
            chosen.add(name)?,
            "the kernel package has no module `{name}`, which is needed; \
             a Debian cloud kernel (linux-image-cloud-amd64) has it"
        );
    }
    for name in optional {
        chosen.add(name)?;
    }
    Ok(chosen.order)
}

struct Selection<'a> {
    files: &'a BTreeMap<String, PathBuf>,
    built_in: &'a BTreeSet<String>,
    seen: BTreeSet<String>,
    order: Vec<Module>,
}

impl Selection<'_> {
    /// Adds a module after what it depends on. False when the kernel has no such thing.
    fn add(&mut self, name: &str) -> Result<bool> {
        if self.built_in.contains(name) || !self.seen.insert(name.to_owned()) {
            return Ok(true);
        }
        let Some(path) = self.files.get(name) else { return Ok(false) };
        let content = unpack(path)?;
        for needed in depends(&content).with_context(|| format!("reading {}", path.display()))? {
            if !self.add(&needed)? {
                bail!("module `{name}` depends on `{needed}`, which the package lacks");
            }
        }
        self.order.push(Module { name: name.to_owned(), content: unsigned(content)? });
        Ok(true)
    }
}

/// Every module file by the kernel's name for it.
fn files(tree: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for entry in walkdir::WalkDir::new(tree.join("kernel")) {
        let entry = entry.context("listing the package's modules")?;
        let file = entry.file_name().to_string_lossy();
        if let Some((stem, "ko" | "ko.xz" | "ko.zst")) = file.split_once('.') {
            found.insert(stem.replace('-', "_"), entry.path().to_owned());
        }
    }
    Ok(found)
}

fn built_in(tree: &Path) -> BTreeSet<String> {
    // Its absence only means that nothing is known to be built in.
    let list = fs::read_to_string(tree.join("modules.builtin")).unwrap_or_default();
    list.lines()
        .filter_map(|line| line.rsplit('/').next()?.strip_suffix(".ko").map(|name| name.replace('-', "_")))
        .collect()
}

fn unpack(path: &Path) -> Result<Vec<u8>> {
    let packed = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let mut content = Vec::new();
    match path.extension().and_then(|word| word.to_str()) {
        Some("xz") => lzma_rust2::XzReader::new(&packed[..], true).take(LARGEST).read_to_end(&mut content),
        Some("zst") => zstd::Decoder::new(&packed[..])?.take(LARGEST).read_to_end(&mut content),
        _ => return Ok(packed),
    }
    .with_context(|| format!("unpacking {}", path.display()))?;
    Ok(content)
}

/// Cuts off the signature (include/linux/module_signature.h): checking it costs an emulated guest 10 ms a module and
/// proves nothing to it, because the node measures the whole initramfs. The guest's kernel is marked tainted (E).
fn unsigned(mut module: Vec<u8>) -> Result<Vec<u8>> {
    const MARK: &[u8] = b"~Module signature appended~\n";
    const DESCRIPTION: usize = 12;
    if let Some(signed) = module.strip_suffix(MARK) {
        let length = signed.last_chunk::<4>().context("a module is nothing but a signature mark")?;
        let signature = usize::try_from(u32::from_be_bytes(*length))?;
        let end =
            signed.len().checked_sub(DESCRIPTION + signature).context("a module's signature is damaged")?;
        module.truncate(end);
    }
    Ok(module)
}

/// The names in the `depends=` word of the `.modinfo` section.
fn depends(module: &[u8]) -> Result<Vec<String>> {
    let modinfo =
        section(module, b".modinfo").context("it is no 64-bit ELF object with a .modinfo section")?;
    let names =
        modinfo.split(|byte| *byte == 0).find_map(|word| word.strip_prefix(b"depends=")).unwrap_or(b"");
    let names = std::str::from_utf8(names)?;
    Ok(names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect())
}

/// A section of a little-endian ELF64 file; `None` for anything malformed.
fn section<'a>(elf: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(len)?)?;
        let mut word = [0; 8];
        word[..len].copy_from_slice(bytes);
        usize::try_from(u64::from_le_bytes(word)).ok()
    };
    let (table, size, count, names) =
        (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?, number(0x3e, 2)?);
    let header = |index: usize| table.checked_add(index.checked_mul(size)?);
    let content = |index: usize| -> Option<&'a [u8]> {
        let at = header(index)?;
        let offset = number(at.checked_add(0x18)?, 8)?;
        elf.get(offset..offset.checked_add(number(at.checked_add(0x20)?, 8)?)?)
    };
    let names = content(names)?;
    (0..count).find_map(|index| {
        let name = names.get(number(header(index)?, 4)?..)?;
        (name.strip_prefix(wanted)?.first() == Some(&0)).then(|| content(index))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_cut_off_and_nothing_else() {
        let mut signed = b"module".to_vec();
        signed.extend_from_slice(&[9; 5]);
        signed.extend_from_slice(&[0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 5]);
        signed.extend_from_slice(b"~Module signature appended~\n");
        assert_eq!(unsigned(signed).unwrap(), b"module");
        assert_eq!(unsigned(b"module".to_vec()).unwrap(), b"module");
        let lying = [&[0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 9, 5], &b"~Module signature appended~\n"[..]].concat();
        assert!(unsigned(lying).is_err());
    }

    #[test]
    fn garbage_has_no_sections() {
        assert!(section(b"", b".modinfo").is_none());
        assert!(section(&[b"\x7fELF\x02\x01".as_slice(), &[0xff; 100]].concat(), b".modinfo").is_none());
    }
}
