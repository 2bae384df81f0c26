"""The table of requests nobody should send: what, to which plane, and what may come back.

Each row is `(name, Request)`. `may` lists further statuses besides 4xx that say clearly what was wrong: 502 is the
proxy's word for "there is no such sandbox or port".
"""

import base64
import dataclasses
import json

HUGE = 10**400
DEEP = "[" * 3000 + "]" * 3000
ABSENT = "abcdefghij0123456789"


@dataclasses.dataclass
class Request:
    plane: str  # "control" or "guest"
    method: str
    path: str
    body: bytes | None = None
    headers: dict = dataclasses.field(default_factory=dict)
    may: tuple = ()


def posted(path, body, plane="control", **more):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(plane, "POST", path, raw, {"Content-Type": "application/json", **more.pop("headers", {})}, **more)


def creates():
    """Bodies for a new sandbox."""
    bad = {
        "no body": b"",
        "not JSON": b"{",
        "not UTF-8": b'{"templateID":"\xff\xfe"}',
        "an array": [],
        "a number": 7,
        "null": None,
        "deep": DEEP.encode(),
        "no template": {},
        "template null": {"templateID": None},
        "template number": {"templateID": 5},
        "template object": {"templateID": {}},
        "template empty": {"templateID": ""},
        "template path": {"templateID": "../../etc/passwd"},
        "template NUL": {"templateID": "base\0"},
        "template long": {"templateID": "x" * 10_000},
        "template unicode": {"templateID": "базе\u202e"},
        "template quote": {"templateID": "' OR 1=1 --"},
        "template absent": {"templateID": "no-such-template-here"},
        "timeout text": {"templateID": "base", "timeout": "soon"},
        "timeout zero": {"templateID": "base", "timeout": 0},
        "timeout negative": {"templateID": "base", "timeout": -1},
        "timeout fraction": {"templateID": "base", "timeout": 1.5},
        "timeout 2^31": {"templateID": "base", "timeout": 2**31},
        "timeout 2^63": {"templateID": "base", "timeout": 2**63},
        "timeout 2^64": {"templateID": "base", "timeout": 2**64},
        "timeout huge": b'{"templateID":"base","timeout":1' + b"0" * 400 + b"}",
        "timeout NaN": b'{"templateID":"base","timeout":NaN}',
        "timeout list": {"templateID": "base", "timeout": [300]},
        "metadata list": {"templateID": "base", "metadata": []},
        "metadata number value": {"templateID": "base", "metadata": {"a": 1}},
        "metadata nested": {"templateID": "base", "metadata": {"a": {"b": "c"}}},
        "metadata large": {"templateID": "base", "metadata": {"a": "x" * 2_000_000}},
        "env list": {"templateID": "base", "envVars": ["A=1"]},
        "env number": {"templateID": "base", "envVars": {"A": 1}},
        "env name empty": {"templateID": "base", "envVars": {"": "1"}},
        "env name with =": {"templateID": "base", "envVars": {"A=B": "1"}},
        "env NUL": {"templateID": "base", "envVars": {"A": "x\0y"}},
        "autoPause text": {"templateID": "base", "autoPause": "yes"},
        "autoResume text": {"templateID": "base", "autoResume": "yes"},
        "secure number": {"templateID": "base", "secure": 2},
        "internet text": {"templateID": "base", "allow_internet_access": "no"},
        "network list": {"templateID": "base", "network": []},
        "network bad CIDR": {"templateID": "base", "network": {"denyOut": ["300.1.2.3/99"]}},
        "network bad type": {"templateID": "base", "network": {"allowOut": "1.1.1.1"}},
        "volumes text": {"templateID": "base", "volumeMounts": "all"},
        "body of 2 MB": b'{"templateID":"' + b"x" * 2_000_000 + b'"}',
    }
    for version in ("/sandboxes", "/v2/sandboxes"):
        for name, body in bad.items():
            # 501: a rule that is well-formed for some later version. It creates nothing.
            yield f"create {version}: {name}", posted(version, body, may=(501,) if "CIDR" in name else ())
    good = json.dumps({"templateID": "base"}).encode()
    yield "create: as a form", Request("control", "POST", "/sandboxes", b"templateID=base", {"Content-Type": "application/x-www-form-urlencoded"})
    yield "create: idempotency key with spaces", posted("/sandboxes", {"templateID": "no-such"}, headers={"Idempotency-Key": "a b"})
    yield "create: idempotency key too long", posted("/sandboxes", {"templateID": "no-such"}, headers={"Idempotency-Key": "a" * 300})
    yield "create: gzip that is none", Request("control", "POST", "/sandboxes", good, {"Content-Type": "application/json", "Content-Encoding": "gzip"})


BAD_IDS = {
    "absent": ABSENT,
    "short": "a",
    "upper case": "ABCDEFGHIJ0123456789",
    "long": "a" * 5000,
    "unicode": "%F0%9F%A6%80",
    "bad percent": "%zz",
    "not UTF-8": "%ff%fe",
    "NUL": "%00",
    "encoded climb": "..%2F..%2Fetc%2Fpasswd",
    "encoded slash": "a%2Fb",
    "newline": "a%0d%0aX-Evil:1",
    "quote": "'%20OR%201=1--",
    "star": "*",
    "dot": "%2e%2e",
    "space": "%20",
}


def ids():
    """Ids that name nothing, at every route that takes one."""
    for name, text in BAD_IDS.items():
        yield f"get {name}", Request("control", "GET", f"/sandboxes/{text}")
        yield f"delete {name}", Request("control", "DELETE", f"/sandboxes/{text}")
        yield f"pause {name}", posted(f"/sandboxes/{text}/pause", {})
        yield f"connect {name}", posted(f"/sandboxes/{text}/connect", {"timeout": 60})
        yield f"timeout {name}", posted(f"/sandboxes/{text}/timeout", {"timeout": 60})
        yield f"metrics {name}", Request("control", "GET", f"/sandboxes/{text}/metrics")
        yield f"logs {name}", Request("control", "GET", f"/v2/sandboxes/{text}/logs")
        yield f"inspect {name}", Request("control", "GET", f"/aenv/v1/sandboxes/{text}")
        yield f"template {name}", Request("control", "GET", f"/templates/{text}")
        yield f"template build {name}", Request("control", "GET", f"/templates/{text}/builds/{text}/status")
        yield f"guest of {name}", Request("guest", "GET", "/", headers={"E2b-Sandbox-Id": text, "E2b-Sandbox-Port": "80"}, may=(502,))


def lists():
    """Queries."""
    for query in (
        "limit=0", "limit=-1", "limit=101", "limit=abc", "limit=1e3", "limit=99999999999999999999",
        "state=flying", "state=running,flying", "state=%00", "order=sideways", "startedAfter=yesterday",
        "startedAfter=9999999999999", "nextToken=garbage", "nextToken=%ff", "nextToken=" + "A" * 3000,
        "metadata=%ff", "limit=1&limit=2",
    ):
        yield f"list ?{query[:40]}", Request("control", "GET", f"/v2/sandboxes?{query}")
    for query in ("limit=0", "limit=abc", "nextToken=garbage"):
        yield f"templates ?{query}", Request("control", "GET", f"/v2/templates?{query}")
    yield "metrics of too many", Request("control", "GET", "/sandboxes/metrics?sandbox_ids=" + ",".join([ABSENT] * 101))
    yield "metrics of bad id", Request("control", "GET", "/sandboxes/metrics?sandbox_ids=*")


def pulls():
    """Bodies for a pull."""
    good = {"image": "oci:/nowhere", "name": "hostile"}
    for name, change in {
        "no image": {"image": None}, "empty image": {"image": ""}, "image number": {"image": 5},
        "image with spaces": {"image": "a b c"}, "image scheme": {"image": "file:///etc/passwd"},
        "image long": {"image": "x" * 5000}, "no name": {"name": None}, "empty name": {"name": ""},
        "name path": {"name": "../x"}, "name NUL": {"name": "a\0b"}, "name long": {"name": "n" * 5000},
        "name unicode": {"name": "имя"}, "name upper": {"name": "a b"}, "cpu zero": {"cpuCount": 0},
        "cpu negative": {"cpuCount": -2}, "cpu many": {"cpuCount": 100_000}, "cpu text": {"cpuCount": "two"},
        "memory tiny": {"memoryMB": 1}, "memory huge": {"memoryMB": 2**40}, "memory text": {"memoryMB": "lots"},
        "disk zero": {"diskSizeMB": 0}, "disk huge": {"diskSizeMB": 2**50}, "force text": {"force": "yes"},
        "password alone": {"password": "x"},
    }.items():
        yield f"pull: {name}", posted("/aenv/v1/templates/pull", {**good, **change})


def shapes():
    """Methods, paths and headers."""
    for method, path in (
        ("PATCH", "/sandboxes"), ("PUT", "/sandboxes"), ("DELETE", "/sandboxes"), ("POST", "/health"),
        ("GET", "/no/such/route"), ("GET", "/sandboxes/"), ("POST", "/sandboxes/x/explode"), ("GET", "//sandboxes//x"),
        ("GET", "/../../etc/passwd"), ("GET", "/%2e%2e/%2e%2e/etc/passwd"), ("TRACE", "/sandboxes"),
        ("CONNECT", "/sandboxes"), ("MAKETEA", "/sandboxes"), ("GET", "/sandboxes/" + "a/" * 2000),
        ("GET", "/" + "x" * 40_000),
    ):
        yield f"{method} {path[:40]}", Request("control", method, path)
    yield "header of 60 kB", Request("control", "GET", "/v2/sandboxes", headers={"X-Large": "x" * 60_000})
    yield "500 headers", Request("control", "GET", "/v2/sandboxes", headers={f"X-H{n}": "y" * 100 for n in range(500)})
    yield "key not ASCII", Request("control", "GET", "/v2/sandboxes", headers={"X-API-Key": "e2b_\xfc"})
    yield "key huge", Request("control", "GET", "/v2/sandboxes", headers={"X-API-Key": "e2b_" + "a" * 10_000})
    yield "key empty", Request("control", "GET", "/v2/sandboxes", headers={"X-API-Key": ""})
    for port in ("0", "-1", "65536", "99999999999", "http", "", "80;81", "８０"):
        headers = {"E2b-Sandbox-Port": port.encode() if not port.isascii() else port}
        yield f"guest port {port!r}", Request("guest", "GET", "/", headers=headers)
    for text in ("", "a b", "../x", "A" * 20, "x" * 5000, "a\tb"):
        yield f"guest id {text[:20]!r}", Request("guest", "GET", "/", headers={"E2b-Sandbox-Id": text}, may=(502,))


def agent():
    """Unary calls and files of the agent of a real sandbox."""
    start, send = "/process.Process/Start", "/process.Process/SendInput"
    for path in (
        "/process.Process/List", "/process.Process/Update", send, "/process.Process/SendSignal",
        "/process.Process/CloseStdin", "/filesystem.Filesystem/Stat", "/filesystem.Filesystem/MakeDir",
        "/filesystem.Filesystem/ListDir", "/filesystem.Filesystem/GetWatcherEvents",
    ):
        short = path.rsplit("/", 1)[1]
        for name, body in {"not JSON": b"{", "an array": b"[]", "not UTF-8": b'{"path":"\xff"}', "a string": b'"x"'}.items():
            if short == "List" and name == "not UTF-8":
                continue  # it has no such field, and unknown fields are passed over
            yield f"{short}: {name}", posted(path, body, plane="guest")
    for name, path, body in (
        ("signal to nobody", "/process.Process/SendSignal", {"process": {"pid": 4194000}, "signal": "SIGNAL_SIGKILL"}),
        ("signal without process", "/process.Process/SendSignal", {"signal": "SIGNAL_SIGKILL"}),
        ("signal unknown", "/process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_NONSENSE"}),
        ("signal to PID 1", "/process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGKILL"}),
        ("signal pid negative", "/process.Process/SendSignal", {"process": {"pid": -1}, "signal": "SIGNAL_SIGKILL"}),
        ("signal pid 2^32", "/process.Process/SendSignal", {"process": {"pid": 2**32}, "signal": "SIGNAL_SIGKILL"}),
        ("input to nobody", send, {"process": {"tag": "none"}, "input": {"stdin": "eA=="}}),
        ("input not base64", send, {"process": {"pid": 1}, "input": {"stdin": "***"}}),
        ("input without process", send, {"input": {"stdin": "eA=="}}),
        ("resize of nobody", "/process.Process/Update", {"process": {"pid": 4194000}, "pty": {"size": {"cols": 1, "rows": 1}}}),
        ("resize negative", "/process.Process/Update", {"process": {"pid": 1}, "pty": {"size": {"cols": -1, "rows": 1}}}),
        ("stat nothing", "/filesystem.Filesystem/Stat", {"path": "/no/such"}),
        ("stat number", "/filesystem.Filesystem/Stat", {"path": 5}),
        ("stat NUL", "/filesystem.Filesystem/Stat", {"path": "/tmp/\0x"}),
        ("stat long", "/filesystem.Filesystem/Stat", {"path": "/" + "a" * 5000}),
        ("make a file's place", "/filesystem.Filesystem/MakeDir", {"path": "/etc/passwd"}),
        ("make in proc", "/filesystem.Filesystem/MakeDir", {"path": "/proc/x"}),
        ("make NUL", "/filesystem.Filesystem/MakeDir", {"path": "a\0b"}),
        ("list nothing", "/filesystem.Filesystem/ListDir", {"path": "/no/such"}),
        ("list a file", "/filesystem.Filesystem/ListDir", {"path": "/etc/passwd"}),
        ("list depth negative", "/filesystem.Filesystem/ListDir", {"path": "/", "depth": -1}),
        ("list depth text", "/filesystem.Filesystem/ListDir", {"path": "/", "depth": "deep"}),
        ("move nothing", "/filesystem.Filesystem/Move", {"source": "/no/such", "destination": "/tmp/x"}),
        ("events of no watcher", "/filesystem.Filesystem/GetWatcherEvents", {"watcherId": "nope"}),
        ("watch nothing", "/filesystem.Filesystem/CreateWatcher", {"path": "/no/such"}),
        ("watch a file", "/filesystem.Filesystem/CreateWatcher", {"path": "/etc/passwd"}),
        ("no such method", "/process.Process/Explode", {}),
        ("no such service", "/nobody.Nothing/List", {}),
    ):
        yield f"agent: {name}", posted(path, body, plane="guest")
    for name, user in {"unknown": "ghost", "empty": "", "path": "../root", "NUL": "a\0b", "long": "u" * 3000, "unicode": "ユーザー"}.items():
        basic = base64.b64encode(f"{user}:".encode()).decode()
        if name != "empty":
            yield f"user {name}", posted("/filesystem.Filesystem/Stat", {"path": "/tmp"}, plane="guest", headers={"Authorization": f"Basic {basic}"})
    yield "unary with a wrong type", Request("guest", "POST", "/process.Process/List", b"{}", {"Content-Type": "text/plain"})
    yield "unary by PUT", Request("guest", "PUT", "/process.Process/List", b"{}", {"Content-Type": "application/json"})
    yield "start as unary", posted(start, {"process": {"cmd": "true"}}, plane="guest", may=(501,))
    for name, query in {
        "missing": "path=/no/such/file", "a directory": "path=/etc", "NUL": "path=/tmp/%00", "not UTF-8": "path=/tmp/%ff%fe",
        "long": "path=/" + "a" * 6000, "unknown user": "path=/tmp/x&username=ghost", "user path": "path=/tmp/x&username=../root",
        "bad signature": "path=/etc/hostname&signature=v1_nonsense",
    }.items():
        token = {"X-Access-Token": "wrong"} if "signature" in query else {}
        yield f"files: {name}", Request("guest", "GET", f"/files?{query}", headers=token)
    yield "files: multipart without boundary", Request("guest", "POST", "/files?path=/tmp/x", b"--x", {"Content-Type": "multipart/form-data"})
    yield "files: multipart cut off", Request("guest", "POST", "/files?path=/tmp/x", b"--x\r\nContent-Disposition: form-da", {"Content-Type": "multipart/form-data; boundary=x"})
    yield "files: wrong type", Request("guest", "POST", "/files?path=/tmp/x", b"x", {"Content-Type": "application/json"})
    yield "files: octets without path", Request("guest", "POST", "/files", b"x", {"Content-Type": "application/octet-stream"})
    yield "files: gzip that is none", Request("guest", "POST", "/files?path=/tmp/x", b"no gzip", {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"})
    yield "files: over a directory", Request("guest", "POST", "/files?path=/etc", b"x", {"Content-Type": "application/octet-stream"})
    yield "files: below a file", Request("guest", "POST", "/files?path=/etc/passwd/x", b"x", {"Content-Type": "application/octet-stream"})
    yield "files: into proc", Request("guest", "POST", "/files?path=/proc/nothing/x", b"x", {"Content-Type": "application/octet-stream"})
    yield "internal init", posted("/init", {}, plane="guest")
    yield "internal freeze", posted("/freeze", {}, plane="guest")


def table():
    rows = [*creates(), *ids(), *lists(), *pulls(), *shapes(), *agent()]
    assert len({name for name, _ in rows}) == len(rows), "two rows of one name"
    return rows
