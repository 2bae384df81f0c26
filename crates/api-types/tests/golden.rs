//! What the official SDKs really sent, read with our types: nothing lost, nothing misread.
//!
//! `golden/{sdk}-{version}.json` were captured by pointing each published SDK at a server that writes down what arrives,
//! with the same calls: three creates (bare, with everything, kill at the end), two connects, pause, set timeout, list.

use aenv_api_types::{ConnectSandbox, ErrorBody, ErrorCode, NewSandbox, PauseSandbox, SetTimeout};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

const CAPTURES: [(&str, &str); 3] = [
    ("python 2.45.1", include_str!("golden/python-2.45.1.json")),
    ("python 2.63.0", include_str!("golden/python-2.63.0.json")),
    ("js 2.51.0", include_str!("golden/js-2.51.0.json")),
];

/// Bodies of the captured requests whose path ends like this.
fn bodies(capture: &str, ending: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_json::from_str(capture).unwrap();
    let matching = all.into_iter().filter(|one| one["request"].as_str().unwrap().ends_with(ending));
    matching.map(|mut one| one["body"].take()).filter(|body| !body.is_null()).collect()
}

/// Reads it and writes it again: the same but for order.
fn same<T: Serialize + DeserializeOwned>(sent: &Value) -> T {
    let read: T = serde_json::from_value(sent.clone()).unwrap_or_else(|error| panic!("{error}: {sent}"));
    assert_eq!(&serde_json::to_value(&read).unwrap(), sent);
    read
}

#[test]
fn every_captured_request_survives_our_types_unchanged() {
    for (sdk, capture) in CAPTURES {
        let creates: Vec<NewSandbox> = bodies(capture, "/sandboxes").iter().map(same).collect();
        assert_eq!(creates.len(), 3, "{sdk}");
        let [bare, full, kill] = &creates[..] else { panic!() };
        assert_eq!(
            (bare.template_id.as_str(), bare.auto_pause),
            ("base", None),
            "{sdk} says nothing of the end"
        );
        assert_eq!(full.metadata.as_ref().unwrap()["run"], "ü", "{sdk}");
        assert_eq!(full.allow_internet_access, Some(false), "{sdk}");
        let network = full.network.as_ref().unwrap();
        assert_eq!(network.mask_request_host.as_deref(), Some("localhost:${PORT}"), "{sdk}");
        assert_eq!(network.allow_public_traffic, Some(false), "{sdk}");
        assert!(full.auto_resume.as_ref().unwrap().enabled, "{sdk}");
        assert_eq!(kill.auto_pause, Some(false), "{sdk}");

        let connects: Vec<ConnectSandbox> = bodies(capture, "/connect").iter().map(same).collect();
        assert_eq!((connects.len(), connects[0].timeout), (2, Some(60)), "{sdk}");
        for pause in bodies(capture, "/pause") {
            assert_ne!(same::<PauseSandbox>(&pause).memory, Some(false), "{sdk}");
        }
        assert_eq!(same::<SetTimeout>(&bodies(capture, "/timeout")[0]).timeout, 0, "{sdk}");
    }
}

#[test]
fn wrong_types_are_refused_and_unknown_fields_are_not() {
    let read = |value: Value| serde_json::from_value::<NewSandbox>(value);
    assert!(read(json!({"templateID": "base", "fromTheFuture": {"x": [1]}})).is_ok());
    for wrong in [
        json!({}),
        json!({"templateID": 1}),
        json!({"templateID": "base", "timeout": "60"}),
        json!({"templateID": "base", "timeout": 1.5}),
        json!({"templateID": "base", "metadata": {"a": 1}}),
        json!({"templateID": "base", "autoPause": "true"}),
        json!({"templateID": "base", "envVars": []}),
    ] {
        assert!(read(wrong.clone()).is_err(), "{wrong}");
    }
}

#[test]
fn an_error_code_of_a_later_server_is_no_error_for_an_earlier_client() {
    let read = |code: &str| {
        serde_json::from_value::<ErrorBody>(json!({"code": 404, "message": "m", "error_code": code})).unwrap()
    };
    assert_eq!(read("sandbox_ended").error_code, Some(ErrorCode::SandboxEnded));
    assert_eq!(read("made_up_later").error_code, Some(ErrorCode::Unknown));
}

/// Published, so frozen: a change here breaks clients that branch on them.
#[test]
fn error_codes_keep_their_names() {
    for (code, name) in [
        (ErrorCode::Unauthorized, "unauthorized"),
        (ErrorCode::Forbidden, "forbidden"),
        (ErrorCode::InvalidRequest, "invalid_request"),
        (ErrorCode::BodyTooLarge, "body_too_large"),
        (ErrorCode::BodyTimeout, "body_timeout"),
        (ErrorCode::RouteNotFound, "route_not_found"),
        (ErrorCode::MethodNotAllowed, "method_not_allowed"),
        (ErrorCode::SandboxNotFound, "sandbox_not_found"),
        (ErrorCode::SandboxEnded, "sandbox_ended"),
        (ErrorCode::SandboxConflict, "sandbox_conflict"),
        (ErrorCode::SandboxUnavailable, "sandbox_unavailable"),
        (ErrorCode::TemplateNotFound, "template_not_found"),
        (ErrorCode::BuildNotFound, "build_not_found"),
        (ErrorCode::SandboxCapacityUnavailable, "sandbox_capacity_unavailable"),
        (ErrorCode::DeadlineExceeded, "deadline_exceeded"),
        (ErrorCode::NotImplemented, "not_implemented"),
        (ErrorCode::InternalServerError, "internal_server_error"),
    ] {
        assert_eq!(serde_json::to_value(code).unwrap(), name);
    }
}
