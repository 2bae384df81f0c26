//! Connect and protobuf types of the guest agent, and the JSON bodies of its plain HTTP routes.
//!
//! The agent listens on [`PORT`] in every guest and speaks E2B's envd interface, so that E2B's clients work
//! unmodified; `README.md` of this crate says what we added to it. [`process`] and [`filesystem`] are generated
//! from `proto/`: messages, service traits ([`process::Process`], [`filesystem::Filesystem`]) and, with the
//! feature `client`, clients ([`process::ProcessClient`], [`filesystem::FilesystemClient`]).
//!
//! Nothing in here does I/O, and nothing in here knows the server.

pub mod http;

#[allow(missing_docs, clippy::all, clippy::pedantic, clippy::cast_possible_truncation, unreachable_pub)]
mod generated {
    connectrpc::include_generated!();
}

pub use generated::{filesystem, process};

/// The payload variants of the generated messages, under the names a reader looks for.
pub mod oneof {
    pub use crate::generated::filesystem::__buffa::oneof::watch_dir_response::Event as WatchEvent;
    pub use crate::generated::process::__buffa::oneof::process_event::Event as ProcessEvent;
    pub use crate::generated::process::__buffa::oneof::process_event::data_event::Output;
    pub use crate::generated::process::__buffa::oneof::process_input::Input;
    pub use crate::generated::process::__buffa::oneof::process_selector::Selector;
    pub use crate::generated::process::__buffa::oneof::stream_input_request::Event as StreamInputEvent;

    /// The borrowed forms, which the clients' streams hand out.
    pub mod view {
        pub use crate::generated::filesystem::__buffa::view::oneof::watch_dir_response::Event as WatchEvent;
        pub use crate::generated::process::__buffa::view::oneof::process_event::Event as ProcessEvent;
        pub use crate::generated::process::__buffa::view::oneof::process_event::data_event::Output;
    }
}

/// Port of the agent in the guest.
pub const PORT: u16 = 49983;

/// Interface version the agent is compatible with; E2B's clients choose their calls by it.
pub const ENVD_VERSION: &str = "0.6.13";

/// Time stamp of [`filesystem::EntryInfo`].
pub use buffa_types::google::protobuf::Timestamp;
