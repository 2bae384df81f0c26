//! The base image, from the host's real package sources to a disk in which people can work.
#![allow(missing_docs)]

mod support;

use aenv_oci::{CancellationToken, Error, Options, Progress, base, prepare, sweep};
use std::{
    fs,
    process::Command,
    sync::{Arc, Mutex},
    time::Instant,
};
use support::{Mount, can, read_disk, run};

#[tokio::test]
#[allow(clippy::print_stdout)]
async fn the_base_image_is_an_ordinary_image_in_which_the_user_may_become_root() {
    if !can(&["mmdebstrap", "umoci", "mke2fs", "skopeo"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("images");
    let said = Arc::new(Mutex::new(Vec::new()));
    let lines = Arc::clone(&said);
    let progress = Progress::new(move |line| lines.lock().unwrap().push(line.to_owned()));
    assert!(!base::exists(&target));
    let began = Instant::now();
    let built = match base::build(&target, progress, CancellationToken::new()).await {
        Ok(built) => built,
        Err(Error::Tool { reason, .. })
            if ["Could not resolve", "Failed to fetch", "Could not connect"]
                .iter()
                .any(|w| reason.contains(w)) =>
        {
            println!("Skipped: the package archive can't be reached");
            return;
        }
        Err(e) => panic!("{e}"),
    };
    println!("built {} MiB in {:?}: {}", built.size >> 20, began.elapsed(), built.digest);
    assert!(base::exists(&target));
    let said = said.lock().unwrap().clone();
    assert!(said.iter().filter(|line| line.starts_with("downloading ")).count() > 20, "{said:?}");
    let inspected = run("skopeo", &["inspect", &format!("oci:{}:base", target.display())]);
    assert!(inspected.contains(&built.digest), "{inspected}");

    let reference = format!("oci:{}:base", target.display()).parse().unwrap();
    let work = dir.path().join("work");
    let began = Instant::now();
    let prepared = prepare(&reference, Options { disk_mib: 256, ..Options::new(&work) }).await.unwrap();
    println!("prepared {} MiB of content in {:?}", prepared.content >> 20, began.elapsed());
    assert_eq!(prepared.digest, built.digest);
    assert_eq!((prepared.config.user.as_str(), prepared.config.working_dir.as_str()), ("user", "/home/user"));
    assert!(prepared.config.env.contains(&("LANG".to_owned(), "C.UTF-8".to_owned())));
    assert_eq!(prepared.config.cmd, ["/bin/bash"]);
    run("e2fsck", &["-f", "-n", prepared.raw_disk.to_str().unwrap()]);

    let entries = read_disk(&prepared.raw_disk);
    let home = &entries["home/user"];
    assert_eq!((home.kind, home.owner), ('d', (1000, 1000)));
    assert_eq!((entries["etc/sudoers.d/user"].mode, entries["etc/sudoers.d/user"].owner), (0o440, (0, 0)));
    let passwd = String::from_utf8_lossy(&entries["etc/passwd"].content).into_owned();
    assert!(passwd.lines().any(|line| line == "user:x:1000:1000::/home/user:/bin/bash"), "{passwd}");
    assert!(entries["etc/machine-id"].content.is_empty());
    for absent in ["etc/hostname", "etc/resolv.conf", "var/log/dpkg.log", "var/cache/apt/pkgcache.bin"] {
        assert!(!entries.contains_key(absent), "{absent}");
    }
    let leftovers = |start: &str| {
        entries
            .iter()
            .filter(|(path, e)| path.starts_with(start) && e.kind == 'f' && !e.content.is_empty())
            .count()
    };
    assert_eq!((leftovers("var/lib/apt/lists/"), leftovers("usr/share/man/"), leftovers("tmp/")), (0, 0, 0));

    // As its user, in its own root: the shell, Python, git and sudo work.
    let mount = Mount::new(&prepared.raw_disk);
    let inside = |script: &str| {
        let output = Command::new("chroot")
            .args(["--userspec=1000:1000", mount.at.path().to_str().unwrap(), "/bin/bash", "-c", script])
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LANG", "C.UTF-8")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{script}: {text}{}", String::from_utf8_lossy(&output.stderr));
        text
    };
    assert_eq!(inside("id -un; sudo -n id -u"), "user\n0\n");
    assert_eq!(inside("python3 -c 'print(\"ü\" * 2)'"), "üü\n");
    assert!(inside("git --version; curl --version; ip -V").contains("git version"));
    drop(mount);
    drop(prepared);
    // A second build replaces the first; one that is cancelled leaves it alone.
    let cancel = CancellationToken::new();
    cancel.cancel();
    let cancelled = base::build(&target, Progress::none(), cancel).await;
    assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
    assert!(base::exists(&target));
    sweep(dir.path()).unwrap();
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().ends_with(".tar")), "{left:?}");
}
