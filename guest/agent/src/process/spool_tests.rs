use super::*;

fn spool() -> Arc<Spool> {
    Spool::new(Budget::new(64 << 20))
}

fn end() -> End {
    End { exit_code: 0, exited: true, status: "exit status 0".into(), error: None }
}

fn text(next: Next) -> String {
    match next {
        Next::Chunk(chunk) => String::from_utf8_lossy(&chunk.data).into_owned(),
        other => format!("{other:?}"),
    }
}

#[test]
fn what_nobody_heard_is_what_the_next_listener_starts_with() {
    let spool = spool();
    spool.append(Stream::Stdout, "one ".into());
    let mut first = spool.listen(None);
    assert_eq!(text(first.next()), "one ");
    assert_eq!(first.next(), Next::Wait);
    drop(first);
    spool.append(Stream::Stdout, "two".into());
    spool.finish(end());
    let mut second = spool.listen(None);
    assert_eq!(second.position(), 4);
    assert_eq!(text(second.next()), "two");
    assert_eq!(second.next(), Next::End(end()));
    let mut again = spool.listen(None);
    assert_eq!(again.next(), Next::End(end()));
}

#[test]
fn a_chunk_whose_stream_broke_is_delivered_again() {
    let spool = spool();
    spool.append(Stream::Stdout, "lost on the way".into());
    let mut broken = spool.listen(None);
    assert_eq!(text(broken.next()), "lost on the way");
    drop(broken);
    assert_eq!(text(spool.listen(None).next()), "lost on the way");
}

#[test]
fn an_offset_reads_on_in_the_middle_of_a_chunk() {
    let spool = spool();
    spool.append(Stream::Stdout, "0123".into());
    spool.append(Stream::Stderr, "4567".into());
    let mut listener = spool.listen(Some(2));
    assert_eq!(text(listener.next()), "23");
    assert_eq!(text(listener.next()), "4567");
    assert_eq!(spool.listen(Some(999)).position(), 8);
}

#[test]
fn small_chunks_are_joined_but_streams_never_mix() {
    let spool = spool();
    for _ in 0..10 {
        spool.append(Stream::Stdout, "ab".into());
    }
    spool.append(Stream::Stderr, "E".into());
    spool.append(Stream::Stdout, "tail".into());
    let mut listener = spool.listen(None);
    assert_eq!(text(listener.next()), "ab".repeat(10));
    assert_eq!(text(listener.next()), "E");
    assert_eq!(text(listener.next()), "tail");
}

#[test]
fn the_oldest_output_is_dropped_and_counted() {
    let spool = spool();
    let block = Bytes::from(vec![b'x'; 64 << 10]);
    for _ in 0..100 {
        spool.append(Stream::Stdout, block.clone());
    }
    let listener = spool.listen(None);
    assert_eq!(listener.dropped(), listener.position());
    assert!(listener.dropped() > 2 << 20, "{}", listener.dropped());
    assert!(spool.end_offset() - listener.position() <= CAPACITY as u64);
}

#[test]
fn single_bytes_are_bounded_too() {
    let spool = spool();
    for _ in 0..200_000 {
        spool.append(Stream::Stdout, Bytes::from_static(b"."));
    }
    assert!(spool.kept().chunks.len() <= CAPACITY / PER_CHUNK);
}

#[test]
fn a_listener_that_falls_behind_is_told_and_holds_up_nobody() {
    let spool = spool();
    let mut stuck = spool.listen(None);
    let mut live = spool.listen(None);
    let block = Bytes::from(vec![b'x'; 64 << 10]);
    for _ in 0..100 {
        assert!(spool.kept().may_grow().is_ok());
        spool.append(Stream::Stdout, block.clone());
        while let Next::Chunk(_) = live.next() {}
    }
    assert!(matches!(stuck.next(), Next::Lost { at: 0, .. }));
}

#[test]
fn a_single_slow_listener_holds_the_process_until_it_stalls() {
    let spool = spool();
    let mut slow = spool.listen(None);
    spool.append(Stream::Stdout, Bytes::from(vec![0; 2 << 20]));
    assert!(spool.kept().may_grow().is_err());
    assert!(matches!(slow.next(), Next::Chunk(_)));
    assert!(spool.kept().may_grow().is_err(), "handed out is not yet taken");
    assert_eq!(slow.next(), Next::Wait);
    assert!(spool.kept().may_grow().is_ok());
    spool.append(Stream::Stdout, Bytes::from(vec![0; 2 << 20]));
    spool.kept().last_progress -= STALL;
    assert!(spool.kept().may_grow().is_ok());
}

#[test]
fn ended_processes_pay_first_when_all_together_are_too_much() {
    let budget = Budget::new(1 << 20);
    let ended = Spool::new(Arc::clone(&budget));
    ended.append(Stream::Stdout, Bytes::from(vec![1; 600 << 10]));
    ended.finish(end());
    let live = Spool::new(Arc::clone(&budget));
    live.append(Stream::Stdout, Bytes::from(vec![2; 600 << 10]));
    assert_eq!(ended.listen(Some(0)).dropped(), 600 << 10);
    assert_eq!(live.listen(None).dropped(), 0);
    drop((ended, live));
    assert_eq!(budget.used.load(Ordering::Relaxed), 0);
}
