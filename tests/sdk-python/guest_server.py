"""Runs in the guest, on the standard library alone: plain answers, echo, server-sent events, slow bodies, WebSocket echo.

`python3 guest_server.py PORT`
"""

import base64
import hashlib
import http.server
import struct
import sys
import time

MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, body: bytes, status=200, kind="text/plain", **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            return self.websocket()
        if self.path == "/events":
            return self.events()
        if self.path.startswith("/headers"):
            text = "".join(f"{name}: {value}\n" for name, value in self.headers.items())
            return self.reply((f"{self.path}\n" + text).encode())
        if self.path == "/teapot":
            return self.reply(b"short and stout", 418, X_Kind="teapot")
        self.reply(b"hello from the guest")

    do_HEAD = do_GET
    do_DELETE = do_GET

    def do_POST(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.reply(hashlib.sha256(body).hexdigest().encode(), X_Length=str(len(body)))

    do_PUT = do_POST

    def events(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        for number in range(5):
            self.wfile.write(f"id: {number}\ndata: tick {number} {time.time()}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.5)
        self.close_connection = True

    def websocket(self):
        key = self.headers["Sec-WebSocket-Key"]
        accept = base64.b64encode(hashlib.sha1((key + MAGIC).encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        while True:
            head = self.rfile.read(2)
            if len(head) < 2:
                break
            opcode, length = head[0] & 15, head[1] & 127
            if length == 126:
                (length,) = struct.unpack(">H", self.rfile.read(2))
            elif length == 127:
                (length,) = struct.unpack(">Q", self.rfile.read(8))
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i & 3] for i, byte in enumerate(self.rfile.read(length)))
            self.wfile.write(frame(opcode, data))
            self.wfile.flush()
            if opcode == 8:
                break
        self.close_connection = True


def frame(opcode: int, data: bytes) -> bytes:
    if len(data) < 126:
        size = bytes([len(data)])
    elif len(data) < 65536:
        size = b"\x7e" + struct.pack(">H", len(data))
    else:
        size = b"\x7f" + struct.pack(">Q", len(data))
    return bytes([0x80 | opcode]) + size + data


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    server.serve_forever()
