//! The real [`Layers`]: files in the overlaybd format, memory read from the monitor's process.

use super::{Captured, Fault, Layers, Result};
use aenv_overlaybd::{BuildOptions, Layer, LayerBuilder, MergeOptions, merge_layers};
use aenv_snapshot::{
    capture::{self, Sink},
    durable, zeros,
};
use async_trait::async_trait;
use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Layers as files of this machine.
#[derive(Debug, Default)]
pub struct LayerFiles;

#[async_trait]
impl Layers for LayerFiles {
    async fn capture(
        &self,
        vm: Arc<dyn aenv_vmm::Vm>,
        size: u64,
        parent: &Path,
        to: &Path,
    ) -> Result<Captured> {
        let regions =
            vm.memory().await.map_err(|error| Fault::new(format!("finding guest memory: {error}")))?;
        let covered: u64 = regions.iter().map(|region| region.len).sum();
        if covered != size {
            return Err(Fault::new(format!(
                "the monitor maps {covered} bytes of guest memory, {size} expected"
            )));
        }
        let (parent, to) = (parent.to_owned(), to.to_owned());
        blocking(to.clone(), move || {
            let parent = open(&parent)?;
            let out = create(&to)?;
            let builder =
                LayerBuilder::new(out, BuildOptions { keep_zeroes: true, ..BuildOptions::new(size) })
                    .map_err(|error| at(&to, &error))?;
            let mut sink = Into { builder };
            let report = capture::capture(&regions, Some(&parent), &mut sink)
                .map_err(|error| at(Path::new("guest memory"), &error))?;
            let built = sink.builder.finish(true).map_err(|error| at(&to, &error))?;
            sync_dir_of(&to)?;
            Ok(Captured {
                pages: report.pages,
                zero: report.zero,
                same: report.same,
                bytes: built.file_bytes,
            })
        })
        .await
    }

    async fn merge(&self, layers: &[PathBuf], to: &Path) -> Result<()> {
        let (layers, to) = (layers.to_vec(), to.to_owned());
        blocking(to.clone(), move || {
            let opened = layers
                .iter()
                .map(|path| Layer::open(Arc::new(open(path)?)).map_err(|error| at(path, &error)))
                .collect::<Result<Vec<_>>>()?;
            let how = MergeOptions { sync: true, ..MergeOptions::default() };
            merge_layers(&opened, create(&to)?, how).map_err(|error| at(&to, &error))?;
            sync_dir_of(&to)
        })
        .await
    }

    async fn finish_image(&self, image: &Path) -> Result<u64> {
        let image = image.to_owned();
        tokio::task::spawn_blocking(move || {
            let file =
                File::options().read(true).write(true).open(&image).map_err(|error| at(&image, &error))?;
            let kept = zeros::punch(&file).map_err(|error| at(&image, &error))?;
            file.sync_all().map_err(|error| at(&image, &error))?;
            sync_dir_of(&image)?;
            Ok(kept)
        })
        .await
        .map_err(|error| Fault::new(format!("writing memory out: {error}")))?
    }
}

/// A capture going into a layer.
struct Into {
    builder: LayerBuilder<File>,
}

impl Sink for Into {
    fn data(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.builder.append(offset, bytes).map_err(io::Error::other)
    }

    fn zero(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.builder.append_zeroes(offset, len).map_err(io::Error::other)
    }
}

/// Runs `work` off the async workers; when it fails, `made` is removed.
async fn blocking<T: Send + 'static>(
    made: PathBuf,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(move || {
        let result = work();
        if result.is_err() {
            // Whatever it is, it is not a layer.
            let _ = std::fs::remove_file(&made);
        }
        result
    })
    .await
    .map_err(|error| Fault::new(format!("writing a layer: {error}")))?
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| at(path, &error))
}

fn create(path: &Path) -> Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .map_err(|error| at(path, &error))
}

fn sync_dir_of(path: &Path) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    durable::sync_dir(dir).map_err(|error| at(dir, &error))
}

fn at(path: &Path, error: &dyn std::fmt::Display) -> Fault {
    Fault::new(format!("{}: {error}", path.display()))
}
