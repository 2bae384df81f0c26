//! The guest's own routes: who may use them, and what `/init` does.
#![allow(missing_docs)]

mod harness;

use harness::{Agent, Answer, frame, shell};
use http::{Method, Request};
use http_body_util::Full;
use serde_json::json;
use sha2::{Digest, Sha256};

#[tokio::test]
async fn health_never_needs_a_token() {
    let agent = Agent::start();
    assert_eq!(agent.get("/health").await.status, 204);
    agent.post("/init", &json!({"accessToken": "tok"})).await;
    assert_eq!(agent.get("/health").await.status, 204);
}

#[tokio::test]
async fn with_a_token_everything_else_is_closed_to_who_has_none() {
    let agent = Agent::start();
    assert_eq!(agent.post("/init", &json!({"accessToken": "tok", "envVars": {"A": "1"}})).await.status, 204);
    for path in ["/envs", "/metrics"] {
        agent.get(path).await.refused(401, "401");
        let answer = agent.http(Method::GET, path, &[("x-access-token", "tok")], "").await;
        assert_eq!(answer.status, 200);
    }
    for method in ["process.Process/List", "filesystem.Filesystem/Stat"] {
        let answer = agent.call(method, &json!({"path": "/"})).await;
        assert_eq!(answer.status, 401, "{method}");
    }
    let envs = agent.http(Method::GET, "/envs", &[("x-access-token", "tok")], "").await;
    assert_eq!(envs.ok(), json!({"A": "1", "E2B_SANDBOX": "true"}));
}

#[tokio::test]
async fn only_the_node_may_init_a_guest_that_knows_its_secret() {
    let hash = hex::encode(Sha256::digest(b"node secret"));
    let agent = Agent::with(&["--init-sha256", &hash]);
    let init = |headers: &'static [(&'static str, &'static str)], body: serde_json::Value| {
        let agent = &agent;
        async move { agent.http(Method::POST, "/init", headers, body.to_string()).await }
    };
    init(&[], json!({})).await.refused(401, "401");
    init(&[("x-aenv-init", "guess")], json!({})).await.refused(401, "401");
    let set = json!({"accessToken": "one"});
    assert_eq!(init(&[("x-aenv-init", "node secret")], set).await.status, 204);
    assert_eq!(init(&[("x-access-token", "one")], json!({"accessToken": "two"})).await.status, 204);
    init(&[("x-access-token", "one")], json!({})).await.refused(401, "401");
    assert_eq!(init(&[("x-aenv-init", "node secret")], json!({})).await.status, 204);
    for path in ["/aenv/sync", "/aenv/shutdown"] {
        agent.post(path, &json!({})).await.refused(401, "401");
    }
    let sync = agent.http(Method::POST, "/aenv/sync", &[("x-aenv-init", "node secret")], "").await;
    assert_eq!(sync.status, 204);
}

#[tokio::test]
async fn a_body_that_makes_no_sense_changes_nothing() {
    let agent = Agent::start();
    for body in [
        json!({"timestamp": "soon", "accessToken": "tok"}),
        json!({"entropy": "%", "accessToken": "tok"}),
        json!({"hostname": "a b", "accessToken": "tok"}),
        json!({"envVars": {"A": "x\u{0}y"}, "accessToken": "tok"}),
        json!({"envVars": ["A"], "accessToken": "tok"}),
        json!([]),
    ] {
        agent.post("/init", &body).await.refused(400, "400");
    }
    assert_eq!(agent.get("/envs").await.status, 200, "no token was set");
    assert_eq!(agent.http(Method::POST, "/init", &[], "").await.status, 204);
}

#[tokio::test]
async fn another_generation_ends_streams_but_not_processes() {
    let agent = Agent::start();
    let (pid, events) = agent.sh("sleep 60").await;
    // A directory of its own: in /tmp somebody else's file is an event before the end.
    let folder = tempfile::tempdir().expect("a directory");
    let dir = json!({"path": folder.path()});
    let mut watch = agent.open("filesystem.Filesystem/WatchDir", &dir, &[]).await;
    watch.frame().await;
    assert_eq!(agent.post("/init", &json!({"generation": 1})).await.status, 204);
    assert_eq!(events.hear().await.error["code"], "unavailable");
    let (flags, end) = watch.frame().await.expect("the end of the stream");
    assert_eq!((flags, &end["error"]["code"]), (2, &json!("unavailable")));
    let again = agent.open("process.Process/Connect", &json!({"process": {"pid": pid}}), &[]).await;
    let signal = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"});
    agent.call("process.Process/SendSignal", &signal).await.ok();
    assert_eq!(again.hear().await.end["status"], "signal: killed");
}

#[tokio::test]
async fn metrics_describe_this_machine() {
    let agent = Agent::start();
    let metrics = agent.get("/metrics").await.ok();
    for field in ["ts", "cpu_count", "mem_total", "mem_used", "disk_total", "mem_total_mib"] {
        assert!(metrics[field].as_u64().is_some_and(|value| value > 0), "{field}: {metrics}");
    }
    assert!(metrics["cpu_used_pct"].as_f64().is_some_and(|used| (0.0..=100.0).contains(&used)), "{metrics}");
    assert_eq!(metrics["mem_total"].as_u64().map(|bytes| bytes >> 20), metrics["mem_total_mib"].as_u64());
}

#[tokio::test]
async fn browsers_are_let_in() {
    let agent = Agent::start();
    let asked = [
        ("origin", "https://example.com"),
        ("access-control-request-headers", "authorization,x-access-token"),
    ];
    let preflight = agent.http(Method::OPTIONS, "/process.Process/Start", &asked, "").await;
    assert_eq!(preflight.status, 204);
    assert_eq!(preflight.header("access-control-allow-headers"), "authorization,x-access-token");
    assert!(preflight.header("access-control-allow-methods").contains("POST"));
    for answer in [preflight, agent.get("/health").await, agent.get("/nowhere").await] {
        assert_eq!(answer.header("access-control-allow-origin"), "*");
    }
}

#[tokio::test]
async fn http2_without_tls_is_served_on_the_same_port() {
    let agent = Agent::start();
    let request = |body: bytes::Bytes, kind: &str, path: &str| {
        Request::post(format!("http://{}/{path}", agent.address))
            .header("content-type", kind)
            .body(Full::new(body))
            .expect("a request")
    };
    let list = request("{}".into(), "application/json", "process.Process/List");
    assert_eq!(Answer::of(agent.send_h2(list).await).await.ok(), json!({}));
    let start = request(frame(0, &shell("echo h2")), "application/connect+json", "process.Process/Start");
    let answer = Answer::of(agent.send_h2(start).await).await;
    assert!(String::from_utf8_lossy(&answer.body).contains(&harness::base64("h2\n")), "{answer:?}");
}

#[tokio::test]
async fn shutdown_ends_the_agent_in_order() {
    let mut agent = Agent::start();
    assert_eq!(agent.post("/aenv/shutdown", &json!({})).await.status, 204);
    assert!(agent.wait().await.success());
}
