//! A server process that is killed with SIGKILL, and the one after it.

use crate::stage::{Act, CHILD, TTL, cast as make, living, start, team};
use aenv_node::{control::Control, model::State};
use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// What the child does before it is killed, and how long it is let do it after it says it begins.
const SCENES: [(&str, u64); 8] = [
    ("run", 0),
    ("create", 15),
    ("create", 60),
    ("create", 150),
    ("pause", 10),
    ("pause", 40),
    ("resume", 30),
    ("resume", 120),
];

/// Runs all scenes; no node may live in this process meanwhile.
pub(crate) fn scenes<'a>(dir: &'a Path) -> Act<'a> {
    Box::pin(play(dir))
}

async fn play(dir: &Path) {
    for (what, millis) in SCENES {
        let mut child = spawn(dir, what);
        let told = wait_for(&mut child, "begins");
        tokio::time::sleep(Duration::from_millis(millis)).await;
        child.kill().expect("SIGKILL");
        child.wait().expect("its end");
        let cast = make(dir, 0).await;
        let found = living(&cast.node).await;
        eprintln!(
            "    killed {millis} ms into '{what}': {:?}",
            found.iter().map(|s| s.state).collect::<Vec<_>>()
        );
        assert!(found.iter().all(|sandbox| matches!(sandbox.state, State::Running | State::Paused)));
        for sandbox in &found {
            cast.node.connect(&team(), &sandbox.id, TTL).await.expect("what is found can be used");
            cast.check(&sandbox.id, "true").await;
            if told.contains(sandbox.id.as_str()) {
                cast.check(&sandbox.id, "test \"$(cat ~/mark)\" = made").await;
            }
        }
        if what != "create" {
            assert_eq!(found.len(), 1, "the sandbox that was there before '{what}' is there after it");
        }
        for sandbox in &found {
            cast.node.kill(&team(), &sandbox.id).await.expect("a kill");
        }
        cast.end().await;
    }
}

fn spawn(dir: &Path, what: &str) -> Child {
    let program = std::env::current_exe().expect("this program");
    Command::new(program)
        .arg(what)
        .env(CHILD, dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child")
}

fn wait_for(child: &mut Child, word: &str) -> String {
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    loop {
        let line = lines.next().expect("the child says something before it ends").expect("text");
        if line.contains(word) {
            return line;
        }
    }
}

pub(crate) async fn child(dir: &Path, what: &str) {
    let cast = make(dir, 0).await;
    let mark = "echo made > ~/mark && sync";
    let say = |text: String| crate::stdout(&format!("{text}\n"));
    match what {
        "create" => {
            say("begins".into());
            let _made = start(&cast).await;
        }
        _ => {
            let id = start(&cast).await;
            cast.check(&id, mark).await;
            match what {
                "pause" => {
                    say(format!("begins {id}"));
                    cast.node.pause(&team(), &id, true).await.expect("a pause");
                }
                "resume" => {
                    cast.node.pause(&team(), &id, true).await.expect("a pause");
                    say(format!("begins {id}"));
                    cast.node.connect(&team(), &id, TTL).await.expect("a resume");
                }
                _ => say(format!("begins {id}")),
            }
        }
    }
    std::future::pending::<()>().await;
}
