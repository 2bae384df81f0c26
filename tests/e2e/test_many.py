"""Many sandboxes of one template alive at once, each for itself."""

import concurrent.futures
import os
import secrets
import statistics

import pytest
from conftest import Host, LABEL, eventually
from e2b import Sandbox

CROWD = int(os.environ.get("AENV_CROWD", "40"))


@pytest.mark.timeout(900)
def test_forty_at_once_keep_their_own_secrets(template, record_property, api):
    before = set(Host.monitors())

    def begin(number):
        box = Sandbox.create(template, timeout=1800, metadata={**LABEL, "number": str(number)})
        secret = secrets.token_hex(16)
        box.files.write("/dev/shm/secret", secret)
        box.commands.run(f"echo {secret} > /home/user/secret && sync", timeout=120)
        return box, secret

    boxes = []
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for outcome in concurrent.futures.as_completed([pool.submit(begin, n) for n in range(CROWD)]):
                boxes.append(outcome.result())
            assert len({box.sandbox_id for box, _ in boxes}) == CROWD

            def read(pair):
                box, secret = pair
                seen = box.commands.run("cat /dev/shm/secret; echo; cat /home/user/secret", timeout=120).stdout.split()
                return seen == [secret, secret]

            assert all(pool.map(read, boxes)), "a sandbox lost its secret or has another's"
            drawn = list(pool.map(lambda pair: pair[0].commands.run("cat /proc/sys/kernel/random/uuid", timeout=120).stdout, boxes))
        assert len(set(drawn)) == CROWD, "two sandboxes drew the same random numbers"

        monitors = set(Host.monitors()) - before or set(Host.monitors())
        sizes = [Host.pss_kib(pid) / 1024 for pid in monitors]
        if sizes:
            figure = f"PSS per sandbox: median {statistics.median(sizes):.1f} MiB, max {max(sizes):.1f} MiB, {len(sizes)} monitors"
            record_property("pss", figure)
            print(figure)
    finally:
        for box, _ in boxes:
            box.kill()
    # What is left belongs to somebody: other sandboxes, or the machines made ahead, of each template that was used lately.
    def all_owned():
        node = api.get("/aenv/v1/node").raise_for_status().json()
        held = sum(n for state, n in node["sandboxes"].items() if state not in ("paused", "dead"))
        return len(Host.monitors()) <= held + sum(node["warm"].values())

    eventually(all_owned, within=90)
