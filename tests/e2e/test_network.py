"""What a guest can reach: the world, and nothing of its host, its neighbours or private networks.

A refused packet and an address where nobody is look alike from inside, so each forbidden address is given a listener
first: on the host itself, and behind the host in a network namespace that plays the outside world. That nobody
connected is then a statement about the rules. An ordinary public address in the same namespace is the control.
"""

import contextlib
import ipaddress
import json
import os
import socket
import subprocess
import threading

import pytest
from conftest import Host
from e2b import SandboxException

OUTSIDE = "aenv-e2e-out"
PUBLIC = "11.22.33.44"
PRIVATE = ["169.254.169.254", "10.77.77.77", "172.16.77.77", "192.168.77.77", "100.64.77.77"]
PORT = 18080

TRY = """
import json, socket, sys
results = {}
for address in json.loads(sys.argv[1]):
    host, port = address.rsplit(":", 1)
    try:
        line = socket.create_connection((host, int(port)), 3)
        line.settimeout(3)
        results[address] = line.recv(100).decode()
        line.close()
    except OSError as error:
        results[address] = None
print(json.dumps(results))
"""


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=20).stdout


class Listener:
    """Says its name to whoever connects, and remembers that somebody did."""

    def __init__(self, address, port, name):
        self.name, self.visits = name, []
        self.socket = socket.create_server((address, port), backlog=64)
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                line, peer = self.socket.accept()
            except OSError:
                return
            self.visits.append(peer)
            with contextlib.suppress(OSError):
                line.sendall(self.name.encode())
                line.close()

    def close(self):
        self.socket.close()


@pytest.fixture(scope="module")
def world():
    """A namespace behind the host with one public and several private addresses, a listener on all of them."""
    if os.geteuid() != 0:
        pytest.skip("Skipped: giving addresses to the host needs root")
    ip("netns", "del", OUTSIDE, check=False)
    ip("netns", "add", OUTSIDE)
    server = None
    try:
        ip("link", "add", "aenv-e2e-h", "type", "veth", "peer", "name", "aenv-e2e-o", "netns", OUTSIDE)
        ip("addr", "add", "11.22.33.1/32", "dev", "aenv-e2e-h")
        ip("link", "set", "aenv-e2e-h", "up")
        inside = ["netns", "exec", OUTSIDE, "ip"]
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "link", "set", "aenv-e2e-o", "up")
        for address in [PUBLIC, *PRIVATE]:
            ip(*inside, "addr", "add", f"{address}/32", "dev", "aenv-e2e-o")
            ip("route", "add", f"{address}/32", "dev", "aenv-e2e-h", "src", "11.22.33.1")
        ip(*inside, "route", "add", "11.22.33.1/32", "dev", "aenv-e2e-o")
        ip(*inside, "route", "add", "default", "via", "11.22.33.1", "dev", "aenv-e2e-o")
        code = (
            "import socket\n"
            f"s = socket.create_server(('0.0.0.0', {PORT}), backlog=64)\n"
            "print('ready', flush=True)\n"
            "while True:\n"
            "    line, _ = s.accept()\n"
            "    line.sendall(b'outside')\n"
            "    line.close()\n"
        )
        server = subprocess.Popen(["ip", "netns", "exec", OUTSIDE, "python3", "-c", code], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        # From the host everything is reachable: what a guest can't reach is the rules' doing.
        for address in [PUBLIC, *PRIVATE]:
            with socket.create_connection((address, PORT), 5) as line:
                assert line.recv(100) == b"outside"
        yield
    finally:
        if server:
            server.kill()
            server.wait()
        ip("link", "del", "aenv-e2e-h", check=False)
        ip("netns", "del", OUTSIDE, check=False)


def reach(box, addresses):
    box.files.write("/tmp/try.py", TRY)
    done = box.commands.run(f"python3 /tmp/try.py '{json.dumps(addresses)}'", timeout=30 + 7 * len(addresses))
    return {address for address, said in json.loads(done.stdout).items() if said}


def host_addresses():
    for link in json.loads(ip("-j", "addr")):
        for info in link["addr_info"]:
            if info["family"] == "inet":
                yield info["local"]


def test_the_world_is_reached_and_private_networks_behind_the_host_are_not(world, start):
    box = start()
    reached = reach(box, [f"{address}:{PORT}" for address in [PUBLIC, *PRIVATE]])
    assert reached == {f"{PUBLIC}:{PORT}"}


def test_no_service_of_the_host_is_reached(world, start):
    box = start()
    listener = Listener("0.0.0.0", 0, "host")
    try:
        gateway = box.commands.run("ip -4 route show default 2>/dev/null | cut -d' ' -f3; true").stdout.strip()
        api = os.environ["E2B_API_URL"].rsplit(":", 1)[1].strip("/")
        addresses = {address for address in host_addresses() if not address.startswith("127.")} | {"169.254.169.254"}
        if gateway:
            addresses.add(gateway)
        wanted = [f"{address}:{port}" for address in sorted(addresses) for port in (listener.port, api, 22)]
        assert reach(box, wanted) == set()
        assert listener.visits == []
    finally:
        listener.close()


def test_the_hosts_loopback_is_not_reached_by_its_own_address(start):
    box = start()
    listener = Listener("127.0.0.1", 0, "loopback")
    try:
        assert reach(box, [f"127.0.0.1:{listener.port}", f"0.0.0.0:{listener.port}", f"127.1.2.3:{listener.port}"]) == set()
        assert listener.visits == []
    finally:
        listener.close()


def test_a_link_local_address_given_to_the_host_is_not_reached(start):
    if os.geteuid() != 0:
        pytest.skip("Skipped: giving addresses to the host needs root")
    box = start()
    taken = ["169.254.169.254/32", "10.78.78.78/32", "192.168.78.78/32"]
    listener = Listener("0.0.0.0", 0, "metadata")
    try:
        for address in taken:
            ip("addr", "add", address, "dev", "lo")
        wanted = [f"{address.split('/')[0]}:{listener.port}" for address in taken]
        assert reach(box, wanted) == set()
        assert listener.visits == []
    finally:
        for address in taken:
            ip("addr", "del", address, "dev", "lo", check=False)
        listener.close()


def test_no_datagram_reaches_the_host(start):
    box = start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inbox:
        inbox.bind(("0.0.0.0", 0))
        inbox.settimeout(3)
        port = inbox.getsockname()[1]
        addresses = [address for address in host_addresses() if not address.startswith("127.")]
        send = "import socket,sys\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\nfor a in sys.argv[2:]:\n  try: s.sendto(b'x',(a,int(sys.argv[1])))\n  except OSError: pass"
        box.files.write("/tmp/send.py", send)
        box.commands.run(f"python3 /tmp/send.py {port} {' '.join(addresses)}")
        with pytest.raises(TimeoutError):
            inbox.recv(10)


def test_one_sandbox_does_not_reach_another(start):
    one, other = start(), start()
    serve = "import socket\ns=socket.create_server(('0.0.0.0',18081))\nwhile True:\n  c,_=s.accept()\n  c.sendall(b'neighbour')\n  c.close()"
    other.files.write("/tmp/serve.py", serve)
    other.commands.run("python3 /tmp/serve.py", background=True, timeout=0)
    own = set(one.commands.run("hostname -I").stdout.split())
    # Every address through which the host could lead to a neighbour: those it routes to single machines or small links.
    routes = json.loads(ip("-j", "route"))
    places = set()
    for route in routes:
        with contextlib.suppress(ValueError):
            network = ipaddress.ip_network(route["dst"], strict=False)
            if network.num_addresses <= 16 and network.version == 4:
                places |= {str(address) for address in network}
    for namespace in Host.namespaces():
        looked = subprocess.run(["nsenter", f"--net={namespace}", "ip", "-j", "addr"], capture_output=True, text=True, timeout=20)
        for link in json.loads(looked.stdout or "[]"):
            places |= {info["local"] for info in link["addr_info"] if info["family"] == "inet"}
    wanted = sorted(f"{place}:18081" for place in places - own if not place.startswith("127."))[:60]
    assert reach(one, wanted) == set()


def test_without_internet_access_nothing_is_reached(world, start):
    box = start(allow_internet_access=False)
    assert reach(box, [f"{address}:{PORT}" for address in [PUBLIC, *PRIVATE]]) == set()
    assert box.commands.run("echo still works").stdout == "still works\n"


def test_rules_for_the_way_out(world, start):
    try:
        denied = start(network={"deny_out": [PUBLIC]})
        allowed = start(network={"allow_out": [PUBLIC], "deny_out": ["0.0.0.0/0"]})
    except SandboxException as error:
        pytest.skip(f"Skipped: this server has no egress rules yet ({error})")
    assert reach(denied, [f"{PUBLIC}:{PORT}"]) == set()
    assert reach(allowed, [f"{PUBLIC}:{PORT}"]) == {f"{PUBLIC}:{PORT}"}


def test_the_way_out_is_open_again_after_pause_and_resume(world, start):
    box = start()
    box.pause()
    box.connect()
    assert reach(box, [f"{address}:{PORT}" for address in [PUBLIC, *PRIVATE]]) == {f"{PUBLIC}:{PORT}"}
