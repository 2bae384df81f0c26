//! Control-plane API, guest proxy, authentication, metrics.
