"""A WebSocket client of forty lines: the suite depends on the SDK alone, and sees each frame."""

import base64
import hashlib
import os
import socket
import struct
import urllib.parse

MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class WebSocket:
    def __init__(self, url: str, headers: dict, path="/", host=None, timeout=60):
        parts = urllib.parse.urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port or 80), timeout)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: {host or parts.netloc}", "Upgrade: websocket", "Connection: Upgrade",
                 f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        self.stream = self.socket.makefile("rb")
        self.status = int(self.stream.readline().split()[1])
        self.headers = {}
        while line := self.stream.readline().strip():
            name, value = line.decode().split(":", 1)
            self.headers[name.strip().lower()] = value.strip()
        if self.status == 101:
            want = base64.b64encode(hashlib.sha1((key + MAGIC).encode()).digest()).decode()
            assert self.headers["sec-websocket-accept"] == want

    def send(self, data: bytes, opcode=2):
        mask = os.urandom(4)
        if len(data) < 126:
            size = bytes([0x80 | len(data)])
        elif len(data) < 65536:
            size = b"\xfe" + struct.pack(">H", len(data))
        else:
            size = b"\xff" + struct.pack(">Q", len(data))
        repeated = (mask * (len(data) // 4 + 1))[: len(data)]
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(data), "big")
        self.socket.sendall(bytes([0x80 | opcode]) + size + mask + masked)

    def receive(self):
        head = self.stream.read(2)
        if len(head) < 2:
            return None
        length = head[1] & 127
        if length == 126:
            (length,) = struct.unpack(">H", self.stream.read(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", self.stream.read(8))
        return head[0] & 15, self.stream.read(length)

    def close(self):
        self.stream.close()
        self.socket.close()
