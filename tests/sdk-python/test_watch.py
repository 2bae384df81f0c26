"""Watching directories: polled (the sync SDK) and pushed (the async one)."""

import asyncio
import uuid

import pytest
from conftest import LABEL, eventually
from e2b import AsyncSandbox, FilesystemEventType as Event, NotFoundException, SandboxException


def test_the_events_of_an_upload_are_exactly_these(sandbox, folder):
    watcher = sandbox.files.watch_dir(folder)
    sandbox.files.write(f"{folder}/x", "1")
    events = watcher.get_new_events()
    assert [(event.name, event.type) for event in events] == [("x", Event.CREATE), ("x", Event.CHMOD), ("x", Event.WRITE)]
    assert watcher.get_new_events() == []
    watcher.stop()


def test_renames_and_removals_are_seen(sandbox, folder):
    sandbox.files.write(f"{folder}/x", "1")
    watcher = sandbox.files.watch_dir(folder)
    sandbox.files.rename(f"{folder}/x", f"{folder}/y")
    sandbox.files.remove(f"{folder}/y")
    seen = [(event.name, event.type) for event in watcher.get_new_events()]
    assert ("x", Event.RENAME) in seen and ("y", Event.CREATE) in seen and ("y", Event.REMOVE) in seen
    watcher.stop()


def test_what_commands_change_is_seen_too(sandbox, folder):
    watcher = sandbox.files.watch_dir(folder)
    sandbox.commands.run(f"echo 1 > {folder}/x; chmod 600 {folder}/x")
    types = {event.type for event in watcher.get_new_events() if event.name == "x"}
    assert {Event.CREATE, Event.WRITE, Event.CHMOD} <= types
    watcher.stop()


def test_depth_is_a_choice(sandbox, folder):
    sandbox.files.make_dir(f"{folder}/sub")
    flat, deep = sandbox.files.watch_dir(folder), sandbox.files.watch_dir(folder, recursive=True)
    sandbox.files.write(f"{folder}/sub/x", "1")
    assert "sub/x" in {event.name for event in deep.get_new_events()}
    assert "sub/x" not in {event.name for event in flat.get_new_events()}
    sandbox.files.write(f"{folder}/sub/new/y", "1")
    eventually(lambda: "sub/new/y" in {event.name for event in deep.get_new_events()} or touch(sandbox, folder))
    flat.stop()
    deep.stop()


def touch(sandbox, folder):
    """A directory made just now is watched from a moment later on: write again until that is seen."""
    sandbox.files.write(f"{folder}/sub/new/y", "2")
    return False


def test_events_can_carry_the_entry(sandbox, folder):
    watcher = sandbox.files.watch_dir(folder, include_entry=True)
    sandbox.files.write(f"{folder}/x", "12345")
    last = watcher.get_new_events()[-1]
    assert last.entry is not None and last.entry.path == f"{folder}/x" and last.entry.size == 5
    watcher.stop()


def test_a_stopped_watcher_says_so(sandbox, folder):
    watcher = sandbox.files.watch_dir(folder)
    watcher.stop()
    with pytest.raises(SandboxException):
        watcher.get_new_events()


def test_only_directories_that_exist_can_be_watched(sandbox, folder):
    with pytest.raises(NotFoundException):
        sandbox.files.watch_dir(f"{folder}/nothing")
    sandbox.files.write(f"{folder}/file", "1")
    with pytest.raises(SandboxException):
        sandbox.files.watch_dir(f"{folder}/file")


def test_events_are_pushed_to_a_callback(template):
    async def scenario():
        box = await AsyncSandbox.create(template, timeout=300, metadata=LABEL)
        try:
            path = f"/home/user/{uuid.uuid4().hex[:8]}"
            await box.files.make_dir(path)
            seen, ended = asyncio.Queue(), asyncio.Event()
            watch = await box.files.watch_dir(path, on_event=seen.put, on_exit=lambda _: ended.set(), timeout=0)
            await box.files.write(f"{path}/x", "1")
            types = []
            while Event.WRITE not in types:
                event = await asyncio.wait_for(seen.get(), 30)
                assert event.name == "x"
                types.append(event.type)
            assert types[0] == Event.CREATE
            await watch.stop()
            await asyncio.wait_for(ended.wait(), 30)
        finally:
            await box.kill()

    asyncio.run(asyncio.wait_for(scenario(), 150))
