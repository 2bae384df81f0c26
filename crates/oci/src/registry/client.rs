//! What is asked of registries.

use super::{
    BlobReader, BlobStream, Error, Format, Manifest, Options, Settings,
    blob::blob_question,
    classify,
    documents::{Document, Fetched},
    endpoint::Endpoint,
    exchange::Question,
    manifest::{self, ACCEPT, MAX_CONFIG, MAX_DEPTH, MAX_MANIFEST, Read},
    native::ARTIFACTS,
    referrers,
    route::{Plan, route},
    transport::Transport,
};
use crate::{fetch::architecture, reference::Remote};
use oci_spec::image::Descriptor;
use parking_lot::Mutex;
use reqwest::Certificate;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio_util::bytes::Bytes;

/// Registries that are remembered at a time.
const MAX_REGISTRIES: usize = 256;
const MAX_BUNDLE: u64 = 8 << 20;

/// Asks registries. Cheap to clone; clones share connections, tokens and bounds.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    options: Options,
    transport: Transport,
    registries: Mutex<HashMap<String, Arc<[Arc<Endpoint>]>>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("options", &self.inner.options).finish_non_exhaustive()
    }
}

impl Client {
    /// Reads the CA bundle, so it may block. Nothing is asked yet.
    ///
    /// # Errors
    /// [`Error::Setup`]: the bundle can't be read, or settings name no host.
    pub fn new(options: Options) -> Result<Self, Error> {
        let certificates = options.ca_bundle.as_deref().map(bundle).transpose()?.unwrap_or_default();
        for (registry, settings) in &options.registries {
            Endpoint::all(registry, settings, &options.credentials)?;
        }
        let transport = Transport::new(&options, certificates);
        Ok(Self { inner: Arc::new(Inner { options, transport, registries: Mutex::default() }) })
    }

    pub(crate) fn options(&self) -> &Options {
        &self.inner.options
    }

    pub(crate) fn transport(&self) -> &Transport {
        &self.inner.transport
    }

    fn endpoints(&self, registry: &str) -> Result<Arc<[Arc<Endpoint>]>, Error> {
        let mut registries = self.inner.registries.lock();
        if let Some(known) = registries.get(registry) {
            return Ok(Arc::clone(known));
        }
        let options = &self.inner.options;
        let default = Settings::default();
        let settings = options.registries.get(registry).unwrap_or(&default);
        let endpoints = Endpoint::all(registry, settings, &options.credentials)?;
        if registries.len() >= MAX_REGISTRIES {
            // References come from users: what they name must not add up. Readers keep theirs alive.
            registries.clear();
        }
        registries.insert(registry.to_owned(), Arc::clone(&endpoints));
        Ok(endpoints)
    }

    async fn document(&self, remote: &Remote, document: &Document) -> Result<Fetched, Error> {
        let endpoints = self.endpoints(&remote.registry)?;
        let options = self.options();
        let plan = Plan { deadline: options.deadline, attempts: options.attempts, skip: 0 };
        Ok(route(self.transport(), &endpoints, plan, document).await?.1)
    }

    /// The image's manifest for linux on this machine's architecture. An index is followed.
    ///
    /// # Errors
    /// [`Error::Platform`] when there is none for this machine; else see [`Error`].
    pub async fn manifest(&self, remote: &Remote) -> Result<Manifest, Error> {
        let mut wanted = remote.digest.clone();
        let mut name = wanted.clone().or_else(|| remote.tag.clone()).unwrap_or_else(|| "latest".to_owned());
        let (mut size, mut index) = (None, None);
        for _ in 0..=MAX_DEPTH {
            let what = format!("manifest {name}");
            let document = Document {
                question: Question {
                    repository: remote.repository.clone(),
                    path: format!("manifests/{name}"),
                    query: None,
                    accept: ACCEPT,
                    span: None,
                    what: what.clone(),
                },
                limit: MAX_MANIFEST,
                digest: wanted.clone(),
            };
            let fetched = self.document(remote, &document).await?;
            check_size(&fetched, size, &what)?;
            match manifest::read(&fetched, &what)? {
                Read::Image(image) => return Ok(Manifest { index, ..*image }),
                Read::Index(list) => {
                    let Some(next) = manifest::choose(list.manifests(), architecture()) else {
                        return Err(Error::Platform {
                            place: Arc::clone(&fetched.place),
                            what: name,
                            architecture: architecture(),
                            has: manifest::platforms(list.manifests()),
                        });
                    };
                    index.get_or_insert(fetched.digest);
                    name = checked(next.digest().as_ref())?;
                    (wanted, size) = (Some(name.clone()), Some(next.size()));
                }
            }
        }
        let place =
            self.endpoints(&remote.registry)?.last().map(|endpoint| endpoint.place(&remote.repository));
        let place = place.ok_or_else(|| Error::Setup("there is no registry to ask".to_owned()))?;
        Err(Error::protocol(&place, &name, format!("its indexes are nested deeper than {MAX_DEPTH}")))
    }

    /// The image's configuration, checked against its digest.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn config(&self, remote: &Remote, manifest: &Manifest) -> Result<Bytes, Error> {
        let config = manifest.manifest.config();
        let digest = checked(config.digest().as_ref())?;
        let what = format!("configuration {digest}");
        let question = blob_question(&remote.repository, &digest, None, what.clone());
        let document = Document { question, limit: MAX_CONFIG, digest: Some(digest) };
        let fetched = self.document(remote, &document).await?;
        check_size(&fetched, Some(config.size()), &what)?;
        Ok(fetched.bytes)
    }

    /// A reader of a blob's bytes by range. Asks nothing yet.
    ///
    /// # Errors
    /// [`Error::Setup`]: the digest or registry is none.
    pub fn blob(&self, remote: &Remote, digest: &str, size: u64) -> Result<BlobReader, Error> {
        let endpoints = self.endpoints(&remote.registry)?;
        Ok(BlobReader::new(self.clone(), endpoints, remote.repository.clone(), checked(digest)?, size))
    }

    /// A blob's bytes in order, all within `deadline`. Asks nothing yet.
    ///
    /// # Errors
    /// [`Error::Setup`]: the digest or registry is none.
    pub fn stream(
        &self,
        remote: &Remote,
        digest: &str,
        size: u64,
        deadline: Duration,
    ) -> Result<BlobStream, Error> {
        let endpoints = self.endpoints(&remote.registry)?;
        Ok(BlobStream::new(
            self.clone(),
            endpoints,
            remote.repository.clone(),
            checked(digest)?,
            size,
            deadline,
        ))
    }

    /// As [`stream`](Self::stream), but past all mirrors: for when what they gave was wrong.
    pub(crate) fn stream_from_registry(
        &self,
        remote: &Remote,
        digest: &str,
        size: u64,
        deadline: Duration,
    ) -> Result<BlobStream, Error> {
        let all = self.endpoints(&remote.registry)?;
        let own = all.last().cloned().into_iter().collect();
        Ok(BlobStream::new(self.clone(), own, remote.repository.clone(), checked(digest)?, size, deadline))
    }

    /// What refers to the manifest or index with the digest `subject`, of one artifact type or all.
    ///
    /// # Errors
    /// See [`Error`]; that nothing refers to it is none.
    pub async fn referrers(
        &self,
        remote: &Remote,
        subject: &str,
        artifact: Option<&str>,
    ) -> Result<Vec<Descriptor>, Error> {
        let subject = checked(subject)?;
        let (mut found, mut query) = (Vec::new(), None);
        for page in 0..referrers::MAX_PAGES {
            let document = referrers::page(&remote.repository, &subject, artifact, query.take());
            let fetched = match self.document(remote, &document).await {
                Ok(fetched) => fetched,
                Err(error) if page == 0 && referrers::is_lacking(&error) => {
                    return self.tagged_referrers(remote, &subject, artifact).await;
                }
                Err(error) => return Err(error),
            };
            let Some(entries) = referrers::read(&fetched) else {
                return self.tagged_referrers(remote, &subject, artifact).await;
            };
            // A registry need not filter.
            found.extend(entries.into_iter().filter(|entry| referrers::is_of(entry, artifact)));
            query = fetched.link.as_deref().and_then(referrers::next);
            if query.is_none() || found.len() >= referrers::MAX_FOUND {
                break;
            }
        }
        found.truncate(referrers::MAX_FOUND);
        Ok(found)
    }

    async fn tagged_referrers(
        &self,
        remote: &Remote,
        subject: &str,
        artifact: Option<&str>,
    ) -> Result<Vec<Descriptor>, Error> {
        let fetched = match self.document(remote, &referrers::tagged(&remote.repository, subject)).await {
            Ok(fetched) => fetched,
            Err(Error::NotFound { .. }) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let entries = referrers::read(&fetched).unwrap_or_default();
        let wanted = entries.into_iter().filter(|entry| referrers::is_of(entry, artifact));
        Ok(wanted.take(referrers::MAX_FOUND).collect())
    }

    /// The manifest with overlaybd layers for an image: its own, or one that refers to it. `None` when there is none.
    ///
    /// What it returns is [`Format::Native`] by [`classify`]; what else refers to the image under such a name is passed
    /// over.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn native(&self, remote: &Remote, image: &Manifest) -> Result<Option<Manifest>, Error> {
        match classify(&image.manifest) {
            Ok(Format::Native(_)) => return Ok(Some(image.clone())),
            Ok(_) => {}
            Err(reason) => {
                tracing::warn!(digest = image.digest, reason, "an image's annotations contradict it")
            }
        }
        for subject in [Some(&image.digest), image.index.as_ref()].into_iter().flatten() {
            let all = self.referrers(remote, subject, None).await?;
            for artifact in ARTIFACTS {
                for entry in all.iter().filter(|entry| referrers::is_of(entry, Some(artifact))).take(4) {
                    let digest = checked(entry.digest().as_ref())?;
                    let named = Remote { tag: None, digest: Some(digest), ..remote.clone() };
                    match self.manifest(&named).await {
                        Ok(found) if matches!(classify(&found.manifest), Ok(Format::Native(_))) => {
                            return Ok(Some(found));
                        }
                        // Of an index over several platforms, perhaps not this one; or an artifact by name only.
                        Ok(_)
                        | Err(Error::Platform { .. } | Error::NotFound { .. } | Error::Protocol { .. }) => {
                            tracing::debug!(digest = %entry.digest(), "a referrer is no overlaybd image for this machine");
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(None)
    }
}

fn check_size(fetched: &Fetched, size: Option<u64>, what: &str) -> Result<(), Error> {
    match size {
        Some(size) if size != fetched.bytes.len() as u64 => Err(Error::protocol(
            &fetched.place,
            what,
            format!("it has {} bytes, and what names it says {size}", fetched.bytes.len()),
        )),
        _ => Ok(()),
    }
}

/// Digests go into addresses and file names.
fn checked(digest: &str) -> Result<String, Error> {
    let good = digest
        .strip_prefix("sha256:")
        .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
    if good {
        Ok(digest.to_owned())
    } else {
        Err(Error::Setup(format!(
            "the digest {:?} is not usable: it must be sha256: and 64 lower-case hex digits",
            super::error::words(digest)
        )))
    }
}

fn bundle(path: &std::path::Path) -> Result<Vec<Certificate>, Error> {
    use std::io::Read as _;
    let bad = |reason: &dyn std::fmt::Display| {
        Error::Setup(format!("the CA bundle {} can't be used: {reason}", path.display()))
    };
    let mut pem = Vec::new();
    let file = std::fs::File::open(path).map_err(|e| bad(&e))?;
    file.take(MAX_BUNDLE).read_to_end(&mut pem).map_err(|e| bad(&e))?;
    let certificates = Certificate::from_pem_bundle(&pem).map_err(|e| bad(&e))?;
    if certificates.is_empty() {
        return Err(bad(&"it holds no certificate in PEM"));
    }
    Ok(certificates)
}
