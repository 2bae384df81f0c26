//! Everything that asks the control plane: codes, formats, pages, confirmation.

use crate::{
    client::{aenv, aenv_with, command},
    fake::{BOX, Fake, KEY},
};
use std::os::unix::fs::PermissionsExt as _;

pub const TESTS: &[(&str, fn())] = &[
    ("start_asks_for_what_its_flags_say", || {
        let fake = Fake::start();
        let args = [
            "start",
            "base",
            "-q",
            "--timeout",
            "77",
            "--metadata",
            "a=b=c",
            "-e",
            "K=V",
            "--on-timeout",
            "kill",
            "--auto-resume",
            "--no-internet",
        ];
        let run = aenv(&fake, &args).with_code(0);
        assert_eq!(run.text().trim().len(), 20);
        let want = serde_json::json!({"templateID": "base", "timeout": 77, "autoPause": false,
            "autoResume": {"enabled": true}, "allow_internet_access": false, "metadata": {"a": "b=c"},
            "envVars": {"K": "V"}});
        assert_eq!(*fake.state.created.lock().expect("lock"), want);
    }),
    ("start_keeps_tokens_to_itself", || {
        let fake = Fake::start();
        let run = aenv(&fake, &["start", "base"]).with_code(0);
        assert!(run.json()["sandboxID"].is_string());
        assert!(!run.text().contains("token-") && !run.err.contains("token-"));
        aenv(&fake, &["start", "missing"]).with_code(3);
    }),
    ("each_refusal_has_its_code_and_says_what_to_do", || {
        let fake = Fake::start();
        for (status, code) in [(400, 2), (404, 3), (401, 4), (403, 4), (429, 4), (503, 4), (409, 1), (500, 1)]
        {
            *fake.state.refuse.lock().expect("lock") = Some((status, "the server's own words"));
            let run = aenv(&fake, &["ls"]).with_code(code);
            assert!(run.err.contains("the server's own words"), "{status}: {}", run.err);
            assert_eq!(run.text(), "", "{status}: nothing but data belongs on standard output");
            if status == 429 {
                assert!(run.err.contains("try again in 7 s"), "{}", run.err);
            }
        }
    }),
    ("without_a_server_it_says_how_to_start_one", || {
        let fake = Fake::start();
        let run = aenv(&fake, &["--api-url", "http://127.0.0.1:9", "ls"]).with_code(1);
        assert!(run.err.contains("aenv up"), "{}", run.err);
    }),
    ("without_a_key_it_says_how_to_get_in", || {
        let fake = Fake::start();
        let output = command(&fake, &["ls"]).env_remove("E2B_API_KEY").output().expect("runs");
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{words}");
        assert!(words.contains("aenv auth login") && words.contains("no API key"), "{words}");
    }),
    ("ls_reads_all_pages_and_filters", || {
        let fake = Fake::start();
        for n in 0..5 {
            let state = if n == 0 { "paused" } else { "running" };
            fake.add(&format!("listed{n:014}"), state, &[("group", "a b&c=d"), ("n", &n.to_string())]);
        }
        let all = aenv(&fake, &["ls"]).with_code(0).json();
        assert_eq!(all.as_array().expect("a list").len(), 6);
        let group = aenv(&fake, &["ls", "-q", "--metadata", "group=a b&c=d"]).with_code(0);
        assert_eq!(group.text().lines().count(), 5);
        let paused = aenv(&fake, &["ls", "-q", "--state", "paused"]).with_code(0);
        assert_eq!(paused.text(), "listed00000000000000\n");
        let few = aenv(&fake, &["ls", "--limit", "3"]).with_code(0).json();
        assert_eq!(few.as_array().expect("a list").len(), 3);
    }),
    ("a_table_is_for_people_and_json_for_pipes", || {
        let fake = Fake::start();
        fake.add("labelledlabelledlabe", "running", &[("evil", "\u{1b}[2J")]);
        let run = aenv(&fake, &["ls", "--output", "table"]).with_code(0);
        assert!(run.text().starts_with("ID"), "{}", run.text());
        assert!(!run.text().contains('\u{1b}'), "labels must not drive the terminal");
        let run = aenv(&fake, &["info", BOX, "--output", "table"]).with_code(0);
        assert!(run.text().contains("phase restore") && run.text().contains("1.234 ms"), "{}", run.text());
        let detail = aenv(&fake, &["info", BOX]).with_code(0).json();
        assert_eq!(detail["lifecycleState"], "running");
        assert!(detail.get("envdAccessToken").is_none());
    }),
    ("pause_resume_and_timeout_tell_the_state", || {
        let fake = Fake::start();
        assert_eq!(aenv(&fake, &["pause", BOX]).with_code(0).json()["state"], "paused");
        assert!(aenv(&fake, &["pause", BOX]).with_code(1).err.contains("already paused"));
        assert_eq!(aenv(&fake, &["resume", BOX]).with_code(0).json()["state"], "running");
        aenv(&fake, &["timeout", BOX, "60"]).with_code(0);
        aenv(&fake, &["timeout", BOX, "-1"]).with_code(2);
        aenv(&fake, &["timeout", "nosuchnosuchnosuchno", "60"]).with_code(3);
    }),
    ("rm_asks_before_it_removes_many", || {
        let fake = Fake::start();
        fake.add("removed0000000000000", "running", &[("group", "x")]);
        fake.add("removed1111111111111", "paused", &[("group", "x")]);
        let run = aenv(&fake, &["rm", "--metadata", "group=x"]).with_code(2);
        assert!(run.err.contains("--yes"), "{}", run.err);
        assert_eq!(fake.state.sandboxes.lock().expect("lock").len(), 3);
        let run = aenv(&fake, &["rm", "--metadata", "group=x", "-y"]).with_code(0);
        assert_eq!(run.json()["removed"].as_array().expect("a list").len(), 2);
        assert_eq!(fake.state.sandboxes.lock().expect("lock").len(), 1);
        let run = aenv(&fake, &["rm", BOX, "nosuchnosuchnosuchno"]).with_code(3);
        assert_eq!(run.json()["removed"], serde_json::json!([BOX]));
        aenv(&fake, &["rm"]).with_code(2);
        aenv(&fake, &["rm", BOX, "--all"]).with_code(2);
    }),
    ("pull_shows_the_build_and_ends_as_it_does", || {
        let fake = Fake::start();
        *fake.state.build.lock().expect("lock") = (vec!["fetching", "booting", "snapshot taken"], None);
        let run = aenv(&fake, &["pull", "oci:/x", "--name", "n"]).with_code(0);
        assert_eq!(run.json()["status"], "ready");
        assert_eq!(run.err, "fetching\nbooting\nsnapshot taken\n");
        *fake.state.build.lock().expect("lock") = (vec!["fetching"], Some("the image has no layers"));
        let run = aenv(&fake, &["pull", "oci:/x", "--name", "n"]).with_code(1);
        assert!(run.err.contains("the image has no layers"), "{}", run.err);
        aenv(&fake, &["pull", "oci:/x"]).with_code(2);
        aenv(&fake, &["pull", "oci:/x", "--name", "n", "--user", "u"]).with_code(2);
    }),
    ("templates_are_named_in_one_path_segment", || {
        let fake = Fake::start();
        aenv(&fake, &["template", "info", "team/base:v1"]).with_code(0);
        assert!(fake.seen("GET /templates/team%2Fbase%3Av1"));
        assert!(aenv(&fake, &["template", "ls", "--output", "table"]).with_code(0).text().contains("ready"));
        aenv(&fake, &["template", "rm", "base"]).with_code(2);
        aenv(&fake, &["template", "rm", "base", "--yes"]).with_code(0);
        aenv(&fake, &["template", "rm", "other", "--yes"]).with_code(3);
    }),
    ("followed_logs_tell_each_line_once_until_the_sandbox_is_gone", || {
        let fake = Fake::start();
        let child = command(&fake, &["logs", "-f", "--output", "table", BOX]).spawn().expect("starts");
        crate::client::eventually("it asks again", || {
            fake.state.seen.lock().expect("lock").iter().filter(|line| line.contains("/logs")).count() >= 3
        });
        // Its lines stay readable after its end.
        fake.add(BOX, "dead", &[]);
        let output = child.wait_with_output().expect("ends");
        assert_eq!(output.status.code(), Some(0));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let told: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
        assert_eq!(told, ["one", "two", "three\\u{1b}[2J"]);
    }),
    ("metrics_are_told_in_both_forms", || {
        let fake = Fake::start();
        assert_eq!(aenv(&fake, &["metrics", BOX]).with_code(0).json()[0]["memTotal"], 4096);
        let run = aenv(&fake, &["metrics", BOX, "--output", "table"]).with_code(0);
        assert!(run.text().contains("1.0 KiB of 4.0 KiB"), "{}", run.text());
    }),
    ("login_checks_the_key_and_keeps_it_private", || {
        let fake = Fake::start();
        let login = |key: &str| aenv_with(&fake, &["auth", "login", "--api-url", fake.url()], key.as_bytes());
        login("nonsense").with_code(2);
        login("e2b_ffff").with_code(4);
        assert!(!fake.home().join(".config/aenv/env").exists());
        login(&format!("{KEY}\n")).with_code(0);
        let path = fake.home().join(".config/aenv/env");
        assert_eq!(std::fs::metadata(&path).expect("written").permissions().mode() & 0o777, 0o600);
        let status = command(&fake, &["auth", "status"])
            .env_remove("E2B_API_KEY")
            .env_remove("E2B_API_URL")
            .output()
            .expect("runs");
        let told: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
        assert_eq!((told["ok"].clone(), status.status.code()), (true.into(), Some(0)), "{told}");
        assert!(!told.to_string().contains(KEY));
    }),
    ("bench_counts_and_describes", || {
        let fake = Fake::start();
        let report = aenv(&fake, &["bench", "start", "-n", "3", "-c", "2", "--cold"]).with_code(0).json();
        assert_eq!(report["variants"][0]["n"], 3);
        assert!(report["variants"][0]["p50Micros"].as_u64().expect("a number") > 0);
        assert_eq!(report["variants"][0]["partsP50Micros"]["server restore"], 1234);
        assert_eq!(fake.state.sandboxes.lock().expect("lock").len(), 1, "bench removes what it starts");
        aenv(&fake, &["bench", "start", "--compare", "podman:x"]).with_code(2);
    }),
    ("completion_knows_every_command", || {
        let fake = Fake::start();
        for shell in ["bash", "zsh", "fish"] {
            let run = aenv(&fake, &["completion", shell]).with_code(0);
            for word in ["exec", "template", "metadata"] {
                assert!(run.text().contains(word), "{shell} lacks {word}");
            }
        }
        aenv(&fake, &["completion", "tcsh"]).with_code(2);
    }),
    ("wrong_usage_is_code_two", || {
        let fake = Fake::start();
        for args in [
            vec![],
            vec!["fly"],
            vec!["start"],
            vec!["start", "base", "--timeout", "0"],
            vec!["start", "base", "--metadata", "nopair"],
            vec!["ls", "--state", "flying"],
            vec!["--output", "xml", "ls"],
            vec!["--api-url", "ftp://x", "ls"],
            vec!["info", ".."],
            vec!["exec", "-d", "-t", BOX, "--", "true"],
        ] {
            aenv(&fake, &args).with_code(2);
        }
    }),
];
