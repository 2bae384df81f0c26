use super::*;
use aenv_vmm::Backend;
use proptest::prelude::*;

fn sample() -> Manifest {
    let file = |path: &str, len| FileRef { path: path.into(), len };
    let layer = |kind: &str, path: &str, len| LayerRef { kind: kind.into(), file: file(path, len) };
    Manifest {
        subject: "abcdefghij0123456789".into(),
        sequence: 3,
        taken_at: "2026-11-30T19:00:00Z".parse().unwrap(),
        vcpus: 1,
        memory_mib: 512,
        disk_size: 1 << 30,
        disk: vec![layer("lsmt", "images/a/disk.layer", 7)],
        memory: Some(Memory {
            made_by: Compatibility {
                backend: Backend::Fake,
                version: "1".into(),
                cpu: "x".into(),
                accel: "tcg".into(),
                tsc_khz: 0,
            },
            state: file("sandboxes/a/state-3", 5),
            layers: vec![layer("raw", "templates/t/b/memory.raw", 512 << 20)],
        }),
        guest: Guest { init_secret: "s".into(), user: "user".into(), ..Guest::default() },
    }
}

fn temporary() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("snapshot.json");
    (dir, path)
}

#[test]
fn what_was_written_is_read_back() {
    let (_dir, path) = temporary();
    sample().write(&path).unwrap();
    assert_eq!(Manifest::read(&path).unwrap(), sample());
}

#[test]
fn the_first_line_is_magic_version_and_checksum() {
    let (_dir, path) = temporary();
    sample().write(&path).unwrap();
    let content = std::fs::read_to_string(&path).unwrap();
    let (head, body) = content.split_once('\n').unwrap();
    assert_eq!(head, format!("aenv-snapshot 1 {}", hex::encode(Sha256::digest(body.as_bytes()))));
}

#[test]
fn a_missing_one_is_told_apart_from_a_damaged_one() {
    let (_dir, path) = temporary();
    assert!(matches!(Manifest::read(&path), Err(Error::Missing(_))));
    std::fs::write(&path, b"").unwrap();
    assert!(matches!(Manifest::read(&path), Err(Error::Damaged { .. })));
}

#[test]
fn a_later_version_is_refused_by_name() {
    let (_dir, path) = temporary();
    std::fs::write(&path, b"aenv-snapshot 2 00\n{}").unwrap();
    let error = Manifest::read(&path).unwrap_err();
    assert!(matches!(error, Error::TooNew { found: 2, .. }), "{error}");
}

#[test]
fn an_endless_file_is_not_read_to_its_end() {
    let (_dir, path) = temporary();
    let file = File::create(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    let error = Manifest::read(&path).unwrap_err();
    assert!(error.to_string().contains("larger than"), "{error}");
}

#[test]
fn a_path_that_leads_out_of_the_data_directory_is_refused() {
    for bad in ["../../etc/shadow", "/etc/shadow", "a/../../b", ""] {
        let (_dir, path) = temporary();
        let mut manifest = sample();
        manifest.disk[0].file.path = bad.into();
        manifest.write(&path).unwrap();
        let error = Manifest::read(&path).unwrap_err();
        assert!(error.to_string().contains("leads out"), "{bad}: {error}");
    }
}

#[test]
fn a_truncated_layer_is_noticed() {
    let (dir, _) = temporary();
    let manifest = Manifest { memory: None, ..sample() };
    std::fs::create_dir_all(dir.path().join("images/a")).unwrap();
    std::fs::write(dir.path().join("images/a/disk.layer"), b"123456").unwrap();
    let error = manifest.check_files(dir.path()).unwrap_err();
    assert!(error.to_string().contains("6 bytes long, 7 expected"), "{error}");
    std::fs::write(dir.path().join("images/a/disk.layer"), b"1234567").unwrap();
    manifest.check_files(dir.path()).unwrap();
}

proptest! {
    #[test]
    fn one_flipped_bit_anywhere_is_noticed(at in 0usize..900, bit in 0u8..8) {
        let (_dir, path) = temporary();
        sample().write(&path).unwrap();
        let mut content = std::fs::read(&path).unwrap();
        let at = at % content.len();
        content[at] ^= 1 << bit;
        std::fs::write(&path, &content).unwrap();
        // A flip inside the version's digit may make it a lower number; the body is then still checked whole.
        if let Ok(read) = Manifest::read(&path) {
            prop_assert_eq!(read, sample());
        }
    }
}
