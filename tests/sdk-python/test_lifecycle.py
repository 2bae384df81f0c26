"""Create, look, time out, pause, resume, kill."""

import datetime
import uuid

import pytest
from conftest import eventually
from e2b import NotFoundException, Sandbox, SandboxException, SandboxState, TimeoutException


def test_a_created_sandbox_runs_commands_at_once(start):
    box = start()
    assert box.commands.run("echo hello").stdout == "hello\n"
    assert box.is_running()


def test_an_id_is_lower_case_letters_and_digits(sandbox):
    assert sandbox.sandbox_id.isalnum() and sandbox.sandbox_id.islower()


def test_info_tells_what_was_asked_for(start, template):
    box = start(timeout=500, metadata={"colour": "grün", "empty": ""})
    info = box.get_info()
    assert info.sandbox_id == box.sandbox_id
    assert info.state == SandboxState.RUNNING
    assert info.metadata["colour"] == "grün" and info.metadata["empty"] == ""
    assert info.name == template or info.template_id == template
    assert info.cpu_count >= 1 and info.memory_mb >= 64
    life = (info.end_at - info.started_at).total_seconds()
    assert 495 <= life <= 520
    now = datetime.datetime.now(datetime.timezone.utc)
    assert abs((now - info.started_at).total_seconds()) < 60


def test_environment_given_at_create_reaches_every_command(start):
    box = start(envs={"COLOUR": "blue", "QUOTE": "a 'b' \"c\" $d ü"})
    assert box.commands.run('printf %s "$COLOUR"').stdout == "blue"
    assert box.commands.run('printf %s "$QUOTE"').stdout == "a 'b' \"c\" $d ü"
    assert box.commands.run('printf %s "$COLOUR"', envs={"COLOUR": "red"}).stdout == "red"
    assert box.commands.run('printf %s "$COLOUR"').stdout == "blue"


def test_the_sandbox_knows_its_own_id(sandbox):
    assert sandbox.commands.run("printf %s $E2B_SANDBOX_ID").stdout == sandbox.sandbox_id
    assert sandbox.commands.run("printf %s $E2B_SANDBOX").stdout == "true"


def test_two_sandboxes_share_nothing(start):
    one, two = start(), start()
    one.files.write("/home/user/secret", "one")
    assert not two.files.exists("/home/user/secret")
    ids = {box.commands.run("cat /proc/sys/kernel/random/uuid").stdout for box in (one, two)}
    assert len(ids) == 2, "two sandboxes of one snapshot drew the same random numbers"


def test_the_clock_is_right(sandbox):
    there = float(sandbox.commands.run("date +%s.%N").stdout)
    here = datetime.datetime.now(datetime.timezone.utc).timestamp()
    assert abs(here - there) < 5


def test_set_timeout_moves_the_end_both_ways(start):
    box = start(timeout=300)
    box.set_timeout(900)
    assert 880 < left(box) < 905
    box.set_timeout(60)
    assert 40 < left(box) < 65


def left(box) -> float:
    return (box.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)).total_seconds()


def test_a_sandbox_whose_time_is_up_is_paused_and_wakes_whole(start):
    box = start()
    box.files.write("/home/user/kept", "still here")
    pid = box.commands.run("sleep 3000", background=True).pid
    box.set_timeout(1)
    eventually(lambda: box.get_info().state == SandboxState.PAUSED)
    assert not box.is_running()
    again = Sandbox.connect(box.sandbox_id, timeout=300)
    assert again.files.read("/home/user/kept") == "still here"
    assert pid in [process.pid for process in again.commands.list()]


def test_a_sandbox_that_shall_be_killed_at_its_end_is(start):
    box = start(lifecycle={"on_timeout": "kill"})
    assert box.get_info().lifecycle["on_timeout"] == "kill"
    box.set_timeout(1)
    eventually(lambda: gone(box.sandbox_id))


def gone(sandbox_id: str) -> bool:
    try:
        Sandbox.get_info(sandbox_id)
        return False
    except NotFoundException:
        return True


def test_pause_keeps_memory_files_and_processes(start):
    box = start()
    box.files.write("/dev/shm/in-memory", "ram")
    box.files.write("/home/user/on-disk", "disk")
    counter = box.commands.run("i=0; while true; do i=$((i+1)); echo $i > /dev/shm/count; sleep 0.1; done", background=True)
    before = int(eventually(lambda: box.commands.run("cat /dev/shm/count || true").stdout.strip()))
    boot = box.commands.run("cat /proc/sys/kernel/random/boot_id").stdout

    assert box.pause() is True
    assert box.get_info().state == SandboxState.PAUSED
    assert not box.is_running()
    assert box.pause() is False, "a second pause says it was paused already"

    same = box.connect(timeout=300)
    assert same.sandbox_id == box.sandbox_id
    # A handle made before the pause keeps working: tokens and ids survive.
    assert box.is_running()
    assert box.files.read("/dev/shm/in-memory") == "ram"
    assert box.files.read("/home/user/on-disk") == "disk"
    assert box.commands.run("cat /proc/sys/kernel/random/boot_id").stdout == boot
    assert counter.pid in [process.pid for process in box.commands.list()]
    after = lambda: int(box.commands.run("cat /dev/shm/count").stdout) > before
    eventually(after)


def test_a_resumed_sandbox_has_the_right_time(start):
    box = start()
    box.pause()
    Sandbox.connect(box.sandbox_id)
    there = float(box.commands.run("date +%s.%N").stdout)
    assert abs(datetime.datetime.now(datetime.timezone.utc).timestamp() - there) < 5


def test_pausing_many_times_loses_nothing(start):
    box = start()
    for round in range(5):
        box.files.write(f"/home/user/round-{round}", str(round))
        assert box.pause()
        Sandbox.connect(box.sandbox_id, timeout=300)
    for round in range(5):
        assert box.files.read(f"/home/user/round-{round}") == str(round)


def test_connect_to_a_running_sandbox_extends_its_life_but_never_shortens_it(start):
    box = start(timeout=100)
    Sandbox.connect(box.sandbox_id, timeout=400)
    assert 380 < left(box) < 405
    Sandbox.connect(box.sandbox_id, timeout=10)
    assert 370 < left(box) < 405


def test_a_second_handle_sees_the_same_sandbox(start):
    box = start()
    other = Sandbox.connect(box.sandbox_id)
    box.files.write("/home/user/x", "1")
    assert other.files.read("/home/user/x") == "1"
    assert other.commands.run("whoami").stdout == "user\n"


def test_kill_ends_it_and_says_whether_there_was_one(start):
    box = start()
    assert box.kill() is True
    assert box.kill() is False
    assert Sandbox.kill(box.sandbox_id) is False
    assert not box.is_running()
    assert gone(box.sandbox_id)


def test_a_paused_sandbox_can_be_killed(start):
    box = start()
    box.pause()
    assert box.kill() is True
    assert gone(box.sandbox_id)
    with pytest.raises(NotFoundException):
        Sandbox.connect(box.sandbox_id)


def test_a_killed_sandbox_fails_with_the_type_clients_catch(start):
    box = start()
    box.kill()
    with pytest.raises(TimeoutException):
        box.commands.run("true")
    with pytest.raises((TimeoutException, NotFoundException)):
        box.files.read("/etc/hostname")
    with pytest.raises(NotFoundException):
        box.set_timeout(10)
    with pytest.raises(NotFoundException):
        Sandbox.connect(box.sandbox_id)


def test_killing_a_sandbox_ends_the_streams_of_its_commands(start):
    box = start()
    command = box.commands.run("sleep 600", background=True, timeout=0)
    box.kill()
    with pytest.raises((TimeoutException, SandboxException)):
        command.wait()


def test_an_unknown_template_is_not_found():
    name = f"no-such-{uuid.uuid4().hex[:8]}"
    with pytest.raises(SandboxException) as caught:
        Sandbox.create(name)
    assert name in str(caught.value) and "does not exist" in str(caught.value)


def test_an_unknown_sandbox_is_not_found():
    with pytest.raises(NotFoundException):
        Sandbox.connect("abcdefghij0123456789")
    with pytest.raises(NotFoundException):
        Sandbox.get_info("abcdefghij0123456789")
    assert Sandbox.kill("abcdefghij0123456789") is False


def test_metrics_tell_plausible_use(start):
    box = start()
    samples = eventually(lambda: box.get_metrics() or None, within=60)
    last = samples[-1]
    assert last.cpu_count >= 1 and 0 <= last.cpu_used_pct <= 100 * last.cpu_count
    assert 0 < last.mem_used < last.mem_total
    assert 0 < last.disk_used < last.disk_total


def test_traffic_wakes_a_sandbox_that_asked_for_it(start):
    box = start(lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.files.write("/home/user/x", "woken")
    box.pause()
    assert box.files.read("/home/user/x") == "woken"
    assert box.get_info().state == SandboxState.RUNNING
