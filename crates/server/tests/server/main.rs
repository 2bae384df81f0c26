//! The server over a fake node and a fake guest, through real sockets.

mod api;
mod client;
mod cost;
mod fake;
mod guest;
mod hostile;
mod life;
mod proxy;
mod sdk;
mod streams;
