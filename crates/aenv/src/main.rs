//! The one program: CLI and the roles up, server, storaged.
fn main() {}
