//! Archives and images made by hand, so that every kind of header is in them.

use sha2::{Digest as _, Sha256};
use std::{fs, io::Write as _, path::Path};

/// A tar archive being written.
#[derive(Default, Clone)]
pub(crate) struct Archive {
    pub(crate) bytes: Vec<u8>,
}

#[derive(Clone)]
pub(crate) struct File<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) kind: u8,
    pub(crate) mode: u32,
    pub(crate) owner: (u64, u64),
    pub(crate) time: u64,
    pub(crate) link: &'a [u8],
    pub(crate) device: (u32, u32),
    pub(crate) content: &'a [u8],
    pub(crate) pax: Vec<(&'a str, Vec<u8>)>,
}

pub(crate) fn file<'a>(name: &'a str, content: &'a [u8]) -> File<'a> {
    let (mode, time) = (0o644, 1_500_000_000);
    File {
        name: name.as_bytes(),
        kind: b'0',
        mode,
        owner: (0, 0),
        time,
        link: b"",
        device: (0, 0),
        content,
        pax: Vec::new(),
    }
}

pub(crate) fn dir(name: &str) -> File<'_> {
    File { kind: b'5', mode: 0o755, ..file(name, b"") }
}

pub(crate) fn symlink<'a>(name: &'a str, target: &'a str) -> File<'a> {
    File { kind: b'2', mode: 0o777, link: target.as_bytes(), ..file(name, b"") }
}

pub(crate) fn hardlink<'a>(name: &'a str, target: &'a str) -> File<'a> {
    File { kind: b'1', link: target.as_bytes(), ..file(name, b"") }
}

#[allow(clippy::needless_pass_by_value, reason = "reads as a constructor")]
pub(crate) fn pax<'a>(file: File<'a>, records: &[(&'a str, &[u8])]) -> File<'a> {
    File { pax: records.iter().map(|(key, value)| (*key, value.to_vec())).collect(), ..file }
}

fn number(field: &mut [u8], value: u64) {
    let digits = format!("{value:0width$o}", width = field.len() - 1);
    if digits.len() < field.len() {
        field[..digits.len()].copy_from_slice(digits.as_bytes());
    } else {
        let len = field.len();
        field[0] = 0x80;
        field[len - 8..].copy_from_slice(&value.to_be_bytes());
        if len == 8 {
            field[0] |= 0x80;
        }
    }
}

impl Archive {
    pub(crate) fn of(files: &[File<'_>]) -> Self {
        let mut archive = Self::default();
        files.iter().for_each(|file| archive.add(file));
        archive
    }

    pub(crate) fn add(&mut self, file: &File<'_>) {
        if !file.pax.is_empty() {
            let mut records = Vec::new();
            for (key, value) in &file.pax {
                let body = key.len() + value.len() + 3;
                let mut length = body + body.to_string().len();
                if length.to_string().len() != body.to_string().len() {
                    length = body + length.to_string().len();
                }
                records.extend_from_slice(format!("{length} {key}=").as_bytes());
                records.extend_from_slice(value);
                records.push(b'\n');
            }
            self.header(&File { pax: Vec::new(), kind: b'x', content: &records, ..self::file("pax", b"") });
        }
        for (kind, text) in [(b'L', file.name), (b'K', file.link)] {
            if text.len() > 100 && file.pax.is_empty() {
                let text = [text, b"\0"].concat();
                self.header(&File { kind, content: &text, ..self::file("././@LongLink", b"") });
            }
        }
        self.header(file);
    }

    fn header(&mut self, file: &File<'_>) {
        let mut header = self.raw_header(file);
        seal(&mut header);
        self.put(&header, file.content);
    }

    pub(crate) fn raw_header(&self, file: &File<'_>) -> [u8; 512] {
        let mut header = [0; 512];
        let name = &file.name[..file.name.len().min(100)];
        header[..name.len()].copy_from_slice(name);
        number(&mut header[100..108], u64::from(file.mode));
        number(&mut header[108..116], file.owner.0);
        number(&mut header[116..124], file.owner.1);
        number(&mut header[124..136], file.content.len() as u64);
        number(&mut header[136..148], file.time);
        header[156] = file.kind;
        let link = &file.link[..file.link.len().min(100)];
        header[157..157 + link.len()].copy_from_slice(link);
        header[257..265].copy_from_slice(if file.pax.is_empty() { b"ustar  \0" } else { b"ustar\x0000" });
        number(&mut header[329..337], u64::from(file.device.0));
        number(&mut header[337..345], u64::from(file.device.1));
        header
    }

    pub(crate) fn put(&mut self, header: &[u8; 512], content: &[u8]) {
        self.bytes.extend_from_slice(header);
        self.bytes.extend_from_slice(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.bytes.extend_from_slice(&[0; 1024]);
        self.bytes
    }
}

pub(crate) fn seal(header: &mut [u8; 512]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compression {
    None,
    Gzip,
    /// Many members.
    Gzips,
    /// Many frames, skippable ones among them.
    Zstd,
}

pub(crate) fn compress(tar: &[u8], how: Compression) -> Vec<u8> {
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let parts = tar.chunks(tar.len() / 3 + 1);
    match how {
        Compression::None => tar.to_vec(),
        Compression::Gzip => gzip(tar),
        Compression::Gzips => parts.map(gzip).collect::<Vec<_>>().concat(),
        Compression::Zstd => {
            let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0][..], b"skip"].concat();
            let frames = parts.map(|part| [&skippable[..], &zstd::encode_all(part, 1).unwrap()].concat());
            frames.collect::<Vec<_>>().concat()
        }
    }
}

pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Writes an OCI layout whose only image has these layers, and gives manifest and configuration.
pub(crate) fn layout(at: &Path, tars: &[Vec<u8>], how: Compression) -> (Vec<u8>, Vec<u8>) {
    let blobs = at.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |bytes: &[u8]| {
        let digest = digest(bytes);
        fs::write(blobs.join(&digest[7..]), bytes).unwrap();
        (digest, bytes.len())
    };
    let suffix = match how {
        Compression::None => "",
        Compression::Gzip | Compression::Gzips => "+gzip",
        Compression::Zstd => "+zstd",
    };
    let layers: Vec<_> = tars
        .iter()
        .map(|tar| {
            let (digest, size) = put(&compress(tar, how));
            serde_json::json!({"mediaType": format!("application/vnd.oci.image.layer.v1.tar{suffix}"), "digest": digest, "size": size})
        })
        .collect();
    let ids: Vec<_> = tars.iter().map(|tar| digest(tar)).collect();
    let config = serde_json::json!({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": ids}})
        .to_string()
        .into_bytes();
    let (config_digest, config_size) = put(&config);
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config_digest, "size": config_size},
        "layers": layers,
    })
    .to_string()
    .into_bytes();
    let (manifest_digest, manifest_size) = put(&manifest);
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": manifest_digest, "size": manifest_size,
        "annotations": {"org.opencontainers.image.ref.name": "image"}}]});
    fs::write(at.join("index.json"), index.to_string()).unwrap();
    fs::write(at.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    (manifest, config)
}
