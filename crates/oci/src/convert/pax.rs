//! The records of a pax header: `length key=value\n`.

use super::tar::{MAX_PIECES, Result, bad};
use std::collections::BTreeMap;

const ATTRIBUTE: &[u8] = b"SCHILY.xattr.";
/// Kinds of attributes no image needs more of.
const MAX_ATTRIBUTES: usize = 256;

#[derive(Default)]
pub(super) struct Records {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) sparse: Option<Sparse>,
}

/// A sparse file of the versions 0.0, 0.1 and 1.0.
#[derive(Default)]
pub(super) struct Sparse {
    pub(super) size: u64,
    pub(super) pieces: Vec<(u64, u64)>,
    /// 1.0: the map lies in the data.
    pub(super) in_data: bool,
}

pub(super) fn read_records(mut bytes: &[u8]) -> Result<Records> {
    let mut records = Records::default();
    let (mut sparse, mut is_sparse, mut name, mut offset) = (Sparse::default(), false, None, None);
    while !bytes.is_empty() {
        let (key, value, rest) = record(bytes)?;
        bytes = rest;
        match key {
            // An empty value takes back what a global header said, and none of those is heeded.
            _ if value.is_empty() && !key.starts_with(ATTRIBUTE) => {}
            b"path" => records.path = Some(value.to_vec()),
            b"linkpath" => records.link = Some(value.to_vec()),
            b"size" => records.size = Some(decimal(value)?),
            b"uid" => records.uid = Some(decimal(value)?),
            b"gid" => records.gid = Some(decimal(value)?),
            b"mtime" => records.mtime = Some(time(value)?),
            b"GNU.sparse.name" => name = Some(value.to_vec()),
            b"GNU.sparse.major" => {
                is_sparse = true;
                sparse.in_data = decimal(value)? > 0;
            }
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => {
                is_sparse = true;
                sparse.size = decimal(value)?;
            }
            b"GNU.sparse.offset" => offset = Some(decimal(value)?),
            b"GNU.sparse.numbytes" => match offset.take() {
                Some(offset) => sparse.pieces.push((offset, decimal(value)?)),
                None => return bad("a sparse file's map has a length without its offset"),
            },
            b"GNU.sparse.map" => {
                let numbers = value.split(|byte| *byte == b',').map(decimal).collect::<Result<Vec<_>>>()?;
                if !numbers.len().is_multiple_of(2) {
                    return bad("a sparse file's map has an offset without its length");
                }
                sparse.pieces = numbers.chunks(2).map(|pair| (pair[0], pair[1])).collect();
            }
            _ => {
                if let Some(attribute) = key.strip_prefix(ATTRIBUTE) {
                    records.attributes.insert(attribute.to_vec(), value.to_vec());
                }
            }
        }
        if sparse.pieces.len() > MAX_PIECES || records.attributes.len() > MAX_ATTRIBUTES {
            return bad("a pax header has too many pieces of a sparse file or too many attributes");
        }
    }
    if is_sparse {
        records.path = name.or(records.path);
        records.sparse = Some(sparse);
    }
    Ok(records)
}

fn record(bytes: &[u8]) -> Result<(&[u8], &[u8], &[u8])> {
    let malformed = || bad("a pax header is malformed");
    let Some(space) = bytes.iter().take(20).position(|byte| *byte == b' ') else { return malformed() };
    let length = usize::try_from(decimal(&bytes[..space])?).unwrap_or(usize::MAX);
    if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
        return malformed();
    }
    let record = &bytes[space + 1..length - 1];
    let Some(equals) = record.iter().position(|byte| *byte == b'=') else { return malformed() };
    Ok((&record[..equals], &record[equals + 1..], &bytes[length..]))
}

pub(super) fn decimal(text: &[u8]) -> Result<u64> {
    let number = std::str::from_utf8(text).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    match number.and_then(|text| text.parse().ok()) {
        Some(number) => Ok(number),
        None => bad(format!("{:?} should be a number", String::from_utf8_lossy(&text[..text.len().min(40)]))),
    }
}

/// Seconds with a fraction, perhaps negative.
fn time(text: &[u8]) -> Result<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut parts = text.splitn(2, |byte| *byte == b'.');
    let seconds = i64::try_from(decimal(parts.next().unwrap_or_default())?);
    let Ok(seconds) = seconds else { return bad("a time is absurd") };
    let fraction = parts.next().unwrap_or_default();
    let mut nanoseconds = 0u32;
    for n in 0..9 {
        let digit = *fraction.get(n).unwrap_or(&b'0');
        if !digit.is_ascii_digit() {
            return bad("a time's fraction is no number");
        }
        nanoseconds = nanoseconds * 10 + u32::from(digit - b'0');
    }
    Ok(match (negative, nanoseconds) {
        (false, nanoseconds) => (seconds, nanoseconds),
        (true, 0) => (-seconds, 0),
        (true, nanoseconds) => (-seconds - 1, 1_000_000_000 - nanoseconds),
    })
}
