//! Small things read whole: manifests, indexes, configurations.

use super::{
    Error, Place,
    endpoint::Endpoint,
    exchange::{Question, exchange},
    route::Ask,
    transport::Transport,
};
use sha2::{Digest as _, Sha256};
use std::sync::Arc;
use tokio_util::bytes::Bytes;

/// One document to read.
pub(crate) struct Document {
    pub(crate) question: Question,
    /// In bytes.
    pub(crate) limit: usize,
    /// What it must have.
    pub(crate) digest: Option<String>,
}

/// A document that came.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) bytes: Bytes,
    pub(crate) digest: String,
    /// Without parameters, in lower case.
    pub(crate) media_type: String,
    /// The header of that name.
    pub(crate) link: Option<String>,
    pub(crate) place: Arc<Place>,
}

impl Ask for Document {
    type Answer = Fetched;

    fn what(&self) -> String {
        self.question.what.clone()
    }

    fn repository(&self) -> &str {
        &self.question.repository
    }

    async fn put(&self, transport: &Transport, endpoint: &Endpoint, _index: usize) -> Result<Fetched, Error> {
        let answer = exchange(transport, endpoint, &self.question).await?.answer;
        let header = |name| answer.header(name).map(str::to_owned);
        let media_type = header("content-type").unwrap_or_default();
        let media_type = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        let (link, claimed) = (header("link"), header("docker-content-digest"));
        let place = Arc::clone(answer.place());
        let bytes = answer.document(self.limit).await?;
        let digest = digest_of(&bytes);
        // Without a digest of our own, a registry that contradicts itself is caught at least.
        let expected = self.digest.clone().or(claimed.filter(|claimed| claimed.starts_with("sha256:")));
        if expected.is_some_and(|expected| expected != digest) {
            return Err(Error::Digest { place, what: self.question.what.clone(), actual: digest });
        }
        Ok(Fetched { bytes, digest, media_type, link, place })
    }
}

pub(crate) fn digest_of(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}
