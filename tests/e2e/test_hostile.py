"""Hostile requests to both planes: each is answered with what was wrong, and nothing is harmed by it."""

import base64
import json
import socket
import threading
import time
import urllib.parse

import pytest
from conftest import API, GUESTS, KEY, LABEL, everything, healthy
from e2b import Sandbox, SandboxQuery
from envd import client, frame, frames
from hostile import Request, posted, table

DEADLINE = 20


def silent():
    """What reads as something else when it is passed over in silence: another filter, another user, no limit."""
    for path, queries in {
        "/v2/sandboxes": (
            "limit=", "limit=%2B5", "limit=%205", "order=", "order=asc&order=desc", "startedAfter=", "template=",
            "state=running,,paused", "state=,", "metadata=novalue", "metadata=a%3D1%26b", "metadata=a%3D1%26a%3D2",
            "metadata=a%3D1&metadata=b%3D1", "metadata=%zz", "nextToken=%", "nextToken=a&nextToken=b",
        ),
        "/sandboxes": ("metadata=novalue",),
        "/v2/templates": ("limit=", "limit=5&limit=5", "nextToken=%ff"),
        "/sandboxes/metrics": ("sandbox_ids=,",),
    }.items():
        for query in queries:
            yield f"silent {path}?{query}", Request("control", "GET", f"{path}?{query}")
    stat = "/filesystem.Filesystem/Stat"
    for name, headers in {
        "Basic that is no base64": {"Authorization": "Basic ***"},
        "Basic without a colon": {"Authorization": "Basic dXNlcg=="},
        "Basic that is not UTF-8": {"Authorization": "Basic /zo="},
        "Basic without anything": {"Authorization": "Basic"},
        "a time limit in words": {"Connect-Timeout-Ms": "soon"},
        "a time limit below zero": {"Connect-Timeout-Ms": "-5"},
        "a time limit of 11 digits": {"Connect-Timeout-Ms": "10000000000"},
    }.items():
        yield f"silent {name}", posted(stat, {"path": "/tmp"}, plane="guest", headers=headers)
    for query in ("path=/etc/hostname&path=/etc/passwd", "path=%zz", "path=/etc/hostname&username=root&username=user"):
        yield f"silent /files?{query}", Request("guest", "GET", f"/files?{query}")


ROWS = [*table(), *silent()]
assert len({name for name, _ in ROWS}) == len(ROWS), "two rows of one name"


@pytest.fixture(scope="module")
def box(template):
    box = Sandbox.create(template, timeout=1800, metadata=LABEL)
    yield box
    assert box.commands.run("echo alive").stdout == "alive\n", "the sandbox did not survive"
    box.kill()


@pytest.fixture(scope="module", autouse=True)
def nothing_leaks():
    if not API:
        yield
        return
    count = lambda: sum(1 for _ in everything(SandboxQuery()))
    before = count()
    yield
    assert healthy(), "the server is no longer healthy"
    assert count() <= before, "hostile requests left sandboxes behind"


def raw(url, request, extra):
    """Sends exactly what the row says; a proper client would refuse to send much of it."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Host": parts.netloc, "Connection": "close", **extra, **request.headers}
    if request.body is not None:
        headers["Content-Length"] = str(len(request.body))
    lines = [f"{request.method} {request.path} HTTP/1.1".encode()]
    for name, value in headers.items():
        lines.append(name.encode() + b": " + (value if isinstance(value, bytes) else value.encode("latin-1", "replace")))
    return exchange(parts, b"\r\n".join(lines) + b"\r\n\r\n" + (request.body or b""))


def exchange(parts, data):
    with socket.create_connection((parts.hostname, parts.port or 80), DEADLINE) as line:
        line.settimeout(DEADLINE)
        # Sent beside the reading: a server may answer and close before it has read everything.
        def send():
            try:
                line.sendall(data)
            except OSError:
                pass

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        answer = b""
        try:
            while piece := line.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        sender.join(DEADLINE)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), f"no HTTP answer: {answer[:200]!r}"
    status = int(head.split()[1])
    if b"transfer-encoding: chunked" in head.lower():
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            count = int(size or b"0", 16)
            whole, body = whole + body[:count], body[count + 2 :]
        body = whole
    return status, head, body


@pytest.mark.parametrize("request_", [row for _, row in ROWS], ids=[name for name, _ in ROWS])
def test_a_request_nobody_should_send_is_refused_clearly(box, request_):
    if request_.plane == "control":
        extra = {"X-API-Key": KEY}
        url = API
    else:
        extra = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983", "X-Access-Token": box._envd_access_token}
        url = GUESTS
    status, _head, body = raw(url, request_, extra)
    if status == 201 and "sandboxID" in message_fields(body):
        Sandbox.kill(message_fields(body)["sandboxID"])  # one defect must not look like a second one
    assert 400 <= status < 500 or status in request_.may, (status, body[:300])
    if status in (414, 431) or (request_.plane == "guest" and status in (405, 415)):
        return  # refused by the protocol before the application saw it: the status says it all
    words = message(body)
    assert words, f"{status} without a word: {body[:300]!r}"
    for secret in (KEY, box._envd_access_token, "panicked", "/root/", "src/"):
        assert secret not in words, f"the message tells too much: {words}"
    if request_.plane == "control":
        assert json.loads(body)["code"] == status


def message_fields(body):
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def message(body):
    try:
        return json.loads(body).get("message", "")
    except ValueError:
        return body.decode(errors="replace").strip()


def test_the_table_is_as_long_as_promised():
    assert len(ROWS) >= 200


@pytest.mark.parametrize("data", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"\0\0\0\0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: abc\r\n\r\n",
    b"POST /sandboxes HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST /sandboxes HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /sandboxes HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
    b"POST /sandboxes HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"GET / HTTP/1.1\r\nX: \x00\x01\r\n\r\n",
    b"GET / HTTP/1.1\r\n : x\r\n\r\n",
], ids=lambda data: repr(data[:40]))
def test_bytes_that_are_no_request_end_the_connection(data):
    parts = urllib.parse.urlsplit(API)
    began = time.monotonic()
    with socket.create_connection((parts.hostname, parts.port or 80), DEADLINE) as line:
        line.settimeout(DEADLINE)
        line.sendall(data)
        answer = b""
        try:
            while piece := line.recv(65536):
                answer += piece
                if b"\r\n\r\n" in answer:
                    break
        except ConnectionResetError:
            pass
    assert time.monotonic() - began < DEADLINE
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:200]
    assert healthy()


STREAM = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
TRUE = {"process": {"cmd": "true"}}


@pytest.mark.parametrize("name, body", [
    ("nothing", b""),
    ("half a header", b"\0\0"),
    ("a length without a message", b"\0\0\0\0\x10"),
    ("a length of 4 GiB", b"\0\xff\xff\xff\xff{}"),
    ("a message cut short", frame(TRUE)[:-3]),
    ("compressed without saying how", frame(TRUE, flags=1)),
    ("an end before the message", frame({}, flags=2)),
    ("a flag nobody knows", frame(TRUE, flags=0x40)),
    ("all flags", frame(TRUE, flags=0xFF)),
    ("a variable without a name", frame({"process": {"cmd": "true", "envs": {"": "x"}}})),
    ("a variable with = in its name", frame({"process": {"cmd": "true", "envs": {"A=B": "x"}}})),
    ("a variable with NUL in its name", frame({"process": {"cmd": "true", "envs": {"A\0": "x"}}})),
    ("a variable with NUL in its value", frame({"process": {"cmd": "true", "envs": {"A": "\0"}}})),
    ("two messages where one belongs", frame(TRUE) + frame(TRUE)),
    ("not JSON", frame(b"{")),
    ("not UTF-8", frame(b'{"process":{"cmd":"\xff"}}')),
    ("an array", frame(b"[]")),
    ("no process", frame({})),
    ("a command that is a number", frame({"process": {"cmd": 5}})),
    ("an empty command", frame({"process": {"cmd": ""}})),
    ("a command with NUL", frame({"process": {"cmd": "a\0b"}})),
    ("a command that is missing", frame({"process": {"cmd": "/no/such/program"}})),
    ("a command that is a directory", frame({"process": {"cmd": "/tmp"}})),
    ("an argument with NUL", frame({"process": {"cmd": "echo", "args": ["a\0b"]}})),
    ("arguments of 4 MB", frame({"process": {"cmd": "echo", "args": ["x" * 4_000_000]}})),
    ("a directory that is missing", frame({"process": {"cmd": "true", "cwd": "/no/such"}})),
    ("a directory that is a file", frame({"process": {"cmd": "true", "cwd": "/etc/passwd"}})),
    ("a terminal of size -1", frame({"process": {"cmd": "true"}, "pty": {"size": {"cols": -1, "rows": 5}}})),
    ("a terminal of size 2^32", frame({"process": {"cmd": "true"}, "pty": {"size": {"cols": 2**32, "rows": 5}}})),
])
def test_a_bad_stream_ends_with_a_connect_error(box, name, body):
    with client(box) as agent:
        answer = agent.post("/process.Process/Start", content=body, headers=STREAM)
        assert answer.status_code < 500, answer.text
        if answer.status_code == 200:
            last_flags, last = frames(answer.content)[-1]
            assert last_flags == 2
            assert last.get("error", {}).get("code"), f"{name} was accepted: {answer.content[:300]!r}"
            assert last["error"].get("message"), last
        else:
            assert message(answer.content)


@pytest.mark.parametrize("header, code", [
    (("Connect-Timeout-Ms", "soon"), "invalid_argument"),
    (("Connect-Timeout-Ms", "-5"), "invalid_argument"),
    (("Connect-Timeout-Ms", "10000000000"), "invalid_argument"),
    (("Keepalive-Ping-Interval", "often"), "invalid_argument"),
    (("Authorization", "Basic ***"), "unauthenticated"),
    (("Authorization", "Basic dXNlcg=="), "unauthenticated"),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else value)
def test_a_bad_header_ends_a_stream_before_anything_starts(box, header, code):
    body = frame({"process": {"cmd": "sleep", "args": ["60"]}, "tag": "never"})
    with client(box) as agent:
        answer = agent.post("/process.Process/Start", content=body, headers={**STREAM, header[0]: header[1]})
        flags, end = frames(answer.content)[-1]
        assert (flags, end["error"]["code"]) == (2, code), end
        assert end["error"]["message"]
        assert header[0].lower() in end["error"]["message"].lower(), end
    assert not [process for process in box.commands.list() if process.tag == "never"]


def test_an_unknown_process_is_told_on_the_stream(box):
    with client(box) as agent:
        for path, body in (
            ("/process.Process/Connect", {"process": {"pid": 4194000}}),
            ("/filesystem.Filesystem/WatchDir", {"path": "/no/such"}),
        ):
            answer = agent.post(path, content=frame(body), headers=STREAM)
            _, end = frames(answer.content)[-1]
            assert end["error"]["code"] == "not_found", end


def test_output_arrives_byte_for_byte(box):
    program = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000); sys.stderr.buffer.write(bytes(range(255, -1, -1)))"
    request = {"process": {"cmd": "python3", "args": ["-c", program]}}
    with client(box) as agent:
        answer = agent.post("/process.Process/Start", content=frame(request), headers=STREAM, timeout=60)
    out, err, ends = b"", b"", []
    for _, event in frames(answer.content):
        data = event.get("event", {}).get("data", {})
        out += base64.b64decode(data.get("stdout", ""))
        err += base64.b64decode(data.get("stderr", ""))
        ends += [event["event"]["end"]] if "end" in event.get("event", {}) else []
    assert out == bytes(range(256)) * 1000 and err == bytes(range(255, -1, -1))
    assert len(ends) == 1 and ends[0].get("exitCode", 0) == 0 and ends[0]["exited"]


def test_many_slow_connections_hold_up_nobody(box):
    parts = urllib.parse.urlsplit(API)
    slow = []
    try:
        for _ in range(200):
            line = socket.create_connection((parts.hostname, parts.port or 80), DEADLINE)
            line.sendall(b"POST /sandboxes HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n")
            slow.append(line)
        began = time.monotonic()
        assert healthy() and box.commands.run("echo quick").stdout == "quick\n"
        assert time.monotonic() - began < DEADLINE
    finally:
        for line in slow:
            line.close()


def test_clients_that_go_away_in_the_middle_leave_nothing(box):
    parts = urllib.parse.urlsplit(GUESTS)
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: {parts.netloc}\r\nE2b-Sandbox-Id: {box.sandbox_id}\r\n"
        f"E2b-Sandbox-Port: 49983\r\nX-Access-Token: {box._envd_access_token}\r\n"
        "Content-Type: application/connect+json\r\nContent-Length: 1000\r\n\r\n"
    ).encode()
    for _ in range(50):
        with socket.create_connection((parts.hostname, parts.port or 80), DEADLINE) as line:
            line.sendall(head + b"\0\0\0")
    assert box.commands.run("echo still").stdout == "still\n"
