"""A web server on 127.0.0.1 alone: it answers requests at once, but works on one at a time.

Any page on the web can make a browser send requests here. So a request must name us in its Host header (against DNS
rebinding), come from our own page if it has an Origin, and have a content type that needs permission (against CSRF).
"""

import json
import re
import select
import socket
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nanodiff.common import UserError

MAX_BODY = 64 * 2**10  # bytes of a request
HEADERS = {
    "Content-Type": "application/json",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",  # our page has its own
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class LocalServer(ThreadingHTTPServer):
    """A thread answers each request; jobs queue in `line`, and only the first runs."""

    def __init__(self, port: int, handler, max_queue: int = 4):
        self.max_queue = max_queue  # this many may wait
        self.line = []  # of handlers
        try:
            super().__init__(("127.0.0.1", port), handler)
        except OSError as e:
            raise UserError(f"port={port}: {e.strerror}; accepted: a free one, or 0 for any") from None
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost", "[::1]")]
        self.origins = {f"http://{host}" for host in self.hosts}

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)  # http.server's also waits for a name service
        self.server_name, self.server_port = self.server_address

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # clients leave when they like
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """One request; subclasses add do_GET and do_POST. Errors are JSON: {"error": "one line"}."""

    timeout = 10  # seconds for a read or a write
    disable_nagle_algorithm = True  # send an event at once
    log_message = lambda *args: None

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        hosts = [host.lower() for host in self.headers.get_all("Host", [])]
        origins = {origin.lower() for origin in self.headers.get_all("Origin", [])}
        if len(hosts) != 1 or hosts[0] not in self.server.hosts or not origins <= self.server.origins:
            return self.refuse(403, f"a foreign Host or Origin; accepted: {', '.join(self.server.hosts)}")
        return True

    def read_body(self) -> bytes | None:
        """The JSON of a request; None if it was refused."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != "application/json":
            return self.refuse(415, "accepted: Content-Type: application/json")
        if not re.fullmatch("[0-9]+", length):
            return self.refuse(411, "a request needs a Content-Length in bytes")
        if len(length) > 9 or int(length) > MAX_BODY:
            return self.refuse(413, f"accepted: requests of up to {MAX_BODY} bytes")
        return self.rfile.read(int(length))

    def reply(self, status: int, content: bytes, headers: dict = HEADERS) -> None:
        """A whole answer, or the start of a stream."""
        self.send_response(status)
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status: int, error: str, headers: dict = HEADERS) -> None:
        self.reply(status, json.dumps({"error": error}).encode(), headers)

    def send_error(self, code, message=None, explain=None):  # http.server's own refusals, otherwise in HTML
        self.refuse(int(code), message or self.responses[code][0])

    def stream(self, work) -> None:
        """Wait in line, then answer with the events that work(self.send) sends. It ends early if the client leaves."""
        line = self.server.line
        line.append(self)
        try:
            ahead = line.index(self)
            if ahead > self.server.max_queue:
                return self.refuse(503, "too many others are waiting; try again in a while", {"Retry-After": "5"})
            self.reply(200, b"", {"Content-Type": "text/event-stream"})
            self.send(ahead=ahead)
            while line[0] is not self:
                time.sleep(0.05)
                self.check_client()
            work(self.send)
        finally:
            line.remove(self)

    def send(self, **event) -> None:
        """Send an event in JSON's types."""
        self.check_client()
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def check_client(self) -> None:
        """Raise BrokenPipeError if the client has left."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise BrokenPipeError
