//! One question to one endpoint, with its challenges answered and its redirects followed.

use super::{
    Error, Place,
    endpoint::Endpoint,
    transport::{Answer, Transport, bare},
};
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, RANGE};
use std::sync::Arc;
use url::Url;

/// Storages need one, proxies before them another.
const MAX_HOPS: usize = 5;
const MAX_LOCATION: usize = 16 << 10;

/// Bytes `first..=last`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

/// What is asked.
#[derive(Debug, Clone)]
pub(crate) struct Question {
    pub(crate) repository: String,
    /// `manifests/latest`, `blobs/sha256:…`, `referrers/sha256:…`.
    pub(crate) path: String,
    pub(crate) query: Option<String>,
    pub(crate) accept: &'static str,
    pub(crate) span: Option<Span>,
    /// For messages.
    pub(crate) what: String,
}

impl Question {
    fn headers(&self) -> Result<HeaderMap, Error> {
        // A proxy that compresses on the way would change what digests and ranges are about.
        let mut headers = HeaderMap::from_iter([
            (ACCEPT, HeaderValue::from_static(self.accept)),
            (ACCEPT_ENCODING, HeaderValue::from_static("identity")),
        ]);
        if let Some(Span { first, last }) = self.span {
            let range = HeaderValue::from_str(&format!("bytes={first}-{last}"));
            headers.insert(RANGE, range.map_err(|e| Error::Setup(e.to_string()))?);
        }
        Ok(headers)
    }
}

/// A good answer: 200 or 206.
pub(crate) struct Reply {
    pub(crate) answer: Answer,
    /// The address of the storage that gave it, when it wasn't the endpoint.
    pub(crate) storage: Option<Url>,
}

/// Asks, and answers what the endpoint asks back.
pub(crate) async fn exchange(
    transport: &Transport,
    endpoint: &Endpoint,
    question: &Question,
) -> Result<Reply, Error> {
    let place = endpoint.place(&question.repository);
    let scoped = endpoint.repository(&question.repository);
    let mut url = endpoint.url(&question.repository, &question.path);
    url.set_query(question.query.as_deref());
    let (mut hops, mut asked, mut refreshed) = (0, false, false);
    loop {
        let own = endpoint.owns(&url);
        let mut headers = question.headers()?;
        let mut used = None;
        if own {
            used = endpoint.auth.authorize(transport, &place, &scoped).await?;
            headers.extend(used.clone().map(|proof| (AUTHORIZATION, proof)));
        }
        let at = if own { Arc::clone(&place) } else { storage_place(&url, &place) };
        let answer = transport.get(endpoint.reach(&url), &url, headers, &at, &question.what).await?;
        match answer.status().as_u16() {
            200 | 206 => return Ok(Reply { answer, storage: (!own).then_some(url) }),
            301 | 302 | 303 | 307 | 308 => {
                hops += 1;
                url = follow(endpoint, &answer, &url, hops)?;
            }
            401 if own => {
                // The first of either is worth another try, the second is an answer.
                let before = if used.is_some() { &mut refreshed } else { &mut asked };
                if std::mem::replace(before, true) {
                    return Err(answer.refusal().await);
                }
                let offers = answer.challenges();
                drop(answer);
                endpoint.auth.challenged(&place, &scoped, &offers, used.as_ref()).await?;
            }
            _ => return Err(answer.refusal().await),
        }
    }
}

/// Asks a storage where a redirect led before. Our credentials stay away.
pub(crate) async fn direct(
    transport: &Transport,
    endpoint: &Endpoint,
    question: &Question,
    url: &Url,
) -> Result<Answer, Error> {
    let at = storage_place(url, &endpoint.place(&question.repository));
    let answer = transport.get(endpoint.reach(url), url, question.headers()?, &at, &question.what).await?;
    match answer.status().as_u16() {
        200 | 206 => Ok(answer),
        _ => Err(answer.refusal().await),
    }
}

fn storage_place(url: &Url, place: &Place) -> Arc<Place> {
    let host = url.host_str().unwrap_or_default();
    let host = url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
    Arc::new(Place { host, repository: place.repository.clone() })
}

/// Where an answer sends us, if that is allowed.
fn follow(endpoint: &Endpoint, answer: &Answer, from: &Url, hops: usize) -> Result<Url, Error> {
    let place = answer.place();
    let location = answer.header(LOCATION.as_str()).filter(|location| location.len() <= MAX_LOCATION);
    let target = location.and_then(|location| from.join(location).ok());
    let Some(mut target) = target else {
        return Err(Error::protocol(place, "a redirect", "it names no usable address"));
    };
    target.set_fragment(None);
    let refuse = |reason: String| Error::Redirect { place: Arc::clone(place), target: bare(&target), reason };
    if hops > MAX_HOPS {
        return Err(refuse(format!("that is redirect {hops}, and {MAX_HOPS} are followed at most")));
    }
    // What began under TLS stays there, also when a later hop is asked by plain HTTP's rules.
    if from.scheme() == "https" && target.scheme() == "http" {
        return Err(refuse("it would leave TLS".to_owned()));
    }
    endpoint.check(&target).map_err(refuse)?;
    Ok(target)
}
