"""Commands: results, users, environment, input, background, reconnect, limits."""

import base64
import concurrent.futures
import hashlib
import time
import uuid

import pytest
from conftest import eventually
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    TimeoutException,
)


def test_output_kinds_are_kept_apart(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2; printf 'no newline'")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\nno newline", "err\n", 0)


def test_output_comes_while_the_command_runs(sandbox):
    times = []
    began = time.monotonic()
    sandbox.commands.run("echo first; sleep 2; echo second", on_stdout=lambda _: times.append(time.monotonic() - began))
    assert len(times) == 2 and times[1] - times[0] > 1.5


def test_stderr_reaches_its_own_callback(sandbox):
    out, err = [], []
    sandbox.commands.run("echo a; echo b >&2", on_stdout=out.append, on_stderr=err.append)
    assert ("".join(out), "".join(err)) == ("a\n", "b\n")


@pytest.mark.parametrize("code", [1, 2, 42, 127, 255])
def test_a_failing_command_raises_with_its_code_and_output(sandbox, code):
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run(f"echo said; echo complained >&2; exit {code}")
    assert caught.value.exit_code == code
    assert (caught.value.stdout, caught.value.stderr) == ("said\n", "complained\n")


def test_an_unknown_command_is_the_shells_127(sandbox):
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("no-such-program-here")
    assert caught.value.exit_code == 127


def test_a_command_ended_by_a_signal_does_not_look_like_success(sandbox):
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("kill -9 $$")
    assert caught.value.exit_code != 0


def test_code_runs_in_python(sandbox):
    snippet = "import sys, json; print(json.dumps({'sum': sum(range(101)), 'v': sys.version_info[0]}))"
    sandbox.files.write("/tmp/snippet.py", snippet)
    assert sandbox.commands.run("python3 /tmp/snippet.py").stdout == '{"sum": 5050, "v": 3}\n'


def test_users(sandbox):
    assert sandbox.commands.run("id -un; echo $HOME; pwd").stdout == "user\n/home/user\n/home/user\n"
    # Where it starts is the image's working directory if it names one, else the user's home.
    assert sandbox.commands.run("id -un; id -u; echo $HOME", user="root").stdout == "root\n0\n/root\n"
    assert sandbox.commands.run("sudo -n id -u").stdout == "0\n"


def test_an_unknown_user_is_refused_by_name(sandbox):
    name = f"ghost{uuid.uuid4().hex[:6]}"
    with pytest.raises(AuthenticationException) as caught:
        sandbox.commands.run("true", user=name)
    assert name in str(caught.value)


def test_working_directory(sandbox, folder):
    assert sandbox.commands.run("pwd", cwd=folder).stdout == folder + "\n"
    assert sandbox.commands.run("pwd", cwd="/").stdout == "/\n"
    assert sandbox.commands.run("pwd", cwd="~").stdout == "/home/user\n"
    assert sandbox.commands.run("pwd", cwd=folder.rsplit("/", 1)[1]).stdout == folder + "\n"


def test_a_missing_working_directory_is_an_invalid_argument(sandbox):
    with pytest.raises(InvalidArgumentException) as caught:
        sandbox.commands.run("true", cwd="/no/such/place")
    assert "/no/such/place" in str(caught.value)


def test_environment_of_one_command_stays_with_it(sandbox):
    assert sandbox.commands.run("printf %s $ONLY_HERE", envs={"ONLY_HERE": "yes"}).stdout == "yes"
    assert sandbox.commands.run("printf %s $ONLY_HERE").stdout == ""
    assert "/usr/bin" in sandbox.commands.run("printf %s $PATH").stdout


def test_odd_text_arrives_as_it_is(sandbox):
    text = "ü 漢字 🦀 'single' \"double\" $HOME `id` \\ \t*"
    assert sandbox.commands.run('printf %s "$TEXT"', envs={"TEXT": text}).stdout == text


def test_multi_byte_characters_survive_the_cutting_into_pieces(sandbox):
    result = sandbox.commands.run("python3 -c \"import sys; sys.stdout.write('漢' * 200000)\"")
    assert result.stdout == "漢" * 200000


def test_bytes_that_are_no_text_do_no_harm(sandbox):
    result = sandbox.commands.run(r"printf 'a\377\376b\000c'")
    assert result.stdout == "a\ufffd\ufffdb\0c"
    everything = "python3 -c 'import sys; sys.stdout.buffer.write(bytes(range(256)) * 4)'"
    encoded = sandbox.commands.run(everything + " | base64 -w0").stdout
    assert base64.b64decode(encoded) == bytes(range(256)) * 4


def test_ten_megabytes_of_output_arrive_whole(sandbox):
    make = "python3 -c \"import sys\nfor i in range(655360): sys.stdout.write('%015d\\n' % i)\""
    result = sandbox.commands.run(make, timeout=150)
    want = "".join(f"{i:015d}\n" for i in range(655360))
    assert len(result.stdout) == len(want) == 10 << 20
    assert hashlib.sha256(result.stdout.encode()).digest() == hashlib.sha256(want.encode()).digest()


def test_twenty_commands_at_once_each_get_their_own_output(sandbox):
    def one(number: int) -> str:
        return sandbox.commands.run(f"sleep 0.5; echo {number}; exit 0", timeout=120).stdout

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        assert list(pool.map(one, range(20))) == [f"{number}\n" for number in range(20)]


def test_one_stuck_command_holds_up_no_other(sandbox):
    stuck = sandbox.commands.run("sleep 300", background=True, timeout=0)
    began = time.monotonic()
    sandbox.commands.run("true")
    assert time.monotonic() - began < 20
    assert stuck.kill()


def test_a_command_that_takes_too_long_is_ended(sandbox):
    mark = uuid.uuid4().hex
    with pytest.raises(TimeoutException):
        sandbox.commands.run(f"exec -a {mark} sleep 120", timeout=2)
    find = f"grep -la '[{mark[0]}]{mark[1:]}' /proc/[0-9]*/cmdline 2>/dev/null || true"
    eventually(lambda: sandbox.commands.run(find).stdout == "")


def test_a_background_command_is_listed_and_can_be_waited_for(sandbox):
    command = sandbox.commands.run("echo begun; sleep 1; echo done; exit 3", background=True)
    assert command.pid in [process.pid for process in sandbox.commands.list()]
    with pytest.raises(CommandExitException) as caught:
        command.wait()
    assert (caught.value.exit_code, caught.value.stdout) == (3, "begun\ndone\n")
    eventually(lambda: command.pid not in [process.pid for process in sandbox.commands.list()])


def test_the_list_tells_what_runs(sandbox):
    command = sandbox.commands.run("sleep 77", background=True, envs={"A": "1"}, cwd="/tmp")
    info = next(process for process in sandbox.commands.list() if process.pid == command.pid)
    assert info.cmd == "/bin/bash" and info.args == ["-l", "-c", "sleep 77"]
    assert info.cwd == "/tmp" and info.envs.get("A") == "1"
    command.kill()


def test_a_dropped_stream_loses_neither_output_nor_exit_code(sandbox):
    command = sandbox.commands.run("sleep 2; for i in 1 2 3; do echo line $i; done; echo bad >&2; exit 7", background=True)
    command.disconnect()
    again = sandbox.commands.connect(command.pid)
    with pytest.raises(CommandExitException) as caught:
        again.wait()
    assert caught.value.exit_code == 7
    assert caught.value.stdout == "line 1\nline 2\nline 3\n"
    assert caught.value.stderr == "bad\n"


def test_output_written_while_nobody_listened_is_there_after_the_end(sandbox):
    command = sandbox.commands.run("sleep 1; seq 1 1000; exit 5", background=True)
    command.disconnect()
    eventually(lambda: command.pid not in [process.pid for process in sandbox.commands.list()])
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.connect(command.pid).wait()
    assert caught.value.exit_code == 5
    assert caught.value.stdout == "".join(f"{i}\n" for i in range(1, 1001))


def test_a_second_listener_gets_what_comes_live(sandbox):
    command = sandbox.commands.run("read line; echo got $line", background=True, stdin=True)
    second = sandbox.commands.connect(command.pid)
    sandbox.commands.send_stdin(command.pid, "hello\n")
    assert command.wait().stdout == "got hello\n"
    assert second.wait().stdout == "got hello\n"


def test_connecting_to_an_unknown_process_is_not_found(sandbox):
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(4194000)


def test_input_is_delivered_in_order_and_can_end(sandbox):
    command = sandbox.commands.run("cat", background=True, stdin=True)
    for part in ("one\n", "two\n", "漢字\n"):
        sandbox.commands.send_stdin(command.pid, part)
    sandbox.commands.close_stdin(command.pid)
    assert command.wait().stdout == "one\ntwo\n漢字\n"


def test_much_input_arrives_whole(sandbox):
    command = sandbox.commands.run("sha256sum", background=True, stdin=True)
    data = "0123456789abcdef" * 65536
    sandbox.commands.send_stdin(command.pid, data)
    sandbox.commands.close_stdin(command.pid)
    assert command.wait().stdout.split()[0] == hashlib.sha256(data.encode()).hexdigest()


def test_without_input_a_reader_sees_the_end(sandbox):
    assert sandbox.commands.run("cat; echo ended", timeout=30).stdout == "ended\n"


def test_input_to_an_unknown_process_fails(sandbox):
    with pytest.raises(NotFoundException):
        sandbox.commands.send_stdin(4194000, "x")


def test_kill_ends_a_process_and_says_whether_there_was_one(sandbox):
    command = sandbox.commands.run("sleep 600", background=True)
    assert sandbox.commands.kill(command.pid) is True
    with pytest.raises(CommandExitException) as caught:
        command.wait()
    assert caught.value.exit_code != 0
    assert sandbox.commands.kill(4194000) is False


def test_a_child_left_running_does_not_keep_the_command_open(sandbox):
    began = time.monotonic()
    result = sandbox.commands.run("(sleep 100 >/dev/null 2>&1 &) ; echo left")
    assert result.stdout == "left\n" and time.monotonic() - began < 30


def test_a_server_stays_up_after_the_command_that_started_it(sandbox):
    pid = sandbox.commands.run("nohup python3 -m http.server 8123 >/tmp/http.log 2>&1 & echo $!").stdout.strip()
    answers = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8123/ || true"
    eventually(lambda: sandbox.commands.run(answers).stdout == "200")
    sandbox.commands.run(f"kill {pid}")


def test_very_long_arguments_are_accepted(sandbox):
    text = "x" * 100_000
    assert sandbox.commands.run(f"printf %s {text} | wc -c").stdout.strip() == "100000"
