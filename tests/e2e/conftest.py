"""The server under test, and what its host shows of it."""

import os
import pathlib
import time
import uuid

import httpx
import pytest
from e2b import Sandbox, SandboxQuery

RUN = uuid.uuid4().hex[:12]
LABEL = {"suite": "e2e", "run": RUN}
NEEDED = ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY")
MISSING = [name for name in NEEDED if not os.environ.get(name)]
API = os.environ.get("E2B_API_URL", "")
GUESTS = os.environ.get("E2B_SANDBOX_URL", "")
KEY = os.environ.get("E2B_API_KEY", "")


def pytest_collection_modifyitems(items):
    if MISSING:
        why = pytest.mark.skip(reason=f"Skipped: no running AgentENV ({', '.join(MISSING)} not set)")
        for item in items:
            item.add_marker(why)


def needs(*names):
    """Skips when the suite wasn't told something about the server."""
    missing = [name for name in names if not os.environ.get(name)]
    return pytest.mark.skipif(bool(missing), reason=f"Skipped: {', '.join(missing)} not set")


@pytest.fixture(scope="session")
def template() -> str:
    return os.environ.get("AENV_TEMPLATE", "base")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind():
    yield
    if not MISSING:
        for info in everything(SandboxQuery(metadata=LABEL)):
            Sandbox.kill(info.sandbox_id)


def everything(query):
    pages = Sandbox.list(query=query)
    while pages.has_next:
        yield from pages.next_items()


@pytest.fixture
def start(template):
    made = []

    def start(**options):
        options.setdefault("timeout", 1800)
        options["metadata"] = {**LABEL, **options.get("metadata", {})}
        box = Sandbox.create(template, **options)
        made.append(box)
        return box

    yield start
    for box in made:
        Sandbox.kill(box.sandbox_id)


@pytest.fixture(scope="module")
def api():
    with httpx.Client(base_url=API, headers={"X-API-Key": KEY}, timeout=60, trust_env=False) as client:
        yield client


def eventually(question, within=60.0, every=0.2):
    """The first truthy answer; for states there is no event for."""
    deadline = time.monotonic() + within
    while True:
        answer = question()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within} s: {question}"
        time.sleep(every)


def healthy() -> bool:
    try:
        return httpx.get(f"{API}/health", timeout=10, trust_env=False).status_code < 300
    except httpx.HTTPError:
        return False


class Host:
    """What this machine holds on behalf of the server: monitors, namespaces, mounts."""

    marks = [os.environ[name] for name in ("AENV_DATA_DIR", "AENV_RUN_DIR") if os.environ.get(name)]

    @classmethod
    def monitors(cls) -> dict:
        """Process id → command line of each virtual machine monitor."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                is_monitor = "qemu-system" in line.split(" ")[0] or "firecracker" in line.split(" ")[0]
                if is_monitor and (not cls.marks or any(mark in line for mark in cls.marks)):
                    found[int(entry.name)] = line
        return found

    @classmethod
    def mounts(cls) -> set:
        lines = pathlib.Path("/proc/mounts").read_text().splitlines()
        return {line.split()[1] for line in lines if any(mark in line.split()[1] for mark in cls.marks)}

    @classmethod
    def namespaces(cls) -> set:
        """Paths of the network namespaces of sandboxes, spare ones included."""
        return {mount for mount in cls.mounts() if "/netns/" in mount}

    @classmethod
    def holdings(cls) -> dict:
        return {"monitors": len(cls.monitors()), "namespaces": len(cls.namespaces()), "mounts": len(cls.mounts())}

    @staticmethod
    def pss_kib(pid: int) -> int:
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
        return 0
