//! A hard image, a real registry, and a look into a disk.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    net::TcpListener,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// Whether root and these programs are there; says Skipped and why if not.
#[allow(clippy::print_stdout)]
pub(crate) fn can(programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| {
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        !path.split(':').any(|dir| Path::new(dir).join(program).exists())
    });
    match missing {
        _ if !rustix::process::geteuid().is_root() => println!("Skipped: needs root"),
        Some(program) => println!("Skipped: needs {program}"),
        None => return true,
    }
    false
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(arguments).env("PATH", path).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text}");
    text
}

/// 200 bytes: beyond what a tar header holds.
pub(crate) fn long_name() -> String {
    "n".repeat(200)
}

/// Makes an image with everything that is easily lost, in two layers, called `layout:hard`.
pub(crate) fn hard_image(dir: &Path) -> PathBuf {
    let lower = dir.join("lower");
    fs::create_dir_all(&lower).unwrap();
    let script = r#"set -eu
        mkdir -p bin etc gone opaque/inner sticky long/path replaced dev
        printf 'hello\n' > bin/hello; chmod 4755 bin/hello
        ln bin/hello bin/hard; ln -s hello bin/soft
        ln -s "$(printf 'x%.0s' $(seq 150))" bin/longsoft
        printf secret > gone/file; printf old > opaque/old; printf old > opaque/inner/old; printf old > removed
        printf old > replaced/file
        chmod 1777 sticky
        printf owned > etc/owned; chown 1234:60001 etc/owned; chmod 0640 etc/owned
        printf cap > bin/cap; chown 7:7 bin/cap
        printf long > "long/path/$NAME"
        mknod dev/char c 1 3; mknod dev/block b 7 200; mkfifo dev/pipe
        truncate -s 3M sparse; printf end >> sparse
        mkdir empty; chmod 0700 empty
        printf u > 'a name with blanks and ü'
        touch -d @1000000000 etc/owned bin/hello
        touch -h -d @1000000001 bin/soft"#;
    shell(&lower, script);
    xattr::set(lower.join("etc/owned"), "user.note", b"kept").unwrap();
    // cap_net_raw=ep, revision 2: linux/capability.h.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    xattr::set(lower.join("bin/cap"), "security.capability", &capability).unwrap();
    let upper = dir.join("upper");
    fs::create_dir_all(&upper).unwrap();
    let script = r#"set -eu
        mkdir opaque
        touch .wh.gone .wh.removed opaque/.wh..wh..opq
        printf new > opaque/new
        printf file > replaced"#;
    shell(&upper, script);
    let layout = dir.join("layout");
    let layout_text = layout.to_str().unwrap().to_owned();
    run("umoci", &["init", "--layout", &layout_text]);
    let image = format!("{layout_text}:hard");
    run("umoci", &["new", "--image", &image]);
    for tree in [&lower, &upper] {
        let tar = dir.join("layer.tar");
        let (tar, tree) = (tar.to_str().unwrap(), tree.to_str().unwrap());
        run("tar", &["--xattrs", "--xattrs-include=*", "--sort=name", "-C", tree, "-cf", tar, "."]);
        run("umoci", &["raw", "add-layer", "--image", &image, tar]);
    }
    let settings =
        ["--config.user=1234", "--config.env=A=1", "--config.workingdir=/etc", "--config.cmd=/bin/hello"];
    run("umoci", &[&["config", "--image", &image], &settings[..]].concat());
    layout
}

fn shell(dir: &Path, script: &str) {
    let status =
        Command::new("sh").args(["-c", script]).current_dir(dir).env("NAME", long_name()).status().unwrap();
    assert!(status.success());
}

/// What is compared of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: char,
    /// Permission bits with setuid, setgid and sticky.
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    /// Of files: content. Of symbolic links: the target.
    pub(crate) content: Vec<u8>,
    pub(crate) device: u64,
    pub(crate) links: u64,
    pub(crate) time: i64,
    pub(crate) attributes: BTreeMap<String, Vec<u8>>,
}

/// Everything in a disk, by path, read through the kernel.
pub(crate) fn read_disk(disk: &Path) -> BTreeMap<String, Entry> {
    let mount = Mount::new(disk);
    let mut entries = BTreeMap::new();
    let mut todo = vec![mount.at.path().to_owned()];
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let kind = meta.file_type();
        let (kind, content) = if kind.is_dir() {
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            ('d', Vec::new())
        } else if kind.is_symlink() {
            ('l', fs::read_link(&path).unwrap().to_string_lossy().into_owned().into_bytes())
        } else if kind.is_char_device() {
            ('c', Vec::new())
        } else if kind.is_block_device() {
            ('b', Vec::new())
        } else if kind.is_fifo() {
            ('p', Vec::new())
        } else {
            ('f', fs::read(&path).unwrap())
        };
        let names = xattr::list(&path).unwrap().map(|name| name.to_string_lossy().into_owned());
        let attributes =
            names.map(|name| (name.clone(), xattr::get(&path, &name).unwrap().unwrap_or_default())).collect();
        let name = path.strip_prefix(mount.at.path()).unwrap().to_string_lossy().into_owned();
        entries.insert(
            name,
            Entry {
                kind,
                mode: meta.mode() & 0o7777,
                owner: (meta.uid(), meta.gid()),
                content,
                device: meta.rdev(),
                links: meta.nlink(),
                time: meta.mtime(),
                attributes,
            },
        );
    }
    entries
}

pub(crate) struct Mount {
    pub(crate) at: tempfile::TempDir,
}

impl Mount {
    pub(crate) fn new(disk: &Path) -> Self {
        let at = tempfile::tempdir().unwrap();
        run("mount", &["-o", "ro,loop", disk.to_str().unwrap(), at.path().to_str().unwrap()]);
        Self { at }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.at.path()).status();
    }
}

/// Debian's docker-registry on a loopback port of its own.
pub(crate) struct Registry {
    process: Child,
    pub(crate) address: String,
    _dir: tempfile::TempDir,
}

/// `user` may enter with this password.
pub(crate) const PASSWORD: &str = "correct horse";
const HTPASSWD: &str = "user:$2b$05$beahh1Ix0rpWdeal3r0pcuD03.FiShAIA.wvZdzIFoyciZArpg0DO\n";

impl Registry {
    pub(crate) fn start(with_password: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let mut config = fs::File::create(dir.path().join("config.yml")).unwrap();
        let root = dir.path().display();
        writeln!(
            config,
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {root}/data\nhttp:\n  addr: {address}"
        )
        .unwrap();
        if with_password {
            fs::write(dir.path().join("htpasswd"), HTPASSWD).unwrap();
            writeln!(config, "auth:\n  htpasswd:\n    realm: test\n    path: {root}/htpasswd").unwrap();
        }
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(dir.path().join("config.yml"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let registry = Self { process, address, _dir: dir };
        let deadline = Instant::now() + Duration::from_secs(20);
        while std::net::TcpStream::connect(&registry.address).is_err() {
            assert!(Instant::now() < deadline, "the registry does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        registry
    }

    /// Copies an image of a layout into the registry.
    pub(crate) fn push(&self, layout: &Path, tag: &str, name: &str, options: &[&str]) {
        let (from, to) =
            (format!("oci:{}:{tag}", layout.display()), format!("docker://{}/{name}", self.address));
        let copy = ["--insecure-policy", "copy", "--dest-tls-verify=false"];
        run("skopeo", &[&copy[..], options, &[&from, &to]].concat());
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
