//! Malformed requests that used to pass as well-formed ones: each has an error code of its own and words that name it.
#![allow(missing_docs)]

mod harness;

use bytes::Bytes;
use harness::{Agent, Answer, raw_frame, shell};
use http::Method;
use serde_json::{Value, json};

const UNARY: (&str, &str) = ("content-type", "application/json");
const STREAM: (&str, &str) = ("content-type", "application/connect+json");

/// The error of a unary call.
fn refusal(answer: &Answer) -> (String, String) {
    assert!((400..500).contains(&answer.status.as_u16()), "{answer:?}");
    words(&answer.json())
}

/// The error in the only frame of a stream.
fn end(answer: &Answer) -> (String, String) {
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.header("content-type"), STREAM.1);
    assert_eq!(answer.body.first(), Some(&2), "{answer:?}");
    let length = u32::from_be_bytes(answer.body[1..5].try_into().expect("four bytes"));
    assert_eq!(usize::try_from(length).ok(), Some(answer.body.len() - 5));
    words(&serde_json::from_slice::<Value>(&answer.body[5..]).expect("JSON")["error"])
}

fn words(error: &Value) -> (String, String) {
    let text = |name: &str| error[name].as_str().unwrap_or_else(|| panic!("no {name} in {error}")).to_owned();
    (text("code"), text("message"))
}

async fn start(agent: &Agent, headers: &[(&str, &str)], body: Bytes) -> (String, String) {
    let headers = [&[STREAM], headers].concat();
    end(&agent.http(Method::POST, "/process.Process/Start", &headers, body).await)
}

fn message(value: &Value) -> Bytes {
    raw_frame(0, value.to_string().as_bytes())
}

#[tokio::test]
async fn a_frame_with_unknown_flags_is_refused_on_streams_of_both_directions() {
    let agent = Agent::start();
    for flags in [0x40, 0x04, 0x80, 0xff] {
        let frame = raw_frame(flags, shell("true").to_string().as_bytes());
        let (code, message) = start(&agent, &[], frame).await;
        assert_eq!(code, "invalid_argument");
        assert!(message.contains(&format!("{flags:#04x}")), "{message}");
        let body = raw_frame(flags, json!({"keepalive": {}}).to_string().as_bytes());
        let answer = agent.http(Method::POST, "/process.Process/StreamInput", &[STREAM], body).await;
        let (code, message) = end(&answer);
        assert_eq!((code.as_str(), message.contains("flags")), ("invalid_argument", true), "{message}");
    }
}

#[tokio::test]
async fn a_time_limit_that_is_no_number_is_refused_by_every_call() {
    let agent = Agent::start();
    for bad in ["soon", "-5", "+5", "1.5", "10000000000", ""] {
        let header = ("connect-timeout-ms", bad);
        let (code, message) = start(&agent, &[header], message(&shell("true"))).await;
        assert_eq!(
            (code.as_str(), message.contains("Connect-Timeout-Ms")),
            ("invalid_argument", true),
            "{bad}"
        );
        for method in ["process.Process/List", "filesystem.Filesystem/Stat"] {
            let answer =
                agent.http(Method::POST, &format!("/{method}"), &[UNARY, header], r#"{"path":"/"}"#).await;
            assert_eq!(refusal(&answer).0, "invalid_argument", "{method} {bad}");
        }
    }
    let answer = agent
        .http(
            Method::POST,
            "/filesystem.Filesystem/Stat",
            &[UNARY, ("connect-timeout-ms", "0")],
            r#"{"path":"/"}"#,
        )
        .await;
    assert_eq!(answer.status, 200, "0 means no limit: {answer:?}");
}

#[tokio::test]
async fn a_variable_no_program_can_have_is_named() {
    let agent = Agent::start();
    for (name, shown) in [("", "empty name"), ("A=B", "\"A=B\""), ("A\u{0}", "\"A\\0\"")] {
        let mut envs = serde_json::Map::new();
        envs.insert(name.to_owned(), json!("x"));
        let request = json!({"process": {"cmd": "true", "envs": envs}});
        let (code, words) = start(&agent, &[], message(&request)).await;
        assert_eq!(code, "invalid_argument");
        assert!(words.contains("process.envs") && words.contains(shown), "{words}");
        let body = json!({"envVars": envs}).to_string();
        let answer = agent.http(Method::POST, "/init", &[UNARY], body).await;
        assert_eq!(answer.status, 400, "{answer:?}");
        let words = answer.json()["message"].to_string();
        assert!(words.contains("envVars"), "{words}");
    }
}

#[tokio::test]
async fn a_broken_basic_header_is_nobody_and_not_the_default_user() {
    let agent = Agent::start();
    for (bad, why) in [
        ("Basic ***", "base64"),
        ("Basic", "no colon"),
        ("Basic dXNlcg==", "no colon"),
        ("basic /zo=", "UTF-8"),
    ] {
        let header = ("authorization", bad);
        let answer = agent
            .http(Method::POST, "/filesystem.Filesystem/Stat", &[UNARY, header], r#"{"path":"/"}"#)
            .await;
        assert_eq!(answer.status, 401, "{bad}: {answer:?}");
        let (code, words) = refusal(&answer);
        assert_eq!((code.as_str(), words.contains(why)), ("unauthenticated", true), "{bad}: {words}");
        assert_eq!(start(&agent, &[header], message(&shell("true"))).await.0, "unauthenticated", "{bad}");
    }
    for good in ["Bearer whatever", "Basic cm9vdDo="] {
        let headers = [UNARY, ("authorization", good)];
        let answer =
            agent.http(Method::POST, "/filesystem.Filesystem/Stat", &headers, r#"{"path":"/"}"#).await;
        assert_eq!(answer.status, 200, "{good}: {answer:?}");
    }
}

#[tokio::test]
async fn a_ping_interval_out_of_range_is_refused_before_anything_starts() {
    let agent = Agent::start();
    for bad in ["0", "-1", "often", "86401", ""] {
        let header = ("keepalive-ping-interval", bad);
        assert_eq!(
            start(&agent, &[header], message(&shell("sleep 60"))).await.0,
            "invalid_argument",
            "{bad}"
        );
        let watch = message(&json!({"path": "/tmp"}));
        let answer =
            agent.http(Method::POST, "/filesystem.Filesystem/WatchDir", &[STREAM, header], watch).await;
        assert_eq!(end(&answer).0, "invalid_argument", "{bad}");
    }
    let answer = agent.http(Method::POST, "/process.Process/List", &[UNARY], "{}").await;
    assert_eq!(answer.json()["processes"].as_array().map_or(0, Vec::len), 0, "{answer:?}");
}

#[tokio::test]
async fn a_parameter_of_files_that_is_repeated_or_badly_encoded_is_refused() {
    let agent = Agent::start();
    for query in
        ["path=/etc/hostname&path=/etc/passwd", "path=%zz", "path=/tmp/100%", "username=root&username=user"]
    {
        let answer = agent.get(&format!("/files?{query}")).await;
        assert_eq!(answer.status, 400, "{query}: {answer:?}");
    }
}
