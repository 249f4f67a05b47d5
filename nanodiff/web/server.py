"""A web server on 127.0.0.1 only, which works on one request at a time."""

import json
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nanodiff.common import UserError


class LocalServer(ThreadingHTTPServer):
    """Answers each request in a thread; a handler holds the lock `working` while it draws."""

    def __init__(self, port: int, handler):
        try:
            super().__init__(("127.0.0.1", port), handler)
        except OSError as e:
            raise UserError(f"port={port}: {e.strerror}; accepted: a free one, or 0 for any") from None
        # A small buffer: a client that stops reading is noticed after a picture or two, not after megabytes
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        self.working = threading.Lock()
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")]

    def handle_error(self, *args):
        if not isinstance(sys.exception(), OSError):  # a client that left
            super().handle_error(*args)


class LocalHandler(BaseHTTPRequestHandler):
    """One request; subclasses add do_GET and do_POST."""

    timeout = 10  # seconds before a client that stops reading is cut off
    log_message = lambda *args: None

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        host = self.headers["Host"]
        fault = ()
        # Any website can point its own name to this machine and read our answers (DNS rebinding)
        if host not in self.server.hosts:
            fault = 403, f"foreign Host header; accepted: {', '.join(self.server.hosts)}"
        elif self.command == "POST":
            # Any page can make a browser POST to us; the browser says which page it was
            if self.headers["Origin"] != f"http://{host}":
                fault = 403, "foreign Origin header; accepted: that of the page which this server shows"
            elif not re.fullmatch("[0-9]{1,7}", self.headers["Content-Length"] or ""):
                fault = 413, "no Content-Length, or a large one; accepted: up to 9,999,999"
        if fault:
            self.send_error(*fault)
        return not fault

    def body(self) -> bytes:
        """A POST's content."""
        return self.rfile.read(int(self.headers["Content-Length"]))

    def refuse(self, status: int, line: str) -> None:
        """Answer with one event, an error."""
        self.reply(b"", "application/x-ndjson", status)
        self.send(error=line)

    def reply(self, content: bytes, kind: str, status: int = 200) -> None:
        """Send a whole answer, or the start of a stream."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Frame-Options", "DENY")  # no other page shows ours under its own buttons
        self.end_headers()
        self.wfile.write(content)

    def send(self, **event) -> None:
        """Send a line of JSON. Raises ConnectionError once the client has left."""
        self.wfile.write(json.dumps(event).encode() + b"\n")

    def stream(self, work) -> None:
        """Answer with the events that work(self.send) sends, or with an error while another request is drawn."""
        if not self.server.working.acquire(timeout=1):  # a request that was just stopped takes a moment to notice
            self.refuse(503, "busy with another drawing: try again when it is done")
            return
        try:
            self.reply(b"", "application/x-ndjson")
            work(self.send)
        finally:
            self.server.working.release()
