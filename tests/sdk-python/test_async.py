"""The async SDK: the same sandbox, many things at once on one loop."""

import asyncio
import hashlib
import os

import pytest
from conftest import LABEL
from e2b import AsyncSandbox, CommandExitException, NotFoundException, PtySize, SandboxQuery, TimeoutException


def scenario(body):
    """Runs `body(box)` with a sandbox of its own, on a loop of its own."""

    def test(template):
        async def run():
            box = await AsyncSandbox.create(template, timeout=600, metadata=LABEL)
            try:
                await body(box)
            finally:
                await box.kill()

        asyncio.run(asyncio.wait_for(run(), 170))

    test.__name__ = body.__name__
    test.__doc__ = body.__doc__
    return test


@scenario
async def test_commands_run_and_fail_as_they_should(box):
    assert (await box.commands.run("echo hello")).stdout == "hello\n"
    with pytest.raises(CommandExitException) as caught:
        await box.commands.run("exit 3")
    assert caught.value.exit_code == 3
    with pytest.raises(TimeoutException):
        await box.commands.run("sleep 60", timeout=1)


@scenario
async def test_twenty_commands_run_at_once_on_one_loop(box):
    results = await asyncio.gather(*(box.commands.run(f"sleep 0.5; echo {n}", timeout=120) for n in range(20)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(20)]


@scenario
async def test_output_is_pushed_while_the_command_runs(box):
    out, err = [], []
    command = await box.commands.run(
        "echo a; sleep 1; echo b >&2; exit 4", background=True, on_stdout=out.append, on_stderr=err.append
    )
    with pytest.raises(CommandExitException):
        await command.wait()
    assert ("".join(out), "".join(err), command.exit_code) == ("a\n", "b\n", 4)


@scenario
async def test_a_dropped_stream_is_taken_up_again(box):
    command = await box.commands.run("sleep 2; seq 1 500; exit 7", background=True)
    await command.disconnect()
    again = await box.commands.connect(command.pid)
    with pytest.raises(CommandExitException) as caught:
        await again.wait()
    assert caught.value.exit_code == 7
    assert caught.value.stdout == "".join(f"{n}\n" for n in range(1, 501))


@scenario
async def test_input_is_sent_and_ended(box):
    command = await box.commands.run("cat", background=True, stdin=True)
    await box.commands.send_stdin(command.pid, "one\n")
    await box.commands.send_stdin(command.pid, "two\n")
    await box.commands.close_stdin(command.pid)
    assert (await command.wait()).stdout == "one\ntwo\n"


@scenario
async def test_files_go_both_ways(box):
    data = os.urandom(2_000_000)
    await box.files.write("/home/user/x", data)
    assert bytes(await box.files.read("/home/user/x", format="bytes")) == data
    digest = hashlib.sha256()
    async for piece in await box.files.read("/home/user/x", format="stream"):
        digest.update(piece)
    assert digest.digest() == hashlib.sha256(data).digest()
    await asyncio.gather(*(box.files.write(f"/home/user/many/{n}", str(n)) for n in range(30)))
    assert len(await box.files.list("/home/user/many")) == 30


@scenario
async def test_a_terminal_shows_what_is_typed(box):
    shown, changed = bytearray(), asyncio.Event()

    def show(piece):
        shown.extend(piece)
        changed.set()

    async def shows(wanted):
        while wanted not in shown:
            changed.clear()
            await asyncio.wait_for(changed.wait(), 60)

    terminal = await box.pty.create(size=PtySize(rows=30, cols=90), on_data=show, timeout=100)
    await box.pty.send_stdin(terminal.pid, b"echo $((6*7))-answer; stty size\n")
    await shows(b"42-answer")
    await shows(b"30 90")
    await box.pty.resize(terminal.pid, PtySize(rows=31, cols=91))
    await box.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    await asyncio.wait_for(terminal.wait(), 60)
    assert b"31 91" in shown


@scenario
async def test_pause_connect_list_and_kill(box):
    await box.files.write("/dev/shm/x", "ram")
    assert await box.pause()
    assert not await box.is_running()
    await box.connect(timeout=300)
    assert await box.files.read("/dev/shm/x") == "ram"
    pages, found = AsyncSandbox.list(query=SandboxQuery(metadata=LABEL)), []
    while pages.has_next:
        found += [info.sandbox_id for info in await pages.next_items()]
    assert box.sandbox_id in found
    assert await box.kill()
    with pytest.raises(NotFoundException):
        await AsyncSandbox.connect(box.sandbox_id)


def test_ten_sandboxes_start_at_once(template):
    async def run():
        boxes = await asyncio.gather(
            *(AsyncSandbox.create(template, timeout=300, metadata=LABEL) for _ in range(10)), return_exceptions=True
        )
        try:
            assert not [box for box in boxes if isinstance(box, BaseException)]
            results = await asyncio.gather(*(box.commands.run("hostname; cat /proc/sys/kernel/random/uuid") for box in boxes))
            assert len({result.stdout for result in results}) == 10
        finally:
            await asyncio.gather(*(box.kill() for box in boxes if isinstance(box, AsyncSandbox)))

    asyncio.run(asyncio.wait_for(run(), 170))
