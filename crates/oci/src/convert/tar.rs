//! Reading a tar archive that nobody vouches for, in one pass.
//!
//! ustar with the extensions of POSIX (pax) and GNU: long names, large numbers, sparse files in all four ways. Source:
//! POSIX.1-2017 pax, the GNU tar manual's appendix. Where writers differ, what Docker's and umoci's reader does is
//! done: global pax headers are passed over, the end is two zero blocks or the end of the input. Every length is
//! bounded before memory is taken for it.

use super::pax::{Records, Sparse, read_records};
use std::io::{self, Read};

pub(super) const SECTOR: usize = 512;
/// Of a pax header or a long name.
const MAX_HEADER: u64 = 1 << 20;
pub(super) const MAX_PIECES: usize = 1 << 18;
const MAX_SIZE: u64 = 1 << 60;

/// Why an archive can't be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}")]
    Bad(String),
    #[error(transparent)]
    Read(#[from] io::Error),
}

pub(super) type Result<T> = std::result::Result<T, Error>;

pub(super) fn bad<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Bad(what.into()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Link,
    Symlink,
    CharDevice,
    BlockDevice,
    Directory,
    Fifo,
}

/// What an archive says of one file. Its content is read from the [`Reader`] before the next entry.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) path: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: Kind,
    pub(super) mode: u16,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: (i64, u32),
    pub(super) device: (u32, u32),
    /// Bytes of the file, holes included.
    pub(super) size: u64,
    /// Where the stored bytes belong: offsets and lengths in order. `None`: all of it, from 0 on.
    pub(super) pieces: Option<Vec<(u64, u64)>>,
    pub(super) attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

pub(super) struct Reader<R> {
    input: R,
    /// Stored bytes of the current entry not read yet, and its padding.
    left: u64,
    padding: u64,
}

type Header = [u8; SECTOR];

impl<R: Read> Reader<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, left: 0, padding: 0 }
    }

    /// The next file; `None` at the end of the archive.
    pub(super) fn next(&mut self) -> Result<Option<Entry>> {
        let (mut long_path, mut long_link, mut pax) = (None, None, Records::default());
        loop {
            let Some(header) = self.header()? else { return Ok(None) };
            let size = number(&header[124..136], "size")?;
            let size = u64::try_from(size).ok().filter(|size| *size < MAX_SIZE);
            let Some(size) = size else { return bad("a size in a header is negative or absurd") };
            match header[156] {
                b'x' | b'X' => pax = read_records(&self.whole(size)?)?,
                b'g' => self.begin(size),
                b'L' => long_path = Some(text(&self.whole(size)?).to_vec()),
                b'K' => long_link = Some(text(&self.whole(size)?).to_vec()),
                b'V' | b'M' | b'N' if header[257..263] == *b"ustar " => self.begin(size),
                _ => return self.entry(&header, size, long_path, long_link, pax).map(Some),
            }
        }
    }

    /// Content of the current entry, without its holes.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> Result<usize> {
        let want = usize::try_from(self.left).unwrap_or(usize::MAX).min(buf.len());
        if want == 0 {
            return Ok(0);
        }
        let got = self.input.read(&mut buf[..want])?;
        if got == 0 {
            return bad("the archive ends within a file");
        }
        self.left -= got as u64;
        Ok(got)
    }

    fn entry(
        &mut self,
        header: &Header,
        size: u64,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
        mut pax: Records,
    ) -> Result<Entry> {
        let posix = header[257..263] == *b"ustar\0";
        let gnu = header[257..265] == *b"ustar  \0";
        let mut path = text(&header[..100]).to_vec();
        let prefix = text(&header[345..500]);
        if posix && !prefix.is_empty() {
            path = [prefix, b"/", &path].concat();
        }
        let path = pax.path.take().or(long_path).unwrap_or(path);
        let link = pax.link.take().or(long_link).unwrap_or_else(|| text(&header[157..257]).to_vec());
        let stored = pax.size.unwrap_or(size);
        if stored >= MAX_SIZE {
            return bad("a size in a pax header is absurd");
        }
        let kind = match header[156] {
            0 | b'0' | b'7' | b'S' if path.ends_with(b"/") && pax.sparse.is_none() => Kind::Directory,
            0 | b'0' | b'7' | b'S' => Kind::File,
            b'1' => Kind::Link,
            b'2' => Kind::Symlink,
            b'3' => Kind::CharDevice,
            b'4' => Kind::BlockDevice,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            other => {
                let name = String::from_utf8_lossy(&path).into_owned();
                return bad(format!(
                    "{name:?} is of type {:?}, which is none of a file system's",
                    char::from(other)
                ));
            }
        };
        let content = matches!(kind, Kind::File);
        self.begin(if content || header[156] == b'0' { stored } else { 0 });
        let (size, pieces) = match (header[156], pax.sparse.take()) {
            (b'S', _) if gnu => {
                let (real, pieces) = self.old_sparse(header)?;
                (real, Some(pieces))
            }
            (_, Some(sparse)) if content => {
                let (real, pieces) = self.sparse(sparse)?;
                (real, Some(pieces))
            }
            _ => (stored, None),
        };
        if let Some(pieces) = &pieces {
            check_pieces(pieces, size, self.left)?;
        }
        let id = |value: Option<u64>, field: &[u8], what| match value {
            Some(value) => Ok(value),
            None => number(field, what).map(i64::cast_unsigned),
        };
        let narrow = |value: u64, what: &str| match u32::try_from(value) {
            Ok(value) => Ok(value),
            Err(_) => bad(format!("the {what} {value} has more than 32 bits")),
        };
        let mtime = match pax.mtime {
            Some(time) => time,
            None => (number(&header[136..148], "time")?, 0),
        };
        let mode = number(&header[100..108], "mode")?;
        let has_device = matches!(kind, Kind::CharDevice | Kind::BlockDevice);
        let device = |field: &[u8]| match number(field, "device")? {
            value if has_device => narrow(value.cast_unsigned(), "device number"),
            _ => Ok(0),
        };
        Ok(Entry {
            path,
            link,
            kind,
            mode: u16::try_from(mode & 0o7777).expect("masked"),
            uid: narrow(id(pax.uid, &header[108..116], "owner")?, "owner")?,
            gid: narrow(id(pax.gid, &header[116..124], "group")?, "group")?,
            mtime,
            device: (device(&header[329..337])?, device(&header[337..345])?),
            size: if content { size } else { 0 },
            pieces,
            attributes: std::mem::take(&mut pax.attributes).into_iter().collect(),
        })
    }

    fn sparse(&mut self, sparse: Sparse) -> Result<(u64, Vec<(u64, u64)>)> {
        if !sparse.in_data {
            return Ok((sparse.size, sparse.pieces));
        }
        // Version 1.0: count, then offsets and lengths, a decimal number a line, in blocks before the data.
        let mut text: Vec<u8> = Vec::new();
        let mut numbers: Vec<u64> = Vec::new();
        let mut wanted = None;
        while wanted.is_none_or(|wanted| numbers.len() < wanted) {
            if self.left < SECTOR as u64 {
                return bad("a sparse file's map ends early");
            }
            let mut block = [0; SECTOR];
            self.input.read_exact(&mut block)?;
            self.left -= SECTOR as u64;
            for byte in block {
                if wanted.is_some_and(|wanted| numbers.len() == wanted) {
                    break;
                }
                if byte != b'\n' {
                    text.push(byte);
                    if text.len() > 20 {
                        return bad("a sparse file's map holds no numbers");
                    }
                    continue;
                }
                let number = super::pax::decimal(&text)?;
                text.clear();
                if wanted.is_some() {
                    numbers.push(number);
                } else {
                    let count = usize::try_from(number).unwrap_or(usize::MAX);
                    if count > MAX_PIECES {
                        return bad(format!("a sparse file has more than {MAX_PIECES} pieces"));
                    }
                    wanted = Some(count * 2);
                }
            }
        }
        Ok((sparse.size, numbers.chunks(2).map(|pair| (pair[0], pair[1])).collect()))
    }

    fn old_sparse(&mut self, header: &Header) -> Result<(u64, Vec<(u64, u64)>)> {
        let positive = |field: &[u8]| match u64::try_from(number(field, "sparse map")?) {
            Ok(value) => Ok(value),
            Err(_) => bad("a sparse file's map holds a negative number"),
        };
        let real = positive(&header[483..495])?;
        let mut pieces = Vec::new();
        let mut take = |area: &[u8]| -> Result<()> {
            for pair in area.chunks_exact(24).take_while(|pair| pair[0] != 0) {
                pieces.push((positive(&pair[..12])?, positive(&pair[12..])?));
            }
            if pieces.len() > MAX_PIECES {
                return bad(format!("a sparse file has more than {MAX_PIECES} pieces"));
            }
            Ok(())
        };
        take(&header[386..482])?;
        let mut more = header[482] != 0;
        while more {
            // These blocks are not counted in the entry's size.
            let mut block = [0; SECTOR];
            self.input.read_exact(&mut block)?;
            take(&block[..504])?;
            more = block[504] != 0;
        }
        Ok((real, pieces))
    }

    fn begin(&mut self, size: u64) {
        self.left = size;
        self.padding = size.next_multiple_of(SECTOR as u64) - size;
    }

    /// The content of a header's header.
    fn whole(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > MAX_HEADER {
            return bad(format!("a header of {size} bytes is too large; at most {MAX_HEADER} are read"));
        }
        self.begin(size);
        let mut bytes = Vec::new();
        self.input.by_ref().take(size).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != size {
            return bad("the archive ends within a header");
        }
        self.left = 0;
        Ok(bytes)
    }

    fn header(&mut self) -> Result<Option<Header>> {
        let pass = self.left + self.padding;
        if pass > 0 && io::copy(&mut self.input.by_ref().take(pass), &mut io::sink())? != pass {
            return bad("the archive ends within a file");
        }
        (self.left, self.padding) = (0, 0);
        let Some(header) = self.sector()? else { return Ok(None) };
        if header != [0; SECTOR] {
            let sum = number(&header[148..156], "checksum")?;
            let field = 148..156;
            let unsigned = |(at, byte): (usize, &u8)| if field.contains(&at) { 32 } else { i64::from(*byte) };
            let signed = |(at, byte): (usize, &u8)| {
                if field.contains(&at) { 32 } else { i64::from(byte.cast_signed()) }
            };
            let sums: [i64; 2] =
                [header.iter().enumerate().map(unsigned).sum(), header.iter().enumerate().map(signed).sum()];
            if !sums.contains(&sum) {
                return bad("a header's checksum is wrong: this is no tar archive or a damaged one");
            }
            return Ok(Some(header));
        }
        match self.sector()? {
            Some(second) if second != [0; SECTOR] => bad("a header is all zeroes, but the archive goes on"),
            _ => Ok(None),
        }
    }

    fn sector(&mut self) -> Result<Option<Header>> {
        let mut sector = [0; SECTOR];
        let mut got = 0;
        while got < SECTOR {
            match self.input.read(&mut sector[got..])? {
                0 if got == 0 => return Ok(None),
                0 => return bad("the archive ends within a header"),
                more => got += more,
            }
        }
        Ok(Some(sector))
    }
}

fn check_pieces(pieces: &[(u64, u64)], size: u64, stored: u64) -> Result<()> {
    let mut end = 0u64;
    let mut sum = 0u64;
    for (offset, len) in pieces {
        let next = offset.checked_add(*len);
        if *offset < end || next.is_none_or(|next| next > size) {
            return bad("a sparse file's pieces overlap, are out of order or lie outside of it");
        }
        end = next.expect("checked above");
        sum += len;
    }
    if sum > stored { bad("a sparse file's pieces are longer than what is stored of it") } else { Ok(()) }
}

/// Up to the first NUL.
fn text(field: &[u8]) -> &[u8] {
    &field[..field.iter().position(|byte| *byte == 0).unwrap_or(field.len())]
}

/// A number in octal digits or, marked by the first bit, in base 256.
fn number(field: &[u8], what: &str) -> Result<i64> {
    if field[0] & 0x80 != 0 {
        let negative = field[0] & 0x40 != 0;
        let mut value: i128 = if negative { -1 } else { 0 };
        for (n, byte) in field.iter().enumerate() {
            let byte = if n == 0 && !negative { byte & 0x7f } else { *byte };
            value = value << 8 | i128::from(byte);
        }
        return i64::try_from(value).or_else(|_| bad(format!("a header's {what} has more than 63 bits")));
    }
    let digits: Vec<u8> = field.iter().copied().filter(|byte| !matches!(byte, 0 | b' ')).collect();
    let mut value = 0i64;
    for digit in digits {
        if !(b'0'..=b'7').contains(&digit) {
            return bad(format!("a header's {what} is no octal number"));
        }
        value = (value << 3) | i64::from(digit - b'0');
    }
    Ok(value)
}
