//! The cache over sources that fail in every way.

mod cache_common;

use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use aenv_blocks::cache::{BLOCK, Cache, CachedLayer, Error, Options, Prune};
use aenv_blocks::remote::{Digest, FetchError, Opener, RangeSource, Remote, SharedFile};
use aenv_blocks::source::{CachedSources, Sources};
use aenv_blocks::spec::{LayerKind, LayerSpec};
use aenv_overlaybd::ReadAt;
use cache_common::{Act, Faulty, du, eventually, rig, runtime};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const MIB: u64 = 1 << 20;

fn read(layer: &CachedLayer, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut buf = vec![0; len];
    layer.read_at(&mut buf, offset).map(|()| buf)
}

fn fetch_error(error: &std::io::Error) -> &FetchError {
    error.get_ref().and_then(|inner| inner.downcast_ref()).expect("a FetchError inside")
}

#[test]
fn what_is_read_is_what_the_source_holds_and_is_fetched_once() {
    let rig = rig(16 * MIB, |_| ());
    let source = Faulty::new(1, 10 * BLOCK + 777);
    let layer = rig.cache.layer(source.clone()).unwrap();
    let mut rng = StdRng::seed_from_u64(2);
    for _ in 0..500 {
        let from = rng.random_range(0..source.bytes.len());
        let len = rng.random_range(1..=(source.bytes.len() - from).min(3 * BLOCK));
        assert!(read(&layer, from as u64, len).unwrap() == source.bytes[from..from + len]);
    }
    assert!(source.asked.lock().values().all(|times| *times == 1), "{:?}", source.asked.lock());
    assert!(read(&layer, source.size() - 1, 2).is_err());
    assert_eq!(read(&layer, source.size(), 0).unwrap(), Vec::<u8>::new());
}

#[test]
fn sixty_four_threads_that_want_the_same_blocks_make_one_fetch_for_each() {
    let rig = rig(16 * MIB, |_| ());
    let source = Faulty::new(3, 12 * BLOCK);
    *source.always.lock() = Some(Act::Slow(Duration::from_millis(20)));
    let layer = Arc::new(rig.cache.layer(source.clone()).unwrap());
    let barrier = Barrier::new(64);
    std::thread::scope(|scope| {
        for thread in 0..64usize {
            let (layer, source, barrier) = (layer.clone(), source.clone(), &barrier);
            scope.spawn(move || {
                barrier.wait();
                for n in 0..12 {
                    let at = (n + thread) % 12 * BLOCK + thread * 100;
                    assert!(read(&layer, at as u64, 5000).unwrap() == source.bytes[at..at + 5000]);
                }
            });
        }
    });
    let asked = source.asked.lock();
    assert!(asked.len() == 12 && asked.values().all(|times| *times == 1), "{asked:?}");
}

#[test]
fn passing_failures_are_retried_and_their_bytes_never_served() {
    let rig = rig(16 * MIB, |o| o.attempt_timeout = Duration::from_millis(100));
    let passing = FetchError::Retryable("registry.example failed with status 503".into());
    for (n, act) in [Act::Fail(passing), Act::Truncate, Act::Stall].into_iter().enumerate() {
        let source = Faulty::new(10 + n as u64, BLOCK).first([act.clone()]);
        let layer = rig.cache.layer(source.clone()).unwrap();
        assert!(read(&layer, 0, BLOCK).unwrap() == source.bytes[..], "after {act:?}");
        assert_eq!(source.reads(), 2, "after {act:?}");
    }
}

#[test]
fn final_failures_are_told_at_once_and_not_remembered() {
    let rig = rig(16 * MIB, |_| ());
    let finals = [
        (FetchError::Denied("401".into()), std::io::ErrorKind::PermissionDenied),
        (FetchError::Denied("403".into()), std::io::ErrorKind::PermissionDenied),
        (FetchError::NotFound("404".into()), std::io::ErrorKind::NotFound),
        (FetchError::Damaged("wrong digest".into()), std::io::ErrorKind::InvalidData),
        (FetchError::Invalid("no ranges".into()), std::io::ErrorKind::InvalidInput),
    ];
    for (n, (failure, kind)) in finals.into_iter().enumerate() {
        let source = Faulty::new(20 + n as u64, BLOCK).first([Act::Fail(failure.clone())]);
        let layer = rig.cache.layer(source.clone()).unwrap();
        let error = read(&layer, 0, 1).unwrap_err();
        assert_eq!((fetch_error(&error), error.kind(), source.reads()), (&failure, kind, 1));
        assert!(read(&layer, 0, BLOCK).unwrap() == source.bytes[..], "after {failure}");
    }
}

#[test]
fn retry_after_is_waited_for_and_one_beyond_the_deadline_is_told_at_once() {
    let rig = rig(16 * MIB, |o| o.deadline = Duration::from_secs(5));
    let throttled = |seconds| {
        let retry_after = Some(Duration::from_millis(seconds));
        Act::Fail(FetchError::Throttled { retry_after, reason: "slow down".into() })
    };
    let source = Faulty::new(30, BLOCK).first([throttled(400)]);
    let layer = rig.cache.layer(source.clone()).unwrap();
    let start = Instant::now();
    assert!(read(&layer, 0, BLOCK).unwrap() == source.bytes[..]);
    assert!(start.elapsed() >= Duration::from_millis(400));

    let source = Faulty::new(31, BLOCK).first([throttled(60_000)]);
    let layer = rig.cache.layer(source.clone()).unwrap();
    let start = Instant::now();
    for _ in 0..2 {
        let error = read(&layer, 0, 1).unwrap_err();
        assert!(matches!(fetch_error(&error), FetchError::Throttled { retry_after: Some(_), .. }), "{error}");
    }
    assert_eq!(source.reads(), 1, "the second reader didn't ask a place that wants to be left alone");
    assert!(start.elapsed() < Duration::from_secs(4));
}

#[test]
fn a_source_that_never_answers_or_panics_ends_in_an_error_for_all_readers() {
    let rig = rig(16 * MIB, |o| {
        (o.attempts, o.attempt_timeout) = (2, Duration::from_millis(100));
    });
    let source = Faulty::new(40, BLOCK);
    *source.always.lock() = Some(Act::Stall);
    let layer = rig.cache.layer(source.clone()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let error = read(&layer, 0, 1).unwrap_err();
                assert!(matches!(fetch_error(&error), FetchError::TimedOut { .. }), "{error}");
            });
        }
    });
    let source = Faulty::new(41, BLOCK).first([Act::Panic]);
    let layer = rig.cache.layer(source.clone()).unwrap();
    assert!(read(&layer, 0, 1).unwrap_err().to_string().contains("stopped"));
    assert!(read(&layer, 0, BLOCK).unwrap() == source.bytes[..]);
}

#[test]
fn fetches_at_a_time_are_bounded_and_too_many_waiting_are_refused() {
    let rig = rig(64 * MIB, |o| (o.fetches, o.fetches_per_place, o.queue) = (4, 3, 10));
    let source = Faulty::new(50, 200 * BLOCK);
    *source.always.lock() = Some(Act::Slow(Duration::from_millis(100)));
    let layer = rig.cache.layer(source.clone()).unwrap();
    // Every other block: nothing to put together.
    let refused = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..60u64)
            .map(|n| {
                scope.spawn({
                    let layer = &layer;
                    move || read(layer, n * 2 * BLOCK as u64, 10)
                })
            })
            .collect();
        readers.into_iter().filter_map(|reader| reader.join().unwrap().err()).collect::<Vec<_>>()
    });
    assert!(!refused.is_empty() && refused.len() < 60);
    assert!(refused.iter().all(|error| *fetch_error(error) == FetchError::Busy(10)));
    assert!(source.most_running.load(Ordering::SeqCst) <= 3);
}

#[test]
fn a_sequential_reader_is_read_ahead_for() {
    let rig = rig(64 * MIB, |_| ());
    let source = Faulty::new(60, 100 * BLOCK);
    let layer = rig.cache.layer(source.clone()).unwrap();
    for at in (0..100 * BLOCK).step_by(BLOCK) {
        assert!(read(&layer, at as u64, BLOCK).unwrap() == source.bytes[at..at + BLOCK]);
    }
    assert!(source.asked.lock().values().all(|times| *times == 1));
    assert!(source.reads() < 50, "{} requests for 100 blocks", source.reads());
}

#[test]
fn a_restart_finds_what_was_cached_and_one_process_owns_it() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options::new(dir.path(), 16 * MIB);
    let source = Faulty::new(70, 20 * BLOCK + 5);
    let runtime = runtime();
    let cache = Cache::open(options.clone(), runtime.handle().clone()).unwrap();
    assert!(matches!(Cache::open(options.clone(), runtime.handle().clone()).err().unwrap(), Error::InUse(_)));
    let layer = cache.layer(source.clone()).unwrap();
    read(&layer, 0, source.bytes.len()).unwrap();
    eventually("the layer's digest is checked", || layer.is_verified());
    drop((layer, cache));
    // Its tasks hold the directory a moment longer.
    let mut again = None;
    eventually("the directory is free", || {
        again = Cache::open(options.clone(), runtime.handle().clone()).ok();
        again.is_some()
    });
    let (cache, source) = (again.unwrap(), Faulty::new(70, 20 * BLOCK + 5));
    *source.always.lock() = Some(Act::Fail(FetchError::NotFound("gone".into())));
    let layer = cache.layer(source.clone()).unwrap();
    assert!(read(&layer, 0, source.bytes.len()).unwrap() == source.bytes[..]);
    assert!(layer.is_verified() && source.reads() == 0);
}

#[test]
fn a_byte_flipped_on_disk_is_noticed_and_fetched_again() {
    let rig = rig(16 * MIB, |_| ());
    let source = Faulty::new(80, 4 * BLOCK);
    let layer = rig.cache.layer(source.clone()).unwrap();
    read(&layer, 0, source.bytes.len()).unwrap();
    eventually("the layer is cached and checked", || layer.is_verified());
    let path = rig.dir.path().join("cache/blocks.data");
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    for at in (0..4 * BLOCK as u64).step_by(4096) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at + 17).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at + 17).unwrap();
    }
    for at in (0..4 * BLOCK).step_by(1000) {
        let len = 1000.min(4 * BLOCK - at);
        assert!(read(&layer, at as u64, len).unwrap() == source.bytes[at..at + len]);
    }
    assert_eq!(rig.cache.stat().damaged, 4);
    assert!(source.asked.lock().values().all(|times| *times == 2));
}

#[test]
fn a_whole_layer_of_wrong_bytes_is_dropped_and_its_readers_told() {
    let rig = rig(16 * MIB, |_| ());
    let source = Faulty::new(90, 3 * BLOCK).first([Act::WrongBytes]);
    let layer = rig.cache.layer(source.clone()).unwrap();
    read(&layer, 0, source.bytes.len()).unwrap();
    let mut said = None;
    eventually("the layer is found wrong", || {
        said = read(&layer, 0, 1).err();
        said.is_some()
    });
    let said = said.unwrap();
    assert!(
        matches!(fetch_error(&said), FetchError::Damaged(_)) && said.to_string().contains("dropped"),
        "{said}"
    );
    drop(layer);
    // Opened again it starts afresh.
    let mut fresh = None;
    eventually("the layer can be read again", || {
        let layer = rig.cache.layer(source.clone()).unwrap();
        fresh = read(&layer, 0, source.bytes.len()).ok();
        fresh.is_some()
    });
    assert!(fresh.unwrap() == source.bytes[..]);
}

#[test]
fn a_thousand_images_go_through_a_cache_of_a_tenth_that_never_grows_beyond_its_bound() {
    let image = 3 * BLOCK;
    let capacity = (1000 * image / 10) as u64;
    let rig = rig(capacity, |_| ());
    let dir = rig.dir.path().join("cache");
    for seed in 0..1000 {
        let source = Faulty::new(seed, image);
        let layer = rig.cache.layer(source.clone()).unwrap();
        assert!(read(&layer, 0, image).unwrap() == source.bytes[..], "image {seed}");
        if seed % 50 == 0 {
            assert!(du(&dir) <= capacity, "{} bytes on disk, {capacity} allowed", du(&dir));
        }
    }
    assert!(du(&dir) <= capacity && rig.cache.stat().bytes > capacity / 2);
    assert!(rig.cache.list().len() <= 101, "rows of layers that are gone stay behind");
    eventually("the last image is stored", || rig.cache.list().iter().all(|layer| !layer.open));
    let pruned = rig.cache.prune(Prune::To(capacity / 4));
    assert!(pruned.bytes > 0 && rig.cache.stat().bytes <= capacity / 4 && du(&dir) <= capacity / 3);
    let one = rig.cache.list()[0].clone();
    assert_eq!(rig.cache.prune(Prune::Layer(one.digest)).bytes, one.cached);
    rig.cache.prune(Prune::All);
    assert_eq!((rig.cache.stat().bytes, rig.cache.list().len()), (0, 0));
    assert!(du(&dir) < 1 << 20, "{} bytes are left", du(&dir));
}

/// Reads, prunes, corruption and restarts in any order, against the plain bytes.
#[test]
fn whatever_happens_reads_are_right() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut rng = StdRng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let open = || {
        let mut cache = None;
        eventually("the directory is free", || {
            cache = Cache::open(Options::new(dir.path(), 4 * MIB), runtime.handle().clone()).ok();
            cache.is_some()
        });
        cache.unwrap()
    };
    let sources =
        [1, 2, 3, 4, 5].map(|n| Faulty::new(500 + n, usize::try_from(n).unwrap() * 5 * BLOCK + 100));
    let layers = |cache: &Cache| -> Vec<CachedLayer> {
        sources.iter().map(|source| cache.layer(source.clone()).unwrap()).collect()
    };
    let mut cache = open();
    let mut opened = layers(&cache);
    for step in 0..20_000 {
        let which = rng.random_range(0..sources.len());
        match rng.random_range(0..1000) {
            0 => {
                drop(opened);
                drop(cache);
                cache = open();
                opened = layers(&cache);
            }
            1 => _ = cache.prune(Prune::To(rng.random_range(0..4 * MIB))),
            2 => _ = cache.prune(Prune::Layer(sources[which].id)),
            3 | 4 => {
                let file = std::fs::File::options().write(true).open(dir.path().join("blocks.data")).unwrap();
                let len = file.metadata().unwrap().len().max(1);
                file.write_all_at(&[rng.random_range(0..=255)], rng.random_range(0..len)).unwrap();
            }
            _ => {
                let bytes = &sources[which].bytes;
                let from = rng.random_range(0..bytes.len());
                let len = rng.random_range(1..=(bytes.len() - from).min(20_000));
                let got = read(&opened[which], from as u64, len).unwrap();
                assert!(got == bytes[from..from + len], "step {step} of SEED={seed}");
            }
        }
    }
    assert!(du(dir.path()) <= 4 * MIB + 8192);
}

#[test]
fn what_a_stack_s_start_read_is_fetched_ahead_at_its_next_start() {
    let rig = rig(64 * MIB, |o| o.trace_window = Duration::from_millis(300));
    let sources = [Faulty::new(200, 40 * BLOCK), Faulty::new(201, 40 * BLOCK)];
    let stack = || {
        let sources = sources.iter().map(|source| source.clone() as Arc<dyn RangeSource>).collect();
        rig.cache.stack(sources).map_err(|(_, error)| error).unwrap()
    };
    let used = [(1, 39), (0, 0), (1, 3), (0, 17), (1, 9), (0, 30)];
    let layers = stack();
    for (layer, block) in used {
        read(&layers[layer], block * BLOCK as u64, 100).unwrap();
    }
    let traces = rig.dir.path().join("cache/traces");
    eventually("the trace is written", || std::fs::read_dir(&traces).is_ok_and(|found| found.count() == 1));
    drop(layers);
    rig.cache.prune(Prune::All);
    sources.iter().for_each(|source| source.asked.lock().clear());
    let layers = stack();
    eventually("all of it is fetched", || rig.cache.stat().bytes == (used.len() * BLOCK) as u64);
    let misses = rig.cache.stat().misses;
    for (layer, block) in used {
        read(&layers[layer], block * BLOCK as u64, 100).unwrap();
    }
    assert_eq!(rig.cache.stat().misses, misses, "nobody waited");
    for (n, source) in sources.iter().enumerate() {
        let mut expected: Vec<_> = used.iter().filter(|(layer, _)| *layer == n).map(|(_, b)| *b).collect();
        expected.sort_unstable();
        let asked = source.asked.lock();
        assert!(asked.keys().copied().eq(expected) && asked.values().all(|times| *times == 1));
    }
}

struct NoOpener;

#[async_trait::async_trait]
impl Opener for NoOpener {
    async fn open(&self, remote: &Remote) -> Result<Arc<dyn RangeSource>, FetchError> {
        Err(FetchError::NotFound(format!("nothing serves {}", remote.digest())))
    }
}

#[test]
fn a_layer_on_a_shared_directory_is_read_through_the_cache_and_starts_without_it_next_time() {
    let rig = rig(16 * MIB, |_| ());
    let file = rig.dir.path().join("layer");
    let bytes = cache_common::random(7, 2 * BLOCK);
    std::fs::write(&file, &bytes).unwrap();
    let (digest, size) = (Digest::of(&bytes), bytes.len() as u64);
    let shared = Remote::Shared(SharedFile { file: file.clone(), digest, size });
    let spec = LayerSpec::remote(LayerKind::Raw, shared);
    let opener = Arc::new(aenv_blocks::remote::FileOpener { others: NoOpener });
    let sources = CachedSources::new(rig.cache.clone(), opener);
    let mut got = vec![0; bytes.len()];
    sources.open(&spec).unwrap().bytes.read_at(&mut got, 0).unwrap();
    assert!(got == bytes);
    eventually("it is cached", || rig.cache.stat().bytes == size);
    std::fs::remove_file(&file).unwrap();
    sources.open(&spec).unwrap().bytes.read_at(&mut got, 0).unwrap();
    assert!(got == bytes);
    rig.cache.prune(Prune::All);
    let error = sources.open(&spec).unwrap().bytes.read_at(&mut got, 0).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}");
}
