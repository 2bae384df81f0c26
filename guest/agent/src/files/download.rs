//! `GET /files` and `HEAD /files`.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    sync::Arc,
};

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use futures_util::{Stream, StreamExt, stream};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header, request::Parts};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{
    blocking,
    encoding::{self, Encoding},
    failed,
    query::Query,
    resolve,
};
use crate::{
    guest::Guest,
    server::answer::{Answer, BodyError, Refusal, empty},
    users::User,
};

/// Read at a time: each read is a trip to another thread.
const PIECE: usize = 256 << 10;

pub(super) async fn serve(
    guest: &Arc<Guest>,
    user: &User,
    query: &Query,
    head: &Parts,
) -> Result<Answer, Refusal> {
    let path = resolve(guest, query.path.as_deref().unwrap_or_default(), user)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let headers = &head.headers;
    let (file, size, modified) = blocking(move || {
        // Opening a pipe must not wait for its other end.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .map_err(|err| failed("error opening file", &path, &err))?;
        let meta = file.metadata().map_err(|err| failed("error looking at", &path, &err))?;
        if meta.is_dir() {
            return Err(Refusal::bad_request(format!("path '{}' is a directory", path.display())));
        }
        if !meta.is_file() {
            return Err(Refusal::bad_request(format!("path '{}' is not a regular file", path.display())));
        }
        Ok((file, meta.len(), meta.modified().ok()))
    })
    .await?;
    let asked = headers.get(header::RANGE).and_then(|value| value.to_str().ok());
    let encoding = encoding::for_answer(headers, asked.is_some())?;
    let range = asked.map_or(Ok(None), |asked| range(asked, size))?;
    let mut answer = Response::new(empty());
    describe(answer.headers_mut(), &name);
    if let Some(modified) = modified.and_then(|time| jiff::Timestamp::try_from(time).ok()) {
        let text = modified.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
        if let Ok(value) = HeaderValue::from_str(&text) {
            answer.headers_mut().insert(header::LAST_MODIFIED, value);
        }
    }
    let (start, length) = range.unwrap_or((0, size));
    if range.is_some() {
        *answer.status_mut() = StatusCode::PARTIAL_CONTENT;
        let text = format!("bytes {start}-{}/{size}", start + length - 1);
        answer.headers_mut().insert(header::CONTENT_RANGE, header_value(&text));
    }
    // Files of /proc and /sys say 0 and have content all the same: those are read to their end, without a length.
    let unknown = size == 0;
    match encoding {
        Encoding::Gzip => {
            answer.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        Encoding::Identity if !unknown => {
            answer.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
        }
        Encoding::Identity => {}
    }
    if head.method != Method::HEAD {
        let wanted = if unknown { u64::MAX } else { length };
        let pieces = pieces(file, start, wanted, unknown, encoding);
        *answer.body_mut() = StreamBody::new(pieces.map(|piece| piece.map(Frame::data))).boxed_unsync();
    }
    Ok(answer)
}

fn header_value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""))
}

fn describe(headers: &mut HeaderMap, name: &str) {
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type(name)));
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    let disposition = if plain {
        format!("inline; filename={name}")
    } else {
        format!("inline; filename*=utf-8''{}", utf8_percent_encode(name, NON_ALPHANUMERIC))
    };
    headers.insert(header::CONTENT_DISPOSITION, header_value(&disposition));
}

/// What a browser needs to show a file; anything else is just bytes.
fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase()).as_deref() {
        Some("txt" | "md" | "log" | "py" | "rs" | "sh" | "toml" | "yaml" | "yml") => {
            "text/plain; charset=utf-8"
        }
        Some("html" | "htm") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("csv") => "text/csv; charset=utf-8",
        Some("js" | "mjs") => "text/javascript; charset=utf-8",
        Some("json") => "application/json",
        Some("xml") => "text/xml; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("png") => "image/png",
        Some("jpg" | "jpeg") => "image/jpeg",
        Some("gif") => "image/gif",
        Some("webp") => "image/webp",
        Some("pdf") => "application/pdf",
        Some("wasm") => "application/wasm",
        Some("zip") => "application/zip",
        Some("gz") => "application/gzip",
        Some("mp4") => "video/mp4",
        _ => "application/octet-stream",
    }
}

/// First byte and length of a `Range` header. None means the whole file, which is also the allowed answer to several
/// ranges and to units nobody knows.
fn range(asked: &str, size: u64) -> Result<Option<(u64, u64)>, Refusal> {
    let Some(spec) = asked.trim().strip_prefix("bytes=") else { return Ok(None) };
    if spec.contains(',') {
        return Ok(None);
    }
    let unsatisfiable = || {
        Refusal::new(StatusCode::RANGE_NOT_SATISFIABLE, format!("range {asked:?} of a file of {size} bytes"))
    };
    let (first, last) = spec.split_once('-').ok_or_else(unsatisfiable)?;
    let number = |text: &str| text.trim().parse::<u64>().map_err(|_| unsatisfiable());
    let (start, end) = match (first.trim(), last.trim()) {
        ("", "") => return Err(unsatisfiable()),
        ("", suffix) => (size.saturating_sub(number(suffix)?), size),
        (first, "") => (number(first)?, size),
        (first, last) => (number(first)?, number(last)?.saturating_add(1).min(size)),
    };
    if start >= end { Err(unsatisfiable()) } else { Ok(Some((start, end - start))) }
}

enum Sink {
    Plain,
    Gzip(Box<GzEncoder<Vec<u8>>>),
}

/// The file in pieces, each read and packed on a blocking thread when it is wanted.
fn pieces(
    file: File,
    start: u64,
    length: u64,
    unknown: bool,
    encoding: Encoding,
) -> impl Stream<Item = Result<Bytes, BodyError>> + Send {
    let sink = match encoding {
        Encoding::Identity => Sink::Plain,
        Encoding::Gzip => Sink::Gzip(Box::new(GzEncoder::new(Vec::new(), Compression::fast()))),
    };
    stream::try_unfold(Some((file, sink, start, length)), move |state| async move {
        let Some((mut file, mut sink, at, left)) = state else { return Ok(None) };
        tokio::task::spawn_blocking(move || {
            let mut left = left;
            if left == length && at > 0 {
                file.seek(SeekFrom::Start(at))?;
            }
            loop {
                let wanted = left.min(PIECE as u64);
                // Room for all of it: growing would read it in many small steps and copy it in between.
                let mut piece = Vec::with_capacity(usize::try_from(wanted).unwrap_or(PIECE));
                let read = Read::by_ref(&mut file).take(wanted).read_to_end(&mut piece)? as u64;
                left -= read;
                if read < wanted && !unknown {
                    // The length is promised already: what is missing must break the answer.
                    if matches!(sink, Sink::Plain) {
                        return Err(BodyError::from("the file became shorter while it was read"));
                    }
                    left = 0;
                }
                let done = left == 0 || read == 0;
                let out = match &mut sink {
                    Sink::Plain => piece,
                    Sink::Gzip(encoder) => {
                        encoder.write_all(&piece)?;
                        if done {
                            encoder.try_finish()?;
                        }
                        std::mem::take(encoder.get_mut())
                    }
                };
                if done {
                    return Ok(Some((Bytes::from(out), None)));
                }
                if !out.is_empty() {
                    return Ok(Some((Bytes::from(out), Some((file, sink, at, left)))));
                }
            }
        })
        .await?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_to_the_file() {
        assert_eq!(range("bytes=0-3", 10), Ok(Some((0, 4))));
        assert_eq!(range("bytes=5-", 10), Ok(Some((5, 5))));
        assert_eq!(range("bytes=-3", 10), Ok(Some((7, 3))));
        assert_eq!(range("bytes=-30", 10), Ok(Some((0, 10))));
        assert_eq!(range("bytes=8-99999999999999999", 10), Ok(Some((8, 2))));
    }

    #[test]
    fn what_can_be_ignored_is_and_what_cannot_be_satisfied_is_416() {
        assert_eq!(range("lines=1-2", 10), Ok(None));
        assert_eq!(range("bytes=0-1,4-5", 10), Ok(None));
        for asked in ["bytes=10-", "bytes=5-2", "bytes=-", "bytes=x-y", "bytes=3", "bytes=-0"] {
            assert_eq!(
                range(asked, 10).map_err(|r| r.status),
                Err(StatusCode::RANGE_NOT_SATISFIABLE),
                "{asked}"
            );
        }
    }
}
