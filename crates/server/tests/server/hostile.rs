//! Two hundred requests that no honest client sends: each is answered, each with a 4xx, each in words.

use crate::{
    client::{body, read, send},
    fake::{KEY, World, world},
};
use aenv_node::model::SandboxId;
use http::{Method, Request};
use serde_json::Value;

/// `{id}` stands for a running sandbox.
struct Case {
    method: &'static str,
    path: String,
    json: String,
    headers: Vec<(&'static str, String)>,
}

fn case(method: &'static str, path: impl Into<String>, json: impl Into<String>) -> Case {
    Case { method, path: path.into(), json: json.into(), headers: Vec::new() }
}

fn bodies() -> Vec<Case> {
    let mut cases = Vec::new();
    let nested = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    let deep = format!(r#"{{"templateID":"base","mcp":{}1{}}}"#, r#"{"a":"#.repeat(500), "}".repeat(500));
    for path in ["/sandboxes", "/v2/sandboxes"] {
        for json in [
            "",
            "x",
            "{",
            "}",
            "null",
            "true",
            "[]",
            "\"base\"",
            "1e999",
            "{}",
            "{\"templateID\":}",
            "{'templateID':'base'}",
            r#"{"templateID":null}"#,
            r#"{"templateID":1}"#,
            r#"{"templateID":["base"]}"#,
            r#"{"templateID":{}}"#,
            r#"{"templateID":""}"#,
            r#"{"templateID":"../../etc/passwd"}"#,
            r#"{"templateID":"a b"}"#,
            r#"{"templateID":"base\u0000"}"#,
            r#"{"templateID":"\ud800"}"#,
            r#"{"templateID":"ünï"}"#,
            r#"{"templateID":"base","templateID":"x"}"#,
            r#"{"templateID":"base"} trailing"#,
            r#"{"templateID":"base","timeout":"60"}"#,
            r#"{"templateID":"base","timeout":0}"#,
            r#"{"templateID":"base","timeout":-1}"#,
            r#"{"templateID":"base","timeout":1.5}"#,
            r#"{"templateID":"base","timeout":1e30}"#,
            r#"{"templateID":"base","timeout":99999999999999999999}"#,
            r#"{"templateID":"base","timeout":86401}"#,
            r#"{"templateID":"base","timeout":true}"#,
            r#"{"templateID":"base","timeout":[]}"#,
            r#"{"templateID":"base","timeout":{"$gt":0}}"#,
            r#"{"templateID":"base","autoPause":"yes"}"#,
            r#"{"templateID":"base","autoPause":1}"#,
            r#"{"templateID":"base","autoResume":true}"#,
            r#"{"templateID":"base","autoResume":{}}"#,
            r#"{"templateID":"base","autoResume":{"enabled":"x"}}"#,
            r#"{"templateID":"base","autoPause":false,"autoResume":{"enabled":true}}"#,
            r#"{"templateID":"base","allow_internet_access":"no"}"#,
            r#"{"templateID":"base","metadata":[]}"#,
            r#"{"templateID":"base","metadata":"x"}"#,
            r#"{"templateID":"base","metadata":{"a":1}}"#,
            r#"{"templateID":"base","metadata":{"a":null}}"#,
            r#"{"templateID":"base","metadata":{"":"x"}}"#,
            r#"{"templateID":"base","metadata":{"a":{"b":"c"}}}"#,
            r#"{"templateID":"base","metadata":{"a\u0000":"x"}}"#,
            r#"{"templateID":"base","envVars":{"A=B":"x"}}"#,
            r#"{"templateID":"base","envVars":{"":"x"}}"#,
            r#"{"templateID":"base","envVars":{"A":"\u0000"}}"#,
            r#"{"templateID":"base","envVars":{"A":7}}"#,
            r#"{"templateID":"base","envVars":[["A","B"]]}"#,
            r#"{"templateID":"base","network":7}"#,
            r#"{"templateID":"base","network":{"allowOut":"x"}}"#,
            r#"{"templateID":"base","network":{"allowPublicTraffic":"x"}}"#,
            r#"{"templateID":"base","network":{"maskRequestHost":"a\r\nx: y"}}"#,
            r#"{"templateID":"base","network":{"maskRequestHost":""}}"#,
            r#"{"templateID":"base","network":{"httpsPorts":[99999]}}"#,
            r#"{"templateID":"base","volumeMounts":{}}"#,
            r#"{"templateID":"base","volumeMounts":[{"name":1}]}"#,
            r#"{"templateID":"base","mcp":[]}"#,
        ] {
            cases.push(case("POST", path, json));
        }
        let long = "a".repeat(5000);
        cases.push(case("POST", path, &*nested));
        cases.push(case("POST", path, &*deep));
        cases.push(case("POST", path, format!(r#"{{"templateID":"{long}"}}"#)));
        cases.push(case("POST", path, format!(r#"{{"templateID":"base","metadata":{{"{long}":"x"}}}}"#)));
        cases.push(case("POST", path, format!(r#"{{"templateID":"base","metadata":{{"a":"{long}"}}}}"#)));
        cases.push(case("POST", path, format!(r#"{{"templateID":"base","x":"{}"}}"#, "y".repeat(2 << 20))));
    }
    cases.push(case("POST", "/sandboxes", r#"{"templateID":"base","secure":"yes"}"#));
    cases.push(case(
        "POST",
        "/sandboxes",
        r#"{"templateID":"base","secure":false,"network":{"allowPublicTraffic":false}}"#,
    ));
    for (path, json) in [
        ("connect", ""),
        ("connect", "{}"),
        ("connect", r#"{"timeout":0}"#),
        ("connect", r#"{"timeout":"1"}"#),
        ("connect", r#"{"timeout":-5}"#),
        ("connect", "[60]"),
        ("timeout", ""),
        ("timeout", "{}"),
        ("timeout", r#"{"timeout":-1}"#),
        ("timeout", r#"{"timeout":1e9}"#),
        ("timeout", r#"{"timeout":null}"#),
        ("timeout", "60"),
        ("refreshes", r#"{"duration":3601}"#),
        ("refreshes", r#"{"duration":-1}"#),
        ("refreshes", r#"{"duration":"x"}"#),
        ("pause", r#"{"memory":"x"}"#),
        ("pause", "x"),
        ("pause", "[]"),
        ("resume", r#"{"timeout":0}"#),
        ("resume", r#"{"autoPause":"x"}"#),
    ] {
        cases.push(case("POST", format!("/sandboxes/{{id}}/{path}"), json));
    }
    cases
}

fn paths() -> Vec<Case> {
    let mut cases = Vec::new();
    for path in [
        "/sandboxes/..",
        "/sandboxes/../..",
        "/sandboxes/%2e%2e",
        "/sandboxes/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/sandboxes/%00",
        "/sandboxes/ABC",
        "/sandboxes/a%20b",
        "/sandboxes/%ff%fe",
        "/sandboxes/%C3%BC",
        "/sandboxes/;drop",
        "/sandboxes/a'or'1'='1",
        "/sandboxes/{id}/",
        "/sandboxes//{id}",
        "//sandboxes",
        "/sandboxes/{id}/nope",
        "/sandboxes/{id}%2Fpause",
        "/SANDBOXES",
        "/v1/sandboxes",
        "/v2/sandboxes/",
        "/v2/sandboxes?limit=0",
        "/v2/sandboxes?limit=101",
        "/v2/sandboxes?limit=-1",
        "/v2/sandboxes?limit=x",
        "/v2/sandboxes?limit=1&limit=2",
        "/v2/sandboxes?limit=99999999999999999999",
        "/v2/sandboxes?limit=1.0",
        "/v2/sandboxes?state=dead",
        "/v2/sandboxes?state=running;paused",
        "/v2/sandboxes?order=random",
        "/v2/sandboxes?startedAfter=yesterday",
        "/v2/sandboxes?startedAfter=99999-01-01T00:00:00Z",
        "/v2/sandboxes?nextToken=%00",
        "/v2/sandboxes?nextToken=nonsense",
        "/v2/sandboxes?metadata=%ff",
        "/v2/sandboxes?metadata=a%3D%25ff",
        "/v2/sandboxes?metadata=%3Dx",
        "/v2/sandboxes?metadata=novalue",
        "/v2/sandboxes?metadata=a%3D1%26b",
        "/v2/sandboxes?metadata=a%3D1%26",
        "/v2/sandboxes?metadata=a%3D1%26a%3D2",
        "/v2/sandboxes?metadata=a%3D1&metadata=b%3D1",
        "/sandboxes?metadata=novalue",
        "/v2/sandboxes?limit=",
        "/v2/sandboxes?limit=%2B5",
        "/v2/sandboxes?limit=%205",
        "/v2/sandboxes?order=",
        "/v2/sandboxes?order=asc&order=desc",
        "/v2/sandboxes?startedAfter=",
        "/v2/sandboxes?template=",
        "/v2/sandboxes?state=running,,paused",
        "/v2/sandboxes?state=running,flying",
        "/v2/sandboxes?state=,",
        "/v2/sandboxes?nextToken=a&nextToken=b",
        "/v2/sandboxes?nextToken=%",
        "/v2/sandboxes?metadata=%zz",
        "/v2/templates?limit=",
        "/v2/templates?limit=0",
        "/v2/templates?nextToken=%ff",
        "/sandboxes/metrics?sandbox_ids=,",
        "/sandboxes/{id}/metrics?start=",
        "/v2/sandboxes/{id}/logs?search=100%",
        "/v2/sandboxes/{id}/logs?search=%00",
        "/v2/sandboxes/{id}/logs?search=a&search=b",
        "/v2/sandboxes/{id}/logs?level=",
        "/v2/sandboxes?template=../x",
        "/sandboxes/metrics",
        "/sandboxes/metrics?sandbox_ids=",
        "/sandboxes/metrics?sandbox_ids=a,b,../c",
        "/sandboxes/{id}/metrics?start=x",
        "/sandboxes/{id}/metrics?start=9&end=1",
        "/sandboxes/{id}/metrics?start=-1",
        "/sandboxes/{id}/metrics?end=99999999999999999999",
        "/sandboxes/{id}/logs?limit=0",
        "/sandboxes/{id}/logs?start=-1",
        "/v2/sandboxes/{id}/logs?direction=up",
        "/v2/sandboxes/{id}/logs?level=loud",
        "/v2/sandboxes/{id}/logs?limit=100000",
        "/v2/sandboxes/{id}/logs?cursor=99999999999999999999",
        "/templates/..",
        "/templates/%2e%2e%2fx",
        "/templates/a%00b",
        "/templates/%ff",
        "/templates/x%20y",
        "/templates/aliases/%2Fetc",
        "/templates/base/builds/x/status",
        "/templates/base/builds/../status",
        "/templates/base/builds/01890a5d-ac96-774b-bcce-b302099a8057/status?limit=101",
        "/templates/base/builds/01890a5d-ac96-774b-bcce-b302099a8057/status?logsOffset=-1",
        "/nodes/other",
        "/nodes/%ff",
        "/aenv/v1/sandboxes/..",
        "/aenv/v1/sandboxes/nobody0",
        "/aenv",
        "/%",
        "/sandboxes/%",
        "/sandboxes/%zz",
        "/.git/config",
        "/wp-login.php",
        "/metrics/..",
        "/files",
        "/process.Process/Start",
        "/init",
    ] {
        cases.push(case("GET", path, ""));
    }
    let many = vec!["abc"; 150]
        .iter()
        .enumerate()
        .map(|(n, id)| format!("{id}{n:017}"))
        .collect::<Vec<_>>()
        .join(",");
    cases.push(case("GET", format!("/sandboxes/metrics?sandbox_ids={many}"), ""));
    cases.push(case("GET", format!("/{}", "a".repeat(20_000)), ""));
    cases.push(case("GET", format!("/v2/sandboxes?x={}", "a".repeat(20_000)), ""));
    for (method, path) in [
        ("PUT", "/sandboxes"),
        ("DELETE", "/sandboxes"),
        ("BREW", "/sandboxes"),
        ("GET", "/sandboxes/{id}/pause"),
        ("PATCH", "/sandboxes/{id}"),
        ("POST", "/health"),
        ("TRACE", "/health"),
        ("PROPFIND", "/"),
    ] {
        cases.push(case(method, path, ""));
    }
    cases
}

fn headers() -> Vec<Case> {
    let mut cases = Vec::new();
    let with = |headers: Vec<(&'static str, String)>| Case { headers, ..case("GET", "/v2/sandboxes", "") };
    let long = "a".repeat(20_000);
    cases.push(with(vec![("x-a", long.clone()), ("x-b", long.clone())]));
    cases.push(with((0..150).map(|_| ("x-a", "b".repeat(300))).collect()));
    cases.push(Case {
        headers: vec![("content-encoding", "gzip".into())],
        ..case("POST", "/v2/sandboxes", "\u{1f}")
    });
    for name in ["idempotency-key", "x-aenv-start"] {
        let headers = vec![(name, "cold".to_owned()), (name, "cold".to_owned())];
        cases.push(Case { headers, ..case("POST", "/v2/sandboxes", r#"{"templateID":"base"}"#) });
    }
    for key in ["", "UPPER", "a b", "a/b", "ü", &"a".repeat(256)] {
        let headers = vec![("idempotency-key", key.to_owned())];
        cases.push(Case { headers, ..case("POST", "/v2/sandboxes", r#"{"templateID":"base"}"#) });
    }
    for id in ["", "..", "ABC", "a/b", "%00", "ü", "a b", "a,b", &"a".repeat(100), "-x", "{id}/..", "{id} "]
    {
        // The last is a valid id once trimmed, asked for a port that cannot be.
        let headers = vec![("e2b-sandbox-id", id.to_owned()), ("e2b-sandbox-port", "x".to_owned())];
        cases.push(Case { headers, ..case("GET", "/", "") });
    }
    for port in ["0", "65536", "-1", "3000;", "99999999", "0x50", "३"] {
        let headers = vec![("e2b-sandbox-id", "{id}".to_owned()), ("e2b-sandbox-port", port.to_owned())];
        cases.push(Case { headers, ..case("GET", "/", "") });
    }
    let twice = vec![("e2b-sandbox-id", "{id}".to_owned()), ("e2b-sandbox-id", "other".to_owned())];
    cases.push(Case { headers: twice, ..case("GET", "/", "") });
    for path in ["/init", "/freeze", "/aenv/v1/node", "/files/../init", "/%69nit", "/debug/pprof", "/"] {
        cases.push(Case { headers: vec![("e2b-sandbox-id", "{id}".to_owned())], ..case("POST", path, "{}") });
    }
    for host in ["0-{id}.box.test", "99999-{id}.box.test", "3000-ABC_.box.test", "3000-.box.test"] {
        cases.push(Case { headers: vec![("host", host.to_owned())], ..case("GET", "/", "") });
    }
    cases
}

async fn answered(world: &World, id: &SandboxId, case: &Case) -> Option<(u16, Value)> {
    let fill = |text: &str| text.replace("{id}", id.as_str());
    let method = Method::from_bytes(case.method.as_bytes()).unwrap();
    let mut request = Request::builder().method(method).uri(fill(&case.path)).header("x-api-key", KEY);
    if !case.headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", "127.0.0.1");
    }
    for (name, value) in &case.headers {
        request = request.header(*name, http::HeaderValue::from_bytes(fill(value).as_bytes()).unwrap());
    }
    // What a client library refuses to build (spaces, controls) is written by hand in the next test.
    let request = request.body(body(case.json.clone())).ok()?;
    let answer = read(send(world.address, request).await).await;
    let json = serde_json::from_slice(&answer.body)
        .unwrap_or_else(|_| panic!("{} {}: {}", case.method, case.path, answer.text()));
    Some((answer.status.as_u16(), json))
}

#[tokio::test]
async fn two_hundred_hostile_requests_are_each_refused_in_words() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let cases: Vec<_> = bodies().into_iter().chain(paths()).chain(headers()).collect();
    let mut sent = 0;
    for case in &cases {
        let Some((status, json)) = answered(&world, &id, case).await else { continue };
        sent += 1;
        let what = format!("{} {:.80} {:.120}", case.method, case.path, case.json);
        assert!((400..500).contains(&status), "{what} → {status} {json}");
        assert_eq!(json["code"], status, "{what} → {json}");
        assert!(json["message"].as_str().is_some_and(|m| m.len() > 5 && m.len() < 1000), "{what} → {json}");
    }
    assert!(sent >= 200, "only {sent} were sent");
    assert_eq!(world.node.sandboxes.lock().len(), 1, "none of them made a sandbox");
    assert_eq!(world.call("GET", "/health", "").await.status, 200);
}

#[tokio::test]
async fn wrong_types_are_refused_by_the_path_of_the_field() {
    let world = world().await;
    for (json, field) in [
        (r#"{"templateID":"base","metadata":{"run":7}}"#, "metadata.run"),
        (r#"{"templateID":"base","autoResume":{"enabled":"x"}}"#, "autoResume.enabled"),
        (r#"{"templateID":"base","network":{"allowOut":["a",1]}}"#, "network.allowOut[1]"),
        (r#"{"templateID":"base","timeout":"1"}"#, "timeout"),
        (r"{}", "templateID"),
    ] {
        let message = world.call("POST", "/v2/sandboxes", json).await.message();
        assert!(message.contains(field), "{json} → {message}");
    }
}

#[tokio::test]
async fn bytes_that_are_no_request_get_a_4xx_or_a_closed_door() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let guest = format!("host: x\r\ne2b-sandbox-id: {id}\r\ne2b-sandbox-port: 3000\r\n");
    let huge = format!("GET / HTTP/1.1\r\nhost: x\r\nx-a: {}\r\n\r\n", "a".repeat(300_000));
    let many = format!("GET / HTTP/1.1\r\nhost: x\r\n{}\r\n", "a: b\r\n".repeat(5000));
    for bytes in [
        "\0\0\0\0\r\n\r\n".to_owned(),
        "GET\r\n\r\n".to_owned(),
        "GET / HTTP/9.9\r\nhost: x\r\n\r\n".to_owned(),
        "GET /a b HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(),
        "GET /\0 HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nhost: x\r\nbad header: y\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".to_owned(),
        "POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n".to_owned(),
        "POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"
            .to_owned(),
        "POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n"
            .to_owned(),
        "POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, gzip\r\n\r\n".to_owned(),
        "POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n".to_owned(),
        format!("POST /sink HTTP/1.1\r\n{guest}transfer-encoding: identity\r\n\r\nxx"),
        format!("CONNECT evil.com:443 HTTP/1.1\r\n{guest}\r\n"),
        "CONNECT evil.com:443 HTTP/1.1\r\nhost: evil.com\r\n\r\n".to_owned(),
        huge,
        many,
    ] {
        let answer = world.raw(bytes.as_bytes()).await;
        let status = answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok());
        let fine = status.is_none() || status.is_some_and(|status| (400..500).contains(&status));
        assert!(fine, "{:.100?} → {answer:.200}", bytes);
    }
    let seen = world.guest.seen.lock().clone();
    assert!(seen.is_empty(), "{seen:?}");
    assert_eq!(world.call("GET", "/health", "").await.status, 200, "the server is still there");
}

#[tokio::test]
async fn bad_chunks_break_off_and_nothing_is_taken_for_a_second_request() {
    let world = world().await;
    let id = world.node.add(|_| ());
    for chunks in [
        "zz\r\nxx\r\n",
        "-1\r\n",
        "ffffffffffffffffff\r\nx",
        "5\r\nabc",
        "3\r\nabcXX0\r\n\r\nGET /two HTTP/1.1\r\nhost: x\r\n\r\n",
    ] {
        let request = format!(
            "POST /sink HTTP/1.1\r\nhost: x\r\ne2b-sandbox-id: {id}\r\ne2b-sandbox-port: 3000\r\n\
             transfer-encoding: chunked\r\n\r\n{chunks}"
        );
        let answer = world.raw(request.as_bytes()).await;
        assert!(
            !answer.starts_with("HTTP/1.1 200") && !answer.starts_with("HTTP/1.1 500"),
            "{chunks:?} → {answer}"
        );
    }
    assert!(!world.guest.seen.lock().iter().any(|line| line.contains("/two")));
}
