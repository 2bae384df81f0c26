"""Signed URLs: whoever has one may move that one file, until it expires; and nobody else gets in."""

import time
import urllib.parse

import httpx
import pytest


@pytest.fixture
def http():
    with httpx.Client(timeout=60, trust_env=False) as client:
        yield client


def test_a_file_is_downloaded_by_url_alone(sandbox, folder, http):
    sandbox.files.write(f"{folder}/ü &x", "content")
    answer = http.get(sandbox.download_url(f"{folder}/ü &x"))
    assert (answer.status_code, answer.text) == (200, "content")


def test_parts_of_a_file_can_be_asked_for(sandbox, folder, http):
    sandbox.files.write(f"{folder}/x", "0123456789")
    answer = http.get(sandbox.download_url(f"{folder}/x"), headers={"Range": "bytes=2-5"})
    assert (answer.status_code, answer.text) == (206, "2345")


def test_a_file_is_uploaded_by_url_alone(sandbox, folder, http):
    answer = http.post(sandbox.upload_url(f"{folder}/x"), files={"file": ("ignored", b"sent")})
    assert answer.status_code == 200 and answer.json()[0]["path"] == f"{folder}/x"
    assert sandbox.files.read(f"{folder}/x") == "sent"


def test_urls_work_for_another_user(sandbox, folder, http):
    sandbox.files.write("/root/by-url", "root's", user="root")
    assert http.get(sandbox.download_url("/root/by-url", user="root")).text == "root's"
    sandbox.files.remove("/root/by-url", user="root")


def test_a_url_expires(sandbox, folder, http):
    sandbox.files.write(f"{folder}/x", "content")
    url = sandbox.download_url(f"{folder}/x", use_signature_expiration=3)
    assert http.get(url).text == "content"
    time.sleep(4)  # the end of life of a signature is a time, not an event
    late = http.get(url)
    assert late.status_code == 401 and "signature is already expired" in late.text


def test_an_expiry_cant_be_moved(sandbox, folder, http):
    sandbox.files.write(f"{folder}/x", "content")
    url = sandbox.download_url(f"{folder}/x", use_signature_expiration=60)
    changed = rewritten(url, signature_expiration=lambda value: str(int(value) + 3600))
    assert http.get(changed).status_code == 401
    assert http.get(rewritten(url, signature_expiration=lambda _: None)).status_code == 401


def test_a_signature_is_good_for_one_path_one_way_one_user(sandbox, folder, http):
    sandbox.files.write(f"{folder}/x", "content")
    sandbox.files.write(f"{folder}/y", "other")
    url = sandbox.download_url(f"{folder}/x")
    assert http.get(rewritten(url, path=lambda _: f"{folder}/y")).status_code == 401
    assert http.post(url, files={"file": ("x", b"overwritten")}).status_code == 401
    assert http.get(rewritten(url, username=lambda _: "root")).status_code == 401
    assert http.get(rewritten(url, signature=lambda value: value[:-3] + "AAA")).status_code == 401
    assert sandbox.files.read(f"{folder}/x") == "content"


def rewritten(url, **changes):
    parts = urllib.parse.urlsplit(url)
    query = dict(urllib.parse.parse_qsl(parts.query))
    for name, change in changes.items():
        value = change(query.get(name))
        if value is None:
            query.pop(name, None)
        else:
            query[name] = value
    return urllib.parse.urlunsplit(parts._replace(query=urllib.parse.urlencode(query)))


def test_a_signature_dies_with_its_sandbox(start, http):
    box = start()
    box.files.write("/home/user/x", "content")
    url = box.download_url("/home/user/x")
    assert http.get(url).status_code == 200
    box.kill()
    assert http.get(url).status_code in (401, 404, 502)


def test_urls_survive_pause_and_resume(start, http):
    box = start()
    box.files.write("/home/user/x", "content")
    url = box.download_url("/home/user/x")
    box.pause()
    box.connect()
    assert http.get(url).text == "content"
