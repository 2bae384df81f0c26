//! The table, cell by cell: a change of one cell must be made twice, here and there.

use super::*;

const STATES: [State; 9] = [
    State::Creating,
    State::Running,
    State::Pausing,
    State::Paused,
    State::Resuming,
    State::Snapshotting,
    State::Forking,
    State::Killing,
    State::Dead,
];

const REQUESTS: [Request; 10] = [
    Request::Kill,
    Request::Pause { memory: true },
    Request::Connect,
    Request::Resume,
    Request::Wake,
    Request::SetTimeout,
    Request::Refresh,
    Request::Snapshot,
    Request::Fork,
    Request::Create,
];

fn letter(decision: Decision) -> &'static str {
    match decision {
        Decision::Start(Op::End(EndCause::Killed)) => "Skill",
        Decision::Start(Op::Pause { memory: true }) => "Spause",
        Decision::Start(Op::Resume) => "Sresume",
        Decision::Start(Op::Snapshot) => "Ssnap",
        Decision::Start(Op::Fork) => "Sfork",
        Decision::Start(_) => "S?",
        Decision::Join => "join",
        Decision::Queue => "queue",
        Decision::Apply => "apply",
        Decision::Refuse(Reason::Running) => "Rrun",
        Decision::Refuse(Reason::Paused) => "Rpaused",
        Decision::Refuse(Reason::Ended) => "Rended",
        Decision::Preempt(Op::End(EndCause::Killed)) => "preempt",
        Decision::Preempt(_) => "P?",
    }
}

#[test]
fn every_request_in_every_state_is_decided_as_agreed() {
    #[rustfmt::skip]
    let table = [
        //                kill       pause      connect    resume     wake       timeout    refresh    snapshot   fork       create
        ("Creating",     ["preempt", "queue",   "join",    "queue",   "join",    "queue",   "queue",   "queue",   "queue",   "join"]),
        ("Running",      ["Skill",   "Spause",  "apply",   "Rrun",    "apply",   "apply",   "apply",   "Ssnap",   "Sfork",   "apply"]),
        ("Pausing",      ["preempt", "join",    "queue",   "queue",   "queue",   "Rpaused", "Rpaused", "queue",   "queue",   "apply"]),
        ("Paused",       ["Skill",   "Rpaused", "Sresume", "Sresume", "Sresume", "Rpaused", "Rpaused", "Ssnap",   "Sfork",   "apply"]),
        ("Resuming",     ["preempt", "queue",   "join",    "queue",   "join",    "queue",   "queue",   "queue",   "queue",   "apply"]),
        ("Snapshotting", ["preempt", "queue",   "apply",   "Rrun",    "apply",   "apply",   "apply",   "queue",   "queue",   "apply"]),
        ("Forking",      ["preempt", "queue",   "apply",   "Rrun",    "apply",   "apply",   "apply",   "queue",   "queue",   "apply"]),
        ("Killing",      ["join",    "Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended"]),
        ("Dead",         ["Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended",  "Rended"]),
    ];
    for (state, (name, row)) in STATES.into_iter().zip(table) {
        assert_eq!(format!("{state:?}"), name);
        for (request, expected) in REQUESTS.into_iter().zip(row) {
            assert_eq!(letter(decide(state, request)), expected, "{request:?} in {state:?}");
        }
    }
}

#[test]
fn a_pause_keeps_what_it_was_asked_to_keep() {
    for memory in [true, false] {
        let decision = decide(State::Running, Request::Pause { memory });
        assert_eq!(decision, Decision::Start(Op::Pause { memory }));
    }
}

#[test]
fn deleting_wins_in_every_state_that_is_left() {
    for state in STATES {
        let decision = decide(state, Request::Kill);
        let wins =
            matches!(decision, Decision::Start(Op::End(_)) | Decision::Preempt(Op::End(_)) | Decision::Join);
        assert_eq!(wins, state != State::Dead, "{state:?}: {decision:?}");
    }
}

#[test]
fn nothing_but_a_delete_preempts_and_an_operation_starts_only_from_rest() {
    for state in STATES {
        for request in REQUESTS {
            match decide(state, request) {
                Decision::Preempt(_) => assert_eq!(request, Request::Kill),
                Decision::Start(_) => {
                    assert!(matches!(state, State::Running | State::Paused), "{request:?} in {state:?}");
                }
                Decision::Join | Decision::Queue => {
                    assert!(
                        !matches!(state, State::Running | State::Paused | State::Dead),
                        "nothing runs that {request:?} could wait for in {state:?}"
                    );
                }
                Decision::Apply | Decision::Refuse(_) => {}
            }
        }
    }
}

#[test]
fn every_event_in_every_state_is_met_as_agreed() {
    let events = [Event::Exited, Event::Expired(OnTimeout::Pause), Event::Expired(OnTimeout::Kill)];
    use Reaction::{Defer, Ignore, Later, Start};
    let crash = Start(Op::End(EndCause::VmmCrash));
    let pause = Start(Op::Pause { memory: true });
    let ttl = Start(Op::End(EndCause::Ttl));
    let table = [
        [Defer, Ignore, Ignore],
        [crash, pause, ttl],
        [Defer, Ignore, Ignore],
        [Ignore, Ignore, Ignore],
        [Defer, Ignore, Ignore],
        [Defer, Later, Later],
        [Defer, Later, Later],
        [Ignore, Ignore, Ignore],
        [Ignore, Ignore, Ignore],
    ];
    for (state, row) in STATES.into_iter().zip(table) {
        for (event, expected) in events.into_iter().zip(row) {
            assert_eq!(react(state, event), expected, "{event:?} in {state:?}");
        }
    }
}

#[test]
fn every_outcome_of_every_operation_settles_as_agreed() {
    let pause = Op::Pause { memory: true };
    let table = [
        (Op::Create, [State::Running, State::Dead, State::Dead]),
        (pause, [State::Paused, State::Running, State::Dead]),
        (Op::Resume, [State::Running, State::Paused, State::Paused]),
        (Op::Snapshot, [State::Running, State::Running, State::Dead]),
        (Op::Fork, [State::Running, State::Running, State::Dead]),
        (Op::End(EndCause::Killed), [State::Dead, State::Dead, State::Dead]),
    ];
    for (op, row) in table {
        for (outcome, expected) in [Outcome::Done, Outcome::Undone, Outcome::Lost].into_iter().zip(row) {
            assert_eq!(settle(op, outcome), expected, "{op:?} {outcome:?}");
        }
    }
}

#[test]
fn whatever_is_asked_in_whatever_order_a_sandbox_is_never_stuck() {
    // Walks random requests and outcomes; from every state reached, a kill must lead to Dead in at most two steps.
    let mut seed = 20_261_130_u64;
    let mut next = |bound: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % bound
    };
    for _ in 0..2000 {
        let (mut state, mut op) = (State::Creating, Some(Op::Create));
        for _ in 0..50 {
            if let (Some(running), 0) = (op, next(2)) {
                let outcome = [Outcome::Done, Outcome::Undone, Outcome::Lost][next(3)];
                state = settle(running, outcome);
                op = None;
            } else if let Decision::Start(begun) | Decision::Preempt(begun) =
                decide(state, REQUESTS[next(10)])
            {
                op = Some(begun);
                state = begun.state();
            }
        }
        let end = match decide(state, Request::Kill) {
            Decision::Start(op) | Decision::Preempt(op) => settle(op, Outcome::Done),
            Decision::Join => settle(op.expect("something to join"), Outcome::Done),
            Decision::Refuse(Reason::Ended) => state,
            other => panic!("{other:?} in {state:?}"),
        };
        assert_eq!(end, State::Dead);
    }
}
