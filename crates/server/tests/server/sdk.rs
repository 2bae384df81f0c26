//! The official SDKs, unmodified, against the control plane.
//!
//! Set `AENV_TEST_PYTHON` to an interpreter that can import `e2b`, or `AENV_TEST_NODE_PATH` to a `node_modules` that has
//! it. What needs a real guest is tested with a real node, elsewhere.

use crate::fake::{KEY, World, world};
use std::process::{Output, Stdio};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

#[expect(clippy::print_stdout, reason = "the house's way to say that a test was skipped")]
fn setting(name: &str) -> Option<String> {
    let value = std::env::var(name).ok();
    if value.is_none() {
        println!("Skipped: {name} is not set");
    }
    value
}

async fn run(world: &World, mut command: tokio::process::Command) -> Output {
    let base = format!("http://{}", world.address);
    command
        .env("E2B_API_URL", &base)
        .env("E2B_SANDBOX_URL", &base)
        .env("E2B_API_KEY", KEY)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await.expect("the SDK hangs").unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    output
}

#[tokio::test]
async fn the_python_sdk_lives_through_the_control_plane() {
    let Some(python) = setting("AENV_TEST_PYTHON") else { return };
    let world = world().await;
    let mut command = tokio::process::Command::new(python);
    command.args(["-c", include_str!("sdk_check.py")]);
    run(&world, command).await;
    let pauses: Vec<_> =
        world.node.calls.lock().iter().filter(|call| call.starts_with("pause ")).cloned().collect();
    assert_eq!(pauses, ["pause memory=true", "pause memory=true"]);
}

#[tokio::test]
async fn the_javascript_sdk_lives_through_the_control_plane() {
    let Some(modules) = setting("AENV_TEST_NODE_PATH") else { return };
    let world = world().await;
    let mut command = tokio::process::Command::new("node");
    command.env("NODE_PATH", modules).args(["-e", include_str!("sdk_check.cjs")]);
    run(&world, command).await;
}

/// For tools run by hand (schemathesis, curl): serves the fake on `AENV_TEST_LISTEN` until interrupted.
#[tokio::test]
#[ignore = "serves until interrupted"]
async fn serve_the_fake_for_tools_run_by_hand() {
    let Some(listen) = setting("AENV_TEST_LISTEN") else { return };
    let world = crate::fake::world_with(|options| options.listen = listen.parse().unwrap()).await;
    world.node.add(|_| ());
    tokio::signal::ctrl_c().await.unwrap();
    world.stop.notify_one();
    world.running.await.unwrap();
}
