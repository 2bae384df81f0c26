//! The aenv commands, over the public API only.
