"""The `aenv` program: every command, its exit codes, what goes to which output, and its JSON."""

import hashlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
import uuid

import pytest
from conftest import API, GUESTS, KEY, LABEL, eventually, needs

pytestmark = needs("AENV_BIN")
BIN = os.environ.get("AENV_BIN", "aenv")


def aenv(*words, code=0, input=None, timeout=120, env=None, text=True):
    done = subprocess.run([BIN, *map(str, words)], input=input, capture_output=True, text=text, timeout=timeout, env=env)
    assert done.returncode == code, f"aenv {words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def table(*words, **options):
    return aenv("--output", "table", *words, **options)


@pytest.fixture(scope="module")
def box(template):
    label = [f"--metadata={key}={value}" for key, value in LABEL.items()]
    name = aenv("start", template, "--timeout", 1800, "-q", "--env", "FROM=start", *label).stdout.strip()
    yield name
    aenv("rm", name)


def test_start_prints_an_id_alone_when_asked(box):
    assert len(box) == 20 and box.isalnum() and box == box.lower()


def test_start_tells_json_when_piped_and_keeps_tokens_to_itself(template):
    done = aenv("start", template, "--timeout", 60, "--on-timeout", "kill", "--no-internet", "--metadata", f"run={LABEL['run']}")
    made = json.loads(done.stdout)
    assert made["sandboxID"] and "envdAccessToken" not in made
    detail = json.loads(aenv("info", made["sandboxID"]).stdout)
    assert detail["lifecycle"]["onTimeout"] == "kill" and detail["allowInternetAccess"] is False
    aenv("rm", made["sandboxID"])


def test_exec_passes_output_input_and_code_through(box):
    done = aenv("exec", box, "--", "sh", "-c", "echo out; echo err >&2; exit 42", code=42)
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    assert aenv("exec", "-i", box, "--", "cat", input="one\ntwo\n").stdout == "one\ntwo\n"
    data = bytes(range(256)) * 5000
    assert aenv("exec", "-i", box, "--", "cat", input=data, text=False).stdout == data
    assert aenv("exec", box, "--", "cat").stdout == ""
    aenv("exec", box, "--", "sh", "-c", "kill -9 $$", code=137)


def test_exec_takes_user_directory_and_environment(box):
    done = aenv("exec", "-u", "root", "-w", "/tmp", "-e", "A=x y", box, "--", "sh", "-c", 'id -un; pwd; echo "$A"; echo $FROM')
    assert done.stdout == "root\n/tmp\nx y\nstart\n"
    assert aenv("exec", box, "--", "printf", "%s|", "a b", "$HOME", "*").stdout == "a b|$HOME|*|"


def test_exec_says_what_is_wrong(box):
    assert "ghost" in aenv("exec", "-u", "ghost", box, "--", "true", code=4).stderr
    assert "/no/such" in aenv("exec", "-w", "/no/such", box, "--", "true", code=2).stderr
    aenv("exec", box, code=2)
    aenv("exec", "abcdefghij0123456789", "--", "true", code=3)


def test_a_detached_command_can_be_watched_later(box):
    done = json.loads(aenv("exec", "-d", box, "--", "sh", "-c", "sleep 2; seq 1 1000; exit 9").stdout)
    later = aenv("exec", box, "--attach", done["pid"], code=9)
    assert later.stdout == "".join(f"{n}\n" for n in range(1, 1001))


def test_control_c_ends_the_remote_command(box):
    mark = str(uuid.uuid4().int % 10**8 + 10**8)
    client = subprocess.Popen([BIN, "exec", box, "--", "sleep", mark], stderr=subprocess.PIPE)
    find = ["exec", box, "--", "sh", "-c", f"grep -la '[{mark[0]}]{mark[1:]}' /proc/[0-9]*/cmdline 2>/dev/null; true"]
    eventually(lambda: aenv(*find).stdout != "")
    client.send_signal(signal.SIGINT)
    assert client.wait(30) == 143
    assert aenv(*find).stdout == ""


def terminal(*words):
    """The program on a terminal of its own: (process id, terminal)."""
    pid, master = pty.fork()
    if pid == 0:
        os.execv(BIN, [BIN, *words])
    return pid, master


def read_until(master, wanted, within=60):
    seen, deadline = b"", time.monotonic() + within
    while wanted not in seen:
        ready, _, _ = select.select([master], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"{wanted!r} is not in {seen!r}"
        try:
            seen += os.read(master, 65536)
        except OSError:
            break
    assert wanted in seen, f"{wanted!r} is not in {seen!r}"
    return seen


def test_connect_is_a_terminal_and_puts_ours_back(box):
    pid, master = terminal("connect", box)
    try:
        before = termios.tcgetattr(master)
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 41, 123, 0, 0))
        os.kill(pid, signal.SIGWINCH)
        os.write(master, b"echo $((6*7))-answer\r")
        read_until(master, b"42-answer")
        os.write(master, b"stty size\r")
        read_until(master, b"41 123")
        os.write(master, b"exit 5\r")
        read_end(master)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5
        assert termios.tcgetattr(master)[:4] == before[:4]
    finally:
        os.close(master)


def test_tilde_dot_leaves_a_session(box):
    pid, master = terminal("connect", box)
    try:
        os.write(master, b"echo $((6*7))-answer\r")
        read_until(master, b"42-answer")
        os.write(master, b"\r~.")
        read_end(master)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(master)


def read_end(master, within=60):
    deadline = time.monotonic() + within
    while True:
        ready, _, _ = select.select([master], [], [], max(0, deadline - time.monotonic()))
        assert ready, "the program did not end"
        try:
            if not os.read(master, 65536):
                return
        except OSError:
            return


def test_files_go_up_and_down_with_their_modes(box, tmp_path):
    data = os.urandom(3_000_000)
    source = tmp_path / "ü file"
    source.write_bytes(data)
    source.chmod(0o750)
    aenv("cp", source, f"{box}:/home/user/up")
    assert aenv("exec", box, "--", "stat", "-c", "%a %s", "/home/user/up").stdout == f"750 {len(data)}\n"
    aenv("cp", f"{box}:/home/user/up", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data and (tmp_path / "down").stat().st_mode & 0o777 == 0o750
    aenv("cp", source, f"{box}:/tmp/")
    assert aenv("exec", box, "--", "sha256sum", "/tmp/ü file").stdout.split()[0] == hashlib.sha256(data).hexdigest()


def test_trees_go_up_and_down(box, tmp_path):
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "x").write_text("deep")
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "link").symlink_to("run.sh")
    (tree / "empty").mkdir()
    aenv("cp", tree, f"{box}:/home/user/tree")
    assert aenv("exec", box, "--", "/home/user/tree/run.sh").stdout == "ran\n"
    assert aenv("exec", box, "--", "readlink", "/home/user/tree/link").stdout == "run.sh\n"
    aenv("cp", f"{box}:/home/user/tree", tmp_path / "back")
    assert (tmp_path / "back" / "a" / "b" / "x").read_text() == "deep"
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert os.readlink(tmp_path / "back" / "link") == "run.sh" and (tmp_path / "back" / "empty").is_dir()
    assert aenv("exec", box, "--", "sh", "-c", "ls -A /tmp | grep aenv-cp; true").stdout == ""


def test_a_dash_is_standard_input_and_output(box):
    data = os.urandom(200_000)
    aenv("cp", "-", f"{box}:/tmp/piped", input=data, text=False)
    assert aenv("cp", f"{box}:/tmp/piped", "-", text=False).stdout == data


def test_copying_what_is_missing_is_not_found(box, tmp_path):
    aenv("cp", tmp_path / "none", f"{box}:/tmp/x", code=3)
    aenv("cp", f"{box}:/no/such", tmp_path / "x", code=3)
    assert not (tmp_path / "x").exists()
    aenv("cp", tmp_path, tmp_path, code=2)


def test_ls_and_info(box):
    found = json.loads(aenv("ls", "--metadata", f"run={LABEL['run']}").stdout)
    assert box in [item["sandboxID"] for item in found]
    assert aenv("ls", "-q", "--metadata", f"run={LABEL['run']}", "--state", "running").stdout.split().count(box) == 1
    words = table("ls", "--metadata", f"run={LABEL['run']}").stdout
    assert words.splitlines()[0].split()[:3] == ["ID", "TEMPLATE", "STATE"] and box in words
    assert json.loads(aenv("ls", "--metadata", "run=nobody").stdout) == []
    detail = json.loads(aenv("info", box).stdout)
    assert detail["sandboxID"] == box and detail["lifecycleState"] == "running" and detail["phases"]
    assert "envdAccessToken" not in detail
    assert "phase" in table("info", box).stdout
    aenv("info", "abcdefghij0123456789", code=3)
    aenv("ls", "--state", "flying", code=2)


def test_pause_resume_and_timeout(box):
    aenv("exec", box, "--", "sh", "-c", "echo ram > /dev/shm/cli")
    assert json.loads(aenv("pause", box).stdout)["state"] == "paused"
    aenv("pause", box, code=1)
    assert json.loads(aenv("resume", box, "--timeout", 900).stdout)["state"] == "running"
    assert aenv("exec", box, "--", "cat", "/dev/shm/cli").stdout == "ram\n"
    assert json.loads(aenv("timeout", box, 1800).stdout)["timeout"] == 1800
    aenv("timeout", box, -5, code=2)
    aenv("pause", "abcdefghij0123456789", code=3)


def test_exec_wakes_a_paused_sandbox_and_says_so(box):
    aenv("pause", box)
    done = aenv("exec", box, "--", "echo", "woken")
    assert done.stdout == "woken\n" and "resumed" in done.stderr
    aenv("timeout", box, 1800)


def test_logs_and_metrics(box):
    entries = json.loads(aenv("logs", box).stdout)
    assert isinstance(entries, list) and all("message" in entry for entry in entries)
    samples = eventually(lambda: json.loads(aenv("metrics", box).stdout))
    assert samples[-1]["memTotal"] > 0
    table("metrics", box)
    aenv("logs", "abcdefghij0123456789", code=3)


def test_following_logs_ends_with_the_sandbox(template):
    name = aenv("start", template, "-q", "--metadata", f"run={LABEL['run']}").stdout.strip()
    follower = subprocess.Popen([BIN, "logs", "-f", name], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        time.sleep(1)
        assert follower.poll() is None, follower.stderr.read()
        aenv("rm", name)
        assert follower.wait(60) in (0, 3)
    finally:
        follower.kill()
        follower.wait()


def test_rm_by_label_asks_first(template):
    mark = uuid.uuid4().hex
    names = {aenv("start", template, "-q", "--metadata", f"mark={mark}").stdout.strip() for _ in range(2)}
    refused = aenv("rm", "--metadata", f"mark={mark}", code=2)
    assert "--yes" in refused.stderr
    assert len(json.loads(aenv("ls", "--metadata", f"mark={mark}").stdout)) == 2
    assert set(json.loads(aenv("rm", "--metadata", f"mark={mark}", "--yes").stdout)["removed"]) == names
    assert json.loads(aenv("ls", "--metadata", f"mark={mark}").stdout) == []
    aenv("rm", names.pop(), code=3)
    aenv("rm", code=2)


def test_templates(template):
    found = json.loads(aenv("template", "ls").stdout)
    assert any(template in item["names"] + item["aliases"] or item["templateID"] == template for item in found)
    assert json.loads(aenv("template", "info", template).stdout)["templateID"]
    assert template in table("template", "ls").stdout
    aenv("template", "info", "no-such-template", code=3)
    aenv("template", "rm", "no-such-template", code=2)
    aenv("template", "rm", "no-such-template", "--yes", code=3)
    aenv("start", "no-such-template", code=3)


def test_a_pull_of_nothing_says_why():
    words = [BIN, "pull", "oci:/no/such/layout", "--name", f"e2e-{uuid.uuid4().hex[:8]}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2, 3) and "/no/such/layout" in done.stderr and done.stdout == ""


def test_auth(tmp_path):
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "E2B_API_URL": API, "E2B_SANDBOX_URL": GUESTS}
    aenv("auth", "login", input="nonsense", env=env, code=2)
    aenv("auth", "login", input="e2b_" + "0" * 40, env=env, code=4)
    aenv("auth", "login", input=KEY + "\n", env=env)
    stored = tmp_path / ".config" / "aenv" / "env"
    assert stored.stat().st_mode & 0o777 == 0o600 and KEY in stored.read_text()
    bare = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    status = json.loads(aenv("auth", "status", env=bare).stdout)
    assert status["ok"] is True and status["source"] == "~/.config/aenv/env" and KEY not in json.dumps(status)
    aenv("ls", env=bare)
    aenv("--api-key", "e2b_" + "0" * 40, "ls", env=bare, code=4)


def test_without_a_server_it_says_how_to_start_one(tmp_path):
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "E2B_API_URL": "http://127.0.0.1:9", "E2B_API_KEY": KEY}
    assert "aenv up" in aenv("ls", env=env, code=1).stderr


def test_completion_version_and_help():
    for shell in ("bash", "zsh", "fish"):
        assert "aenv" in aenv("completion", shell).stdout
    assert json.loads(aenv("version").stdout)["version"]
    assert "exec" in aenv("--help").stdout
    aenv("no-such-command", code=2)
    aenv(code=2)


def test_bench_measures_and_says_on_what(template):
    report = json.loads(aenv("bench", "start", "--template", template, "-n", 3, timeout=180).stdout)
    assert report["variants"][0]["n"] == 3 and report["variants"][0]["p50Micros"] > 0 and report["machine"]["cpus"] >= 1
    report = json.loads(aenv("bench", "pause", "--template", template, "-n", 2, "--dirty", 5, timeout=180).stdout)
    assert [variant["name"] for variant in report["variants"]] == ["pause", "resume"]
    assert "P50" in table("bench", "start", "--template", template, "-n", 1).stdout
