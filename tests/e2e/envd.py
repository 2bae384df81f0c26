"""Talks to a guest agent below the SDK: any bytes, any frames, and reads what comes back."""

import json
import struct

import httpx
from conftest import GUESTS


def client(box) -> httpx.Client:
    headers = {
        "E2b-Sandbox-Id": box.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": box._envd_access_token or "",
    }
    return httpx.Client(base_url=GUESTS, headers=headers, timeout=30, trust_env=False)


def frame(message, flags=0) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return bytes([flags]) + struct.pack(">I", len(body)) + body


def frames(body: bytes):
    """Splits an answer into (flags, JSON) pairs; raises on anything malformed."""
    out = []
    while body:
        flags, (length,) = body[0], struct.unpack(">I", body[1:5])
        assert len(body) >= 5 + length, "the answer ends in the middle of a frame"
        out.append((flags, json.loads(body[5 : 5 + length] or b"{}")))
        body = body[5 + length :]
    return out
