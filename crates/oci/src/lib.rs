//! OCI references, image configuration, images to root filesystems.
