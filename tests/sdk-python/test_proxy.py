"""Ports of a sandbox from outside: HTTP, streams, WebSocket, and who is let in."""

import hashlib
import os
import pathlib
import time

import httpx
import pytest
from conftest import eventually
from e2b import AuthenticationException, Sandbox
from websocket import WebSocket

PORT = 8321
BASE = os.environ.get("E2B_SANDBOX_URL", "")


@pytest.fixture(scope="module")
def served(sandbox):
    """The shared sandbox with a server in it, and a client that addresses that server."""
    sandbox.files.write("/tmp/guest_server.py", (pathlib.Path(__file__).parent / "guest_server.py").read_text())
    command = sandbox.commands.run(f"python3 /tmp/guest_server.py {PORT}", background=True, timeout=0)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    with httpx.Client(base_url=BASE, headers=headers, timeout=60, trust_env=False) as client:
        eventually(lambda: client.get("/").status_code == 200)
        yield client
    command.kill()


def test_the_host_of_a_port_names_port_and_sandbox(sandbox):
    assert sandbox.get_host(PORT).startswith(f"{PORT}-{sandbox.sandbox_id}.")


def test_a_server_in_the_sandbox_is_reached(served):
    answer = served.get("/")
    assert (answer.status_code, answer.text) == (200, "hello from the guest")


def test_a_port_is_reached_by_its_host_name_alone(served, sandbox):
    domain = os.environ.get("AENV_DOMAIN")
    if not domain:
        pytest.skip("Skipped: the server has no base domain (AENV_DOMAIN not set)")
    for host in (f"{PORT}-{sandbox.sandbox_id}.{domain}", f"{PORT}-{sandbox.sandbox_id}-old.{domain}"):
        answer = httpx.get(BASE + "/health", headers={"Host": host}, timeout=60, trust_env=False)
        assert answer.text == "hello from the guest", host


def test_paths_that_are_also_the_apis_go_to_the_guest(served):
    for path in ("/health", "/sandboxes", "/v2/sandboxes", "/templates", "/metrics", "/aenv/v1/node", "/files"):
        assert served.get(path).text == "hello from the guest", path


def test_status_headers_and_query_pass_through(served):
    answer = served.get("/teapot")
    assert (answer.status_code, answer.text, answer.headers["x-kind"]) == (418, "short and stout", "teapot")
    seen = served.get("/headers?a=1&b=%2F%20x", headers={"X-Mine": "yes"}).text
    assert seen.startswith("/headers?a=1&b=%2F%20x\n") and "X-Mine: yes" in seen.replace("x-mine", "X-Mine")


def test_our_tokens_are_not_shown_to_the_guest(served):
    seen = served.get("/headers", headers={"X-API-Key": os.environ["E2B_API_KEY"]}).text
    assert os.environ["E2B_API_KEY"] not in seen


def test_bodies_pass_whole_with_and_without_length(served):
    data = os.urandom(5 << 20)
    want = hashlib.sha256(data).hexdigest()
    assert served.post("/", content=data).text == want
    pieces = (data[i : i + 100_000] for i in range(0, len(data), 100_000))
    assert served.post("/", content=pieces).text == want
    assert served.put("/", content=b"").text == hashlib.sha256(b"").hexdigest()
    assert served.head("/").headers["content-length"] == str(len("hello from the guest"))


def test_events_arrive_when_they_are_sent_not_at_the_end(served):
    began, times = time.monotonic(), []
    with served.stream("GET", "/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        for line in answer.iter_lines():
            if line.startswith("data: tick"):
                times.append(time.monotonic() - began)
    assert len(times) == 5 and times[-1] - times[0] > 1.5


def test_a_websocket_echoes_text_bytes_and_large_frames(sandbox, served):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    line = WebSocket(BASE, headers)
    assert line.status == 101
    line.send("ü 漢字".encode(), opcode=1)
    assert line.receive() == (1, "ü 漢字".encode())
    for size in (0, 125, 126, 65_535, 65_536, 300_000):
        data = os.urandom(size)
        line.send(data)
        assert line.receive() == (2, data)
    line.send(b"\x03\xe8", opcode=8)
    assert line.receive() == (8, b"\x03\xe8")
    line.close()


def test_a_websocket_survives_silence(sandbox, served):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    line = WebSocket(BASE, headers)
    time.sleep(20)
    line.send(b"still there")
    assert line.receive() == (2, b"still there")
    line.close()


def test_a_closed_port_says_that_the_sandbox_runs(sandbox):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "9"}
    answer = httpx.get(BASE, headers=headers, timeout=60, trust_env=False)
    body = answer.json()
    assert answer.status_code == 502 and body["code"] == 502
    assert "port is not open" in body["message"] and body["sandboxId"] == sandbox.sandbox_id


def test_an_unknown_sandbox_says_that_it_was_not_found():
    headers = {"E2b-Sandbox-Id": "abcdefghij0123456789", "E2b-Sandbox-Port": "80"}
    answer = httpx.get(BASE, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 502 and "was not found" in answer.json()["message"]


def test_the_agents_own_routes_are_not_for_everyone(sandbox):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    for path in ("/init", "/freeze", "/thaw"):
        assert httpx.post(BASE + path, headers=headers, json={}, timeout=60, trust_env=False).status_code == 404, path


def test_without_its_token_a_sandbox_lets_nobody_in(sandbox):
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    with httpx.Client(base_url=BASE, headers=headers, timeout=60, trust_env=False) as client:
        assert client.get("/health").status_code == 204, "health is open to all"
        for token in (None, "", "wrong", "e2b_" + "0" * 40):
            with_token = {} if token is None else {"X-Access-Token": token}
            assert client.get("/files", params={"path": "/etc/hostname"}, headers=with_token).status_code == 401
            answer = client.post("/process.Process/List", json={}, headers=with_token)
            assert answer.status_code == 401 and answer.json()["code"] in ("unauthenticated", 401)
            assert client.get("/envs", headers=with_token).status_code == 401
            assert client.get("/metrics", headers=with_token).status_code == 401


def test_one_sandboxs_token_opens_no_other(sandbox, start):
    other = start()
    headers = {"E2b-Sandbox-Id": other.sandbox_id, "E2b-Sandbox-Port": "49983",
               "X-Access-Token": sandbox._envd_access_token}
    assert httpx.get(f"{BASE}/envs", headers=headers, timeout=60, trust_env=False).status_code == 401


def test_without_a_good_key_the_api_is_closed(template):
    with pytest.raises(AuthenticationException):
        Sandbox.create(template, api_key="e2b_" + "0" * 40)
    with pytest.raises(AuthenticationException):
        Sandbox.list(api_key="e2b_" + "0" * 40).next_items()
    api = os.environ["E2B_API_URL"]
    for path in ("/sandboxes", "/v2/sandboxes", "/templates", "/sandboxes/abcdefghij0123456789"):
        answer = httpx.get(api + path, timeout=60, trust_env=False)
        assert answer.status_code == 401 and answer.json()["code"] == 401, path


def test_private_traffic_needs_the_traffic_token(start):
    box = start(network={"allow_public_traffic": False})
    box.files.write("/tmp/guest_server.py", (pathlib.Path(__file__).parent / "guest_server.py").read_text())
    box.commands.run(f"python3 /tmp/guest_server.py {PORT}", background=True, timeout=0)
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    with httpx.Client(base_url=BASE, headers=headers, timeout=60, trust_env=False) as client:
        good = {"E2b-Traffic-Access-Token": box.traffic_access_token}
        eventually(lambda: client.get("/", headers=good).status_code == 200)
        assert client.get("/").status_code == 403
        assert client.get("/", headers={"E2b-Traffic-Access-Token": "wrong"}).status_code == 403


def test_a_server_is_reached_again_after_pause_and_resume(start):
    box = start()
    box.files.write("/tmp/guest_server.py", (pathlib.Path(__file__).parent / "guest_server.py").read_text())
    box.commands.run(f"python3 /tmp/guest_server.py {PORT}", background=True, timeout=0)
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(PORT)}
    with httpx.Client(base_url=BASE, headers=headers, timeout=60, trust_env=False) as client:
        eventually(lambda: client.get("/").status_code == 200)
        box.pause()
        assert client.get("/").status_code == 502
        box.connect()
        assert client.get("/").text == "hello from the guest"
