//! Why an operation was refused or failed.

use crate::export::ExportError;
use crate::source::LayerError;
use crate::upper_dir::UpperError;

/// Why an operation was refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name can't be one.
    #[error("{0:?} can't name an export: use 1 to 128 letters, digits, dots, dashes and underscores")]
    BadName(String),
    /// A value in the request makes no sense.
    #[error("{0}")]
    BadRequest(String),
    /// No export has that name.
    #[error("there is no export named {0}; open it first")]
    Unknown(String),
    /// The name stands for something else.
    #[error("export {name} exists with another {what}; close it or choose another name")]
    Different {
        /// The export.
        name: String,
        /// What differs.
        what: &'static str,
    },
    /// Only writable exports can be sealed.
    #[error("export {0} is read-only: there is nothing to seal")]
    ReadOnly(String),
    /// A bound was reached.
    #[error("{0}")]
    TooMany(String),
    /// A layer can't be read.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The upper can't be used.
    #[error(transparent)]
    Upper(#[from] UpperError),
    /// The layers don't make a stack, or a seal failed.
    #[error("export {name}: {source}")]
    Stack {
        /// The export.
        name: String,
        /// The cause.
        source: aenv_overlaybd::Error,
    },
    /// Making data durable failed.
    #[error("flushing export {name}: {source}; the disk may be failing")]
    Flush {
        /// The export.
        name: String,
        /// The cause.
        source: std::io::Error,
    },
    /// Some exports are open, so the process can't end.
    #[error("{} exports are open ({}); end their VMs first", .0.len(), .0.iter().take(5).cloned().collect::<Vec<_>>().join(", "))]
    Busy(Vec<String>),
    /// The process is ending and takes no new exports.
    #[error("storaged is ending; start it again")]
    Ending,
    /// It could not be exported, or is in use.
    #[error(transparent)]
    Export(#[from] ExportError),
}
