//! `POST /files`: one file as the raw body, or several in a form.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, chown, fchown},
    path::{Path, PathBuf},
    sync::Arc,
};

use aenv_envd_proto::http::UploadedFile;
use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt, stream};
use http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, BodyStream};
use hyper::body::Incoming;

use super::{blocking, encoding, failed, query::Query, resolve};
use crate::{
    filesystem::{ensure_dirs, metadata},
    guest::Guest,
    server::answer::{Answer, BodyError, Refusal, json},
    users::User,
};

/// Collected before a write: each write is a trip to another thread.
const PIECE: usize = 512 << 10;

pub(super) async fn serve(
    guest: &Arc<Guest>,
    user: &User,
    query: &Query,
    headers: &HeaderMap,
    body: &mut Incoming,
) -> Result<Answer, Refusal> {
    let mut body = Box::pin(data(body));
    let files = take(guest, user, query, headers, &mut body).await?;
    Ok(json(StatusCode::OK, &files))
}

fn data(body: &mut Incoming) -> impl Stream<Item = Result<Bytes, BodyError>> + Send {
    BodyStream::new(body.map_err(BodyError::from))
        .filter_map(|frame| async { frame.map(|frame| frame.into_data().ok()).transpose() })
}

type Data<'a> = &'a mut (dyn Stream<Item = Result<Bytes, BodyError>> + Send + Unpin);

async fn take(
    guest: &Guest,
    user: &User,
    query: &Query,
    headers: &HeaderMap,
    body: Data<'_>,
) -> Result<Vec<UploadedFile>, Refusal> {
    let encoding = encoding::of_body(headers)?;
    let metadata = metadata::of_headers(headers)
        .map_err(|err| Refusal::bad_request(format!("invalid metadata: {err}")))?;
    let content_type = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let mut decoded = encoding::decoded(body, encoding);
    if kind == "application/octet-stream" {
        let path = query
            .path
            .as_deref()
            .ok_or_else(|| Refusal::bad_request("path query parameter is required for raw body upload"))?;
        let path = resolve(guest, path, user)?;
        return Ok(vec![store(path, user, &metadata, &mut decoded).await?]);
    }
    if !kind.starts_with("multipart/") {
        return Err(Refusal::bad_request(format!(
            "unsupported content type: {content_type:?}, expected multipart/form-data or application/octet-stream"
        )));
    }
    let boundary = multer::parse_boundary(&content_type)
        .map_err(|err| Refusal::bad_request(format!("error parsing multipart form: {err}")))?;
    let mut form = multer::Multipart::new(decoded, boundary);
    let mut files: Vec<UploadedFile> = Vec::new();
    let unreadable = |err: multer::Error| Refusal::bad_request(format!("error reading form: {err}"));
    while let Some(mut field) = form.next_field().await.map_err(unreadable)? {
        if field.name() != Some("file") {
            continue;
        }
        let name = query.path.as_deref().or(field.file_name()).unwrap_or_default();
        if name.is_empty() {
            return Err(Refusal::bad_request(
                "a file of the form has no name, and there is no path parameter",
            ));
        }
        let path = resolve(guest, name, user)?;
        if files.iter().any(|file| Path::new(&file.path) == path) {
            return Err(Refusal::bad_request(format!(
                "you cannot upload multiple files to the same path '{}' in one upload request, only the first \
                 specified file was uploaded",
                path.display()
            )));
        }
        let mut content = stream::poll_fn(move |cx| {
            std::pin::Pin::new(&mut field)
                .poll_next(cx)
                .map(|piece| piece.map(|piece| piece.map_err(BodyError::from)))
        });
        files.push(store(path, user, &metadata, &mut content).await?);
    }
    Ok(files)
}

/// Writes one file. The steps and their order are those whose events watchers of E2B know: created, given to the
/// user, written.
async fn store(
    path: PathBuf,
    user: &User,
    metadata: &BTreeMap<String, String>,
    content: Data<'_>,
) -> Result<UploadedFile, Refusal> {
    let mut file = {
        let (path, user) = (path.clone(), user.clone());
        blocking(move || open(&path, &user)).await?
    };
    let mut piece = BytesMut::new();
    loop {
        let next = content.next().await.transpose();
        let next = next.map_err(|err| Refusal::bad_request(format!("the body broke off: {err}")))?;
        let at_end = next.is_none();
        if let Some(bytes) = next {
            piece.extend_from_slice(&bytes);
        }
        if !piece.is_empty() && (at_end || piece.len() >= PIECE) {
            let full = std::mem::take(&mut piece);
            let path = path.clone();
            file = blocking(move || {
                file.write_all(&full).map_err(|err| failed("error writing file", &path, &err))?;
                Ok(file)
            })
            .await?;
        }
        if at_end {
            break;
        }
    }
    let metadata = metadata.clone();
    blocking(move || {
        metadata::replace(&file, &metadata)
            .map_err(|err| failed("error writing file metadata of", &path, &err))?;
        Ok(uploaded(&path, metadata::of_file(&file)))
    })
    .await
}

pub(super) fn uploaded(path: &Path, metadata: BTreeMap<String, String>) -> UploadedFile {
    UploadedFile {
        path: path.to_string_lossy().into_owned(),
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        r#type: "file".to_owned(),
        metadata,
    }
}

fn open(path: &Path, user: &User) -> Result<File, Refusal> {
    if let Some(parent) = path.parent() {
        ensure_dirs(parent, user).map_err(|err| match err.raw_os_error() {
            // "does not exist" would be a strange thing to say about what is being made.
            Some(libc::ENOENT) => Refusal::bad_request(format!("cannot make '{}': {err}", parent.display())),
            _ => failed("error making directory", parent, &err),
        })?;
    }
    let existed = match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => {
            return Err(Refusal::bad_request(format!("path is a directory: {}", path.display())));
        }
        Ok(_) => true,
        Err(err) if err.kind() == io::ErrorKind::NotFound => false,
        Err(err) => return Err(failed("error looking at", path, &err)),
    };
    if existed {
        chown(path, Some(user.uid), Some(user.gid))
            .map_err(|err| failed("error changing owner of", path, &err))?;
    }
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        // A pipe without a reader must not hold us.
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(|err| failed("error opening file", path, &err))?;
    if !existed {
        fchown(&file, Some(user.uid), Some(user.gid))
            .map_err(|err| failed("error changing owner of", path, &err))?;
    }
    Ok(file)
}
