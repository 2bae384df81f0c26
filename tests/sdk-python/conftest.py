"""One server, many sandboxes: everything made here carries this run's label and is gone when the run ends."""

import os
import time
import uuid

import pytest
from e2b import Sandbox, SandboxQuery

RUN = uuid.uuid4().hex[:12]
LABEL = {"suite": "sdk-python", "run": RUN}
NEEDED = ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY")


def pytest_collection_modifyitems(items):
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        why = pytest.mark.skip(reason=f"Skipped: no running AgentENV ({', '.join(missing)} not set)")
        for item in items:
            item.add_marker(why)


@pytest.fixture(scope="session")
def template() -> str:
    return os.environ.get("AENV_TEMPLATE", "base")


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind():
    yield
    if all(os.environ.get(name) for name in NEEDED):
        left = list(everything(SandboxQuery(metadata=LABEL)))
        for info in left:
            Sandbox.kill(info.sandbox_id)


def everything(query, **options):
    """All items of a listing, over all pages."""
    pages = Sandbox.list(query=query, **options)
    while pages.has_next:
        yield from pages.next_items()


@pytest.fixture(scope="module")
def sandbox(template):
    """One sandbox that the tests of a file share; each leaves it as it found it."""
    box = Sandbox.create(template, timeout=1800, metadata=LABEL)
    yield box
    box.kill()


@pytest.fixture
def start(template):
    """Starts sandboxes of a test's own."""
    made = []

    def start(**options):
        options.setdefault("timeout", 600)
        options["metadata"] = {**LABEL, **options.get("metadata", {})}
        box = Sandbox.create(template, **options)
        made.append(box)
        return box

    yield start
    for box in made:
        Sandbox.kill(box.sandbox_id)


@pytest.fixture
def folder(sandbox):
    """A directory of a test's own in the shared sandbox."""
    path = f"/home/user/{uuid.uuid4().hex[:10]}"
    sandbox.files.make_dir(path)
    yield path
    sandbox.files.remove(path, user="root")


def eventually(question, within=30.0, every=0.2):
    """The first answer that is neither None nor False; for states the API has no event for."""
    deadline = time.monotonic() + within
    while True:
        answer = question()
        if answer is not None and answer is not False:
            return answer
        assert time.monotonic() < deadline, f"not within {within} s: {question}"
        time.sleep(every)
