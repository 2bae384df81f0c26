//! Reading an OCI image layout, and making the one that the unpacker gets.
//!
//! A layout (opencontainers/image-spec, image-layout.md) is `index.json` and blobs named by their digest. The index may
//! lead through further indexes, one manifest a platform. Manifest and configuration are read here, size-capped and
//! checked against their digests. The unpacker gets a *view*: a layout with just that manifest, its blobs symbolic
//! links to the source, so that nothing is copied. Two things are put right in it: umoci 0.4 knows no zstd, so such
//! layers are decompressed into the view; and skopeo 1.9 calls some uncompressed layers compressed (those of a Docker
//! archive), so a layer's first bytes decide, not its media type.

use crate::{
    Error, ImageConfig,
    error::During as _,
    fetch::{TAG, architecture},
};
use oci_spec::image::{Descriptor, ImageIndex, ImageManifest};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The distribution spec asks for 4 MiB of manifest at least; configurations get the same twice.
const MAX_DOCUMENT: u64 = 8 << 20;
const MAX_DEPTH: usize = 4;
const MAX_LAYERS: usize = 512;
/// A layer that decompresses to more is an attack or a mistake.
const MAX_LAYER: u64 = 256 << 30;
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

/// An image found in a layout.
pub(crate) struct Image {
    pub(crate) config: ImageConfig,
    /// Of the manifest.
    pub(crate) digest: String,
    manifest: serde_json::Value,
    layers: Vec<Layer>,
    blobs: PathBuf,
    config_digest: String,
}

struct Layer {
    digest: String,
}

enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Reads the magic number. Blocking.
fn compression(blob: &Path, digest: &str) -> Result<Compression, Error> {
    let mut magic = Vec::new();
    let read = File::open(blob).and_then(|file| file.take(4).read_to_end(&mut magic));
    read.map_err(|e| Error::invalid(format!("layer {digest}"), e))?;
    Ok(match magic[..] {
        [0x1f, 0x8b, ..] => Compression::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd] => Compression::Zstd,
        _ => Compression::None,
    })
}

/// Finds the image called `tag`, or the only one. Blocking.
pub(crate) fn open(layout: &Path, tag: Option<&str>) -> Result<Image, Error> {
    let index_path = layout.join("index.json");
    let bytes = match File::open(&index_path) {
        Ok(file) => read_capped(file, "the layout's index")?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let reason = "there is no index.json in it, so it is no OCI image layout".to_owned();
            return Err(Error::NotFound { image: format!("oci:{}", layout.display()), reason });
        }
        Err(e) => return Err(Error::Io { step: format!("read {}", index_path.display()), source: e }),
    };
    let index = ImageIndex::from_reader(&bytes[..]).map_err(|e| Error::invalid("the layout's index", e))?;
    let named = choose(index.manifests(), tag).map_err(|reason| Error::NotFound {
        image: format!("oci:{}{}", layout.display(), tag.map(|t| format!(":{t}")).unwrap_or_default()),
        reason,
    })?;
    let blobs = layout.join("blobs/sha256");
    let (digest, bytes) = resolve(&blobs, named, MAX_DEPTH)?;
    let manifest = ImageManifest::from_reader(&bytes[..]).map_err(|e| Error::invalid("its manifest", e))?;
    let config = ImageConfig::parse(&document(&blobs, manifest.config())?)?;
    if config.architecture != architecture() {
        let reason = format!("it is for {}", config.architecture);
        return Err(Error::Platform { image: digest, architecture: architecture(), reason });
    }
    if manifest.layers().len() > MAX_LAYERS {
        return Err(Error::invalid("its manifest", format!("more than {MAX_LAYERS} layers")));
    }
    let layers = manifest.layers().iter().map(layer).collect::<Result<_, Error>>()?;
    let json = serde_json::from_slice(&bytes).map_err(|e| Error::invalid("its manifest", e))?;
    Ok(Image {
        config,
        config_digest: manifest.config().digest().to_string(),
        digest,
        manifest: json,
        layers,
        blobs,
    })
}

fn layer(descriptor: &Descriptor) -> Result<Layer, Error> {
    let digest = descriptor.digest().to_string();
    hex_of(&digest)?;
    let kind = descriptor.media_type().to_string();
    let layer = ["application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs."]
        .iter()
        .find_map(|family| kind.strip_prefix(family));
    // v1.tar, diff.tar and the like; with encryption it would end in "+encrypted".
    if layer.is_some_and(|rest| rest.contains(".tar") && !rest.contains("encrypted")) {
        Ok(Layer { digest })
    } else {
        Err(Error::invalid(
            format!("layer {digest}"),
            format!("its type {kind:?} is not a file system layer"),
        ))
    }
}

fn choose<'a>(manifests: &'a [Descriptor], tag: Option<&str>) -> Result<&'a Descriptor, String> {
    let name = |d: &'a Descriptor| d.annotations().as_ref().and_then(|a| a.get(REF_NAME)).map(String::as_str);
    let known = || manifests.iter().filter_map(name).take(20).collect::<Vec<_>>().join(", ");
    match tag {
        Some(tag) => manifests
            .iter()
            .find(|d| name(d) == Some(tag))
            .ok_or_else(|| format!("the layout has no image {tag:?}; it has: {}", known())),
        None => match manifests {
            [only] => Ok(only),
            [] => Err("the layout holds no image".to_owned()),
            several => Err(format!("the layout holds {} images; name one of: {}", several.len(), known())),
        },
    }
}

/// Follows indexes to the manifest for this machine.
fn resolve(blobs: &Path, descriptor: &Descriptor, depth: usize) -> Result<(String, Vec<u8>), Error> {
    let bytes = document(blobs, descriptor)?;
    let kind = descriptor.media_type().to_string();
    if !kind.contains("index") && !kind.contains("manifest.list") {
        return Ok((descriptor.digest().to_string(), bytes));
    }
    let index =
        ImageIndex::from_reader(&bytes[..]).map_err(|e| Error::invalid("an index in the layout", e))?;
    let fits = |d: &&Descriptor| {
        d.platform()
            .as_ref()
            .is_none_or(|p| p.os().to_string() == "linux" && p.architecture().to_string() == architecture())
    };
    match index.manifests().iter().find(fits) {
        Some(next) if depth > 0 => resolve(blobs, next, depth - 1),
        Some(_) => Err(Error::invalid("an index in the layout", "indexes are nested too deep")),
        None => Err(Error::Platform {
            image: descriptor.digest().to_string(),
            architecture: architecture(),
            reason: "its index names other platforms only".to_owned(),
        }),
    }
}

/// Reads a small blob and checks it.
fn document(blobs: &Path, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
    let digest = descriptor.digest().to_string();
    let path = blobs.join(hex_of(&digest)?);
    let what = format!("blob {digest}");
    let file = File::open(&path).map_err(|e| Error::invalid(&what, e))?;
    let bytes = read_capped(file, &what)?;
    if format!("sha256:{}", hex::encode(Sha256::digest(&bytes))) != digest {
        return Err(Error::invalid(what, "its content does not match its digest; fetch it again"));
    }
    Ok(bytes)
}

fn read_capped(file: File, what: &str) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    file.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes).during(|| format!("read {what}"))?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        return Err(Error::invalid(what, format!("it is larger than {} MiB", MAX_DOCUMENT >> 20)));
    }
    Ok(bytes)
}

/// The hex part of a sha256 digest, fit for a file name.
fn hex_of(digest: &str) -> Result<&str, Error> {
    digest
        .strip_prefix("sha256:")
        .filter(|hex| hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()))
        .ok_or_else(|| Error::invalid(format!("digest {digest:?}"), "only sha256 is supported"))
}

impl Image {
    /// Makes the unpacker's layout in `directory`, where the image is called [`TAG`]. Blocking.
    pub(crate) fn view(&self, directory: &Path) -> Result<(), Error> {
        let step = || format!("make a layout in {}", directory.display());
        let blobs = directory.join("blobs/sha256");
        fs::create_dir_all(&blobs).during(step)?;
        fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).during(step)?;
        let source = self.blobs.canonicalize().during(step)?;
        let mut manifest = self.manifest.clone();
        for (n, layer) in self.layers.iter().enumerate() {
            let blob = source.join(hex_of(&layer.digest)?);
            let descriptor = &mut manifest["layers"][n];
            match compression(&blob, &layer.digest)? {
                Compression::Zstd => {
                    let (digest, size) = decompress(&blob, &blobs, &layer.digest)?;
                    *descriptor = serde_json::json!({ "mediaType": TAR, "digest": digest, "size": size });
                    continue;
                }
                Compression::Gzip => descriptor["mediaType"] = format!("{TAR}+gzip").into(),
                Compression::None => descriptor["mediaType"] = TAR.into(),
            }
            link(&source, &blobs, &layer.digest).during(step)?;
        }
        link(&source, &blobs, &self.config_digest).during(step)?;
        let bytes = manifest.to_string();
        let digest = hex::encode(Sha256::digest(&bytes));
        fs::write(blobs.join(&digest), &bytes).during(step)?;
        let index = serde_json::json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": format!("sha256:{digest}"),
                "size": bytes.len(),
                "annotations": { REF_NAME: TAG },
            }],
        });
        fs::write(directory.join("index.json"), index.to_string()).during(step)
    }
}

fn link(source: &Path, blobs: &Path, digest: &str) -> io::Result<()> {
    let hex = digest.trim_start_matches("sha256:");
    match std::os::unix::fs::symlink(source.join(hex), blobs.join(hex)) {
        // The same layer twice.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Writes the decompressed layer under its own digest; returns that and its size.
fn decompress(source: &Path, blobs: &Path, name: &str) -> Result<(String, u64), Error> {
    let what = || format!("layer {name}");
    let file = File::open(source).map_err(|e| Error::invalid(what(), e))?;
    let mut compressed = Hashing { inner: file, hash: Sha256::new() };
    let partial = blobs.join("decompressing");
    let step = || format!("decompress layer {name}");
    let mut output = Hashing { inner: File::create(&partial).during(step)?, hash: Sha256::new() };
    let mut decoder = zstd::Decoder::new(&mut compressed).during(step)?;
    let size = io::copy(&mut (&mut decoder).take(MAX_LAYER + 1), &mut output)
        .map_err(|e| Error::invalid(what(), e))?;
    if size > MAX_LAYER {
        return Err(Error::invalid(what(), format!("it decompresses to more than {} GiB", MAX_LAYER >> 30)));
    }
    drop(decoder);
    // What the decoder left unread belongs to the digest, too.
    io::copy(&mut compressed, &mut io::sink()).during(step)?;
    if format!("sha256:{}", hex::encode(compressed.hash.finalize())) != name {
        return Err(Error::invalid(what(), "its content does not match its digest; fetch it again"));
    }
    let digest = hex::encode(output.hash.finalize());
    fs::rename(&partial, blobs.join(&digest)).during(step)?;
    Ok((format!("sha256:{digest}"), size))
}

struct Hashing<T> {
    inner: T,
    hash: Sha256,
}

impl<T: Read> Read for Hashing<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.inner.read(buffer)?;
        self.hash.update(&buffer[..len]);
        Ok(len)
    }
}

impl<T: Write> Write for Hashing<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.inner.write(bytes)?;
        self.hash.update(&bytes[..len]);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
