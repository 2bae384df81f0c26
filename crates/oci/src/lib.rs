//! OCI references, image configuration, and the way from an image to a root filesystem.
//!
//! [`prepare`] turns a [`Reference`] into a raw ext4 disk and the image's [`ImageConfig`]: fetch into an OCI layout
//! ([`registry`], or skopeo for archives), unpack as root (umoci), make a filesystem (mke2fs). It is correct rather than quick: converting layers
//! one by one without unpacking them replaces it behind [`Images`]. [`convert`] does that. [`base::build`] makes an image out of Debian
//! packages for machines that reach no registry.
//!
//! Inside out: [`Reference`], `disk::Geometry` and `sources` are pure; `layout` reads OCI layouts; `command` runs tools
//! with a deadline, cancellation and progress; `scratch` holds temporary files so that none outlives a crash for long.

#![forbid(unsafe_code)]

pub mod base;
mod command;
mod config;
pub mod convert;
mod disk;
mod error;
mod ext4;
mod fetch;
mod layout;
mod prepare;
pub mod reference;
pub mod registry;
mod scratch;
mod sources;

pub use command::Progress;
pub use config::ImageConfig;
pub use error::Error;
pub use fetch::Auth;
pub use prepare::{DEFAULT_DISK_MIB, Images, Options, Prepared, Tools, prepare};
pub use reference::Reference;
pub use scratch::sweep;
pub use tokio_util::sync::CancellationToken;
