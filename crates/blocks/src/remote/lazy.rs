//! A source that is opened by its first read: what is cached whole starts while its registry is down.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::OnceCell;

use super::{Digest, FetchError, Opener, RangeSource, Remote};

/// A blob's source, opened at its first read. A failure to open is not remembered.
pub struct LazySource {
    remote: Remote,
    opener: Arc<dyn Opener>,
    opened: OnceCell<Arc<dyn RangeSource>>,
}

impl LazySource {
    /// Nothing is asked yet.
    pub fn new(remote: Remote, opener: Arc<dyn Opener>) -> Self {
        Self { remote, opener, opened: OnceCell::new() }
    }

    async fn connect(&self) -> Result<Arc<dyn RangeSource>, FetchError> {
        let source = self.opener.open(&self.remote).await?;
        let (got, wanted) = ((source.id(), source.size()), (self.id(), self.size()));
        if got != wanted {
            return Err(FetchError::Invalid(format!(
                "{} offers {} of {} bytes for {} of {} bytes",
                source.place(),
                got.0,
                got.1,
                wanted.0,
                wanted.1
            )));
        }
        Ok(source)
    }
}

#[async_trait::async_trait]
impl RangeSource for LazySource {
    fn id(&self) -> Digest {
        self.remote.digest()
    }

    fn size(&self) -> u64 {
        self.remote.size()
    }

    fn place(&self) -> String {
        self.remote.place()
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Bytes, FetchError> {
        self.opened.get_or_try_init(|| self.connect()).await?.read(offset, len).await
    }
}
