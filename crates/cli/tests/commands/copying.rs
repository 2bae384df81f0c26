//! `cp`: the guest's files are files of this machine, in a directory of the test's own.

use crate::{
    client::{aenv, aenv_with},
    fake::{BOX, Fake},
};
use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    sync::atomic::Ordering,
};

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("there").permissions().mode() & 0o777
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn tree(at: &Path) {
    fs::create_dir_all(at.join("a/ü b")).expect("made");
    fs::create_dir(at.join("empty")).expect("made");
    fs::write(at.join("a/ü b/x"), "deep").expect("written");
    fs::write(at.join("run.sh"), "#!/bin/sh\n").expect("written");
    fs::set_permissions(at.join("run.sh"), fs::Permissions::from_mode(0o750)).expect("set");
}

pub const TESTS: &[(&str, fn())] = &[
    ("a_file_goes_both_ways_with_its_mode", || {
        let fake = Fake::start();
        let (here, guest) = (tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
        let source = here.path().join("ü file");
        fs::write(&source, vec![7_u8; 1_000_000]).expect("written");
        fs::set_permissions(&source, fs::Permissions::from_mode(0o751)).expect("set");
        let target = guest.path().join("up");
        aenv(&fake, &["cp", text(&source), &format!("{BOX}:{}", text(&target))]).with_code(0);
        assert_eq!((fs::read(&target).expect("there").len(), mode(&target)), (1_000_000, 0o751));
        let back = here.path().join("back");
        aenv(&fake, &["cp", &format!("{BOX}:{}", text(&target)), text(&back)]).with_code(0);
        assert_eq!((fs::read(&back).expect("there"), mode(&back)), (vec![7_u8; 1_000_000], 0o751));
        // Into a directory, under its own name.
        aenv(&fake, &["cp", text(&source), &format!("{BOX}:{}", text(guest.path()))]).with_code(0);
        assert!(guest.path().join("ü file").is_file());
    }),
    ("a_tree_goes_both_ways_as_one_archive", || {
        let fake = Fake::start();
        let (here, guest) = (tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
        let source = here.path().join("tree");
        tree(&source);
        symlink("run.sh", source.join("link")).expect("linked");
        let target = guest.path().join("tree");
        aenv(&fake, &["cp", text(&source), &format!("{BOX}:{}", text(&target))]).with_code(0);
        let back = here.path().join("back");
        aenv(&fake, &["cp", &format!("{BOX}:{}", text(&target)), text(&back)]).with_code(0);
        for place in [&target, &back] {
            assert_eq!(fs::read_to_string(place.join("a/ü b/x")).expect("there"), "deep");
            assert_eq!(mode(&place.join("run.sh")), 0o750);
            assert_eq!(fs::read_link(place.join("link")).expect("a link"), Path::new("run.sh"));
            assert!(place.join("empty").is_dir());
        }
        let left = fs::read_dir("/tmp").expect("there").filter_map(Result::ok);
        let left: Vec<_> =
            left.map(|e| e.file_name()).filter(|n| n.to_string_lossy().contains(".aenv-cp-")).collect();
        assert!(left.is_empty(), "archives were left behind: {left:?}");
    }),
    ("a_tree_goes_both_ways_without_tar_in_the_guest", || {
        let fake = Fake::start();
        fake.state.no_tar.store(true, Ordering::Relaxed);
        let (here, guest) = (tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
        let source = here.path().join("tree");
        tree(&source);
        let target = guest.path().join("tree");
        let run = aenv(&fake, &["cp", text(&source), &format!("{BOX}:{}", text(&target))]).with_code(0);
        assert!(run.err.contains("no tar"), "{}", run.err);
        assert_eq!(mode(&target.join("run.sh")), 0o750);
        let back = here.path().join("back");
        aenv(&fake, &["cp", &format!("{BOX}:{}", text(&target)), text(&back)]).with_code(0);
        assert_eq!(fs::read_to_string(back.join("a/ü b/x")).expect("there"), "deep");
        assert_eq!(mode(&back.join("run.sh")), 0o750);
    }),
    ("a_dash_is_standard_input_and_output", || {
        let fake = Fake::start();
        let guest = tempfile::tempdir().expect("dir");
        let remote = format!("{BOX}:{}", text(&guest.path().join("piped")));
        let data: Vec<u8> = (0..=255).cycle().take(100_000).collect();
        aenv_with(&fake, &["cp", "-", &remote], &data).with_code(0);
        assert_eq!(aenv(&fake, &["cp", &remote, "-"]).with_code(0).out, data);
    }),
    ("what_is_missing_is_not_found_and_leaves_nothing", || {
        let fake = Fake::start();
        let here = tempfile::tempdir().expect("dir");
        let target = here.path().join("x");
        aenv(&fake, &["cp", &format!("{BOX}:/no/such"), text(&target)]).with_code(3);
        aenv(&fake, &["cp", text(&target), &format!("{BOX}:/tmp/x")]).with_code(3);
        aenv(&fake, &["cp", text(here.path()), text(&target)]).with_code(2);
        aenv(&fake, &["cp", &format!("{BOX}:/a"), &format!("{BOX}:/b")]).with_code(2);
        assert_eq!(fs::read_dir(here.path()).expect("there").count(), 0);
    }),
];
