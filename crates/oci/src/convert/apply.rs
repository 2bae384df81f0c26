//! One layer's archive onto the file system below.
//!
//! What umoci does when it unpacks is done here: names are made clean first, so `..` and a leading `/` stay inside; a
//! symbolic link on the way is followed inside the root, at most 255 of them; the last part is never followed. A file
//! replaces whatever has its name, a directory joins a directory. A whiteout removes what lower layers brought and
//! spares what this layer brought, whichever comes first in the archive.

use super::tar::{self, Entry, Kind, Reader};
use crate::ext4::{self, Meta, ROOT, Volume};
use std::{
    collections::{HashSet, VecDeque},
    io::Read,
};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const MAX_SYMLINKS: u32 = 255;
const MAX_PATH: usize = 4096;
const MAX_DEPTH: usize = 1024;
/// What a mark costs in memory besides its bytes.
const MARK_COST: u64 = 64;

/// Why a layer can't be applied.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Archive(#[from] tar::Error),
    #[error("{path:?}: {reason}")]
    Entry { path: String, reason: String },
    #[error(transparent)]
    Volume(#[from] ext4::Error),
    #[error("cancelled")]
    Cancelled,
}

type Result<T> = std::result::Result<T, Error>;

fn refused<T>(path: &[u8], reason: impl Into<String>) -> Result<T> {
    let path = String::from_utf8_lossy(&path[..path.len().min(MAX_PATH)]).into_owned();
    Err(Error::Entry { path, reason: reason.into() })
}

/// Applies `archive` up to its end; bytes after the end are left unread.
pub(super) fn apply(
    archive: impl Read,
    volume: &mut Volume,
    max_bytes: u64,
    cancelled: &dyn Fn() -> bool,
) -> Result<()> {
    let mut layer = Layer { volume, upper: HashSet::new(), buffer: vec![0; 128 << 10], left: max_bytes };
    let mut reader = Reader::new(archive);
    while let Some(entry) = reader.next()? {
        if cancelled() {
            return Err(Error::Cancelled);
        }
        layer.entry(&mut reader, &entry, cancelled)?;
    }
    Ok(())
}

struct Layer<'a> {
    volume: &'a mut Volume,
    /// Names that this layer brought, and all directories on the way to them.
    upper: HashSet<(u32, Vec<u8>)>,
    buffer: Vec<u8>,
    /// Bytes of content that may still come.
    left: u64,
}

/// A directory, and the names that led to it.
struct Place {
    directory: u32,
    way: Vec<(u32, Vec<u8>)>,
}

impl Layer<'_> {
    fn entry<R: Read>(
        &mut self,
        reader: &mut Reader<R>,
        entry: &Entry,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<()> {
        let mut parts = clean(&entry.path)?;
        let meta = Meta {
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            attributes: entry.attributes.clone(),
        };
        let Some(name) = parts.pop() else {
            if entry.kind != Kind::Directory {
                return refused(&entry.path, "the root can only be a directory");
            }
            return Ok(self.volume.set_meta(ROOT, ext4::Kind::Directory, &meta)?);
        };
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            return self.whiteout(entry, parts, (name != OPAQUE).then(|| hidden.to_vec()));
        }
        let place = self.resolve(&entry.path, parts, Some(entry.mtime))?.expect("made where missing");
        self.put(reader, entry, &place, &name, &meta, cancelled)?;
        self.mark(place, name)
    }

    fn put<R: Read>(
        &mut self,
        reader: &mut Reader<R>,
        entry: &Entry,
        place: &Place,
        name: &[u8],
        meta: &Meta,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<()> {
        let directory = place.directory;
        let there = self.volume.lookup(directory, name)?;
        if entry.kind == Kind::Directory {
            if let Some((number, ext4::Kind::Directory)) = there {
                return Ok(self.volume.set_meta(number, ext4::Kind::Directory, meta)?);
            }
            self.volume.remove(directory, name)?;
            self.volume.make_dir(directory, name, meta)?;
            return Ok(());
        }
        if entry.kind == Kind::Link {
            return self.link(entry, place, name, there);
        }
        self.volume.remove(directory, name)?;
        match entry.kind {
            Kind::File => return self.file(reader, entry, directory, name, meta, cancelled),
            Kind::Symlink => self.volume.make_symlink(directory, name, &entry.link, meta)?,
            Kind::CharDevice => {
                self.volume.make_node(directory, name, ext4::Kind::CharDevice, entry.device, meta)?
            }
            Kind::BlockDevice => {
                self.volume.make_node(directory, name, ext4::Kind::BlockDevice, entry.device, meta)?
            }
            _ => self.volume.make_node(directory, name, ext4::Kind::Fifo, (0, 0), meta)?,
        };
        Ok(())
    }

    fn link(
        &mut self,
        entry: &Entry,
        place: &Place,
        name: &[u8],
        there: Option<(u32, ext4::Kind)>,
    ) -> Result<()> {
        let mut parts = clean(&entry.link)?;
        let target = match parts.pop() {
            None => None,
            Some(last) => match self.resolve(&entry.path, parts, None)? {
                None => None,
                Some(from) => self.volume.lookup(from.directory, &last)?,
            },
        };
        let Some((number, kind)) = target else {
            let link = String::from_utf8_lossy(&entry.link).into_owned();
            return refused(&entry.path, format!("it is a hard link to {link:?}, which does not exist"));
        };
        if kind == ext4::Kind::Directory {
            return refused(&entry.path, "it is a hard link to a directory");
        }
        // A link to itself, or once more to the same: removing first would lose the file.
        if there == Some((number, kind)) {
            return Ok(());
        }
        // What stands in the link's place may be a directory that holds the link's target.
        self.volume.hold(number)?;
        self.volume.remove(place.directory, name)?;
        Ok(self.volume.name_held(place.directory, name, number, kind)?)
    }

    fn file<R: Read>(
        &mut self,
        reader: &mut Reader<R>,
        entry: &Entry,
        directory: u32,
        name: &[u8],
        meta: &Meta,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<()> {
        let mut file = self.volume.make_file(directory, name, meta)?;
        let whole = [(0, entry.size)];
        for (offset, len) in entry.pieces.as_deref().unwrap_or(&whole) {
            file.skip_to(self.volume, *offset)?;
            let mut left = *len;
            while left > 0 {
                let want = usize::try_from(left).unwrap_or(usize::MAX).min(self.buffer.len());
                let got = reader.read(&mut self.buffer[..want])?;
                if got == 0 {
                    return refused(&entry.path, "less of it is stored than its header says");
                }
                let count = got as u64;
                let Some(rest) = self.left.checked_sub(count) else {
                    return refused(
                        &entry.path,
                        "with it the layer unpacks to more bytes than the limit allows",
                    );
                };
                self.left = rest;
                file.write(self.volume, &self.buffer[..got])?;
                left -= count;
                if cancelled() {
                    return Err(Error::Cancelled);
                }
            }
        }
        file.skip_to(self.volume, entry.size)?;
        Ok(file.finish(self.volume)?)
    }

    /// `hidden` is `None` for an opaque directory.
    fn whiteout(&mut self, entry: &Entry, parts: Vec<Vec<u8>>, hidden: Option<Vec<u8>>) -> Result<()> {
        let Some(place) = self.resolve(&entry.path, parts, None)? else { return Ok(()) };
        match hidden {
            Some(name) if matches!(&name[..], b"" | b"." | b"..") => {
                refused(&entry.path, "it is a whiteout of nothing")
            }
            Some(name) => self.purge(place.directory, name),
            None => {
                for name in self.volume.names(place.directory)? {
                    self.purge(place.directory, name)?;
                }
                Ok(())
            }
        }
    }

    /// Removes what this layer did not bring.
    fn purge(&mut self, directory: u32, name: Vec<u8>) -> Result<()> {
        let mut todo = vec![(directory, name)];
        while let Some(place) = todo.pop() {
            if !self.upper.contains(&place) {
                self.volume.remove(place.0, &place.1)?;
            } else if let Some((number, ext4::Kind::Directory)) = self.volume.lookup(place.0, &place.1)? {
                todo.extend(self.volume.names(number)?.into_iter().map(|name| (number, name)));
            }
        }
        Ok(())
    }

    fn mark(&mut self, place: Place, name: Vec<u8>) -> Result<()> {
        let mut step = Some((place.directory, name));
        let mut way = place.way;
        while let Some(mark) = step {
            let bytes = MARK_COST + mark.1.len() as u64;
            if !self.upper.insert(mark) {
                break;
            }
            self.volume.charge(bytes)?;
            step = way.pop();
        }
        Ok(())
    }

    /// The directory that `parts` lead to. Missing ones are made when `make` gives their time; else there is none.
    fn resolve(
        &mut self,
        path: &[u8],
        parts: Vec<Vec<u8>>,
        make: Option<(i64, u32)>,
    ) -> Result<Option<Place>> {
        let mut todo: VecDeque<Vec<u8>> = parts.into();
        let mut place = Place { directory: ROOT, way: Vec::new() };
        let mut followed = 0;
        while let Some(part) = todo.pop_front() {
            if part == b".." {
                place.directory = place.way.pop().map_or(ROOT, |(parent, _)| parent);
                continue;
            }
            let next = match self.volume.lookup(place.directory, &part)? {
                Some((number, ext4::Kind::Directory)) => number,
                Some((number, ext4::Kind::Symlink)) => {
                    followed += 1;
                    if followed > MAX_SYMLINKS {
                        return refused(path, "more than 255 symbolic links lead to it: they go in a circle");
                    }
                    let target = self.volume.target(number)?;
                    if target.starts_with(b"/") {
                        place = Place { directory: ROOT, way: Vec::new() };
                    }
                    for part in split(&target).rev() {
                        todo.push_front(part.to_vec());
                    }
                    if todo.len() > MAX_PATH {
                        return refused(path, "symbolic links make its path too long");
                    }
                    continue;
                }
                Some(_) if make.is_none() => return Ok(None),
                Some(_) => return refused(path, "a part of its path is a file, not a directory"),
                None => {
                    let Some(mtime) = make else { return Ok(None) };
                    let meta = Meta { mode: 0o755, mtime, ..Meta::default() };
                    self.volume.make_dir(place.directory, &part, &meta)?
                }
            };
            if place.way.len() >= MAX_DEPTH {
                return refused(path, format!("it lies more than {MAX_DEPTH} directories deep"));
            }
            place.way.push((place.directory, part));
            place.directory = next;
        }
        Ok(Some(place))
    }
}

fn split(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".")
}

/// The parts of a path, without `.`; `..` takes the part before it away and ends at the root.
fn clean(path: &[u8]) -> Result<Vec<Vec<u8>>> {
    if path.len() > MAX_PATH * 4 {
        return refused(path, "its path is too long");
    }
    let mut parts: Vec<Vec<u8>> = Vec::new();
    for part in split(path) {
        if part == b".." {
            parts.pop();
        } else {
            parts.push(part.to_vec());
        }
    }
    Ok(parts)
}
