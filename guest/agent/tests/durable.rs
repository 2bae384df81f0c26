//! Output outlives the stream it was meant for.
#![allow(missing_docs)]

mod harness;

use std::time::{Duration, Instant};

use harness::{Agent, Events, shell};
use serde_json::{Value, json};

async fn connect(agent: &Agent, pid: u64, headers: &[(&str, &str)]) -> Events {
    agent.open("process.Process/Connect", &json!({"process": {"pid": pid}}), headers).await
}

/// Waits until the process is no longer listed.
async fn ended(agent: &Agent, pid: u64) {
    let deadline = Instant::now() + harness::PATIENCE;
    loop {
        let list = agent.call("process.Process/List", &json!({})).await.ok();
        let running = list["processes"].as_array().is_some_and(|all| all.iter().any(|p| p["pid"] == pid));
        if !running {
            return;
        }
        assert!(Instant::now() < deadline, "process {pid} does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn leaving_a_stream_neither_ends_the_process_nor_loses_its_output() {
    let agent = Agent::start();
    let (pid, events) = agent.sh("sleep 0.3; echo while away; sleep 0.3; exit 5").await;
    drop(events);
    ended(&agent, pid).await;
    let heard = connect(&agent, pid, &[]).await.hear().await;
    assert_eq!((heard.text().as_str(), &heard.end["exitCode"]), ("while away\n", &json!(5)));
    let again = connect(&agent, pid, &[]).await.hear().await;
    assert_eq!((again.text().as_str(), &again.end["exitCode"]), ("", &json!(5)));
}

#[tokio::test]
async fn a_tag_finds_the_youngest_of_its_name() {
    let agent = Agent::start();
    for code in [1, 2] {
        let mut message = shell(&format!("exit {code}"));
        message["tag"] = json!("job");
        agent.start_process(&message, &[]).await.hear().await;
    }
    let events = agent.open("process.Process/Connect", &json!({"process": {"tag": "job"}}), &[]).await;
    assert_eq!(events.hear().await.end["exitCode"], 2);
}

#[tokio::test]
async fn an_offset_reads_on_exactly_where_a_client_stopped() {
    let agent = Agent::start();
    let (pid, mut events) = agent.sh("printf 0123456789").await;
    while events.event().await["end"].is_null() {}
    let mut events = connect(&agent, pid, &[("x-aenv-offset", "4")]).await;
    assert_eq!(events.event().await["start"], json!({"pid": pid, "offset": "4"}));
    let data = events.event().await["data"].clone();
    assert_eq!(data, json!({"stdout": harness::base64("456789"), "offset": "4"}));
    assert_eq!(events.event().await["end"]["status"], "exit status 0");
    let plain = connect(&agent, pid, &[]).await.event().await;
    assert_eq!(plain["start"], json!({"pid": pid}), "who did not ask gets no fields E2B does not have");
}

#[tokio::test]
async fn two_listeners_get_the_same() {
    let agent = Agent::start();
    let (pid, first) = agent.sh("sleep 0.3; seq 1 2000").await;
    let second = connect(&agent, pid, &[("x-aenv-offset", "0")]).await;
    let (first, second) = tokio::join!(first.hear(), second.hear());
    assert_eq!(first.text(), second.text());
    assert!(first.text().ends_with("2000\n"));
}

#[tokio::test]
async fn a_stuck_listener_holds_up_neither_the_process_nor_another_listener() {
    let agent = Agent::start();
    const SIZE: usize = 40 << 20;
    let (pid, stuck) = agent.sh(&format!("sleep 0.3; head -c {SIZE} /dev/zero; exit 6")).await;
    let live = connect(&agent, pid, &[("x-aenv-offset", "0")]).await;
    let heard = live.hear().await;
    assert_eq!((heard.stdout.len(), &heard.end["exitCode"]), (SIZE, &json!(6)));
    // The stuck one finds out when it reads on: either it was told, or what it missed fits what is kept.
    let heard = stuck.hear().await;
    assert_eq!(heard.error["code"], "data_loss", "{:?}", heard.error);
    let message = heard.error["message"].as_str().unwrap_or_default();
    assert!(message.contains("x-aenv-offset"), "{message}");
}

#[tokio::test]
async fn a_slow_listener_alone_gets_every_byte() {
    let agent = Agent::start();
    const SIZE: usize = 12 << 20;
    let (_, mut events) = agent.sh(&format!("head -c {SIZE} /dev/zero")).await;
    // Longer than it takes to fill every buffer on the way.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let first = events.event().await;
    assert!(first["data"]["stdout"].is_string());
    let heard = events.hear().await;
    let size = heard.stdout.len()
        + first["data"]["stdout"].as_str().map_or(0, |text| text.len() / 4 * 3 - text.matches('=').count());
    assert_eq!((size, heard.error), (SIZE, Value::Null));
}

#[tokio::test]
async fn what_nobody_hears_is_bounded_and_counted() {
    let agent = Agent::start();
    const SIZE: u64 = 20 << 20;
    let (pid, events) = agent.sh(&format!("sleep 0.3; head -c {SIZE} /dev/zero")).await;
    drop(events);
    ended(&agent, pid).await;
    let mut events = connect(&agent, pid, &[("x-aenv-offset", "0")]).await;
    let start = events.event().await["start"].clone();
    let number =
        |name: &str| start[name].as_str().and_then(|text| text.parse::<u64>().ok()).unwrap_or_default();
    assert_eq!(number("offset"), number("dropped"));
    assert!(number("dropped") >= SIZE - (4 << 20), "{start}");
    assert_eq!(events.hear().await.stdout.len() as u64, SIZE - number("dropped"));
}

#[tokio::test]
async fn an_old_process_can_still_be_asked_about_after_many_others() {
    let agent = Agent::start();
    let (pid, events) = agent.sh("exit 9").await;
    events.hear().await;
    for _ in 0..100 {
        agent.sh("exit 0").await.1.hear().await;
    }
    assert_eq!(connect(&agent, pid, &[]).await.hear().await.end["exitCode"], 9);
}

#[tokio::test]
async fn many_processes_at_once_all_report_their_own_end() {
    let agent = std::sync::Arc::new(Agent::start());
    let mut runs = tokio::task::JoinSet::new();
    for number in 0..100 {
        let agent = std::sync::Arc::clone(&agent);
        runs.spawn(async move {
            let (_, events) = agent.sh(&format!("echo {number}; exit {number}")).await;
            let heard = events.hear().await;
            assert_eq!(heard.text(), format!("{number}\n"));
            assert_eq!(heard.end["exitCode"].as_i64().unwrap_or_default(), number);
        });
    }
    while let Some(run) = runs.join_next().await {
        run.expect("every run is as it should be");
    }
}
