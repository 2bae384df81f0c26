//! What can be wrong with a layer, an upper or a stack.

use std::io;

/// Why a layer, upper or stack could not be opened, built or sealed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading or writing the underlying bytes failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The bytes are not an LSMT layer, or damaged, or of a kind this code doesn't read.
    #[error("not a usable layer: {0}; fetch or build the layer again")]
    BadLayer(String),
    /// A compressed file is damaged or of a kind this code doesn't read.
    #[error("unusable ZFile: at byte {offset}: {what}; fetch or build the layer again")]
    BadZFile {
        /// Where in the compressed file.
        offset: u64,
        /// What is wrong there.
        what: String,
    },
    /// Whoever asked for the work told it to stop. What was written so far is to be thrown away.
    #[error("stopped by its caller; the unfinished output can be deleted")]
    Cancelled,
    /// The files of a writable upper are damaged or don't belong together.
    #[error("unusable upper: {0}")]
    BadUpper(String),
    /// The layers don't belong on each other in this order.
    #[error("layers out of order: {0}; give the layers bottom first, exactly as they were written")]
    OutOfOrder(String),
    /// More layers than one stack can have.
    #[error("a stack holds at most {max} layers, this one would have {got}; merge its lower layers first")]
    TooManyLayers {
        /// Layers asked for.
        got: usize,
        /// The bound.
        max: usize,
    },
    /// An index larger than we are willing to load or write.
    #[error("the index has {got} entries, the most allowed is {max}; merge or rebuild the layer")]
    IndexTooLarge {
        /// Entries found.
        got: u64,
        /// The bound.
        max: u64,
    },
    /// A size or position that is not a whole number of sectors, or out of range.
    #[error("{0}")]
    BadRange(String),
    /// The commit step given to a seal failed; the upper goes on as before.
    #[error("could not put the sealed layer in place: {0}")]
    Commit(io::Error),
}

impl Error {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// An `io::Error` for callers that speak only that, keeping the kind where there is one.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::Io { source, .. } => source.kind(),
            Error::Commit(source) => source.kind(),
            Error::BadRange(_) => io::ErrorKind::InvalidInput,
            Error::Cancelled => io::ErrorKind::Interrupted,
            _ => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, error)
    }
}
