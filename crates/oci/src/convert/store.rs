//! Converted layers by chain id: `<root>/<hex>/layer.lsmt` and `layer.json`.
//!
//! A directory appears with both files in it by one rename and is never changed. Any number of processes may share one.

use super::{ConvertError, SourceError, spool::Spool};
use crate::CancellationToken;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

pub(super) const LAYER: &str = "layer.lsmt";
const RECORD: &str = "layer.json";
pub(super) const TEMPORARY: &str = "tmp-";
const MAX_RECORD: u64 = 64 << 10;
/// Counted up when the bytes made of an archive change: other versions' layers are converted anew.
pub(super) const FORMAT: u32 = 1;

/// A layer that is ready to be put on the ones below it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvertedLayer {
    /// Of what made it.
    pub format: u32,
    /// Identifies the layer together with all below it, `sha256:…`.
    pub chain_id: String,
    /// Of its archive.
    pub diff_id: String,
    /// sha256 of the file, `sha256:…`.
    pub digest: String,
    /// Bytes of the file.
    pub size: u64,
    /// Bytes of the file system with this layer on top.
    pub fs_size: u64,
    /// Bytes of it in use.
    pub used: u64,
    /// The file.
    #[serde(skip)]
    pub path: PathBuf,
}

/// A directory of converted layers.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

/// A bucket, or another machine's store. Both files of a layer belong together: put the record last.
#[async_trait]
pub trait SharedLayers: Send + Sync {
    /// Puts the record's bytes into `record` and the layer into `file` where there is one called `chain_id`; says
    /// whether. The caller checks digest and format.
    async fn get(&self, chain_id: &str, record: &Path, file: &Path) -> Result<bool, SourceError>;

    /// Keeps a layer for others; its record lies beside its file as `layer.json`. That it is there already is no error.
    async fn put(&self, layer: &ConvertedLayer) -> Result<(), SourceError>;
}

fn during<T>(result: io::Result<T>, step: impl FnOnce() -> String) -> Result<T, ConvertError> {
    result.map_err(|source| ConvertError::Io { step: step(), source })
}

impl Store {
    /// Opens `root`, which is made. Blocking.
    ///
    /// # Errors
    /// [`ConvertError::Io`] when it can't be made.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, ConvertError> {
        let root = root.into();
        during(fs::create_dir_all(&root), || format!("make the store {}", root.display()))?;
        Ok(Self { root })
    }

    /// Where its layers lie.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Removes what killed conversions left more than `age` ago; says how many. Blocking.
    ///
    /// # Errors
    /// [`ConvertError::Io`] when the store can't be read.
    pub fn sweep(&self, age: Duration) -> Result<usize, ConvertError> {
        let step = || format!("look through the store {}", self.root.display());
        let mut removed = 0;
        for entry in during(fs::read_dir(&self.root), step)? {
            let entry = during(entry, step)?;
            let left_over = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
            let changed =
                entry.metadata().and_then(|meta| meta.modified()).unwrap_or_else(|_| SystemTime::now());
            let old = SystemTime::now().duration_since(changed).is_ok_and(|since| since >= age);
            if left_over && old && fs::remove_dir_all(entry.path()).is_ok() {
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// A layer that is here already, by its chain id. Blocking.
    ///
    /// # Errors
    /// [`ConvertError::Io`] when its record can't be read. One that is damaged or of another version counts as missing.
    pub fn get(&self, chain_id: &str) -> Result<Option<ConvertedLayer>, ConvertError> {
        let directory = self.place(chain_id);
        let step = || format!("read the converted layer {}", directory.display());
        let Some(mut layer) = during(read_record(&directory.join(RECORD)), step)? else { return Ok(None) };
        layer.path = directory.join(LAYER);
        let size = fs::metadata(&layer.path).map(|meta| meta.len()).unwrap_or_default();
        Ok((layer.format == FORMAT && layer.chain_id == chain_id && layer.size == size).then_some(layer))
    }

    pub(super) async fn find(
        &self,
        chain_id: &str,
        shared: Option<&dyn SharedLayers>,
    ) -> Result<Option<ConvertedLayer>, ConvertError> {
        let (store, chain) = (self.clone(), chain_id.to_owned());
        let found = blocking(move || store.get(&chain)).await?;
        let (None, Some(shared)) = (&found, shared) else { return Ok(found) };
        let store = self.clone();
        let directory = blocking(move || store.temporary()).await?;
        let (record, file) = (directory.path().join(RECORD), directory.path().join(LAYER));
        if !shared.get(chain_id, &record, &file).await.map_err(ConvertError::Shared)? {
            return Ok(None);
        }
        let (store, chain) = (self.clone(), chain_id.to_owned());
        blocking(move || {
            let step = || format!("read what the shared store gave for {chain}");
            let Some(layer) = during(read_record(&record), step)? else { return Ok(None) };
            let digest = during(File::open(&file).and_then(digest_of), step)?;
            if layer.format != FORMAT || layer.chain_id != chain || layer.digest != digest {
                tracing::warn!(
                    chain,
                    "a shared converted layer is damaged or of another version; converting anew"
                );
                return Ok(None);
            }
            store.keep(directory, layer).map(Some)
        })
        .await
    }

    pub(super) fn spool(&self, stop: CancellationToken) -> Result<Spool, ConvertError> {
        let file =
            during(tempfile::tempfile_in(&self.root), || format!("make a file in {}", self.root.display()))?;
        Ok(Spool::new(file, stop))
    }

    pub(super) fn temporary(&self) -> Result<tempfile::TempDir, ConvertError> {
        let made = tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(&self.root);
        during(made, || format!("make a directory in {}", self.root.display()))
    }

    /// Gives a finished layer its name. One that has been there since is as good.
    pub(super) fn keep(
        &self,
        directory: tempfile::TempDir,
        mut layer: ConvertedLayer,
    ) -> Result<ConvertedLayer, ConvertError> {
        let place = self.place(&layer.chain_id);
        let step = || format!("keep the converted layer {}", place.display());
        let json = serde_json::to_vec_pretty(&layer).map_err(io::Error::other);
        let record = directory.path().join(RECORD);
        during(json.and_then(|json| fs::write(&record, json)), step)?;
        during(File::open(&record).and_then(|file| file.sync_all()), step)?;
        during(File::open(directory.path()).and_then(|file| file.sync_all()), step)?;
        layer.path = place.join(LAYER);
        match fs::rename(directory.path(), &place) {
            Ok(()) => drop(directory.keep()),
            Err(_) if self.get(&layer.chain_id)?.is_some() => {}
            Err(_) => {
                // One of another version or a damaged one stands in the way.
                let aside = self.temporary()?;
                during(fs::rename(&place, aside.path().join("old")), step)?;
                during(fs::rename(directory.path(), &place), step)?;
                drop(directory.keep());
            }
        }
        during(File::open(&self.root).and_then(|file| file.sync_all()), step)?;
        Ok(layer)
    }

    fn place(&self, chain_id: &str) -> PathBuf {
        self.root.join(chain_id.strip_prefix("sha256:").unwrap_or(chain_id))
    }
}

/// `None` where there is none, or one that this version can't read.
fn read_record(path: &Path) -> io::Result<Option<ConvertedLayer>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(MAX_RECORD).read_to_end(&mut bytes)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    Ok(serde_json::from_slice(&bytes).ok())
}

pub(super) fn digest_of(mut file: File) -> io::Result<String> {
    use sha2::Digest as _;
    use std::io::Read as _;
    let mut hash = sha2::Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(format!("sha256:{}", hex::encode(hash.finalize()))),
            got => hash.update(&buffer[..got]),
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ConvertError> + Send + 'static,
) -> Result<T, ConvertError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}
