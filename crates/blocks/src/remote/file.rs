//! Files of a shared directory as a source: the file system is asked on the blocking pool.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;

use super::{Digest, FetchError, Opener, RangeSource, Remote, SharedFile};

/// One file.
pub struct FileSource {
    file: Arc<File>,
    shared: SharedFile,
    place: String,
}

impl FileSource {
    /// Opens it. May block.
    ///
    /// # Errors
    /// Also when it has another size than said.
    pub fn open(shared: SharedFile) -> Result<Self, FetchError> {
        let name = shared.file.display();
        if !shared.file.is_absolute() {
            return Err(FetchError::Invalid(format!("{name} must be an absolute path")));
        }
        let failed = |error: io::Error| sort(&format!("opening {name}"), &error);
        let file = File::open(&shared.file).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(FetchError::Invalid(format!("{name} is no regular file")));
        }
        if metadata.len() != shared.size {
            let (has, size) = (metadata.len(), shared.size);
            return Err(FetchError::Damaged(format!("{name} has {has} bytes instead of {size}")));
        }
        let place = Remote::Shared(shared.clone()).place();
        Ok(Self { file: Arc::new(file), shared, place })
    }
}

#[async_trait::async_trait]
impl RangeSource for FileSource {
    fn id(&self) -> Digest {
        self.shared.digest
    }

    fn size(&self) -> u64 {
        self.shared.size
    }

    fn place(&self) -> String {
        self.place.clone()
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Bytes, FetchError> {
        let file = self.file.clone();
        let read = tokio::task::spawn_blocking(move || {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, offset).map(|()| Bytes::from(bytes))
        });
        let name = self.shared.file.display();
        match read.await {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(error)) => Err(sort(&format!("reading {name}"), &error)),
            Err(stopped) => Err(FetchError::Retryable(format!("reading {name}: {stopped}"))),
        }
    }
}

/// Opens shared files, and hands everything else on.
pub struct FileOpener<O> {
    /// Asked for registries and object stores.
    pub others: O,
}

#[async_trait::async_trait]
impl<O: Opener> Opener for FileOpener<O> {
    async fn open(&self, remote: &Remote) -> Result<Arc<dyn RangeSource>, FetchError> {
        let Remote::Shared(shared) = remote else { return self.others.open(remote).await };
        let shared = shared.clone();
        let opened = tokio::task::spawn_blocking(move || FileSource::open(shared)).await;
        let source = opened.map_err(|stopped| FetchError::Retryable(stopped.to_string()))??;
        Ok(Arc::new(source))
    }
}

fn sort(what: &str, error: &io::Error) -> FetchError {
    let text = format!("{what}: {error}");
    match error.kind() {
        io::ErrorKind::NotFound => FetchError::NotFound(text),
        io::ErrorKind::PermissionDenied => FetchError::Denied(text),
        _ => FetchError::Retryable(text),
    }
}
