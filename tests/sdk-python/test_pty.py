"""Terminals: size, keys, resize, end."""

import threading
import time

import pytest
from e2b import CommandExitException, PtySize


class Screen:
    """What a terminal has shown, readable while it runs."""

    def __init__(self, handle):
        self.text = b""
        self.changed = threading.Condition()
        self.outcome = None
        self.thread = threading.Thread(target=self.follow, args=(handle,), daemon=True)
        self.thread.start()

    def follow(self, handle):
        try:
            self.outcome = handle.wait(on_pty=self.add)
        except Exception as error:
            self.outcome = error

    def add(self, piece):
        with self.changed:
            self.text += bytes(piece)
            self.changed.notify_all()

    def shows(self, wanted: bytes, within=30.0):
        with self.changed:
            seen = self.changed.wait_for(lambda: wanted in self.text, within)
        assert seen, f"{wanted!r} is not in {self.text!r}"

    def ended(self, within=30.0):
        self.thread.join(within)
        assert not self.thread.is_alive(), "the terminal did not end"
        return self.outcome


@pytest.fixture
def terminal(sandbox):
    made = []

    def terminal(**options):
        options.setdefault("size", PtySize(rows=24, cols=80))
        options.setdefault("timeout", 120)
        handle = sandbox.pty.create(**options)
        made.append(handle.pid)
        return handle.pid, Screen(handle)

    yield terminal
    for pid in made:
        sandbox.pty.kill(pid)


def test_keys_go_in_and_the_screen_comes_out(sandbox, terminal):
    pid, screen = terminal()
    sandbox.pty.send_stdin(pid, b"echo $((6*7))-answer\n")
    screen.shows(b"42-answer")
    sandbox.pty.send_stdin(pid, b"exit\n")
    assert screen.ended().exit_code == 0


def test_it_is_a_terminal_of_the_asked_size(sandbox, terminal):
    pid, screen = terminal(size=PtySize(rows=37, cols=133))
    sandbox.pty.send_stdin(pid, b"stty size; tty; echo term=$TERM\n")
    screen.shows(b"37 133")
    screen.shows(b"/dev/pts/")
    screen.shows(b"term=xterm-256color")


def test_a_new_size_reaches_the_program(sandbox, terminal):
    pid, screen = terminal()
    sandbox.pty.send_stdin(pid, b"stty size\n")
    screen.shows(b"24 80")
    sandbox.pty.resize(pid, PtySize(rows=50, cols=150))
    sandbox.pty.send_stdin(pid, b"stty size\n")
    screen.shows(b"50 150")


def test_user_directory_and_environment(sandbox, terminal):
    pid, screen = terminal(user="root", cwd="/tmp", envs={"COLOUR": "blue"})
    sandbox.pty.send_stdin(pid, b"echo [$(id -un)][$PWD][$COLOUR]\n")
    screen.shows(b"[root][/tmp][blue]")


def test_control_c_interrupts_the_program_not_the_shell(sandbox, terminal):
    pid, screen = terminal()
    # Written so that the echo of the keys is not the output.
    sandbox.pty.send_stdin(pid, b"echo wa''it; sleep 300\n")
    screen.shows(b"wait")
    time.sleep(1)  # the sleep must be in the foreground; the terminal has no event for that
    sandbox.pty.send_stdin(pid, b"\x03")
    sandbox.pty.send_stdin(pid, b"echo still-$((1+1))\n")
    screen.shows(b"still-2")


def test_the_exit_code_of_the_shell_is_told(sandbox, terminal):
    pid, screen = terminal()
    sandbox.pty.send_stdin(pid, b"exit 9\n")
    outcome = screen.ended()
    assert isinstance(outcome, CommandExitException) and outcome.exit_code == 9


def test_kill_ends_it(sandbox, terminal):
    pid, screen = terminal()
    assert sandbox.pty.kill(pid) is True
    assert isinstance(screen.ended(), CommandExitException)
    assert sandbox.pty.kill(4194000) is False


def test_a_terminal_can_be_taken_up_again(sandbox, terminal):
    pid, first = terminal()
    sandbox.pty.send_stdin(pid, b"echo be''gun\n")
    first.shows(b"begun")
    second = Screen(sandbox.pty.connect(pid, timeout=60))
    sandbox.pty.send_stdin(pid, b"echo for-$((2+3))-both\n")
    first.shows(b"for-5-both")
    second.shows(b"for-5-both")
