"""The main job through the official E2B SDK, each step with its time.

Needs E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY in the environment (. ~/.config/aenv/env) and `pip install e2b`.
"""

import os
import sys
import time

from e2b import PtySize, Sandbox, SandboxQuery

TEMPLATE = os.environ.get("AENV_TEMPLATE", "base")


class Steps:
    """Prints what is done and how long it took."""

    def __call__(self, what):
        self.what = what
        return self

    def __enter__(self):
        self.begun = time.perf_counter()

    def __exit__(self, kind, value, trace):
        took = (time.perf_counter() - self.begun) * 1000
        mark = "✗" if kind else "✓"
        print(f"  {mark} {self.what:<52} {took:8.0f} ms", flush=True)


def expect(got, wanted):
    """Stops the demo when the sandbox gave another answer than it must."""
    if got != wanted:
        sys.exit(f"expected {wanted!r}, got {got!r}")


def main():
    step = Steps()
    began = time.perf_counter()
    with step(f"create a sandbox from '{TEMPLATE}'"):
        sandbox = Sandbox.create(template=TEMPLATE, timeout=300, metadata={"run": "demo"})
    try:
        with step("first command: uname -r"):
            kernel = sandbox.commands.run("uname -r").stdout.strip()
        print(f"    its own kernel: {kernel}")
        with step("run Python in it"):
            expect(sandbox.commands.run("python3 -c 'print(sum(range(101)))'").stdout, "5050\n")
        with step("write a file, read it back"):
            sandbox.files.write("notes/hello.txt", "written from outside\n")
            expect(sandbox.files.read("notes/hello.txt"), "written from outside\n")
        with step("start a counter in the background"):
            counter = sandbox.commands.run(
                "i=0; while sleep 0.05; do i=$((i+1)); echo $i > /tmp/count; done", background=True
            )
        with step("a terminal: type, read, leave"):
            seen = []
            terminal = sandbox.pty.create(size=PtySize(rows=24, cols=80))
            sandbox.pty.send_stdin(terminal.pid, b"echo $((40+2))-from-a-pty; exit\n")
            terminal.wait(on_pty=lambda data: seen.append(bytes(data)))
            expect(b"42-from-a-pty" in b"".join(seen), True)
        with step("pause: memory, processes and disk are kept"):
            sandbox.pause()
        with step("resume, and ask the same counter"):
            sandbox = Sandbox.connect(sandbox.sandbox_id)
            count = int(sandbox.commands.run("cat /tmp/count").stdout)
        print(f"    the counter (pid {counter.pid}) went on from {count}")
        with step("list sandboxes by metadata"):
            found = Sandbox.list(query=SandboxQuery(metadata={"run": "demo"})).next_items()
            expect(sandbox.sandbox_id in [item.sandbox_id for item in found], True)
    finally:
        with step("kill it"):
            sandbox.kill()
    print(f"  all of it in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
