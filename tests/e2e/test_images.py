"""Starting from an image that nobody made a template of, out of a real registry on this machine."""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tarfile

import httpx
import pytest
from conftest import API, KEY, LABEL, eventually, needs
from e2b import Sandbox

pytestmark = needs("AENV_BASE_IMAGE")
BIN = os.environ.get("AENV_BIN", "aenv")


def blob(layout, content):
    name = hashlib.sha256(content).hexdigest()
    (layout / "blobs/sha256" / name).write_bytes(content)
    return {"digest": f"sha256:{name}", "size": len(content)}


def derived(base, layout, scratch):
    """The base image with one more layer and settings of its own, as `docker build` would have made it."""
    shutil.copytree(base, layout)
    index = json.loads((layout / "index.json").read_text())
    read = lambda descriptor: json.loads((layout / "blobs" / descriptor["digest"].replace(":", "/")).read_text())
    manifest = read(index["manifests"][0])
    config = read(manifest["config"])
    tar = scratch / "layer.tar"
    with tarfile.open(tar, "w") as archive:
        folder = tarfile.TarInfo("srv/task")
        folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o755, 1000, 1000
        archive.addfile(folder)
        note = scratch / "note"
        note.write_text("from the image\n")
        archive.add(note, "srv/task/note")
    layer = tar.read_bytes()
    media = "application/vnd.oci.image.layer.v1.tar"
    manifest["layers"].append({"mediaType": media, **blob(layout, layer)})
    config["rootfs"]["diff_ids"].append(f"sha256:{hashlib.sha256(layer).hexdigest()}")
    config["config"] = {
        **config.get("config", {}),
        "Env": [*(config.get("config", {}).get("Env") or []), "TASK=seven", "GREETING=hello world"],
        "WorkingDir": "/srv/task",
        "User": "user",
    }
    config.pop("history", None)
    manifest["config"] = {"mediaType": manifest["config"]["mediaType"], **blob(layout, json.dumps(config).encode())}
    index["manifests"] = [{"mediaType": index["manifests"][0]["mediaType"], **blob(layout, json.dumps(manifest).encode())}]
    index["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": "task"}
    (layout / "index.json").write_text(json.dumps(index))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Its reference in the registry."""
    if not (program := shutil.which("docker-registry")):
        pytest.skip("Skipped: docker-registry is not installed")
    scratch = tmp_path_factory.mktemp("registry")
    derived(pathlib.Path(os.environ["AENV_BASE_IMAGE"]), scratch / "layout", scratch)
    port = free_port()
    settings = scratch / "config.yml"
    settings.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {scratch}/data}}}}\n"
        f"http: {{addr: 127.0.0.1:{port}}}\n"
    )
    registry = subprocess.Popen([program, "serve", settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(port))
        reference = f"localhost:{port}/team/task:1"
        subprocess.run(
            ["skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", f"oci:{scratch}/layout:task", f"docker://{reference}"],
            check=True, capture_output=True, timeout=120,
        )
        yield reference
    finally:
        registry.terminate()
        registry.wait(30)


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v2/", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def start_image():
    made = []

    def start(reference, **options):
        box = Sandbox.create(reference, metadata=LABEL, timeout=600, request_timeout=600, **options)
        made.append(box)
        return box

    yield start
    for box in made:
        Sandbox.kill(box.sandbox_id)


def test_a_create_names_an_image_and_its_settings_reach_commands(image, start_image):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(lambda _: start_image(image), range(3))
    said = first.commands.run('echo "$TASK|$GREETING|$(pwd)|$(id -un)"; cat note').stdout
    assert said == "seven|hello world|/srv/task|user\nfrom the image\n"
    assert {box.get_info().template_id for box in others} == {first.get_info().template_id}, "one build served all"
    given = start_image(image, envs={"TASK": "eight"})
    assert given.commands.run("echo $TASK $GREETING").stdout == "eight hello world\n"


def test_processors_memory_and_disk_are_the_creators_choice(image):
    body = {"templateID": image, "timeout": 600, "metadata": LABEL, "cpuCount": 1, "memoryMB": 384, "diskSizeMB": 3072}
    with httpx.Client(base_url=API, headers={"X-API-Key": KEY}, timeout=600, trust_env=False) as api:
        made = api.post("/sandboxes", json=body).raise_for_status().json()
        try:
            box = Sandbox.connect(made["sandboxID"])
            cores, memory, disk = box.commands.run(
                "nproc; awk '/MemTotal/ {print $2}' /proc/meminfo; df -k --output=size / | tail -n1"
            ).stdout.split()
            assert cores == "1"
            assert 300_000 < int(memory) < 384 * 1024
            assert 2_700_000 < int(disk) < 3_900_000
        finally:
            Sandbox.kill(made["sandboxID"])


@pytest.mark.parametrize(
    ("reference", "status", "word"),
    [
        ("localhost:1/nobody/here:1", 400, "can't be reached"),
        ("localhost:{port}/team/other:1", 400, "was not found"),
        ("localhost:{port}/team/task:none", 400, "was not found"),
        ("localhost:{port}/TEAM/task:1", 400, "localhost"),
        ("oci:/nonexistent/layout:x", 400, "/nonexistent/layout"),
    ],
)
def test_an_image_that_cannot_be_had_is_told_by_name(image, reference, status, word):
    port = image.split("/")[0].rpartition(":")[2]
    reference = reference.format(port=port)
    answer = httpx.post(
        f"{API}/sandboxes", json={"templateID": reference}, headers={"X-API-Key": KEY}, timeout=120, trust_env=False
    )
    assert answer.status_code == status, answer.text
    assert word in answer.json()["message"], answer.text


def test_the_program_starts_an_image(image):
    done = subprocess.run(
        [BIN, "start", image, "-q", "--timeout", "120", "--memory", "384", "--metadata", f"run={LABEL['run']}"],
        capture_output=True, text=True, timeout=600, check=True,
    )
    name = done.stdout.strip()
    told = subprocess.run([BIN, "exec", name, "--", "cat", "/srv/task/note"], capture_output=True, text=True, timeout=60)
    Sandbox.kill(name)
    assert told.stdout == "from the image\n", told
