//! The life of a sandbox, request by request.

use super::{Setup, all, assert_true, create_request, reach, setup, setup_with, team};
use crate::{
    control::{Control, Error},
    model::{CreateSandbox, EndCause, LogQuery, OnTimeout, Principal, SandboxQuery, State},
};
use aenv_network::Egress;
use aenv_vmm::ExitCause;
use jiff::Timestamp;
use std::{sync::Arc, time::Duration};

const TTL: Duration = Duration::from_secs(300);

#[tokio::test]
async fn a_created_sandbox_runs_with_its_own_identity() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    assert_eq!(sandbox.state, State::Running);
    let route = node.route(&sandbox.id).unwrap();
    let identity = world.identity(&route.slot.clone().unwrap()).unwrap();
    assert_eq!(identity.sandbox, sandbox.id.as_str());
    assert_eq!(identity.access_token, sandbox.envd_token);
    assert_eq!(identity.default_user, "user");
    assert_eq!(identity.default_workdir.as_deref(), Some("/app"));
    assert_eq!(sandbox.image_command.entrypoint, ["/entry"]);
    assert_eq!(sandbox.image_command.cmd, ["serve"]);
    assert_eq!((identity.env["FROM_IMAGE"].as_str(), identity.env["BOTH"].as_str()), ("1", "request"));
    let names: Vec<_> = sandbox.phases.iter().map(|phase| phase.name.as_str()).collect();
    assert_eq!(names, ["queued", "network", "storage", "memory", "restore", "agent", "total"]);
    assert_true(&world, &node, dir.path(), "created").await;
}

#[tokio::test]
async fn a_sandbox_without_internet_gets_a_closed_slot() {
    let Setup { world, node, dir: _dir } = setup().await;
    let request = CreateSandbox { allow_internet_access: false, ..create_request() };
    let sandbox = node.create(&team(), request).await.unwrap();
    let slot = node.route(&sandbox.id).unwrap().slot.unwrap();
    assert_eq!(world.egress_of(&slot), Some(Egress::Nothing));
}

#[tokio::test]
async fn tokens_exist_only_where_they_are_asked_for() {
    let Setup { node, dir: _dir, .. } = setup().await;
    let open = CreateSandbox { secure: false, ..create_request() };
    let open = node.create(&team(), open).await.unwrap();
    assert_eq!((open.envd_token, open.traffic_token), (None, None));
    let closed = CreateSandbox { allow_public_traffic: false, ..create_request() };
    let closed = node.create(&team(), closed).await.unwrap();
    assert!(closed.traffic_token.is_some_and(|token| token.len() == 64));
    assert_eq!(node.envd_tokens(), [(closed.id, closed.envd_token.unwrap())]);
}

#[tokio::test]
async fn a_repeated_create_returns_the_sandbox_made_first_even_while_it_is_made() {
    let Setup { world, node, dir: _dir } = setup().await;
    let request = CreateSandbox { idempotency_key: Some("k-1".into()), ..create_request() };
    world.hold("guest.init");
    let begun = world.steps().len();
    let first = tokio::spawn({
        let (node, request) = (Arc::clone(&node), request.clone());
        async move { node.create(&team(), request).await.unwrap() }
    });
    world.at_gate(begun + 3).await;
    let second = tokio::spawn({
        let (node, request) = (Arc::clone(&node), request.clone());
        async move { node.create(&team(), request).await.unwrap() }
    });
    world.release_all();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(first.id, second.id);
    assert_eq!(node.create(&team(), request.clone()).await.unwrap().id, first.id);
    assert_eq!(world.machines().len(), 1);
    // Another team's key is another key.
    let other = Principal { team: "b".into() };
    assert!(matches!(node.create(&other, request.clone()).await, Err(Error::TemplateForbidden(_))));
    // Ended means ended: not made a second time.
    node.kill(&team(), &first.id).await.unwrap();
    assert!(matches!(node.create(&team(), request).await, Err(Error::SandboxEnded { .. })));
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_nothing() {
    let Setup { world, node, dir: _dir } = setup().await;
    world.hold("vmm.restore");
    let begun = world.steps().len();
    let client = tokio::spawn({
        let node = Arc::clone(&node);
        async move { node.create(&team(), create_request()).await }
    });
    world.at_gate(begun + 2).await;
    client.abort();
    world.release_all();
    let id = loop {
        if let Some(sandbox) = all(&node).await.pop() {
            break sandbox.id;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    reach(&node, &id, State::Running).await;
}

#[tokio::test]
async fn a_kill_wins_over_a_create_that_waits_for_its_guest() {
    let Setup { world, node, dir } = setup().await;
    world.hold("guest.init");
    let begun = world.steps().len();
    let create = tokio::spawn({
        let node = Arc::clone(&node);
        async move { node.create(&team(), create_request()).await }
    });
    world.at_gate(begun + 3).await;
    let id = all(&node).await[0].id.clone();
    // The guest never answers: the gate stays shut.
    node.kill(&team(), &id).await.unwrap();
    assert!(matches!(create.await.unwrap(), Err(Error::SandboxEnded { .. })));
    let dead = reach(&node, &id, State::Dead).await;
    assert_eq!(dead.tombstone.unwrap().cause, EndCause::Killed);
    assert_true(&world, &node, dir.path(), "killed while starting").await;
}

#[tokio::test]
async fn a_create_whose_guest_never_answers_fails_in_time_and_leaves_a_tombstone() {
    let Setup { world, node, dir } =
        setup_with(|options| options.deadlines.agent = Duration::from_millis(200)).await;
    world.hold("guest.init");
    let error = node.create(&team(), create_request()).await.unwrap_err();
    assert!(matches!(error, Error::Timeout(_)), "{error}");
    let dead = all(&node).await.pop().unwrap();
    assert_eq!(dead.tombstone.unwrap().cause, EndCause::StartFailed);
    assert_true(&world, &node, dir.path(), "start failed").await;
}

#[tokio::test]
async fn a_paused_sandbox_keeps_its_identity_and_comes_back_in_a_new_generation() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    let before = node.route(&sandbox.id).unwrap();
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    let paused = node.get(&team(), &sandbox.id).await.unwrap();
    assert_eq!(paused.state, State::Paused);
    let names: Vec<_> = paused.phases.iter().map(|phase| phase.name.as_str()).collect();
    assert_eq!(names, ["stop", "state", "memory", "disk", "manifest", "record", "free", "total"]);
    assert!(!node.route(&sandbox.id).unwrap().running);
    assert_true(&world, &node, dir.path(), "paused").await;
    assert!(matches!(node.pause(&team(), &sandbox.id, true).await, Err(Error::Conflict(_))));
    assert!(matches!(node.set_timeout(&team(), &sandbox.id, TTL).await, Err(Error::Conflict(_))));

    let connected = node.connect(&team(), &sandbox.id, TTL).await.unwrap();
    assert!(connected.resumed);
    assert_eq!(connected.sandbox.envd_token, sandbox.envd_token);
    let after = node.route(&sandbox.id).unwrap();
    assert!(after.generation > before.generation);
    assert!(world.exports().iter().any(|name| name.starts_with("mem-")), "memory is a stack now");
    assert!(!node.connect(&team(), &sandbox.id, TTL).await.unwrap().resumed);
    assert!(matches!(node.resume(&team(), &sandbox.id, TTL, None).await, Err(Error::Conflict(_))));
    assert_true(&world, &node, dir.path(), "resumed").await;
}

#[tokio::test]
async fn a_pause_without_memory_keeps_the_disk_and_boots_again() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    world.plan(super::world::Plan::Nothing);
    node.pause(&team(), &sandbox.id, false).await.unwrap();
    assert_eq!(
        (world.count("guest.sync"), world.count("vm.save_state"), world.count("layers.capture")),
        (1, 0, 0)
    );
    node.resume(&team(), &sandbox.id, TTL, Some(OnTimeout::Kill)).await.unwrap();
    assert_eq!((world.count("vmm.boot"), world.count("vmm.restore")), (1, 0));
    assert_eq!(node.get(&team(), &sandbox.id).await.unwrap().on_timeout, OnTimeout::Kill);
    // Its memory is a file of its own now; the next pause keeps that.
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    assert_eq!((world.count("layers.finish_image"), world.count("layers.capture")), (1, 0));
    node.connect(&team(), &sandbox.id, TTL).await.unwrap();
    assert_eq!(world.count("vmm.restore"), 1);
    assert_true(&world, &node, dir.path(), "restored from its own boot").await;
}

#[tokio::test]
async fn a_connect_during_a_pause_waits_and_resumes() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    world.hold("layers.capture");
    let pause = tokio::spawn({
        let (node, id) = (Arc::clone(&node), sandbox.id.clone());
        async move { node.pause(&team(), &id, true).await }
    });
    reach(&node, &sandbox.id, State::Pausing).await;
    let second = tokio::spawn({
        let (node, id) = (Arc::clone(&node), sandbox.id.clone());
        async move { node.pause(&team(), &id, true).await }
    });
    let connect = tokio::spawn({
        let (node, id) = (Arc::clone(&node), sandbox.id.clone());
        async move { node.connect(&team(), &id, TTL).await }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    world.release_all();
    pause.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert!(connect.await.unwrap().unwrap().resumed);
    assert_true(&world, &node, dir.path(), "paused and connected").await;
}

#[tokio::test]
async fn many_connects_at_once_resume_once() {
    let Setup { world, node, dir: _dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    world.plan(super::world::Plan::Nothing);
    let connects = (1..=10).map(|n| {
        let (node, id) = (Arc::clone(&node), sandbox.id.clone());
        async move { node.connect(&team(), &id, TTL * n).await.unwrap() }
    });
    let all = futures_util::future::join_all(connects).await;
    assert!(all.iter().any(|connected| connected.resumed));
    assert_eq!(world.count("vmm.restore"), 1);
    let end = node.get(&team(), &sandbox.id).await.unwrap().end_at;
    let left = end.duration_since(Timestamp::now());
    assert!(left > jiff::SignedDuration::from_secs(2900), "the longest life wins: {left}");
}

#[tokio::test]
async fn a_kill_wins_over_a_pause_and_over_a_resume() {
    let Setup { world, node, dir } = setup().await;
    for gate in ["layers.capture", "guest.init"] {
        let sandbox = node.create(&team(), create_request()).await.unwrap();
        if gate == "guest.init" {
            node.pause(&team(), &sandbox.id, true).await.unwrap();
        }
        world.hold(gate);
        let other = tokio::spawn({
            let (node, id) = (Arc::clone(&node), sandbox.id.clone());
            async move {
                if gate == "guest.init" {
                    node.connect(&team(), &id, TTL).await.map(drop)
                } else {
                    node.pause(&team(), &id, true).await
                }
            }
        });
        let during = if gate == "guest.init" { State::Resuming } else { State::Pausing };
        reach(&node, &sandbox.id, during).await;
        let kill = tokio::spawn({
            let (node, id) = (Arc::clone(&node), sandbox.id.clone());
            async move { node.kill(&team(), &id).await }
        });
        if gate == "layers.capture" {
            tokio::time::sleep(Duration::from_millis(20)).await;
            world.release_all();
        }
        kill.await.unwrap().unwrap();
        world.release_all();
        let _ = other.await.unwrap();
        assert_eq!(node.get(&team(), &sandbox.id).await.unwrap().state, State::Dead, "{gate}");
        assert_true(&world, &node, dir.path(), gate).await;
    }
}

#[tokio::test]
async fn a_failed_pause_lets_the_sandbox_run_on_and_the_next_one_succeeds() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    for step in ["vm.pause", "vm.save_state", "layers.capture", "storage.seal"] {
        world.break_(step);
        let error = node.pause(&team(), &sandbox.id, true).await.unwrap_err();
        assert!(error.to_string().contains("injected"), "{step}: {error}");
        world.mend();
        assert_eq!(node.get(&team(), &sandbox.id).await.unwrap().state, State::Running, "{step}");
        assert_true(&world, &node, dir.path(), step).await;
    }
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    node.connect(&team(), &sandbox.id, TTL).await.unwrap();
}

#[tokio::test]
async fn a_failed_resume_leaves_it_paused_and_the_next_one_succeeds() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    for step in ["network.acquire", "storage.open", "vmm.restore", "guest.init"] {
        world.break_(step);
        node.connect(&team(), &sandbox.id, TTL).await.unwrap_err();
        world.mend();
        assert_eq!(node.get(&team(), &sandbox.id).await.unwrap().state, State::Paused, "{step}");
        assert_true(&world, &node, dir.path(), step).await;
    }
    assert!(node.connect(&team(), &sandbox.id, TTL).await.unwrap().resumed);
}

#[tokio::test]
async fn the_end_of_life_pauses_or_kills_as_asked() {
    let Setup { world, node, dir } = setup().await;
    let pauses = node.create(&team(), create_request()).await.unwrap();
    let kills = CreateSandbox { on_timeout: OnTimeout::Kill, ..create_request() };
    let kills = node.create(&team(), kills).await.unwrap();
    node.set_timeout(&team(), &pauses.id, Duration::ZERO).await.unwrap();
    node.set_timeout(&team(), &kills.id, Duration::from_millis(30)).await.unwrap();
    reach(&node, &pauses.id, State::Paused).await;
    let dead = reach(&node, &kills.id, State::Dead).await;
    assert_eq!(dead.tombstone.unwrap().cause, EndCause::Ttl);
    assert_true(&world, &node, dir.path(), "expired").await;
}

#[tokio::test]
async fn refresh_and_connect_extend_and_never_shorten_a_life_while_timeout_sets_it() {
    let Setup { node, dir: _dir, .. } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    let short = Duration::from_secs(10);
    node.refresh(&team(), &sandbox.id, short).await.unwrap();
    node.connect(&team(), &sandbox.id, short).await.unwrap();
    assert_eq!(node.get(&team(), &sandbox.id).await.unwrap().end_at, sandbox.end_at);
    node.refresh(&team(), &sandbox.id, TTL * 2).await.unwrap();
    assert!(node.get(&team(), &sandbox.id).await.unwrap().end_at > sandbox.end_at);
    node.set_timeout(&team(), &sandbox.id, short).await.unwrap();
    assert!(node.get(&team(), &sandbox.id).await.unwrap().end_at < sandbox.end_at);
    let forever = Duration::from_secs(u64::MAX);
    assert!(matches!(node.set_timeout(&team(), &sandbox.id, forever).await, Err(Error::Invalid(_))));
    assert!(matches!(node.connect(&team(), &sandbox.id, Duration::ZERO).await, Err(Error::Invalid(_))));
}

#[tokio::test]
async fn the_end_of_a_machine_is_the_end_of_its_sandbox_with_the_cause() {
    let Setup { world, node, dir } = setup().await;
    let causes = [
        (ExitCause::GuestShutdown, EndCause::GuestShutdown),
        (ExitCause::GuestPanic, EndCause::GuestPanic),
        (ExitCause::GuestOom, EndCause::GuestOom),
        (ExitCause::HostOom, EndCause::HostOom),
        (ExitCause::VmmCrash, EndCause::VmmCrash),
    ];
    for (exit, expected) in causes {
        let sandbox = node.create(&team(), create_request()).await.unwrap();
        world.end_machine(&world.machines()[0], exit);
        let dead = reach(&node, &sandbox.id, State::Dead).await;
        let tombstone = dead.tombstone.unwrap();
        assert_eq!((tombstone.cause, tombstone.last_state), (expected, State::Running));
        assert!(matches!(node.route(&sandbox.id), Err(Error::SandboxEnded { .. })));
        assert!(matches!(node.kill(&team(), &sandbox.id).await, Err(Error::SandboxEnded { .. })));
        assert_true(&world, &node, dir.path(), "exited").await;
    }
    assert_eq!(node.stats().ended.iter().map(|(_, count)| count).sum::<u64>(), 5);
}

#[tokio::test]
async fn a_machine_that_ends_during_a_pause_ends_the_sandbox() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    world.hold("layers.capture");
    let pause = tokio::spawn({
        let (node, id) = (Arc::clone(&node), sandbox.id.clone());
        async move { node.pause(&team(), &id, true).await }
    });
    reach(&node, &sandbox.id, State::Pausing).await;
    world.until_true(|world| world.paused_machines() == 1).await;
    world.end_machine(&world.machines()[0], ExitCause::VmmCrash);
    world.release_all();
    pause.await.unwrap().unwrap_err();
    let dead = reach(&node, &sandbox.id, State::Dead).await;
    assert_eq!(dead.tombstone.unwrap().cause, EndCause::VmmCrash);
    assert_true(&world, &node, dir.path(), "crashed while pausing").await;
}

#[tokio::test]
async fn traffic_wakes_only_those_who_asked_for_it() {
    let Setup { node, dir: _dir, .. } = setup().await;
    let sleeper = CreateSandbox { auto_resume: true, ..create_request() };
    let sleeper = node.create(&team(), sleeper).await.unwrap();
    let other = node.create(&team(), create_request()).await.unwrap();
    for id in [&sleeper.id, &other.id] {
        assert!(node.wake(id).await.unwrap().running);
        node.pause(&team(), id, true).await.unwrap();
    }
    assert!(matches!(node.wake(&other.id).await, Err(Error::Unavailable(_))));
    let route = node.wake(&sleeper.id).await.unwrap();
    assert!(route.running && route.slot.is_some());
    assert_eq!(node.get(&team(), &other.id).await.unwrap().state, State::Paused);
}

#[tokio::test]
async fn a_full_node_refuses_in_the_words_clients_look_for_and_takes_more_when_one_ends() {
    let Setup { node, dir: _dir, .. } =
        setup_with(|options| options.limits.memory_limit_mib = Some(1024)).await;
    let first = node.create(&team(), create_request()).await.unwrap();
    node.create(&team(), create_request()).await.unwrap();
    let error = node.create(&team(), create_request()).await.unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert!(error.to_string().contains("maximum number of concurrent"), "{error}");
    // A paused one holds no memory.
    node.pause(&team(), &first.id, true).await.unwrap();
    node.create(&team(), create_request()).await.unwrap();
    assert!(matches!(node.connect(&team(), &first.id, TTL).await, Err(Error::Full { .. })));
    assert_eq!(node.get(&team(), &first.id).await.unwrap().state, State::Paused);
}

#[tokio::test]
async fn lists_filter_and_page_newest_first() {
    let Setup { node, dir: _dir, .. } = setup().await;
    let mut made = Vec::new();
    for run in 0..5 {
        let metadata = [("run".to_owned(), (run % 2).to_string())].into();
        made.push(node.create(&team(), CreateSandbox { metadata, ..create_request() }).await.unwrap().id);
    }
    node.pause(&team(), &made[0], true).await.unwrap();
    made.reverse();
    let mut seen = Vec::new();
    let mut token = None;
    loop {
        let query = SandboxQuery { limit: 2, token, ..SandboxQuery::default() };
        let page = node.list(&team(), query).await.unwrap();
        seen.extend(page.items.into_iter().map(|sandbox| sandbox.id));
        token = page.next;
        if token.is_none() {
            break;
        }
    }
    assert_eq!(seen, made);
    let count = async |query: SandboxQuery| {
        node.list(&team(), SandboxQuery { limit: 100, ..query }).await.unwrap().items.len()
    };
    let by_label = [("run".to_owned(), "1".to_owned())].into();
    assert_eq!(count(SandboxQuery { metadata: by_label, ..SandboxQuery::default() }).await, 2);
    assert_eq!(count(SandboxQuery { states: vec![State::Paused], ..SandboxQuery::default() }).await, 1);
    assert_eq!(count(SandboxQuery { template: Some("base".into()), ..SandboxQuery::default() }).await, 5);
    let middle = node.get(&team(), &made[2]).await.unwrap().started_at;
    assert_eq!(count(SandboxQuery { started_after: Some(middle), ..SandboxQuery::default() }).await, 3);
    let bad = SandboxQuery { token: Some("nonsense".into()), ..SandboxQuery::default() };
    assert!(matches!(node.list(&team(), bad).await, Err(Error::Invalid(_))));
    let stranger = Principal { team: "b".into() };
    assert!(matches!(node.get(&stranger, &made[0]).await, Err(Error::SandboxNotFound(_))));
    assert!(matches!(node.kill(&stranger, &made[0]).await, Err(Error::SandboxNotFound(_))));
}

#[tokio::test]
async fn what_happened_is_told_in_the_log_and_phases_in_the_metrics() {
    let Setup { node, dir: _dir, .. } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    let query = LogQuery { limit: 100, ..LogQuery::default() };
    let page = node.logs(&team(), &sandbox.id, query.clone()).await.unwrap();
    let lines: Vec<_> = page.entries.iter().map(|entry| entry.message.as_str()).collect();
    assert!(lines.iter().any(|line| line.starts_with("create done")), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("pause done")), "{lines:?}");
    let wrong = LogQuery { level: Some("loud".into()), ..query };
    assert!(matches!(node.logs(&team(), &sandbox.id, wrong).await, Err(Error::Invalid(_))));
    let stats = node.stats();
    assert!(stats.phases.iter().any(|phase| (phase.operation, phase.phase) == ("pause", "total")));
    assert!(stats.sandboxes.contains(&("paused", 1)));
}

#[tokio::test]
async fn long_stacks_are_merged_and_old_files_go() {
    let Setup { world, node, dir } = setup().await;
    let sandbox = node.create(&team(), create_request()).await.unwrap();
    for _ in 0..30 {
        node.pause(&team(), &sandbox.id, true).await.unwrap();
        node.connect(&team(), &sandbox.id, TTL).await.unwrap();
    }
    world.until("layers.merge", 2).await;
    let home = dir.path().join("data/sandboxes").join(sandbox.id.as_str());
    let layers = || super::dirs(&home).into_iter().filter(|name| name.ends_with(".layer")).count();
    // Each merge takes the place of nine; the ones it replaced go with the pause after.
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    node.connect(&team(), &sandbox.id, TTL).await.unwrap();
    node.pause(&team(), &sandbox.id, true).await.unwrap();
    assert!(layers() <= 40, "{:?}", super::dirs(&home));
    assert!(node.connect(&team(), &sandbox.id, TTL).await.unwrap().resumed);
    assert_true(&world, &node, dir.path(), "after many pauses").await;
}

#[tokio::test]
async fn bad_values_are_refused_by_name() {
    let Setup { world, node, dir: _dir } = setup().await;
    let bad = [
        CreateSandbox { ttl: Duration::ZERO, ..create_request() },
        CreateSandbox { ttl: Duration::from_secs(u64::MAX), ..create_request() },
        CreateSandbox { env_vars: [("A=B".to_owned(), String::new())].into(), ..create_request() },
        CreateSandbox { env_vars: [("A".to_owned(), "\0".to_owned())].into(), ..create_request() },
        CreateSandbox { metadata: [("a".to_owned(), "x".repeat(70_000))].into(), ..create_request() },
    ];
    for request in bad {
        let error = node.create(&team(), request).await.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    }
    for template in ["", "nope", "base:nope", "../base", &"x".repeat(10_000), "базa"] {
        let request = CreateSandbox { template: template.to_owned(), ..create_request() };
        let error = node.create(&team(), request).await.unwrap_err();
        assert!(matches!(error, Error::TemplateNotFound(_)), "{error}");
        assert!(error.to_string().len() < 400);
    }
    assert_eq!(world.machines().len(), 0);
}
