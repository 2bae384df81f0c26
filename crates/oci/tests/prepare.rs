//! From images to disks, with the real tools, a real registry and the kernel as judge.
#![allow(missing_docs)]

mod support;

use aenv_oci::{Auth, CancellationToken, Error, Options, Prepared, Progress, Reference, prepare, sweep};
use std::{
    collections::BTreeMap,
    fs,
    io::BufRead as _,
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use support::{Entry, PASSWORD, Registry, can, hard_image, long_name, read_disk, run};

const TOOLS: [&str; 4] = ["skopeo", "umoci", "mke2fs", "docker-registry"];

fn options(work: &Path) -> Options {
    Options { disk_mib: 64, ..Options::new(work) }
}

async fn disk_of(reference: &str, options: Options) -> Result<Prepared, Error> {
    prepare(&reference.parse::<Reference>().unwrap(), options).await
}

/// Nothing but what somebody still holds is in the work directory.
async fn assert_empty(work: &Path) {
    // A dropped scratch is removed by a thread of the runtime.
    let deadline = Instant::now() + Duration::from_secs(10);
    while fs::read_dir(work).unwrap().count() > 0 {
        assert!(Instant::now() < deadline, "left: {:?}", fs::read_dir(work).unwrap().collect::<Vec<_>>());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn check_hard_image(entries: &BTreeMap<String, Entry>) {
    let at = |path: &str| entries.get(path).unwrap_or_else(|| panic!("{path} is missing"));
    for gone in ["gone", "gone/file", "removed", "opaque/old", "opaque/inner", "replaced/file"] {
        assert!(!entries.contains_key(gone), "{gone} should be whited out");
    }
    assert!(!entries.keys().any(|path| path.contains(".wh.")));
    assert_eq!(
        (at("opaque/new").content.as_slice(), at("replaced").content.as_slice()),
        (&b"new"[..], &b"file"[..])
    );
    let hello = at("bin/hello");
    assert_eq!((hello.mode, hello.owner, hello.links, hello.time), (0o4755, (0, 0), 2, 1_000_000_000));
    assert_eq!(hello, at("bin/hard"));
    assert_eq!(
        (at("bin/soft").kind, at("bin/soft").content.as_slice(), at("bin/soft").time),
        ('l', &b"hello"[..], 1_000_000_001)
    );
    assert_eq!(at("bin/longsoft").content.len(), 150);
    let owned = at("etc/owned");
    assert_eq!((owned.mode, owned.owner, owned.time), (0o640, (1234, 60001), 1_000_000_000));
    assert_eq!(owned.attributes["user.note"], b"kept");
    assert_eq!(at("bin/cap").attributes["security.capability"].len(), 20);
    assert_eq!((at("sticky").mode, at("empty").mode), (0o1777, 0o700));
    assert_eq!((at("dev/char").kind, at("dev/char").device), ('c', 0x103));
    assert_eq!((at("dev/block").kind, at("dev/block").device), ('b', 0x7c8));
    assert_eq!(at("dev/pipe").kind, 'p');
    assert_eq!(at(&format!("long/path/{}", long_name())).content, b"long");
    let sparse = &at("sparse").content;
    assert!(sparse.len() == (3 << 20) + 3 && sparse.ends_with(b"\0end"));
    assert_eq!(at("a name with blanks and ü").content, b"u");
    assert_eq!((at("").owner, at("").mode & 0o555), ((0, 0), 0o555));
}

fn check_disk(prepared: &Prepared) {
    let disk = prepared.raw_disk.to_str().unwrap();
    run("e2fsck", &["-f", "-n", disk]);
    let header = run("dumpe2fs", &["-h", disk]);
    let number = |name: &str| -> u64 {
        let line = header
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_else(|| panic!("{name} in {header}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(number("Free blocks:") * 4096 >= 64 << 20, "{header}");
    assert_eq!(number("Reserved block count:"), 0);
    assert!(header.contains("aenv-root"));
    let meta = fs::metadata(&prepared.raw_disk).unwrap();
    assert_eq!((meta.len(), meta.len() % (1 << 20)), (prepared.size, 0));
    assert!(meta.blocks() * 512 < prepared.content + (8 << 20), "{} bytes on disk", meta.blocks() * 512);
    // What a guest would zero in the background is marked as zero.
    let groups = run("dumpe2fs", &[disk]);
    let mut groups =
        groups.lines().filter(|line| line.starts_with("Group ") && line.contains("(Blocks ")).peekable();
    assert!(groups.peek().is_some());
    groups.for_each(|line| assert!(line.contains("ITABLE_ZEROED"), "{line}"));
}

#[tokio::test]
async fn a_hard_image_from_a_registry_becomes_a_clean_disk_with_everything_in_it() {
    if !can(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let layout = hard_image(dir.path());
    let registry = Registry::start(false);
    // As Docker stores it, so that the conversion is part of the test; and as OCI, with zstd layers.
    registry.push(&layout, "hard", "team/hard:v2s2", &["--format=v2s2"]);
    registry.push(&layout, "hard", "team/hard:zstd", &["--format=oci", "--dest-compress-format=zstd"]);
    let work = dir.path().join("work");
    for tag in ["v2s2", "zstd"] {
        let said = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&said);
        let progress = Progress::new(move |line| lines.lock().unwrap().push(line.to_owned()));
        let reference = format!("{}/team/hard:{tag}", registry.address);
        let prepared = disk_of(&reference, Options { progress, ..options(&work) }).await.unwrap();
        assert_eq!((prepared.config.user.as_str(), prepared.config.working_dir.as_str()), ("1234", "/etc"));
        assert!(prepared.config.env.contains(&("A".to_owned(), "1".to_owned())));
        assert_eq!(prepared.config.cmd, ["/bin/hello"]);
        assert!(prepared.digest.starts_with("sha256:"));
        check_disk(&prepared);
        check_hard_image(&read_disk(&prepared.raw_disk));
        let said = said.lock().unwrap().clone();
        assert!(
            said.iter().any(|l| l.contains("fetching")) && said.iter().any(|l| l.contains("Copying")),
            "{said:?}"
        );
        assert!(
            said.iter().any(|l| l.contains("unpack")) && said.iter().any(|l| l.contains("disk")),
            "{said:?}"
        );
        drop(prepared);
        assert_empty(&work).await;
    }
}

#[tokio::test]
async fn layouts_and_archives_on_this_machine_give_the_same_disk() {
    if !can(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let layout = hard_image(dir.path());
    let from = format!("oci:{}:hard", layout.display());
    let archives = [
        format!("oci-archive:{}:hard", dir.path().join("oci.tar").display()),
        format!("docker-archive:{}:hard:1", dir.path().join("docker.tar").display()),
    ];
    for archive in &archives {
        run("skopeo", &["--insecure-policy", "copy", &from, archive]);
    }
    let work = dir.path().join("work");
    let untagged = format!("oci:{}", layout.display());
    let mut digests = Vec::new();
    for reference in archives.iter().chain([&from, &untagged]) {
        let prepared = disk_of(reference, options(&work)).await.unwrap();
        check_disk(&prepared);
        check_hard_image(&read_disk(&prepared.raw_disk));
        digests.push(prepared.digest.clone());
    }
    assert_eq!(digests[2], digests[3]);
    // The source is read in place and left alone.
    run("umoci", &["stat", "--image", &format!("{}:hard", layout.display())]);
    assert_empty(&work).await;
}

#[tokio::test]
async fn what_is_not_there_or_not_allowed_is_told_apart() {
    if !can(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let layout = hard_image(dir.path());
    let work = dir.path().join("work");
    let (open, closed) = (Registry::start(false), Registry::start(true));
    open.push(&layout, "hard", "team/hard:1", &[]);
    closed.push(&layout, "hard", "team/hard:1", &["--dest-creds", &format!("user:{PASSWORD}")]);
    let fail = async |reference: String, auth: Auth| {
        disk_of(&reference, Options { auth, ..options(&work) }).await.map(|_| ()).unwrap_err()
    };
    let digest = format!("sha256:{}", "0".repeat(64));
    for missing in [
        format!("{}/team/hard:2", open.address),
        format!("{}/team/other:1", open.address),
        format!("{}/team/hard@{digest}", open.address),
        format!("oci:{}:other", layout.display()),
        format!("oci:{}", dir.path().join("nowhere").display()),
        format!("oci-archive:{}", dir.path().join("nowhere.tar").display()),
    ] {
        let error = fail(missing.clone(), Auth::Anonymous).await;
        assert!(matches!(error, Error::NotFound { .. }), "{missing}: {error:?}");
        assert!(!error.to_string().contains("level="), "{error}");
    }
    let secret = format!("{}/team/hard:1", closed.address);
    let wrong = Auth::Password { username: "user".to_owned(), password: "wrong".to_owned() };
    for auth in [Auth::Anonymous, wrong] {
        let error = fail(secret.clone(), auth).await;
        assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
    }
    let right = Auth::Password { username: "user".to_owned(), password: PASSWORD.to_owned() };
    let prepared = disk_of(&secret, Options { auth: right, ..options(&work) }).await.unwrap();
    check_hard_image(&read_disk(&prepared.raw_disk));
    drop(prepared);
    let file = dir.path().join("auth.json");
    let json = format!(r#"{{"auths":{{"{}":{{"auth":"dXNlcjpjb3JyZWN0IGhvcnNl"}}}}}}"#, closed.address);
    fs::write(&file, json).unwrap();
    disk_of(&secret, Options { auth: Auth::File(file), ..options(&work) }).await.unwrap();
    drop(open);
    // Nobody listens there any more.
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = fail(format!("{unused}/x:1"), Auth::Anonymous).await;
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert_empty(&work).await;
}

#[tokio::test]
async fn a_layout_that_was_tampered_with_is_refused() {
    if !can(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let layout = hard_image(dir.path());
    let work = dir.path().join("work");
    let reference = format!("oci:{}:hard", layout.display());
    let blobs: Vec<_> =
        fs::read_dir(layout.join("blobs/sha256")).unwrap().map(|e| e.unwrap().path()).collect();
    let (mut all, mut unused) = (0, 0);
    for blob in blobs {
        let original = fs::read(&blob).unwrap();
        let mut changed = original.clone();
        let middle = changed.len() / 2;
        changed[middle] ^= 1;
        fs::write(&blob, changed).unwrap();
        let outcome = disk_of(&reference, options(&work)).await;
        fs::write(&blob, original).unwrap();
        match outcome {
            // A blob that only earlier steps of the image's making refer to.
            Ok(_) => unused += 1,
            Err(error) => assert!(matches!(error, Error::Invalid { .. } | Error::Tool { .. }), "{error:?}"),
        }
        all += 1;
    }
    // Two layers, a configuration and a manifest are the image.
    assert_eq!(all - unused, 4);
    disk_of(&reference, options(&work)).await.unwrap();
    assert_empty(&work).await;
}

/// Accepts connections and never answers.
fn silent_server() -> (std::net::TcpListener, String) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

#[tokio::test]
async fn a_fetch_that_hangs_ends_by_its_deadline_or_by_cancelling() {
    if !can(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().join("work");
    let (_listener, address) = silent_server();
    let reference = format!("{address}/x:1");
    let late = Options { fetch_deadline: Duration::from_millis(500), ..options(&work) };
    let error = disk_of(&reference, late).await.map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error:?}");
    let cancel = CancellationToken::new();
    let token = cancel.clone();
    let progress = Progress::new(move |_| token.cancel());
    let cancelled = Options { cancel, progress, ..options(&work) };
    let error = disk_of(&reference, cancelled).await.map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error:?}");
    // A caller that goes away.
    let gone = tokio::time::timeout(Duration::from_millis(500), disk_of(&reference, options(&work))).await;
    assert!(gone.is_err());
    assert_empty(&work).await;
}

#[test]
fn what_a_killed_process_leaves_is_swept_once_its_tools_are_gone() {
    if !can(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // An archive that gives nothing for as long as this test holds its other end.
    let archive = dir.path().join("archive.tar");
    run("mkfifo", &[archive.to_str().unwrap()]);
    let work = dir.path().join("work");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["prepare_until_killed", "--exact", "--ignored", "--nocapture"])
        .env("AENV_OCI_TEST", format!("{} oci-archive:{}", work.display(), archive.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("fetching")));
    // Opens once skopeo reads: it runs.
    let writer = fs::File::options().write(true).open(&archive).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(sweep(&work).unwrap(), 0, "a tool still works in the directory");
    assert!(fs::read_dir(&work).unwrap().count() > 0);
    drop(writer);
    let deadline = Instant::now() + Duration::from_secs(60);
    while sweep(&work).unwrap() == 0 {
        assert!(Instant::now() < deadline, "skopeo did not end");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
}

#[tokio::test]
#[ignore = "run by what_a_killed_process_leaves_is_swept_once_its_tools_are_gone"]
#[allow(clippy::print_stdout)]
async fn prepare_until_killed() {
    let Ok(arguments) = std::env::var("AENV_OCI_TEST") else { return };
    let (work, reference) = arguments.split_once(' ').unwrap();
    let progress = Progress::new(|line| println!("{line}"));
    let _ = disk_of(reference, Options { progress, ..options(Path::new(work)) }).await;
}
