"""One sandbox paused and resumed many times: its process, its memory and its files go on."""

import hashlib
import os
import statistics
import time

import pytest

CYCLES = int(os.environ.get("AENV_CYCLES", "50"))

COUNTER = """
import os, secrets, time
token, count = secrets.token_hex(16), 0
ballast = bytearray(os.urandom(8 << 20))
import hashlib
seal = hashlib.sha256(ballast).hexdigest()
while True:
    count += 1
    if count % 20 == 0 and hashlib.sha256(ballast).hexdigest() != seal:
        token = "memory-was-damaged"
    with open("/dev/shm/state.new", "w") as out:
        out.write(f"{os.getpid()} {token} {count}")
    os.rename("/dev/shm/state.new", "/dev/shm/state")
    time.sleep(0.05)
"""


@pytest.mark.timeout(1800)
def test_fifty_cycles_lose_nothing(start, record_property):
    box = start(timeout=3600)
    box.files.write("/tmp/counter.py", COUNTER)
    process = box.commands.run("exec python3 /tmp/counter.py", background=True, timeout=0)
    for number in range(20):
        data = os.urandom(100_000 + number)
        box.files.write(f"/home/user/data/{number}", data)
    box.commands.run("cd /home/user/data && sha256sum * > ../sums")
    listing = box.files.read("/home/user/sums")
    boot = box.commands.run("cat /proc/sys/kernel/random/boot_id").stdout

    def state():
        pid, token, count = box.files.read("/dev/shm/state").split()
        return (pid, token), int(count)

    deadline = time.monotonic() + 60
    while not box.files.exists("/dev/shm/state"):
        assert time.monotonic() < deadline, "the counter did not begin"
        time.sleep(0.1)
    identity, last = state()
    pauses, resumes = [], []
    for cycle in range(CYCLES):
        marker = hashlib.sha256(str(cycle).encode()).hexdigest()
        box.files.write(f"/home/user/cycle-{cycle}", marker)
        began = time.monotonic()
        assert box.pause() is True
        pauses.append(time.monotonic() - began)
        began = time.monotonic()
        box.connect(timeout=3600)
        box.commands.run("true")
        resumes.append(time.monotonic() - began)
        now, count = state()
        assert now == identity, f"cycle {cycle}: another process, or its memory changed"
        assert count >= last, f"cycle {cycle}: the counter went back from {last} to {count}"
        last = count
        assert box.files.read(f"/home/user/cycle-{cycle}") == marker
    time.sleep(1)
    assert state()[1] > last, "the counter stands still"
    box.commands.run("cd /home/user/data && sha256sum --status -c ../sums")
    assert box.files.read("/home/user/sums") == listing
    for cycle in range(CYCLES):
        assert box.files.read(f"/home/user/cycle-{cycle}") == hashlib.sha256(str(cycle).encode()).hexdigest()
    assert box.commands.run("cat /proc/sys/kernel/random/boot_id").stdout == boot
    assert process.pid in [info.pid for info in box.commands.list()]
    figure = f"pause p50 {statistics.median(pauses) * 1000:.0f} ms, resume to first command p50 {statistics.median(resumes) * 1000:.0f} ms over {CYCLES}"
    record_property("cycles", figure)
    print(figure)
