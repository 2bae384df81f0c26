//! The control plane by its contract.

use crate::{
    client::{Answer, body, read, send},
    fake::{KEY, OTHER_KEY, World, template_id, world, world_with},
};
use aenv_node::{
    control::Error,
    model::{EndCause, OnTimeout, SandboxId, State},
};
use http::Request;
use serde_json::{Value, json};
use std::{sync::atomic::Ordering::SeqCst, time::Duration};

fn refused(answer: &Answer, status: u16, code: &str) {
    let body = answer.json();
    assert_eq!(answer.status, status, "{body}");
    assert_eq!(body["code"], status, "{body}");
    assert_eq!(body["error_code"], code, "{body}");
    assert!(body["message"].as_str().is_some_and(|m| !m.is_empty()), "{body}");
}

async fn create(world: &World, path: &str, json: &Value) -> (Answer, Option<SandboxId>) {
    let answer = world.call("POST", path, &json.to_string()).await;
    let id = answer.json()["sandboxID"].as_str().map(|id| id.parse().unwrap());
    (answer, id)
}

#[tokio::test]
async fn a_create_answers_what_the_sdk_needs_to_talk_to_the_guest() {
    let world = world().await;
    let (answer, id) =
        create(&world, "/v2/sandboxes", &json!({"templateID": "base", "metadata": {}, "envVars": {}})).await;
    assert_eq!(answer.status, 201);
    let id = id.unwrap();
    assert_eq!(
        answer.json(),
        json!({
            "templateID": template_id().as_str(), "sandboxID": id.as_str(), "clientID": "local", "alias": "base",
            "envdVersion": "0.6.13", "envdAccessToken": format!("envd-{id}"), "domain": "box.test",
        })
    );
}

#[tokio::test]
async fn the_two_generations_of_create_differ_in_defaults() {
    let world = world().await;
    let asked = |id: Option<SandboxId>| world.node.change(&id.unwrap(), |entry| entry.asked.clone());
    let v1 = asked(create(&world, "/sandboxes", &json!({"templateID": "base"})).await.1);
    assert_eq!((v1.ttl, v1.secure), (Duration::from_secs(15), true));
    let v2 = asked(create(&world, "/v2/sandboxes", &json!({"templateID": "base", "secure": false})).await.1);
    assert_eq!((v2.ttl, v2.secure), (Duration::from_secs(300), true));
    let open = asked(create(&world, "/sandboxes", &json!({"templateID": "base", "secure": false})).await.1);
    assert!(!open.secure);
}

#[tokio::test]
async fn saying_nothing_about_the_end_of_life_keeps_the_sandbox() {
    let world = world().await;
    for (given, expected) in
        [(json!(null), OnTimeout::Pause), (json!(true), OnTimeout::Pause), (json!(false), OnTimeout::Kill)]
    {
        let (_, id) =
            create(&world, "/v2/sandboxes", &json!({"templateID": "base", "autoPause": given})).await;
        assert_eq!(world.node.change(&id.unwrap(), |entry| entry.asked.on_timeout), expected, "{given}");
    }
}

#[tokio::test]
async fn everything_a_create_may_say_reaches_the_node() {
    let world = world().await;
    let (answer, id) = create(
        &world,
        "/v2/sandboxes",
        &json!({
            "templateID": "base", "timeout": 3600, "autoPause": true, "autoResume": {"enabled": true},
            "allow_internet_access": false, "metadata": {"run": "7", "ü": "ß"}, "envVars": {"A": "1"},
            "network": {"allowPublicTraffic": false, "maskRequestHost": "localhost:${PORT}"}, "mcp": null,
            "volumeMounts": [], "somethingNew": {"x": [1]},
        }),
    )
    .await;
    assert_eq!(answer.json()["trafficAccessToken"], "traffic-secret");
    let asked = world.node.change(&id.unwrap(), |entry| entry.asked.clone());
    assert_eq!(asked.ttl, Duration::from_secs(3600));
    assert!(asked.auto_resume && !asked.allow_internet_access && !asked.allow_public_traffic);
    assert_eq!(asked.metadata["ü"], "ß");
    assert_eq!(asked.env_vars["A"], "1");
    assert_eq!(asked.mask_request_host.as_deref(), Some("localhost:${PORT}"));
}

#[tokio::test]
async fn a_retried_create_with_the_same_key_makes_one_sandbox() {
    let world = world().await;
    let post = || async {
        let headers = [("x-api-key", KEY), ("idempotency-key", "run-7")];
        world.call_with("POST", "/v2/sandboxes", r#"{"templateID":"base"}"#, &headers).await.json()["sandboxID"].clone()
    };
    assert_eq!(post().await, post().await);
    let headers = [("x-api-key", KEY), ("idempotency-key", "Not OK")];
    let answer = world.call_with("POST", "/v2/sandboxes", r#"{"templateID":"base"}"#, &headers).await;
    refused(&answer, 400, "invalid_request");
    assert!(answer.message().starts_with("Idempotency-Key"));
}

#[tokio::test]
async fn what_this_version_lacks_is_refused_by_name_and_never_dropped() {
    let world = world().await;
    for (field, value) in [
        ("volumeMounts", json!([{"name": "v", "path": "/v"}])),
        ("mcp", json!({"x": {}})),
        ("network", json!({"allowOut": ["pypi.org"], "denyOut": ["0.0.0.0/0"]})),
        ("network", json!({"rules": {"api.x.com": []}})),
        ("autoPauseMemory", json!(false)),
    ] {
        let (answer, _) = create(&world, "/v2/sandboxes", &json!({"templateID": "base", field: value})).await;
        refused(&answer, 501, "not_implemented");
        assert!(answer.message().contains(field), "{}", answer.message());
    }
    for (method, path) in [
        ("POST", "/sandboxes/abc/fork"),
        ("POST", "/v3/templates"),
        ("GET", "/volumes"),
        ("GET", "/templates/base/tags"),
        ("PUT", "/sandboxes/abc/network"),
    ] {
        refused(&world.call(method, path, "").await, 501, "not_implemented");
    }
}

#[tokio::test]
async fn every_control_route_needs_a_key_and_either_header_will_do() {
    let world = world().await;
    for (method, path) in
        [("GET", "/v2/sandboxes"), ("POST", "/sandboxes"), ("GET", "/volumes"), ("GET", "/aenv/v1/node")]
    {
        refused(&world.call_with(method, path, "", &[]).await, 401, "unauthorized");
        refused(&world.call_with(method, path, "", &[("x-api-key", "e2b_wrong")]).await, 401, "unauthorized");
    }
    let bearer = format!("Bearer {KEY}");
    assert_eq!(world.call_with("GET", "/teams", "", &[("authorization", &bearer)]).await.status, 200);
    assert_eq!(world.call_with("GET", "/health", "", &[]).await.status, 200);
    assert_eq!(world.call_with("GET", "/openapi.json", "", &[]).await.status, 200);
}

#[tokio::test]
async fn accepted_keys_are_remembered_and_wrong_ones_are_not() {
    let world = world().await;
    for _ in 0..5 {
        assert_eq!(world.call("GET", "/teams", "").await.status, 200);
    }
    assert_eq!(world.node.authentications.load(SeqCst), 1);
    for _ in 0..3 {
        world.call_with("GET", "/teams", "", &[("x-api-key", "e2b_wrong")]).await;
    }
    assert_eq!(world.node.authentications.load(SeqCst), 4);
}

#[tokio::test]
async fn another_teams_sandbox_is_not_found() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let answer = world.call_with("GET", &format!("/sandboxes/{id}"), "", &[("x-api-key", OTHER_KEY)]).await;
    refused(&answer, 404, "sandbox_not_found");
}

#[tokio::test]
async fn lists_page_by_token_newest_first_and_the_last_page_says_so() {
    let world = world().await;
    let ids: Vec<_> = (0..5).map(|_| world.node.add(|_| ()).to_string()).collect();
    let mut seen = Vec::new();
    let mut token = String::new();
    let mut pages = 0;
    loop {
        let page = world.call("GET", &format!("/v2/sandboxes?limit=2&nextToken={token}"), "").await;
        pages += 1;
        let items = page.json();
        seen.extend(
            items.as_array().unwrap().iter().map(|item| item["sandboxID"].as_str().unwrap().to_owned()),
        );
        token = page.headers["x-next-token"].to_str().unwrap().to_owned();
        if token.is_empty() {
            break;
        }
    }
    let newest_first: Vec<_> = ids.into_iter().rev().collect();
    assert_eq!((seen, pages), (newest_first, 3));
}

#[tokio::test]
async fn lists_filter_by_state_labels_and_start() {
    let world = world().await;
    let odd = "a=b&c d/é%";
    let paused = world.node.add(|entry| {
        entry.sandbox.state = State::Paused;
        entry.sandbox.metadata.insert("odd key".into(), odd.into());
    });
    let running = world.node.add(|entry| {
        entry.sandbox.metadata.insert("odd key".into(), "else".into());
    });
    let list = |query: String| {
        let world = &world;
        async move {
            let answer = world.call("GET", &format!("/v2/sandboxes?{query}"), "").await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let ids: Vec<_> = answer
                .json()
                .as_array()
                .unwrap()
                .iter()
                .map(|i| i["sandboxID"].as_str().unwrap().to_owned())
                .collect();
            ids
        }
    };
    assert_eq!(list("state=paused".into()).await, [paused.to_string()]);
    assert_eq!(list("state=running".into()).await, [running.to_string()]);
    assert_eq!(list("state=running,paused".into()).await.len(), 2);
    // As both SDKs do: each part percent-encoded, the pairs form-encoded, and that as one parameter.
    let quote = |text: &str| {
        percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
    };
    let pairs = url::form_urlencoded::Serializer::new(String::new())
        .append_pair(&quote("odd key"), &quote(odd))
        .finish();
    assert_eq!(list(format!("metadata={}", quote(&pairs))).await, [paused.to_string()]);
    let start = world.node.change(&running, |entry| entry.sandbox.started_at);
    assert_eq!(list(format!("startedAfter={start}")).await, [running.to_string()]);
    let python = start.to_string().replace('Z', "%2B00:00");
    assert_eq!(list(format!("startedAfter={python}")).await, [running.to_string()]);
    let v1 = world.call("GET", "/sandboxes", "").await.json();
    assert_eq!(v1.as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_sandbox_lives_through_pause_connect_and_kill() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let detail = world.call("GET", &format!("/sandboxes/{id}"), "").await.json();
    assert_eq!(detail["state"], "running");
    assert_eq!(detail["lifecycle"], json!({"autoResume": false, "onTimeout": "pause"}));
    assert_eq!(
        (&detail["cpuCount"], &detail["memoryMB"], &detail["diskSizeMB"]),
        (&json!(2), &json!(512), &json!(10240))
    );

    let connect = |version: &'static str| {
        let (world, id) = (&world, &id);
        async move {
            world.call("POST", &format!("{version}/sandboxes/{id}/connect"), r#"{"timeout":60}"#).await.status
        }
    };
    assert_eq!(connect("").await, 200);
    assert_eq!(world.call("POST", &format!("/sandboxes/{id}/pause"), "").await.status, 204);
    refused(&world.call("POST", &format!("/sandboxes/{id}/pause"), "{}").await, 409, "sandbox_conflict");
    assert_eq!(world.call("GET", &format!("/sandboxes/{id}"), "").await.json()["state"], "paused");
    assert_eq!(connect("/v2").await, 201);
    refused(&world.call("POST", &format!("/sandboxes/{id}/resume"), "{}").await, 409, "sandbox_conflict");
    world.call("POST", &format!("/sandboxes/{id}/pause"), "").await;
    assert_eq!(world.call("POST", &format!("/sandboxes/{id}/resume"), r#"{"timeout":9}"#).await.status, 201);
    assert_eq!(world.call("POST", &format!("/sandboxes/{id}/timeout"), r#"{"timeout":0}"#).await.status, 204);
    assert_eq!(world.call("POST", &format!("/sandboxes/{id}/refreshes"), "").await.status, 204);
    assert_eq!(world.call("DELETE", &format!("/sandboxes/{id}"), "").await.status, 204);
    assert_eq!(world.call("DELETE", &format!("/sandboxes/{id}"), "").await.status, 404);
}

#[tokio::test]
async fn an_ended_sandbox_is_a_404_that_names_the_cause_and_can_still_be_inspected() {
    let world = world().await;
    let id = world.node.add(|_| ());
    world.node.vanish(&id, EndCause::GuestOom);
    let answer = world.call("GET", &format!("/sandboxes/{id}"), "").await;
    refused(&answer, 404, "sandbox_ended");
    assert!(answer.message().contains("guest_oom"), "{}", answer.message());
    let inspected = world.call("GET", &format!("/aenv/v1/sandboxes/{id}"), "").await.json();
    assert_eq!(inspected["lifecycleState"], "dead");
    assert_eq!(inspected["tombstone"]["cause"], "guest_oom");
    assert_eq!(inspected["phases"][0], json!({"name": "restore", "micros": 42_000}));
}

#[tokio::test]
async fn the_body_of_a_pause_counts_however_it_is_framed() {
    let world = world().await;
    for (framing, expected) in [
        ("content-length: 16\r\n\r\n{\"memory\":false}", "pause memory=false"),
        ("transfer-encoding: chunked\r\n\r\n10\r\n{\"memory\":false}\r\n0\r\n\r\n", "pause memory=false"),
        ("content-length: 0\r\n\r\n", "pause memory=true"),
        ("\r\n", "pause memory=true"),
    ] {
        let id = world.node.add(|_| ());
        let request = format!(
            "POST /sandboxes/{id}/pause HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: {KEY}\r\n{framing}"
        );
        let answer = world.raw(request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
        assert_eq!(world.node.calls.lock().last().unwrap(), expected);
    }
}

#[tokio::test]
async fn a_strict_pause_asks_the_agent_first() {
    let world = world().await;
    let id = world.node.add(|_| ());
    world.node.ports.lock().remove(&49983);
    let strict = r#"{"requireHealthyGuest":true}"#;
    let answer = world.call("POST", &format!("/sandboxes/{id}/pause"), strict).await;
    refused(&answer, 409, "sandbox_conflict");
    world.node.ports.lock().insert(49983, world.guest.address);
    assert_eq!(world.call("POST", &format!("/sandboxes/{id}/pause"), strict).await.status, 204);
}

#[tokio::test]
async fn resuming_without_memory_is_refused_rather_than_ignored() {
    let world = world().await;
    let id = world.node.add(|entry| entry.sandbox.state = State::Paused);
    let cold = r#"{"timeout":60,"memory":false}"#;
    refused(&world.call("POST", &format!("/v2/sandboxes/{id}/connect"), cold).await, 501, "not_implemented");
    refused(&world.call("POST", &format!("/sandboxes/{id}/resume"), cold).await, 501, "not_implemented");
}

#[tokio::test]
async fn every_failure_of_the_node_has_its_status_and_code() {
    let world = world().await;
    let id = world.node.add(|_| ());
    let text = || "because".to_owned();
    for (error, status, code) in [
        (Error::SandboxNotFound(text()), 404, "sandbox_not_found"),
        (Error::SandboxEnded { id: text(), cause: text() }, 404, "sandbox_ended"),
        (Error::TemplateForbidden(text()), 403, "forbidden"),
        (Error::Conflict(text()), 409, "sandbox_conflict"),
        (Error::Invalid(text()), 400, "invalid_request"),
        (Error::Unavailable(text()), 503, "sandbox_unavailable"),
        (Error::Timeout(text()), 504, "deadline_exceeded"),
        (Error::Internal(text()), 500, "internal_server_error"),
    ] {
        world.node.fail("get", error);
        refused(&world.call("GET", &format!("/sandboxes/{id}"), "").await, status, code);
    }
    world
        .node
        .fail("create", Error::Full { message: "40 of 40".into(), retry_after: Duration::from_secs(7) });
    let full = world.call("POST", "/v2/sandboxes", r#"{"templateID":"base"}"#).await;
    refused(&full, 429, "sandbox_capacity_unavailable");
    assert!(full.message().contains("maximum number of concurrent"), "{}", full.message());
    assert_eq!(full.headers["retry-after"], "7");
    world.node.fail("health", Error::Unavailable("disk full".into()));
    assert_eq!(world.call("GET", "/health", "").await.status, 503);
}

#[tokio::test]
async fn a_missing_template_is_a_404_with_the_words_clients_look_for() {
    let world = world().await;
    let answer = world.call("POST", "/v2/sandboxes", r#"{"templateID":"nope"}"#).await;
    refused(&answer, 404, "template_not_found");
    assert!(answer.message().contains("does not exist"), "{}", answer.message());
}

#[tokio::test]
async fn templates_are_found_by_encoded_names() {
    let world = world().await;
    assert_eq!(world.call("GET", "/templates", "").await.json()[0]["buildStatus"], "ready");
    assert_eq!(world.call("GET", "/v2/templates", "").await.headers["x-next-token"], "");
    let detail = world.call("GET", "/templates/ns%2Fbase%3Av1", "").await;
    assert_eq!(detail.json()["builds"][0]["status"], "ready");
    assert_eq!(detail.json()["createdBy"], Value::Null);
    assert_eq!(world.call("DELETE", "/templates/ns%2Fbase%3Av1", "").await.status, 204);
    assert!(world.node.calls.lock().contains(&"delete_template ns/base:v1".to_owned()));
    let alias = world.call("GET", "/templates/aliases/base", "").await;
    assert_eq!(alias.json(), json!({"templateID": template_id().as_str(), "public": false}));
    refused(&world.call("GET", "/templates/aliases/nope", "").await, 404, "template_not_found");
    let other = world.call_with("GET", "/templates/aliases/base", "", &[("x-api-key", OTHER_KEY)]).await;
    refused(&other, 403, "forbidden");
}

#[tokio::test]
async fn a_builds_log_is_read_in_pages_and_by_level() {
    let world = world().await;
    let build = crate::fake::build_id();
    let status = |query: &'static str| {
        let world = &world;
        async move { world.call("GET", &format!("/templates/base/builds/{build}/status{query}"), "").await.json() }
    };
    let page = status("?logsOffset=1&limit=2").await;
    assert_eq!(page["logs"], json!(["step 1", "step 2"]));
    assert_eq!(page["logEntries"][0]["step"], "base");
    assert_eq!(page["status"], "building");
    assert_eq!(status("?logsOffset=5").await["logs"], json!([]));
    assert_eq!(status("?level=error").await["logs"], json!(["step 4"]));
    let logs = world
        .call("GET", &format!("/templates/base/builds/{build}/logs?direction=backward&limit=1"), "")
        .await;
    assert_eq!(logs.json()["logs"][0]["message"], "step 4");
    let unknown = "00000000-0000-0000-0000-000000000000";
    refused(
        &world.call("GET", &format!("/templates/base/builds/{unknown}/status"), "").await,
        404,
        "build_not_found",
    );
}

#[tokio::test]
async fn a_pull_reaches_the_node_with_defaults_and_checks() {
    let world = world().await;
    let answer = world
        .call(
            "POST",
            "/aenv/v1/templates/pull",
            r#"{"image":"debian:12","name":"deb","username":"u","password":"p"}"#,
        )
        .await;
    assert_eq!(answer.status, 202);
    assert_eq!(answer.json()["buildID"], crate::fake::build_id().to_string());
    let pull = world.node.pulls.lock()[0].clone();
    assert_eq!((pull.vcpus, pull.memory_mib, pull.disk_mib, pull.force), (2, 512, 10_240, false));
    assert_eq!(pull.credentials, Some(("u".into(), "p".into())));
    for (field, body) in [
        ("image", json!({"image": "", "name": "x"})),
        ("name", json!({"image": "x", "name": "../x"})),
        ("cpuCount", json!({"image": "x", "name": "x", "cpuCount": 0})),
        ("memoryMB", json!({"image": "x", "name": "x", "memoryMB": 129})),
        ("diskSizeMB", json!({"image": "x", "name": "x", "diskSizeMB": 1})),
        ("username", json!({"image": "x", "name": "x", "username": "u"})),
    ] {
        let answer = world.call("POST", "/aenv/v1/templates/pull", &body.to_string()).await;
        refused(&answer, 400, "invalid_request");
        assert!(answer.message().starts_with(field), "{field}: {}", answer.message());
    }
}

#[tokio::test]
async fn metrics_and_logs_have_the_shapes_the_sdks_parse() {
    let world = world().await;
    let (one, two) = (world.node.add(|_| ()), world.node.add(|_| ()));
    let samples = world.call("GET", &format!("/sandboxes/{one}/metrics?start=1&end=2"), "").await.json();
    for field in [
        "timestamp",
        "timestampUnix",
        "cpuCount",
        "cpuUsedPct",
        "memUsed",
        "memTotal",
        "memCache",
        "diskUsed",
        "diskTotal",
    ] {
        assert!(!samples[0][field].is_null(), "{field}");
    }
    let batch =
        world.call("GET", &format!("/sandboxes/metrics?sandbox_ids={one},{two},gone0"), "").await.json();
    assert_eq!(batch["sandboxes"].as_object().unwrap().len(), 2);
    let v1 = world.call("GET", &format!("/sandboxes/{one}/logs?limit=3"), "").await.json();
    assert_eq!(v1["logs"].as_array().unwrap().len(), 3);
    assert_eq!(v1["logEntries"][1]["level"], "info", "a level the SDKs don't know is told as info");
    let v2 = world.call("GET", &format!("/v2/sandboxes/{one}/logs?search=line%207"), "").await.json();
    assert_eq!(v2["logs"][0]["message"], "line 7");
    let start = world.node.change(&one, |entry| entry.sandbox.started_at).as_millisecond();
    let back = world
        .call(
            "GET",
            &format!("/v2/sandboxes/{one}/logs?direction=backward&limit=2&cursor={}", start + 5000),
            "",
        )
        .await
        .json();
    assert_eq!(back["logs"][0]["message"], "line 5");
}

#[tokio::test]
async fn prometheus_text_is_for_this_machine_or_for_a_key() {
    let world = world().await;
    world.call("GET", "/v2/sandboxes", "").await;
    let text = world.call_with("GET", "/metrics", "", &[]).await.text();
    for line in [
        "aenv_http_requests_total{plane=\"control\",route=\"/v2/sandboxes\",method=\"GET\",status=\"200\"} 1",
        "aenv_memory_limit_mebibytes 8192",
        "aenv_warm_machines{template=\"base\"} 2",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
    let forwarded = world.call_with("GET", "/metrics", "", &[("x-forwarded-for", "203.0.113.1")]).await;
    refused(&forwarded, 401, "unauthorized");
}

#[tokio::test]
async fn unknown_routes_and_methods_answer_in_the_error_body() {
    let world = world().await;
    refused(&world.call("GET", "/nope", "").await, 404, "route_not_found");
    refused(&world.call("PATCH", "/sandboxes", "").await, 405, "method_not_allowed");
    refused(&world.call("DELETE", "/health", "").await, 405, "method_not_allowed");
    let lost = world.call("POST", "/process.Process/Start", "{}").await;
    refused(&lost, 404, "route_not_found");
    assert!(lost.message().contains("E2b-Sandbox-Id"), "{}", lost.message());
}

#[tokio::test]
async fn a_browser_may_ask_from_anywhere() {
    let world = world().await;
    let preflight = Request::builder()
        .method("OPTIONS")
        .uri("/v2/sandboxes")
        .header("host", "x")
        .header("origin", "https://app.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "x-api-key,lang,package_version");
    let answer = read(send(world.address, preflight.body(body("")).unwrap()).await).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["access-control-allow-origin"], "*");
    assert_eq!(answer.headers["access-control-allow-headers"], "x-api-key,lang,package_version");
    let refused = world.call_with("GET", "/v2/sandboxes", "", &[("origin", "https://app.example")]).await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.headers["access-control-allow-origin"], "*", "a page must be able to read why");
}

#[tokio::test]
async fn a_body_that_is_too_large_or_too_slow_is_refused_in_time() {
    let world = world_with(|options| {
        options.max_body_bytes = 1000;
        options.body_timeout = Duration::from_millis(200);
    })
    .await;
    let large = json!({"templateID": "base", "metadata": {"k": "v".repeat(2000)}});
    refused(&world.call("POST", "/v2/sandboxes", &large.to_string()).await, 413, "body_too_large");
    let slow =
        format!("POST /v2/sandboxes HTTP/1.1\r\nhost: x\r\nx-api-key: {KEY}\r\ncontent-length: 50\r\n\r\n{{");
    let answer = world.raw(slow.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("body_timeout"), "{answer}");
}

#[tokio::test]
async fn an_answer_carries_the_requests_id() {
    let world = world().await;
    let answer = world.call_with("GET", "/health", "", &[("x-request-id", "mine-1")]).await;
    assert_eq!(answer.headers["x-request-id"], "mine-1");
    assert_eq!(world.call("GET", "/health", "").await.headers["x-request-id"].len(), 36);
}
