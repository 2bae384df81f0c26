//! Snapshot manifests and memory capture.
