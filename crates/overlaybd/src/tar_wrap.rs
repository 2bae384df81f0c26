//! Layers as registries hold them: often the one file of a tar archive, so that tools that expect tar accept them.
//!
//! Upstream writes `pax header | pax record "size" | header | layer | two zero blocks`; converters of containerd write
//! one header only. The blob's own bytes say which; what follows the file is not looked at. Source: `tar_file.cpp` of
//! containerd/overlaybd, POSIX pax for the fields.

use std::io;
use std::sync::Arc;

use crate::Error;
use crate::io::ReadAt;

const BLOCK: u64 = 512;
/// Extended headers that may stand before the file.
const MAX_EXTENDED: usize = 4;
/// Bytes of one extended header's records.
const MAX_RECORDS: u64 = 64 << 10;

/// The layer's bytes in `source`: itself, or the first file when it is a tar archive.
pub(crate) fn unwrap(source: Arc<dyn ReadAt>) -> Result<Arc<dyn ReadAt>, Error> {
    let size = source.size().map_err(Error::io("reading the layer's size"))?;
    Ok(match first_file(&*source, size)? {
        None => source,
        Some((start, len)) => Arc::new(Section { source, start, len }),
    })
}

/// Start and length of the first file of a tar archive; `None` when it is none.
fn first_file(source: &dyn ReadAt, size: u64) -> Result<Option<(u64, u64)>, Error> {
    let bad = |at: u64, what: &str| Err(Error::BadLayer(format!("the tar header at byte {at} {what}")));
    let mut at = 0;
    let mut pax_size = None;
    for _ in 0..=MAX_EXTENDED {
        let mut block = [0u8; 512];
        if size.checked_sub(at).is_none_or(|left| left < BLOCK) {
            return if at == 0 { Ok(None) } else { bad(at, "is missing: the archive is cut short") };
        }
        source.read_at(&mut block, at).map_err(Error::io("reading a layer's first bytes"))?;
        if !is_header(&block) {
            return if at == 0 { Ok(None) } else { bad(at, "is damaged") };
        }
        let Some(len) = number(&block[124..136]) else { return bad(at, "has no readable size") };
        match block[156] {
            kind @ (b'x' | b'g') => {
                if len > MAX_RECORDS || size - at - BLOCK < len {
                    return bad(at, "announces more records than there can be");
                }
                let mut records = vec![0; usize::try_from(len).expect("at most 64 KiB")];
                source
                    .read_at(&mut records, at + BLOCK)
                    .map_err(Error::io("reading a layer's tar header"))?;
                if kind == b'x' {
                    pax_size = pax_record(&records, b"size=").or(pax_size);
                }
                at += BLOCK + len.next_multiple_of(BLOCK);
            }
            b'0' | 0 => {
                let len = pax_size.filter(|&size| size > 0).unwrap_or(len);
                return match (at + BLOCK).checked_add(len) {
                    Some(end) if end <= size => Ok(Some((at + BLOCK, len))),
                    _ => bad(at, &format!("announces a file of {len} bytes, the archive has {size}")),
                };
            }
            _ => return bad(at, "stands for something else than a file"),
        }
    }
    bad(at, "follows too many extended headers")
}

fn is_header(block: &[u8; 512]) -> bool {
    let sum: u64 = block
        .iter()
        .enumerate()
        .map(|(i, &byte)| if (148..156).contains(&i) { u64::from(b' ') } else { u64::from(byte) })
        .sum();
    block[257..].starts_with(b"ustar") && number(&block[148..156]) == Some(sum)
}

/// A number field: octal text, or base 256 where the first bit is set.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let mut digits = field[1..].iter();
        let value = digits.try_fold(0u64, |value, &byte| value.checked_mul(256)?.checked_add(byte.into()));
        return value.filter(|_| field[0] == 0x80);
    }
    let text = str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

/// The decimal value of the last record `length key=value\n` that `key` names.
fn pax_record(mut records: &[u8], key: &[u8]) -> Option<u64> {
    let mut found = None;
    while let Some(space) = records.iter().position(|&byte| byte == b' ') {
        let len: usize = str::from_utf8(&records[..space]).ok()?.parse().ok()?;
        let record = records.get(space + 1..len)?;
        if let Some(value) = record.strip_prefix(key) {
            found = str::from_utf8(value).ok()?.trim_end().parse().ok();
        }
        records = &records[len..];
    }
    found
}

/// A part of a file as a file.
struct Section {
    source: Arc<dyn ReadAt>,
    start: u64,
    len: u64,
}

impl ReadAt for Section {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let len = u64::try_from(buf.len()).unwrap_or(u64::MAX);
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "{len} bytes at {offset} reach past the {} bytes of a file in a tar archive",
                    self.len
                ),
            ));
        }
        self.source.read_at(buf, self.start + offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn distrust(&self, offset: u64, len: u64) {
        self.source.distrust(self.start.saturating_add(offset), len);
    }
}
