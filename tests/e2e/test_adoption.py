"""kill -9 of the server in every state of a sandbox: afterwards each is what the server says it is, and none is lost.

The server is told to this suite by `AENV_SERVER_PID_FILE` and `AENV_RESTART_CMD`. Sandboxes are running or paused
or have a tombstone; nothing else is left on the host.
"""

import os
import pathlib
import secrets
import signal
import subprocess
import threading
import time

import httpx
import pytest
from conftest import API, Host, KEY, LABEL, everything, eventually, healthy, needs
from e2b import Sandbox, SandboxQuery, SandboxState

pytestmark = [needs("AENV_SERVER_PID_FILE", "AENV_RESTART_CMD"), pytest.mark.timeout(600)]


def server_pid():
    return int(pathlib.Path(os.environ["AENV_SERVER_PID_FILE"]).read_text().split()[0])


def crash_and_restart():
    pid = server_pid()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not alive(pid))
    begin_again()


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def begin_again():
    done = subprocess.run(os.environ["AENV_RESTART_CMD"], shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    eventually(healthy, within=90)


@pytest.fixture(scope="module")
def baseline():
    return Host.holdings()


@pytest.fixture(autouse=True)
def the_server_runs(baseline):
    if not healthy():
        begin_again()
    yield
    if not healthy():
        begin_again()


def inspect(sandbox_id):
    answer = httpx.get(f"{API}/aenv/v1/sandboxes/{sandbox_id}", headers={"X-API-Key": KEY}, timeout=60, trust_env=False)
    return answer.json() if answer.status_code == 200 else None


def settled(sandbox_id):
    """What became of it, once it is no longer passing between states; `None` when the server never made it."""
    def ask():
        found = inspect(sandbox_id)
        if found is None:
            return {"lifecycleState": "unknown"}
        return found if found["lifecycleState"] in ("running", "paused", "dead") else None

    return eventually(ask, within=120)


def prove(sandbox_id, secret):
    """It is what the server says it is, and whole. Returns that state."""
    found = settled(sandbox_id)
    state = found["lifecycleState"]
    if state == "dead":
        assert found["tombstone"]["cause"] and found["tombstone"]["detail"]
        return state
    if state in ("running", "paused"):
        box = Sandbox.connect(sandbox_id, timeout=600)
        assert box.files.read("/dev/shm/secret") == secret
        assert box.files.read("/home/user/secret") == secret
        assert box.commands.run("echo works").stdout == "works\n"
        assert Sandbox.get_info(sandbox_id).state == SandboxState.RUNNING
    return state


def prepared(start):
    box, secret = start(), secrets.token_hex(16)
    box.files.write("/dev/shm/secret", secret)
    box.files.write("/home/user/secret", secret)
    box.commands.run("sync")
    return box, secret


def test_running_sandboxes_go_on_and_so_do_their_commands(start):
    boxes = [prepared(start) for _ in range(3)]
    command = boxes[0][0].commands.run("i=0; while true; do i=$((i+1)); echo $i > /dev/shm/count; sleep 0.1; done", background=True, timeout=0)
    pid = command.pid
    uptime = boxes[0][0].commands.run("cat /proc/uptime").stdout
    crash_and_restart()
    for box, secret in boxes:
        assert prove(box.sandbox_id, secret) == "running"
    box = boxes[0][0]
    assert pid in [process.pid for process in box.commands.list()]
    assert float(box.commands.run("cat /proc/uptime").stdout.split()[0]) > float(uptime.split()[0])
    count = int(box.files.read("/dev/shm/count") or 0)
    eventually(lambda: int(box.files.read("/dev/shm/count") or 0) > count)
    assert box.get_info().metadata["suite"] == "e2e"


def test_output_written_while_the_server_was_dead_is_not_lost(start):
    box, _ = prepared(start)
    command = box.commands.run("sleep 3; seq 1 100; exit 7", background=True, timeout=0)
    crash_and_restart()
    with pytest.raises(Exception) as caught:
        box.commands.connect(command.pid, timeout=60).wait()
    assert caught.value.exit_code == 7
    assert caught.value.stdout == "".join(f"{n}\n" for n in range(1, 101))


def test_paused_sandboxes_stay_paused_and_resume(start):
    box, secret = prepared(start)
    box.pause()
    crash_and_restart()
    assert Sandbox.get_info(box.sandbox_id).state == SandboxState.PAUSED
    assert prove(box.sandbox_id, secret) == "paused"


def test_an_end_of_life_that_came_meanwhile_is_kept(start):
    box, _ = prepared(start)
    kill = start(lifecycle={"on_timeout": "kill"})
    box.set_timeout(2)
    kill.set_timeout(2)
    pid = server_pid()
    os.kill(pid, signal.SIGKILL)
    time.sleep(3)  # the end of life passes while nobody watches
    begin_again()
    eventually(lambda: settled(box.sandbox_id)["lifecycleState"] == "paused")
    eventually(lambda: settled(kill.sandbox_id)["lifecycleState"] == "dead")


def begun(act):
    """Starts an operation that won't get its answer."""
    def run():
        try:
            act()
        except Exception:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("after_ms", [0, 30, 100, 300])
def test_killed_while_pausing(start, after_ms):
    box, secret = prepared(start)
    begun(box.pause)
    time.sleep(after_ms / 1000)
    crash_and_restart()
    assert prove(box.sandbox_id, secret) in ("running", "paused")


@pytest.mark.parametrize("after_ms", [0, 30, 100, 300])
def test_killed_while_resuming(start, after_ms):
    box, secret = prepared(start)
    box.pause()
    begun(lambda: Sandbox.connect(box.sandbox_id, timeout=600))
    time.sleep(after_ms / 1000)
    crash_and_restart()
    assert prove(box.sandbox_id, secret) in ("running", "paused"), "a pause that was durable must not be lost"


@pytest.mark.parametrize("after_ms", [0, 30, 100, 300])
def test_killed_while_creating(template, after_ms):
    mark = secrets.token_hex(8)
    begun(lambda: Sandbox.create(template, timeout=600, metadata={**LABEL, "mark": mark}))
    time.sleep(after_ms / 1000)
    crash_and_restart()
    for info in everything(SandboxQuery(metadata={"mark": mark})):
        assert settled(info.sandbox_id)["lifecycleState"] in ("running", "paused")
        box = Sandbox.connect(info.sandbox_id)
        assert box.commands.run("echo works").stdout == "works\n"
        box.kill()


@pytest.mark.parametrize("after_ms", [0, 30, 100])
def test_killed_while_killing(start, after_ms):
    box, _ = prepared(start)
    begun(box.kill)
    time.sleep(after_ms / 1000)
    crash_and_restart()
    state = settled(box.sandbox_id)["lifecycleState"]
    assert state in ("dead", "running", "unknown")
    Sandbox.kill(box.sandbox_id)
    assert settled(box.sandbox_id)["lifecycleState"] in ("dead", "unknown")


def test_a_monitor_that_died_meanwhile_is_told_as_such(start):
    before = set(Host.monitors())
    box, _ = prepared(start)
    mine = [pid for pid, line in Host.monitors().items() if box.sandbox_id in line] or list(set(Host.monitors()) - before)
    if len(mine) != 1:
        pytest.skip(f"Skipped: can't tell which monitor is the sandbox's ({len(mine)} candidates)")
    server = server_pid()
    os.kill(server, signal.SIGKILL)
    os.kill(mine[0], signal.SIGKILL)
    eventually(lambda: not alive(server) and not alive(mine[0]))
    begin_again()
    found = settled(box.sandbox_id)
    assert found["lifecycleState"] == "dead" and found["tombstone"]["cause"] in ("vmm_crash", "node_lost")


def test_a_monitor_that_dies_under_a_living_server_is_told_at_once(start):
    before = set(Host.monitors())
    box, _ = prepared(start)
    mine = [pid for pid, line in Host.monitors().items() if box.sandbox_id in line] or list(set(Host.monitors()) - before)
    if len(mine) != 1:
        pytest.skip(f"Skipped: can't tell which monitor is the sandbox's ({len(mine)} candidates)")
    os.kill(mine[0], signal.SIGKILL)
    eventually(lambda: (inspect(box.sandbox_id) or {}).get("lifecycleState") == "dead", within=10)
    assert inspect(box.sandbox_id)["tombstone"]["cause"] == "vmm_crash"


def test_nothing_is_left_on_the_host(baseline):
    for info in everything(SandboxQuery(metadata=LABEL)):
        Sandbox.kill(info.sandbox_id)
    crash_and_restart()

    def clean():
        now = Host.holdings()
        # A pool of warm machines may have grown back to its size, never beyond what was there at first.
        return all(now[kind] <= baseline[kind] for kind in now)

    try:
        eventually(clean, within=90)
    except AssertionError:
        pytest.fail(f"left behind: {Host.holdings()} where there was {baseline}; mounts {Host.mounts()}")
