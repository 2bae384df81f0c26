"""What the control plane owes the Python SDK. Exits non-zero at the first difference."""

import datetime
import e2b
from e2b import Sandbox, SandboxQuery

made = Sandbox.create("base", timeout=120, metadata={"run": "a=b&c d/é%"}, envs={"A": "1"})
assert made.sandbox_id and made.get_host(3000).startswith(f"3000-{made.sandbox_id}.box.test"), made.get_host(3000)
assert made._envd_access_token == f"envd-{made.sandbox_id}"

info = made.get_info()
assert (info.sandbox_id, info.cpu_count, info.memory_mb) == (made.sandbox_id, 2, 512), info
assert info.metadata == {"run": "a=b&c d/é%"}, info.metadata
assert info.envd_version == "0.6.13" and info.state.value == "running"

others = [Sandbox.create("base", timeout=60) for _ in range(3)]
pages = Sandbox.list(limit=2)
seen = []
while pages.has_next:
    seen += [item.sandbox_id for item in pages.next_items()]
assert seen == [box.sandbox_id for box in reversed([made, *others])], seen
found = Sandbox.list(query=SandboxQuery(metadata={"run": "a=b&c d/é%"})).next_items()
assert [item.sandbox_id for item in found] == [made.sandbox_id], found

assert made.is_running() is True
made.set_timeout(300)
assert len(made.get_metrics(start=datetime.datetime.now() - datetime.timedelta(hours=1))) == 1

pause = getattr(Sandbox, "pause", None) or Sandbox.beta_pause
assert pause(made.sandbox_id) in (True, None)
assert made.get_info().state.value == "paused"
assert pause(made.sandbox_id) in (False, None)
assert made.is_running() is False
from e2b import SandboxQuery as Query
paused = Sandbox.list(query=Query(state=[e2b.SandboxState.PAUSED])).next_items()
assert [item.sandbox_id for item in paused] == [made.sandbox_id], paused
again = Sandbox.connect(made.sandbox_id, timeout=60)
assert again.sandbox_id == made.sandbox_id and again._envd_access_token == made._envd_access_token
assert made.is_running() is True

assert made.kill() is True
assert made.kill() is False
assert made.is_running() is False
for call in (made.get_info, lambda: Sandbox.connect(made.sandbox_id)):
    try:
        call()
        raise SystemExit("an ended sandbox was found")
    except e2b.NotFoundException:
        pass
try:
    Sandbox.create("no-such-template")
    raise SystemExit("a missing template was found")
except e2b.SandboxException as error:
    assert "404" in str(error) and "does not exist" in str(error), error
try:
    Sandbox.create("base", timeout=10**6)
    raise SystemExit("a timeout of eleven days was accepted")
except e2b.SandboxException as error:
    assert "timeout" in str(error), error
try:
    Sandbox.create("base", api_key="e2b_" + "0" * 40)
    raise SystemExit("a wrong key was accepted")
except e2b.AuthenticationException:
    pass
try:
    made.commands.run("true")
    raise SystemExit("a command ran in an ended sandbox")
except e2b.TimeoutException as error:
    assert "Killed" in str(error), error
except e2b.SandboxException as error:
    assert "Killed" in str(error), error
