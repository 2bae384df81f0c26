//! The content of files over plain HTTP: `GET`, `HEAD` and `POST /files`, `POST /files/compose`.

mod compose;
mod download;
mod encoding;
mod query;
mod signature;
mod upload;

use std::{io, path::Path, sync::Arc};

use http::{Method, StatusCode, request::Parts};
use hyper::body::Incoming;

pub(crate) use compose::compose;

use crate::{
    credentials,
    guest::Guest,
    server::answer::{Answer, Refusal},
    users::User,
};
use query::Query;
use signature::Operation;

/// Answers a request to `/files`.
pub(crate) async fn serve(guest: &Arc<Guest>, head: &Parts, body: &mut Incoming) -> Result<Answer, Refusal> {
    let query = Query::parse(head.uri.query().unwrap_or_default())?;
    let operation = if head.method == Method::POST { Operation::Write } else { Operation::Read };
    let now = jiff::Timestamp::now().as_second();
    signature::check(guest, credentials::token(&head.headers), &query, operation, now)?;
    let user = user(guest, query.username.as_deref())?;
    match operation {
        Operation::Read => download::serve(guest, &user, &query, head).await,
        Operation::Write => upload::serve(guest, &user, &query, &head.headers, body).await,
    }
}

fn user(guest: &Guest, name: Option<&str>) -> Result<User, Refusal> {
    guest.user(name).map_err(|err| Refusal::unauthorized(err.to_string()))
}

fn resolve(guest: &Guest, path: &str, user: &User) -> Result<std::path::PathBuf, Refusal> {
    guest.resolve(path, user).map_err(|err| Refusal::bad_request(err.to_string()))
}

/// Runs `work` where it may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|err| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, err.to_string()))?
}

/// The answer to a failed call on `path`.
fn failed(what: &str, path: &Path, err: &io::Error) -> Refusal {
    let shown = path.display();
    let (status, message) = match err.raw_os_error() {
        Some(libc::ENOENT) => (StatusCode::NOT_FOUND, format!("path '{shown}' does not exist")),
        Some(libc::ENOSPC | libc::EDQUOT) => {
            (StatusCode::INSUFFICIENT_STORAGE, format!("{what} '{shown}': not enough disk space available"))
        }
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => {
            (StatusCode::FORBIDDEN, format!("{what} '{shown}': {err}"))
        }
        Some(
            libc::ENOTDIR
            | libc::EISDIR
            | libc::ENAMETOOLONG
            | libc::EINVAL
            | libc::ELOOP
            | libc::ENXIO
            | libc::ETXTBSY
            | libc::EFBIG,
        ) => (StatusCode::BAD_REQUEST, format!("{what} '{shown}': {err}")),
        _ if err.kind() == io::ErrorKind::NotADirectory => {
            (StatusCode::BAD_REQUEST, format!("{what} '{shown}': {err}"))
        }
        _ => (StatusCode::INTERNAL_SERVER_ERROR, format!("{what} '{shown}': {err}")),
    };
    Refusal::new(status, message)
}
