//! Conversion of layers, with e2fsck, the kernel and umoci as judges.
#![allow(missing_docs, clippy::print_stderr, reason = "tests say why they are skipped")]

mod archive;
mod random;
mod tree;

use aenv_oci::convert::{
    ConvertError, ConvertOptions, ConvertedImage, ConvertedLayer, LayerBytes, LayerRef, LayerSource,
    LayoutSource, SharedLayers, SourceError, Store, convert_image, layers_of,
};
use archive::{Archive, Compression, File, dir, file, hardlink, layout, pax, seal, symlink};
use async_trait::async_trait;
use futures_util::StreamExt as _;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};
use tree::{Mounted, assert_clean, difference, export, read_tree};

fn can() -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("Skipped: needs root to mount");
        return false;
    }
    for tool in ["umoci", "e2fsck", "mount"] {
        let found = std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(tool).exists()));
        if !found {
            eprintln!("Skipped: {tool} is not installed");
            return false;
        }
    }
    true
}

struct Image {
    dir: tempfile::TempDir,
    manifest: Vec<u8>,
    config: Vec<u8>,
}

impl Image {
    fn new(tars: &[Vec<u8>], how: Compression) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (manifest, config) = layout(&dir.path().join("layout"), tars, how);
        Self { dir, manifest, config }
    }

    fn layout(&self) -> PathBuf {
        self.dir.path().join("layout")
    }

    fn store(&self) -> Store {
        Store::open(self.dir.path().join("store")).unwrap()
    }

    async fn convert_with(
        &self,
        store: &Store,
        options: &ConvertOptions,
    ) -> Result<ConvertedImage, ConvertError> {
        let manifest = oci_spec::image::ImageManifest::from_reader(&self.manifest[..]).unwrap();
        let layers = layers_of(&manifest, &self.config).unwrap();
        convert_image(Arc::new(LayoutSource { layout: self.layout() }), &layers, store, options).await
    }

    async fn convert(&self) -> ConvertedImage {
        self.convert_with(&self.store(), &ConvertOptions::default()).await.unwrap()
    }
}

/// Converts, checks the file system after each layer, and compares the whole with what umoci unpacks.
async fn assert_like_umoci(tars: &[Vec<u8>], how: Compression, dated: &[&str]) -> ConvertedImage {
    let image = Image::new(tars, how);
    let converted = image.convert().await;
    let disk = image.dir.path().join("disk");
    let paths = converted.paths();
    let every = if paths.len() > 20 { 25 } else { 1 };
    for n in (1..=paths.len()).filter(|n| n % every == 0 || *n == paths.len()) {
        export(&paths[..n], converted.layers[n - 1].fs_size, &disk);
        assert_clean(&disk);
    }
    // umoci knows no zstd.
    let theirs = if how == Compression::Zstd { Image::new(tars, Compression::Gzip) } else { image };
    compare(&theirs.layout(), "image", theirs.dir.path(), &disk, dated);
    converted
}

/// Compares a disk with what umoci unpacks of the image `tag`.
fn compare(layout: &Path, tag: &str, scratch: &Path, disk: &Path, dated: &[&str]) {
    let bundle = scratch.join("bundle");
    let out = Command::new("umoci")
        .args(["unpack", "--image", &format!("{}:{tag}", layout.display())])
        .arg(&bundle)
        .output()
        .unwrap();
    assert!(out.status.success(), "umoci: {}", String::from_utf8_lossy(&out.stderr));
    let dated: BTreeSet<PathBuf> = dated.iter().map(PathBuf::from).collect();
    let is_dated = |path: &Path| dated.contains(path);
    let expected = read_tree(&bundle.join("rootfs"), &is_dated);
    let mounted = Mounted::new(disk, "ro,loop");
    let got = read_tree(mounted.at.path(), &is_dated);
    assert!(got == expected, "{}", difference(&got, &expected));
}

#[tokio::test]
async fn the_base_image_is_what_umoci_makes_of_it() {
    let layout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/base-image");
    if !can() {
        return;
    }
    let Ok(index) = fs::read(layout.join("index.json")) else {
        eprintln!("Skipped: no base image was made yet");
        return;
    };
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let blob = |descriptor: &serde_json::Value| {
        fs::read(layout.join("blobs/sha256").join(&descriptor["digest"].as_str().unwrap()[7..])).unwrap()
    };
    let descriptor = &index["manifests"][0];
    let tag = descriptor["annotations"]["org.opencontainers.image.ref.name"].as_str().unwrap();
    let bytes = blob(descriptor);
    let manifest: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let config = blob(&manifest["config"]);
    let manifest = oci_spec::image::ImageManifest::from_reader(&bytes[..]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("store")).unwrap();
    let layers = layers_of(&manifest, &config).unwrap();
    let source = Arc::new(LayoutSource { layout: layout.clone() });
    let converted = convert_image(source, &layers, &store, &ConvertOptions::default()).await.unwrap();
    let disk = dir.path().join("disk");
    export(&converted.paths(), converted.fs_size, &disk);
    assert_clean(&disk);
    compare(&layout, tag, dir.path(), &disk, &[]);
}

fn tar(files: &[File<'_>]) -> Vec<u8> {
    Archive::of(files).end()
}

const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

#[tokio::test]
async fn files_of_every_kind_arrive_with_all_their_metadata() {
    if !can() {
        return;
    }
    let long = "x".repeat(90);
    let deep = format!("{long}/{long}/{long}/file");
    let target = "t/".repeat(100);
    let big = vec![7; 5_000_000];
    let acl: Vec<u8> = [
        &2u32.to_le_bytes()[..],
        &[1, 0, 6, 0, 255, 255, 255, 255],
        &[2, 0, 4, 0, 232, 3, 0, 0],
        &[4, 0, 4, 0, 255, 255, 255, 255],
        &[16, 0, 4, 0, 255, 255, 255, 255],
        &[32, 0, 4, 0, 255, 255, 255, 255],
    ]
    .concat();
    let large = vec![b'v'; 3000];
    let files = [
        dir("./"),
        dir("./etc"),
        file("etc/plain", b"content"),
        file("/absolute", b"inside"),
        file("a/../../../up", b"inside too"),
        file("empty", b""),
        file("big", &big),
        File { mode: 0o4755, owner: (1000, 70000), ..file("setuid", b"s") },
        File { mode: 0o1777, ..dir("tmp") },
        File { mode: 0o2750, owner: (3, 4), ..dir("group") },
        File { owner: (3_000_000_000, 2_500_000_000), ..file("big-ids", b"b") },
        File { kind: b'3', mode: 0o600, device: (1, 3), ..file("null", b"") },
        File { kind: b'4', mode: 0o660, device: (259, 70000), ..file("disk", b"") },
        File { kind: b'6', mode: 0o644, ..file("fifo", b"") },
        symlink("short", "etc/plain"),
        symlink("long", &target),
        hardlink("hard", "etc/plain"),
        file(&deep, b"deep"),
        file("a name with blanks, ü and 日本", b"u"),
        pax(file("nano", b"n"), &[("mtime", b"1234567890.123456789"), ("path", b"nano-\xc3\xbc")]),
        pax(file("ancient", b"n"), &[("mtime", b"-86400.5")]),
        pax(file("cap", b"c"), &[("SCHILY.xattr.security.capability", &CAPABILITY)]),
        pax(
            file("user", b"c"),
            &[
                ("SCHILY.xattr.user.note", b"kept"),
                ("SCHILY.xattr.user.large", &large),
                ("SCHILY.xattr.user.other", b"a longer one that hardly fits in the inode"),
            ],
        ),
        pax(file("acl", b"c"), &[("SCHILY.xattr.system.posix_acl_access", &acl)]),
        pax(dir("dir-with"), &[("SCHILY.xattr.user.d", b"1"), ("SCHILY.xattr.trusted.t", b"2")]),
        pax(file("ids", b"i"), &[("uid", b"4000000000"), ("gid", b"123")]),
        file("twice", b"first"),
        file("twice", b"second, longer"),
    ];
    let dated = ["etc", "tmp", "group", "dir-with"];
    for how in [Compression::None, Compression::Gzip, Compression::Gzips, Compression::Zstd] {
        assert_like_umoci(&[tar(&files)], how, &dated).await;
    }
}

#[tokio::test]
async fn whiteouts_hide_what_lies_below_and_nothing_else() {
    if !can() {
        return;
    }
    let base = tar(&[
        dir("a"),
        file("a/1", b"1"),
        file("a/2", b"2"),
        dir("a/sub"),
        file("a/sub/x", b"x"),
        dir("b"),
        file("b/1", b"1"),
        dir("b/deep"),
        file("b/deep/y", b"y"),
        dir("c"),
        file("c/keep", b"k"),
        file("c/gone", b"g"),
        dir("d"),
        dir("d/e"),
        file("d/e/f", b"f"),
        file("top", b"t"),
        symlink("link", "a"),
        dir("o"),
        file("o/old", b"o"),
        dir("o/olddir"),
        file("o/olddir/z", b"z"),
    ]);
    let middle = tar(&[
        file("a/.wh.1", b""),
        file("a/1", b"new after its whiteout"),
        file("b/new", b"before the opaque"),
        dir("b/deep"),
        file("b/deep/kept", b"k"),
        file("b/.wh..wh..opq", b""),
        file(".wh.top", b""),
        file("c/.wh.gone", b""),
        file("c/.wh.never", b""),
        file("nowhere/.wh.x", b""),
        file(".wh.link", b""),
        file("o/.wh..wh..opq", b""),
        file("o/after", b"after the opaque"),
    ]);
    let top = tar(&[
        file(".wh.d", b""),
        file("d/back", b"again"),
        file("top", b"back"),
        file("a/.wh.sub", b""),
        file("b/.wh.deep", b""),
    ]);
    assert_like_umoci(&[base, middle, top], Compression::Gzip, &["c"]).await;
}

#[tokio::test]
async fn hard_links_and_replacements_across_layers_are_what_umoci_makes_of_them() {
    if !can() {
        return;
    }
    let base = tar(&[
        dir("x"),
        file("x/one", b"shared"),
        hardlink("x/two", "x/one"),
        dir("dir"),
        file("dir/in", b"in"),
        file("file", b"file"),
        symlink("sym", "x"),
        symlink("abs", "/x"),
        symlink("up", "../../../x"),
        symlink("dangling", "not/there"),
        symlink("tolink", "sym"),
        file("plain", b"p"),
        dir("real"),
    ]);
    let second = tar(&[
        hardlink("three", "x/two"),
        hardlink("x/symhard", "sym"),
        file("dir", b"now a file"),
        dir("file"),
        file("file/child", b"now a directory"),
        file("sym/through", b"through a link"),
        file("abs/absolute", b"through an absolute link"),
        file("up/upwards", b"never outside"),
        hardlink("plain2", "tolink/one"),
        symlink("real", "x"),
    ]);
    let third = tar(&[
        file("x/one", b"changed: the others keep theirs"),
        file(".wh.three", b""),
        dir("sym"),
        file("sym/own", b"a directory of its own"),
    ]);
    assert_like_umoci(&[base, second, third], Compression::Gzip, &["file"]).await;
}

/// GNU's first kind of sparse file, which umoci refuses.
fn old_sparse() -> Vec<u8> {
    let mut archive = Archive::default();
    // Six pieces, so that the map goes on in a block of its own.
    let data: Vec<u8> = (0..6u8).flat_map(|n| vec![b'a' + n; 1000]).collect();
    let mut header = archive.raw_header(&File { kind: b'S', content: &data, ..file("old", b"") });
    let octal = |value: usize| format!("{value:011o}\0").into_bytes();
    let at = |n: usize| n * 1_000_000 + 17;
    for n in 0..4 {
        header[386 + n * 24..][..12].copy_from_slice(&octal(at(n)));
        header[398 + n * 24..][..12].copy_from_slice(&octal(1000));
    }
    header[482] = 1;
    header[483..495].copy_from_slice(&octal(9_000_000));
    seal(&mut header);
    archive.bytes.extend_from_slice(&header);
    let mut more = [0; 512];
    for n in 0..2 {
        more[n * 24..][..12].copy_from_slice(&octal(at(n + 4)));
        more[n * 24 + 12..][..12].copy_from_slice(&octal(1000));
    }
    archive.put(&more, &data);
    archive.end()
}

fn sparse_files() -> Vec<u8> {
    let mut archive = Archive::default();
    archive.add(&pax(
        file("GNUSparseFile.0/zero", b"onetwo"),
        &[
            ("GNU.sparse.size", b"100000"),
            ("GNU.sparse.numblocks", b"2"),
            ("GNU.sparse.offset", b"10"),
            ("GNU.sparse.numbytes", b"3"),
            ("GNU.sparse.offset", b"50000"),
            ("GNU.sparse.numbytes", b"3"),
        ],
    ));
    archive.add(&pax(
        file("GNUSparseFile.0/one", b"onetwo"),
        &[
            ("GNU.sparse.name", b"one"),
            ("GNU.sparse.size", b"100000"),
            ("GNU.sparse.numblocks", b"2"),
            ("GNU.sparse.map", b"10,3,99997,3"),
        ],
    ));
    let mut map = b"2\n4096\n3\n2000000\n3\n".to_vec();
    map.resize(512, 0);
    map.extend_from_slice(b"onetwo");
    archive.add(&pax(
        file("GNUSparseFile.0/v1", &map),
        &[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"v1"),
            ("GNU.sparse.realsize", b"50000000"),
        ],
    ));
    archive.end()
}

#[tokio::test]
async fn sparse_files_keep_their_holes_and_their_content() {
    if !can() {
        return;
    }
    let converted = assert_like_umoci(&[sparse_files()], Compression::Gzip, &[]).await;
    assert!(converted.layers[0].size < 1 << 20, "{:?}", converted.layers[0]);
    let image = Image::new(&[old_sparse()], Compression::Gzip);
    let converted = image.convert().await;
    let disk = image.dir.path().join("disk");
    export(&converted.paths(), converted.fs_size, &disk);
    assert_clean(&disk);
    let content = fs::read(Mounted::new(&disk, "ro,loop").at.path().join("old")).unwrap();
    let mut expected = vec![0; 9_000_000];
    for n in 0..6 {
        expected[n * 1_000_000 + 17..][..1000].fill(b'a' + u8::try_from(n).unwrap());
    }
    assert!(content == expected);
}

#[tokio::test]
async fn huge_directories_are_indexed_and_grow_over_layers() {
    if !can() {
        return;
    }
    let names: Vec<String> = (0..30_000).map(|n| format!("huge/file-with-a-rather-long-name-{n}")).collect();
    let mut files = vec![dir("huge")];
    files.extend(names.iter().map(|name| file(name, b"")));
    let subs: Vec<String> = (0..300).map(|n| format!("huge/sub{n}")).collect();
    let more: Vec<_> = subs.iter().map(|name| dir(name)).collect();
    let gone: Vec<String> =
        (0..29_990).map(|n| format!("huge/.wh.file-with-a-rather-long-name-{n}")).collect();
    let less: Vec<_> = gone.iter().map(|name| file(name, b"")).collect();
    assert_like_umoci(&[tar(&files), tar(&more), tar(&less)], Compression::Gzip, &[]).await;
}

#[tokio::test]
async fn an_image_may_have_127_layers() {
    if !can() {
        return;
    }
    let mut tars = Vec::new();
    for n in 0..127 {
        let (own, shared, gone) =
            (format!("d{}/f{n}", n % 7), format!("n{n}"), format!("d{}/.wh.f{}", n % 7, n.max(14) - 14));
        let text = vec![b'a' + u8::try_from(n % 26).unwrap(); 100 * n];
        tars.push(tar(&[file(&own, &text), file("same", &text), file(&shared, b"n"), file(&gone, b"")]));
    }
    assert_like_umoci(&tars, Compression::Gzip, &[]).await;
}

#[tokio::test]
async fn a_large_file_makes_the_file_system_grow_and_the_kernel_can_write_and_grow_it_further() {
    if !can() {
        return;
    }
    let content: Vec<u8> = (0..150_000_000u32).map(|n| low(n.wrapping_mul(2_654_435_761) >> 13)).collect();
    let image =
        Image::new(&[tar(&[file("small", b"s")]), tar(&[file("large", &content)])], Compression::None);
    let converted = image.convert().await;
    assert!(converted.fs_size > 128 << 20 && converted.layers[0].size < 1 << 20, "{converted:?}");
    let disk = image.dir.path().join("disk");
    export(&converted.paths(), converted.fs_size, &disk);
    assert_clean(&disk);
    // A larger device, as a guest with more disk has it.
    fs::File::options().write(true).open(&disk).unwrap().set_len(20 << 30).unwrap();
    let mounted = Mounted::new(&disk, "rw,loop");
    assert!(fs::read(mounted.at.path().join("large")).unwrap() == content);
    fs::write(mounted.at.path().join("new"), b"written by the kernel").unwrap();
    let source =
        Command::new("findmnt").args(["-n", "-o", "SOURCE"]).arg(mounted.at.path()).output().unwrap();
    let device = String::from_utf8(source.stdout).unwrap().trim().to_owned();
    let grown = Command::new("resize2fs").arg(&device).output().unwrap();
    let said = String::from_utf8_lossy(&grown.stderr).into_owned();
    if said.contains("Permission denied") {
        eprintln!("Skipped: growing while mounted needs CAP_SYS_RESOURCE");
        drop(mounted);
        let grown = Command::new("resize2fs").args(["-f"]).arg(&disk).output().unwrap();
        assert!(grown.status.success(), "{}", String::from_utf8_lossy(&grown.stderr));
        assert_clean(&disk);
    } else {
        assert!(grown.status.success(), "{said}");
        drop(mounted);
    }
    let mounted = Mounted::new(&disk, "rw,loop");
    fs::write(mounted.at.path().join("after"), b"the file system grew").unwrap();
    assert!(fs::read(mounted.at.path().join("large")).unwrap() == content);
    let total = rustix::fs::statvfs(mounted.at.path()).unwrap();
    assert!(total.f_blocks * total.f_frsize > 18 << 30);
    drop(mounted);
    assert_clean(&disk);
}

fn low(value: u32) -> u8 {
    value.to_le_bytes()[0]
}

#[tokio::test]
async fn the_same_image_gives_the_same_bytes_and_shared_layers_are_converted_once() {
    let base = tar(&[dir("a"), file("a/b", b"base")]);
    let first = Image::new(&[base.clone(), tar(&[file("one", b"1")])], Compression::Gzip);
    let second = Image::new(&[base, tar(&[file("two", b"2")])], Compression::Zstd);
    let (here, there) = (first.store(), second.store());
    let options = ConvertOptions::default();
    let one = first.convert_with(&here, &options).await.unwrap();
    let again = first.convert_with(&there, &options).await.unwrap();
    let digests =
        |image: &ConvertedImage| image.layers.iter().map(|layer| layer.digest.clone()).collect::<Vec<_>>();
    assert_eq!(digests(&one), digests(&again));
    // The base's archive is not needed any more.
    for blob in fs::read_dir(first.layout().join("blobs/sha256")).unwrap() {
        fs::remove_file(blob.unwrap().path()).unwrap();
    }
    assert_eq!(first.convert_with(&here, &options).await.unwrap().paths(), one.paths());
    let two = second.convert_with(&here, &options).await.unwrap();
    assert_eq!(two.layers[0], one.layers[0]);
    assert_ne!(two.layers[1].chain_id, one.layers[1].chain_id);
    assert_eq!(fs::read_dir(here.root()).unwrap().count(), 3);
    // Several at once, of the same.
    let fresh = Store::open(second.dir.path().join("fresh")).unwrap();
    let (a, b) = tokio::join!(second.convert_with(&fresh, &options), second.convert_with(&fresh, &options));
    assert_eq!(a.unwrap().paths(), b.unwrap().paths());
    assert_eq!(fs::read_dir(fresh.root()).unwrap().count(), 2);
}

#[tokio::test]
async fn what_is_wrong_with_an_image_is_said_and_nothing_is_left_of_it() {
    let fails = async |tars: &[Vec<u8>], options: ConvertOptions, words: &str| {
        let image = Image::new(tars, Compression::Gzip);
        let error = image.convert_with(&image.store(), &options).await.unwrap_err();
        assert!(error.to_string().contains(words), "{error} lacks {words:?}");
        assert_eq!(fs::read_dir(image.store().root()).unwrap().count(), 0);
    };
    let good = ConvertOptions::default;
    fails(&[b"no archive at all".repeat(100)], good(), "checksum").await;
    let mut short = tar(&[file("a", &[1; 5000])]);
    short.truncate(3000);
    fails(&[short], good(), "ends within a file").await;
    fails(&[tar(&[hardlink("a", "missing")])], good(), "does not exist").await;
    fails(&[tar(&[dir("d"), hardlink("a", "d")])], good(), "hard link to a directory").await;
    fails(&[tar(&[symlink("a", "b"), symlink("b", "a"), file("a/c", b"")])], good(), "circle").await;
    fails(&[tar(&[file("a", b""), file("a/b", b"")])], good(), "not a directory").await;
    fails(&[tar(&[file(&"n".repeat(256), b"")])], good(), "255").await;
    let bomb = vec![0; 20 << 20];
    fails(&[tar(&[file("zeroes", &bomb)])], ConvertOptions { max_layer_bytes: 10 << 20, ..good() }, "limit")
        .await;
    let many: Vec<String> = (0..200).map(|n| n.to_string()).collect();
    let many: Vec<_> = many.iter().map(|name| file(name, b"")).collect();
    fails(&[tar(&many)], ConvertOptions { max_files: 100, ..good() }, "limit on files").await;
    fails(&[tar(&many)], ConvertOptions { max_memory: 16 << 10, ..good() }, "memory").await;
    let noise: Vec<u8> = (0..140_000_000u32).map(|n| low(n.wrapping_mul(2_654_435_761) >> 13) | 1).collect();
    fails(
        &[tar(&[file("noise", &noise)])],
        ConvertOptions { max_fs_bytes: 128 << 20, ..good() },
        "limit on its size",
    )
    .await;
    // A configuration that names other content.
    let mut image = Image::new(&[tar(&[file("a", b"a")])], Compression::Gzip);
    image.config = Image::new(&[tar(&[file("a", b"b")])], Compression::Gzip).config;
    let error = image.convert_with(&image.store(), &good()).await.unwrap_err();
    assert!(matches!(error, ConvertError::Digest { .. }), "{error}");
    assert_eq!(fs::read_dir(image.store().root()).unwrap().count(), 0);
    // A blob that is damaged, cut or gone.
    let image = Image::new(&[tar(&[file("a", &[5; 9000])])], Compression::None);
    let manifest: serde_json::Value = serde_json::from_slice(&image.manifest).unwrap();
    let blob =
        image.layout().join("blobs/sha256").join(&manifest["layers"][0]["digest"].as_str().unwrap()[7..]);
    let bytes = fs::read(&blob).unwrap();
    let mut damaged = bytes.clone();
    damaged[5000] ^= 1;
    for wrong in [&damaged[..], &[&bytes[..], b"more"].concat()] {
        fs::write(&blob, wrong).unwrap();
        let error = image.convert_with(&image.store(), &good()).await.unwrap_err();
        assert!(matches!(error, ConvertError::Digest { .. } | ConvertError::Source { .. }), "{error}");
        assert_eq!(fs::read_dir(image.store().root()).unwrap().count(), 0);
    }
    fs::remove_file(&blob).unwrap();
    let error = image.convert_with(&image.store(), &good()).await.unwrap_err();
    assert!(matches!(error, ConvertError::Source { .. }), "{error}");
}

#[tokio::test]
async fn an_image_without_layers_is_an_empty_file_system() {
    if !can() {
        return;
    }
    let image = Image::new(&[], Compression::Gzip);
    let converted = image.convert().await;
    let disk = image.dir.path().join("disk");
    export(&converted.paths(), converted.fs_size, &disk);
    assert_clean(&disk);
    let mounted = Mounted::new(&disk, "ro,loop");
    assert_eq!(fs::read_dir(mounted.at.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn random_layers_are_what_umoci_makes_of_them() {
    if !can() {
        return;
    }
    for seed in 1..=25 {
        eprintln!("seed {seed}");
        let tars = random::layers(&mut random::Random::new(seed));
        assert_like_umoci(&tars, Compression::None, &["p", "q"]).await;
    }
}

#[tokio::test]
async fn damaged_archives_end_in_an_error_or_a_clean_file_system() {
    let mut refused = 0;
    for seed in 1..=150 {
        eprintln!("seed {seed}");
        match random::damaged_once(seed).await {
            None => refused += 1,
            Some((dir, image)) if can() && seed % 5 == 0 => {
                let disk = dir.path().join("disk");
                export(&image.paths(), image.fs_size, &disk);
                assert_clean(&disk);
            }
            Some(_) => {}
        }
    }
    assert!((10..150).contains(&refused), "{refused} of 150 were refused");
}

/// A directory that stands for a bucket.
struct Bucket(PathBuf);

#[async_trait]
impl SharedLayers for Bucket {
    async fn get(&self, chain_id: &str, record: &Path, file: &Path) -> Result<bool, SourceError> {
        let from = self.0.join(&chain_id[7..]);
        if !from.join("record").exists() {
            return Ok(false);
        }
        fs::copy(from.join("file"), file)?;
        fs::copy(from.join("record"), record)?;
        Ok(true)
    }

    async fn put(&self, layer: &ConvertedLayer) -> Result<(), SourceError> {
        let to = self.0.join(&layer.chain_id[7..]);
        fs::create_dir_all(&to)?;
        fs::copy(&layer.path, to.join("file"))?;
        fs::copy(layer.path.with_file_name("layer.json"), to.join("record"))?;
        Ok(())
    }
}

#[tokio::test]
async fn another_machine_takes_converted_layers_from_the_bucket_and_converts_damaged_ones_anew() {
    let image = Image::new(&[tar(&[file("a", b"1")]), tar(&[file("b", b"2")])], Compression::Gzip);
    let bucket = image.dir.path().join("bucket");
    let options =
        ConvertOptions { shared: Some(Arc::new(Bucket(bucket.clone()))), ..ConvertOptions::default() };
    let first = image.convert_with(&image.store(), &options).await.unwrap();
    let blobs = image.layout().join("blobs");
    fs::rename(&blobs, image.layout().join("away")).unwrap();
    let second = Store::open(image.dir.path().join("second")).unwrap();
    let taken = image.convert_with(&second, &options).await.unwrap();
    assert_eq!(taken.layers[1].digest, first.layers[1].digest);
    assert!(taken.paths()[1].starts_with(second.root()));
    fs::rename(image.layout().join("away"), &blobs).unwrap();
    let damaged = bucket.join(&first.layers[1].chain_id[7..]).join("file");
    let mut bytes = fs::read(&damaged).unwrap();
    bytes[5000] ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let third = Store::open(image.dir.path().join("third")).unwrap();
    let anew = image.convert_with(&third, &options).await.unwrap();
    assert_eq!(anew.layers[1].digest, first.layers[1].digest);
}

/// Gives a few bytes and then nothing for ever.
struct Hanging;

#[async_trait]
impl LayerSource for Hanging {
    async fn open(&self, _: &LayerRef) -> Result<LayerBytes, SourceError> {
        let first = futures_util::stream::iter([Ok(vec![0x1f, 0x8b, 8, 0].into())]);
        Ok(first.chain(futures_util::stream::pending()).boxed())
    }
}

#[tokio::test]
async fn a_source_that_hangs_ends_by_the_deadline_or_by_cancelling_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let digest = archive::digest(b"");
    let layers = [LayerRef { digest: digest.clone(), size: 100, diff_id: digest }];
    let deadline = std::time::Duration::from_millis(300);
    let late = ConvertOptions { deadline, ..ConvertOptions::default() };
    let error = convert_image(Arc::new(Hanging), &layers, &store, &late).await.unwrap_err();
    assert!(matches!(error, ConvertError::TimedOut(_)), "{error}");
    let options = ConvertOptions::default();
    let cancel = options.cancel.clone();
    let (result, ()) = tokio::join!(convert_image(Arc::new(Hanging), &layers, &store, &options), async {
        while fs::read_dir(dir.path()).unwrap().count() == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        cancel.cancel();
    });
    assert!(matches!(result, Err(ConvertError::Cancelled)), "{result:?}");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while fs::read_dir(dir.path()).unwrap().count() > 0 {
        assert!(std::time::Instant::now() < end, "a conversion goes on though nobody wants it");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
