//! Guest image, packaging, checks.
fn main() {}
