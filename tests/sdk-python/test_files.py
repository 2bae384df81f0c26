"""Files: every way in and out, trees, permissions, names, size."""

import datetime
import hashlib
import io
import os

import pytest
from e2b import AuthenticationException, CommandExitException, FileNotFoundException, FileType, InvalidArgumentException, SandboxException

BIG_MB = int(os.environ.get("AENV_BIG_MB", "100"))


def test_text_comes_back_as_it_went(sandbox, folder):
    text = "first\nzweite Zeile ü\n漢字🦀\n"
    written = sandbox.files.write(f"{folder}/text", text)
    assert (written.name, written.path, written.type) == ("text", f"{folder}/text", FileType.FILE)
    assert sandbox.files.read(f"{folder}/text") == text


@pytest.mark.parametrize("octets", [None, False, True])
@pytest.mark.parametrize("gzip", [False, True])
def test_bytes_come_back_in_every_encoding_of_the_upload(sandbox, folder, octets, gzip):
    if gzip and octets is False:
        pytest.skip("Skipped: the newest SDK refuses this combination itself")
    data = bytes(range(256)) * 300
    sandbox.files.write(f"{folder}/bytes", data, use_octet_stream=octets, gzip=gzip)
    assert bytes(sandbox.files.read(f"{folder}/bytes", format="bytes")) == data
    assert bytes(sandbox.files.read(f"{folder}/bytes", format="bytes", gzip=True)) == data


def test_streams_go_in_and_out(sandbox, folder):
    data = os.urandom(3_000_000)
    sandbox.files.write(f"{folder}/stream", io.BytesIO(data))
    with sandbox.files.read(f"{folder}/stream", format="stream") as pieces:
        assert b"".join(pieces) == data


def test_a_stream_that_is_left_early_harms_nothing(sandbox, folder):
    sandbox.files.write(f"{folder}/long", b"x" * 5_000_000)
    with sandbox.files.read(f"{folder}/long", format="stream") as pieces:
        next(pieces)
    assert sandbox.commands.run("echo fine").stdout == "fine\n"


def test_an_empty_file(sandbox, folder):
    sandbox.files.write(f"{folder}/empty", "")
    assert sandbox.files.read(f"{folder}/empty") == ""
    assert sandbox.files.get_info(f"{folder}/empty").size == 0


def test_many_files_in_one_call(sandbox, folder):
    entries = [{"path": f"{folder}/many/{n}", "data": f"content {n}"} for n in range(50)]
    written = sandbox.files.write_files(entries)
    assert [info.path for info in written] == [entry["path"] for entry in entries]
    assert sandbox.commands.run(f"cat {folder}/many/*| wc -c").stdout.strip() == str(sum(len(e["data"]) for e in entries))


def test_files_of_different_kinds_in_one_call(sandbox, folder):
    sandbox.files.write_files([
        {"path": f"{folder}/a", "data": "text"},
        {"path": f"{folder}/b", "data": b"\x00\xff"},
        {"path": f"{folder}/c", "data": io.BytesIO(b"stream")},
    ])
    assert sandbox.files.read(f"{folder}/a") == "text"
    assert bytes(sandbox.files.read(f"{folder}/b", format="bytes")) == b"\x00\xff"
    assert sandbox.files.read(f"{folder}/c") == "stream"
    assert sandbox.files.write_files([]) == []


def test_parents_are_made_and_belong_to_the_user(sandbox, folder):
    sandbox.files.write(f"{folder}/deep/er/still/x", "1")
    assert sandbox.files.get_info(f"{folder}/deep/er").owner == "user"


def test_a_file_is_replaced_not_appended_to(sandbox, folder):
    sandbox.files.write(f"{folder}/x", "long content")
    sandbox.files.write(f"{folder}/x", "short")
    assert sandbox.files.read(f"{folder}/x") == "short"


@pytest.mark.timeout(900)
def test_a_large_file_goes_both_ways_whole(sandbox, folder):
    block = os.urandom(1 << 20)

    class Source(io.RawIOBase):
        """Makes the file while it is sent, so that memory says nothing about what is buffered."""

        def __init__(self):
            self.left, self.hash, self.rest = BIG_MB, hashlib.sha256(), b""

        def readable(self):
            return True

        def read(self, count=-1):
            if not self.rest:
                if self.left == 0:
                    return b""
                self.rest = self.left.to_bytes(4, "big") + block[4:]
                self.left -= 1
            count = len(self.rest) if count < 0 else count
            piece, self.rest = self.rest[:count], self.rest[count:]
            self.hash.update(piece)
            return piece

    source = Source()
    sandbox.files.write(f"{folder}/big", source, request_timeout=600)
    assert sandbox.files.get_info(f"{folder}/big").size == BIG_MB << 20
    there = sandbox.commands.run(f"sha256sum {folder}/big", timeout=300).stdout.split()[0]
    assert there == source.hash.hexdigest()
    back = hashlib.sha256()
    with sandbox.files.read(f"{folder}/big", format="stream") as pieces:
        for piece in pieces:
            back.update(piece)
    assert back.hexdigest() == source.hash.hexdigest()


def test_what_is_missing_is_not_found(sandbox, folder):
    for act in (
        lambda path: sandbox.files.read(path),
        lambda path: sandbox.files.get_info(path),
        lambda path: sandbox.files.list(path),
        lambda path: sandbox.files.rename(path, f"{folder}/elsewhere"),
    ):
        with pytest.raises(FileNotFoundException):
            act(f"{folder}/nothing")
    assert sandbox.files.exists(f"{folder}/nothing") is False


def test_reading_a_directory_is_an_invalid_argument(sandbox, folder):
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read(folder)


def test_writing_over_a_directory_is_refused(sandbox, folder):
    with pytest.raises(SandboxException):
        sandbox.files.write(folder, "x")


def test_listing_a_file_is_an_invalid_argument(sandbox, folder):
    sandbox.files.write(f"{folder}/x", "1")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list(f"{folder}/x")


def test_files_belong_to_the_user_who_wrote_them(sandbox, folder):
    # As with E2B's agent, the user decides the owner and the home, not what may be touched: whoever may call the agent
    # may act as root.
    sandbox.files.write(f"{folder}/by-root", "x", user="root")
    assert sandbox.files.get_info(f"{folder}/by-root").owner == "root"
    sandbox.files.write(f"{folder}/by-user", "x")
    assert sandbox.files.get_info(f"{folder}/by-user").owner == "user"
    sandbox.files.write("of-root", "root's", user="root")
    assert sandbox.files.read("/root/of-root", user="root") == "root's"
    sandbox.files.remove("/root/of-root", user="root")


def test_commands_are_held_to_the_rights_of_their_user(sandbox, folder):
    sandbox.files.write("/root/secret", "root's", user="root")
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("cat /root/secret")
    assert "Permission denied" in caught.value.stderr and "root's" not in caught.value.stdout
    assert sandbox.commands.run("cat /root/secret", user="root").stdout == "root's"
    sandbox.files.remove("/root/secret", user="root")


@pytest.mark.parametrize(("size", "times"), [(1, 60), (1_000_000, 20)])
def test_a_refused_upload_costs_the_next_call_nothing(sandbox, folder, size, times):
    for _ in range(times):
        with pytest.raises(AuthenticationException):
            sandbox.files.write(f"{folder}/x", "1" * size, user="ghost")
        assert sandbox.files.list(folder) == []


def test_an_unknown_user_is_refused(sandbox, folder):
    for act in (lambda: sandbox.files.write(f"{folder}/x", "1", user="ghost"), lambda: sandbox.files.list(folder, user="ghost")):
        with pytest.raises(AuthenticationException) as caught:
            act()
        assert "ghost" in str(caught.value)


def test_relative_paths_begin_at_home(sandbox, folder):
    name = folder.rsplit("/", 1)[1]
    sandbox.files.write(f"{name}/x", "1")
    assert sandbox.files.read(f"{folder}/x") == "1"
    assert sandbox.files.read(f"~/{name}/x") == "1"


@pytest.mark.parametrize("name", ["ü", "漢字 🦀", "with space", "a&b=c?d#e", "100%", "quo\"te'", "-dash", "a+b", "semi;colon", "n" * 200])
def test_names_of_all_kinds(sandbox, folder, name):
    path = f"{folder}/{name}"
    written = sandbox.files.write(path, name)
    assert written.path == path and written.name == name
    assert sandbox.files.read(path) == name
    assert [entry.name for entry in sandbox.files.list(folder)] == [name]
    sandbox.files.rename(path, path + "2" if len(name) < 200 else f"{folder}/short")
    assert not sandbox.files.exists(path)


def test_rename_moves_files_and_directories(sandbox, folder):
    sandbox.files.write(f"{folder}/from/x", "1")
    moved = sandbox.files.rename(f"{folder}/from", f"{folder}/to")
    assert (moved.name, moved.path, moved.type) == ("to", f"{folder}/to", FileType.DIR)
    assert sandbox.files.read(f"{folder}/to/x") == "1"
    assert not sandbox.files.exists(f"{folder}/from")


def test_remove_takes_files_trees_and_nothing(sandbox, folder):
    sandbox.files.write(f"{folder}/tree/a/b", "1")
    sandbox.files.remove(f"{folder}/tree")
    assert not sandbox.files.exists(f"{folder}/tree")
    sandbox.files.remove(f"{folder}/tree")


def test_make_dir_says_whether_it_was_new(sandbox, folder):
    assert sandbox.files.make_dir(f"{folder}/a/b/c") is True
    assert sandbox.files.make_dir(f"{folder}/a/b/c") is False
    assert sandbox.files.exists(f"{folder}/a/b/c") is True
    sandbox.files.write(f"{folder}/file", "1")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.make_dir(f"{folder}/file")


def test_listing_goes_as_deep_as_asked(sandbox, folder):
    sandbox.files.write(f"{folder}/a/b/c/x", "1")
    sandbox.files.write(f"{folder}/y", "2")
    paths = lambda depth: {e.path.removeprefix(folder) for e in sandbox.files.list(folder, depth=depth)}
    assert paths(1) == {"/a", "/y"}
    assert paths(2) == {"/a", "/y", "/a/b"}
    assert paths(10) == {"/a", "/y", "/a/b", "/a/b/c", "/a/b/c/x"}
    kinds = {e.name: e.type for e in sandbox.files.list(folder)}
    assert kinds == {"a": FileType.DIR, "y": FileType.FILE}


def test_a_thousand_entries_are_listed(sandbox, folder):
    sandbox.commands.run(f"cd {folder} && seq 1 1000 | xargs touch")
    assert {entry.name for entry in sandbox.files.list(folder)} == {str(n) for n in range(1, 1001)}


def test_info_is_what_ls_says(sandbox, folder):
    sandbox.files.write(f"{folder}/x", "12345")
    sandbox.commands.run(f"chmod 640 {folder}/x && touch -d '2020-02-03 04:05:06 UTC' {folder}/x && chmod 751 {folder}")
    info = sandbox.files.get_info(f"{folder}/x")
    assert (info.name, info.path, info.type, info.size) == ("x", f"{folder}/x", FileType.FILE, 5)
    assert (info.mode & 0o777, info.permissions, info.owner, info.group) == (0o640, "-rw-r-----", "user", "user")
    assert info.modified_time.astimezone(datetime.timezone.utc).isoformat() == "2020-02-03T04:05:06+00:00"
    assert info.symlink_target is None
    there = sandbox.files.get_info(folder)
    assert (there.type, there.permissions) == (FileType.DIR, "drwxr-x--x")


def test_a_link_tells_where_it_points(sandbox, folder):
    sandbox.files.write(f"{folder}/x", "1")
    sandbox.commands.run(f"cd {folder} && ln -s {folder}/x good && ln -s /no/where bad && ln -s {folder} dir")
    entries = {entry.name: entry for entry in sandbox.files.list(folder)}
    # The SDK itself leaves out entries without a type, such as a link to nowhere.
    assert set(entries) - {"bad"} == {"x", "good", "dir"}
    assert entries["good"].symlink_target == f"{folder}/x" and entries["good"].type == FileType.FILE
    assert entries["dir"].type == FileType.DIR
    assert sandbox.files.read(f"{folder}/good") == "1"


def test_metadata_stays_with_the_file(sandbox, folder):
    written = sandbox.files.write(f"{folder}/x", "1", metadata={"origin": "test", "n": "7"})
    assert written.metadata == {"origin": "test", "n": "7"}
    assert sandbox.files.get_info(f"{folder}/x").metadata == {"origin": "test", "n": "7"}


def test_a_full_disk_is_told_and_passes(sandbox, folder):
    sandbox.commands.run(f"sudo mkdir -p {folder}/small && sudo mount -t tmpfs -o size=1m,mode=777 tmpfs {folder}/small")
    try:
        with pytest.raises(SandboxException) as caught:
            sandbox.files.write(f"{folder}/small/x", b"x" * (4 << 20))
        assert type(caught.value).__name__ == "NotEnoughSpaceException"
    finally:
        sandbox.commands.run(f"sudo umount {folder}/small")
    sandbox.files.write(f"{folder}/x", "room again")
