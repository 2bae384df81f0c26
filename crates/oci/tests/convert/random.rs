//! Random archives: valid ones for umoci to judge, damaged ones that must end in an error or a clean file system.

use crate::archive::{Archive, Compression, File, dir, file, hardlink, layout, pax, symlink};
use aenv_oci::convert::{
    ConvertError, ConvertOptions, ConvertedImage, LayoutSource, Store, convert_image, layers_of,
};
use std::{path::Path, sync::Arc, time::Duration};

/// xorshift64*: a seed gives the same run everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let value = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(value).unwrap() % end
    }

    fn of<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }
}

const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// Layers over a handful of names, so that they collide in every way. Only what umoci takes, too: each layer makes
/// its directories before it puts something in them, and links only to what it has just made.
pub(crate) fn layers(random: &mut Random) -> Vec<Vec<u8>> {
    let count = 1 + random.below(4);
    (0..count).map(|n| layer(random, n > 0)).collect()
}

fn layer(random: &mut Random, upper: bool) -> Vec<u8> {
    let mut archive = Archive::default();
    for _ in 0..1 + random.below(25) {
        let parent = random.of(&["p", "q", "p/r", "q/s"]);
        let mut at = String::new();
        for part in parent.split('/') {
            at = if at.is_empty() { part.to_owned() } else { format!("{at}/{part}") };
            archive.add(&dir(&at));
        }
        let name = format!("{parent}/{}", random.of(&NAMES));
        let content = vec![b'a'; random.below(20_000)];
        let mode = [0o644, 0o600, 0o4755, 0o2711][random.below(4)];
        match random.below(if upper { 12 } else { 9 }) {
            0..=2 => archive.add(&File { mode, ..file(&name, &content) }),
            3 => archive.add(&dir(&name)),
            4 => archive.add(&symlink(&name, random.of(&["a", "../q", "/p/r", "nowhere"]))),
            5 => {
                let target = format!("{parent}/target{}", random.below(3));
                archive.add(&file(&target, &content));
                archive.add(&hardlink(&name, &target));
            }
            6 => {
                archive.add(&pax(file(&name, &content), &[("SCHILY.xattr.user.k", b"v"), ("mtime", b"1.5")]))
            }
            7 => archive.add(&File { kind: b'3', device: (1, 5), ..file(&name, b"") }),
            8 => archive.add(&File { kind: b'6', owner: (7, 8), ..file(&name, b"") }),
            9 | 10 => archive.add(&file(&format!("{parent}/.wh.{}", random.of(&NAMES)), b"")),
            _ => archive.add(&file(&format!("{parent}/.wh..wh..opq"), b"")),
        }
    }
    archive.end()
}

/// Bytes changed, cut out, put in twice; headers get their checksum right again half of the time, so that what is
/// behind the checksum is reached.
pub(crate) fn damage(random: &mut Random, tar: &mut Vec<u8>) {
    for _ in 0..1 + random.below(6) {
        let sector = random.below(tar.len() / 512) * 512;
        match random.below(8) {
            0 => drop(tar.drain(sector..sector + 512)),
            1 => {
                let copy = tar[sector..sector + 512].to_vec();
                let to = random.below(tar.len() / 512) * 512;
                tar.splice(to..to, copy);
            }
            2 => tar.truncate(sector + random.below(512)),
            _ => {
                let fields = [0, 100, 108, 124, 136, 156, 157, 257, 329, 345, 386, 482, 483];
                let at = sector + fields[random.below(fields.len())] + random.below(8);
                tar[at] = [0, 0xff, 0x80, b'7', b'/', b'.', b'S', b'x', b'L', b'1'][random.below(10)];
            }
        }
        if tar.len() < 1024 {
            return;
        }
        if random.below(2) == 0 && sector + 512 <= tar.len() {
            let mut header: [u8; 512] = tar[sector..sector + 512].try_into().unwrap();
            crate::archive::seal(&mut header);
            tar[sector..sector + 512].copy_from_slice(&header);
        }
    }
}

/// Converts within bounds small enough that a bomb would be noticed.
pub(crate) async fn convert(at: &Path, tars: &[Vec<u8>]) -> Result<ConvertedImage, ConvertError> {
    let (manifest, config) = layout(&at.join("layout"), tars, Compression::None);
    let manifest = oci_spec::image::ImageManifest::from_reader(&manifest[..]).unwrap();
    let options = ConvertOptions {
        max_fs_bytes: 1 << 30,
        max_layer_bytes: 64 << 20,
        max_files: 10_000,
        max_memory: 64 << 20,
        deadline: Duration::from_secs(20),
        ..ConvertOptions::default()
    };
    let store = Store::open(at.join("store")).unwrap();
    let source = Arc::new(LayoutSource { layout: at.join("layout") });
    convert_image(source, &layers_of(&manifest, &config).unwrap(), &store, &options).await
}

/// One damaged image; says whether it could be converted nevertheless.
pub(crate) async fn damaged_once(seed: u64) -> Option<(tempfile::TempDir, ConvertedImage)> {
    let mut random = Random::new(seed);
    let mut tars = layers(&mut random);
    let one = random.below(tars.len());
    damage(&mut random, &mut tars[one]);
    let dir = tempfile::tempdir().unwrap();
    match convert(dir.path(), &tars).await {
        Ok(image) => Some((dir, image)),
        Err(ConvertError::Layer { .. }) => None,
        Err(error) => panic!("seed {seed}: {error}"),
    }
}
