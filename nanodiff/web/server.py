"""A web server on 127.0.0.1 alone: it answers requests at once, and works off jobs in a queue.

Any page on the web can make a browser send requests here. So a request must name us in its Host header (against DNS
rebinding), come from our own page if it has an Origin, and have a content type that needs permission (against CSRF).
"""

import contextlib
import json
import queue
import re
import select
import socket
import socketserver
import sys
import threading
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


class Job:
    """Work that a client waits for: the worker sends events in JSON's types, at last None, and stops if `gone`."""

    def __init__(self, request):
        self.request = request
        self.gone = threading.Event()  # the client has left
        self.events = queue.SimpleQueue()

    def send(self, **event) -> None:
        self.events.put(event)


class LocalServer(ThreadingHTTPServer):
    """Threads answer requests; the one that calls next_job does the work."""

    def __init__(self, port: int, handler, max_queue: int = 4):
        self.jobs = queue.Queue(max_queue)
        self.at_work = False
        try:
            super().__init__(("127.0.0.1", port), handler)
        except OSError as e:
            raise UserError(f"port={port}: {e.strerror}; accepted: a free one, or 0 for any") from None
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost", "[::1]")]
        self.origins = {f"http://{host}" for host in self.hosts}

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)  # http.server's also waits for a name service
        self.server_name, self.server_port = self.server_address

    def next_job(self) -> Job:
        """Wait for a job whose client is still there."""
        self.at_work = False
        while True:
            with contextlib.suppress(queue.Empty):  # an endless wait would sleep through a Ctrl-C just before it
                job = self.jobs.get(timeout=0.5)
                if not job.gone.is_set():
                    self.at_work = True
                    return job

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

    def stream(self, job: Job) -> None:
        """Queue a job and pass its events on, unless the queue is full or the client leaves."""
        job.send(ahead=self.server.jobs.qsize() + self.server.at_work)
        try:
            self.server.jobs.put_nowait(job)
        except queue.Full:
            return self.refuse(503, "too many others are waiting; try again in a while", {"Retry-After": "5"})
        try:
            self.reply(200, b"", {"Content-Type": "text/event-stream"})
            while not self.client_left():
                with contextlib.suppress(queue.Empty):
                    event = job.events.get(timeout=0.2)
                    if event is None:
                        return
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        finally:
            job.gone.set()

    def client_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
