//! Processes as E2B's clients start, feed, watch and end them.
#![allow(missing_docs)]

mod harness;

use std::time::{Duration, Instant};

use aenv_envd_proto::{
    oneof::{Selector, view},
    process::{
        ConnectRequest, ListRequest, ProcessConfig, ProcessSelector, SendSignalRequest, Signal, StartRequest,
    },
};
use harness::{Agent, base64, basic, frame, is_root, shell};
use serde_json::{Value, json};

async fn run(agent: &Agent, script: &str) -> harness::Heard {
    agent.start_process(&shell(script), &[]).await.hear().await
}

fn by_pid(pid: u64) -> Value {
    json!({"process": {"pid": pid}})
}

#[tokio::test]
async fn output_and_exit_code_reach_the_caller() {
    let agent = Agent::start();
    let heard = run(&agent, "echo out; echo err >&2; exit 3").await;
    assert_eq!(heard.stdout, b"out\n");
    assert_eq!(heard.stderr, b"err\n");
    assert_eq!(
        heard.end,
        json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"})
    );
    let fine = run(&agent, "true").await;
    assert_eq!(fine.end, json!({"exited": true, "status": "exit status 0"}));
}

#[tokio::test]
async fn raw_bytes_pass_unchanged() {
    let agent = Agent::start();
    let heard = run(&agent, r"printf '\377\000\200'").await;
    assert_eq!(heard.stdout, [0xff, 0, 0x80]);
}

#[tokio::test]
async fn the_protobuf_client_sees_the_same() {
    let agent = Agent::start();
    let client = agent.processes();
    let request = StartRequest {
        process: Some(ProcessConfig {
            cmd: "sh".into(),
            args: vec!["-c".into(), "echo $GREETING; exit 2".into()],
            envs: [("GREETING".to_owned(), "hello".to_owned())].into_iter().collect(),
            ..Default::default()
        })
        .into(),
        stdin: Some(false),
        ..Default::default()
    };
    let mut stream = client.start(request).await.expect("started");
    let (mut pid, mut out, mut code) = (0, Vec::new(), None);
    while let Some(message) = harness::within(stream.message()).await.expect("a whole stream") {
        match message.view().event.as_option().and_then(|event| event.event.as_ref()) {
            Some(view::ProcessEvent::Start(start)) => pid = start.pid,
            Some(view::ProcessEvent::Data(data)) => {
                if let Some(view::Output::Stdout(bytes)) = &data.output {
                    out.extend_from_slice(bytes);
                }
            }
            Some(view::ProcessEvent::End(end)) => code = Some(end.exit_code),
            _ => {}
        }
    }
    assert_eq!((String::from_utf8_lossy(&out).as_ref(), code), ("hello\n", Some(2)));
    let list = client.list(ListRequest::default()).await.expect("a list");
    assert!(list.into_view().reborrow().processes.iter().all(|process| process.pid != pid));
    let gone = SendSignalRequest {
        process: Some(ProcessSelector { selector: Some(Selector::Pid(pid)), ..Default::default() }).into(),
        signal: Signal::SIGNAL_SIGKILL.into(),
        ..Default::default()
    };
    let err = client.send_signal(gone.clone()).await.expect_err("it has ended");
    assert_eq!(err.code, connectrpc::ErrorCode::NotFound);
    let again = ConnectRequest { process: gone.process, ..Default::default() };
    let mut late = client.connect(again).await.expect("its exit is kept");
    let mut code = None;
    while let Some(message) = harness::within(late.message()).await.expect("a whole stream") {
        if let Some(view::ProcessEvent::End(end)) =
            message.view().event.as_option().and_then(|event| event.event.as_ref())
        {
            code = Some(end.exit_code);
        }
    }
    assert_eq!(code, Some(2));
}

#[tokio::test]
async fn the_environment_is_layered_and_init_replaces_its_part() {
    let agent = Agent::start();
    agent.post("/init", &json!({"envVars": {"A": "init", "B": "init"}, "sandboxId": "sbx"})).await;
    let mut message = shell("echo $A $B $E2B_SANDBOX $E2B_SANDBOX_ID $USER $HOME $LOGNAME");
    message["process"]["envs"] = json!({"B": "request"});
    let heard = agent.start_process(&message, &[]).await.hear().await;
    assert_eq!(heard.text(), "init request true sbx root /root root\n");
    agent.post("/init", &json!({"envVars": {"C": "2"}})).await;
    assert_eq!(run(&agent, "echo \"[$A]$C\"").await.text(), "[]2\n");
}

#[tokio::test]
async fn a_process_runs_where_it_is_told_or_not_at_all() {
    let agent = Agent::start();
    let mut message = shell("pwd");
    message["process"]["cwd"] = json!("/usr/bin/");
    assert_eq!(agent.start_process(&message, &[]).await.hear().await.text(), "/usr/bin\n");
    message["process"]["cwd"] = json!("/nowhere");
    let heard = agent.start_process(&message, &[]).await.hear().await;
    assert_eq!(heard.error, json!({"code": "invalid_argument", "message": "cwd '/nowhere' does not exist"}));
}

#[tokio::test]
async fn a_program_that_is_not_there_is_the_callers_mistake() {
    let agent = Agent::start();
    for cmd in ["no-such-program", "/no/such/program", "/etc/passwd", ""] {
        let heard = agent.start_process(&json!({"process": {"cmd": cmd}}), &[]).await.hear().await;
        assert_eq!(heard.error["code"], "invalid_argument", "{cmd}: {heard:?}");
        assert!(heard.error["message"].as_str().is_some_and(|text| !text.is_empty()));
    }
    assert_eq!(agent.call("process.Process/List", &json!({})).await.ok(), json!({}));
}

#[tokio::test]
async fn processes_run_as_the_user_who_asks() {
    if !is_root() {
        return;
    }
    let agent = Agent::start();
    let nobody = basic("nobody");
    let script = shell("id -u; id -G; touch /etc/x 2>/dev/null || echo no");
    let heard = agent.start_process(&script, &[("authorization", &nobody)]).await.hear().await;
    assert_eq!(heard.text(), "65534\n65534\nno\n");
    let ghost = basic("ghost");
    let heard = agent.start_process(&shell("true"), &[("authorization", &ghost)]).await.hear().await;
    assert_eq!(heard.error, json!({"code": "unauthenticated", "message": "invalid username: 'ghost'"}));
}

#[tokio::test]
async fn stdin_arrives_in_order_and_ends_when_closed() {
    let agent = Agent::start();
    let mut message = shell("cat");
    message["stdin"] = json!(true);
    let mut events = agent.start_process(&message, &[]).await;
    let pid = events.pid().await;
    for part in ["one ", "two "] {
        let input = json!({"process": {"pid": pid}, "input": {"stdin": base64(part)}});
        agent.call("process.Process/SendInput", &input).await.ok();
    }
    let mut stream = Vec::new();
    stream.extend(frame(0, &json!({"start": {"process": {"pid": pid}}})));
    stream.extend(frame(0, &json!({"keepalive": {}})));
    stream.extend(frame(0, &json!({"data": {"input": {"stdin": base64("three")}}})));
    let headers = [("content-type", "application/connect+json"), ("connect-protocol-version", "1")];
    let answer = agent.http(http::Method::POST, "/process.Process/StreamInput", &headers, stream).await;
    assert_eq!(answer.status, 200);
    assert!(answer.body.ends_with(b"{}"), "{answer:?}");
    agent.call("process.Process/CloseStdin", &by_pid(pid)).await.ok();
    let late = json!({"process": {"pid": pid}, "input": {"stdin": base64("x")}});
    let refused = agent.call("process.Process/SendInput", &late).await;
    assert!(refused.status == 400 || refused.status == 404, "{refused:?}");
    assert_eq!(events.hear().await.text(), "one two three");
}

#[tokio::test]
async fn a_terminal_has_a_size_and_takes_keys() {
    let agent = Agent::start();
    let message = json!({
        "process": {"cmd": "/bin/sh", "envs": {"TERM": "xterm", "PS1": ""}},
        "pty": {"size": {"cols": 90, "rows": 30}}, "tag": "term"
    });
    let mut events = agent.start_process(&message, &[]).await;
    let pid = events.pid().await;
    let by_tag = json!({"tag": "term"});
    agent
        .call(
            "process.Process/Update",
            &json!({"process": by_tag, "pty": {"size": {"cols": 101, "rows": 31}}}),
        )
        .await
        .ok();
    agent.call("process.Process/CloseStdin", &by_pid(pid)).await.refused(400, "failed_precondition");
    let wrong = json!({"process": by_tag, "input": {"stdin": base64("x")}});
    agent.call("process.Process/SendInput", &wrong).await.refused(400, "failed_precondition");
    let keys = json!({"process": by_tag, "input": {"pty": base64("stty size; test -t 0 && echo terminal; exit 4\n")}});
    agent.call("process.Process/SendInput", &keys).await.ok();
    let heard = events.hear().await;
    let screen = String::from_utf8_lossy(&heard.pty).into_owned();
    assert!(screen.contains("31 101") && screen.contains("terminal\r\n"), "{screen}");
    assert_eq!(heard.end["exitCode"], 4);
}

#[tokio::test]
async fn signals_reach_the_whole_group() {
    let agent = Agent::start();
    let (pid, events) = agent.sh("sleep 60 & sleep 60; echo never").await;
    let signal = |name: &str| json!({"process": {"pid": pid}, "signal": name});
    agent
        .call("process.Process/SendSignal", &signal("SIGNAL_UNSPECIFIED"))
        .await
        .refused(400, "invalid_argument");
    agent.call("process.Process/SendSignal", &signal("SIGNAL_SIGTERM")).await.ok();
    let heard = events.hear().await;
    assert_eq!(
        heard.end,
        json!({"exitCode": -1, "status": "signal: terminated", "error": "signal: terminated"})
    );
    let (pid, events) = agent.sh("trap '' TERM; echo ready; sleep 60").await;
    agent
        .call("process.Process/SendSignal", &json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}))
        .await
        .ok();
    assert_eq!(events.hear().await.end["status"], "signal: killed");
}

#[tokio::test]
async fn the_time_limit_kills_the_process_and_ends_the_stream() {
    let agent = Agent::start();
    let started = Instant::now();
    let mut events = agent.start_process(&shell("sleep 60"), &[("connect-timeout-ms", "300")]).await;
    let pid = events.pid().await;
    let heard = events.hear().await;
    assert_eq!(heard.error["code"], "deadline_exceeded");
    assert!(started.elapsed() < Duration::from_secs(5));
    let end = agent.open("process.Process/Connect", &by_pid(pid), &[]).await.hear().await.end;
    assert_eq!(end["status"], "signal: killed");
    let none = agent.start_process(&shell("sleep 0.2; echo done"), &[("connect-timeout-ms", "0")]).await;
    assert_eq!(none.hear().await.text(), "done\n");
}

#[tokio::test]
async fn a_process_whose_output_is_still_held_open_ends_all_the_same() {
    let agent = Agent::start();
    let started = Instant::now();
    let heard = run(&agent, "sleep 30 & echo started").await;
    assert_eq!(heard.text(), "started\n");
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_quiet_stream_is_kept_alive() {
    let agent = Agent::start();
    let mut events = agent.start_process(&shell("sleep 1.5"), &[("keepalive-ping-interval", "1")]).await;
    events.pid().await;
    assert_eq!(events.event().await, json!({"keepalive": {}}));
}

#[tokio::test]
async fn running_processes_are_listed_with_what_they_were_started_with() {
    let agent = Agent::start();
    let mut message = shell("sleep 60");
    message["tag"] = json!("sleeper");
    message["process"]["cwd"] = json!("/");
    let mut events = agent.start_process(&message, &[]).await;
    let pid = events.pid().await;
    let list = agent.call("process.Process/List", &json!({})).await.ok();
    let expected = json!([{
        "pid": pid, "tag": "sleeper",
        "config": {"cmd": "/bin/sh", "args": ["-c", "sleep 60"], "cwd": "/"}
    }]);
    assert_eq!(list["processes"], expected);
}
