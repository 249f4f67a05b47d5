"""A web server for the person at this machine: on 127.0.0.1 alone, everything that a client can hold being bounded.

Any page on the web can make this person's browser send requests here. So a request must name us in its Host header
(else a foreign name that resolves to 127.0.0.1 could read the answers: DNS rebinding), and come from our own page if it
has an Origin (else any page could start work here: CSRF). Answers carry no CORS headers. Connections, the time and size
of a request, and the jobs that wait are limited: more connections wait in the kernel, more jobs are refused (503).
"""

import contextlib
import io
import json
import queue
import select
import socket
import socketserver
import sys
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nanodiff.common import UserError

MAX_BODY = 64 * 2**10  # bytes of a request, and of its headers
MAX_DRAIN = 64 * 2**20  # bytes of a refused request that are read all the same
SECURITY = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",  # a page has its own
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Job:
    """Work that a client waits for: a worker `send`s it events, and should stop when the client is `gone`."""

    def __init__(self, request):
        self.request, self.gone, self.events = request, threading.Event(), queue.SimpleQueue()

    def send(self, **event) -> None:
        """An event for the client, of JSON's types. Never waits for it."""
        self.events.put(event)

    def finish(self) -> None:
        """There is nothing more to come."""
        self.events.put(None)


class LocalServer(ThreadingHTTPServer):
    """Requests are answered in threads; work is done by whoever calls `next_job`, in order, one after the other.

    `port` 0 = any that is free. At most `max_queue` jobs wait besides the one at work; at most `max_connections` are
    open, and a request must be complete within `timeout_s`. Raises UserError for a port that cannot be had.
    """

    request_queue_size = 128  # connections that the kernel keeps for us until we look

    def __init__(self, port: int, handler, max_queue: int = 4, max_connections: int = 32, timeout_s: float = 10.0):
        self.max_queue, self.max_connections, self.timeout_s = max_queue, max_connections, timeout_s
        self.waiting, self.at_work, self.changed = deque(), False, threading.Condition()
        self.deadlines = {}  # open connection -> when its request must be complete
        try:
            super().__init__(("127.0.0.1", port), handler)
        except OSError as e:
            raise UserError(f"port={port}: {e.strerror}; accepted: a free one, or 0 for any") from None
        hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost", "[::1]")]
        self.hosts, self.origins = hosts, [f"http://{host}" for host in hosts]

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)  # http.server's asks the name service who we are, and waits for it
        self.server_name, self.server_port = self.server_address

    # -----------------------------------------------------------------------------------------------------------------
    # Jobs

    def join(self, job: Job) -> bool:
        """Let a job wait for its turn; False where too many do."""
        with self.changed:
            if len(self.waiting) >= self.max_queue:
                return False
            job.send(ahead=len(self.waiting) + self.at_work)
            self.waiting.append(job)
            self.changed.notify()
        return True

    def leave(self, job: Job) -> None:
        """The client of a job has left, or has all that it wanted."""
        job.gone.set()
        with self.changed, contextlib.suppress(ValueError):
            self.waiting.remove(job)

    def next_job(self) -> Job:
        """The job whose turn it is; waits for one. To be called by one thread, when it has finished the last."""
        with self.changed:
            self.at_work = False
            while not self.changed.wait_for(lambda: self.waiting, timeout=0.5):
                pass  # a wait without end would sleep through a Ctrl-C that comes just before it
            self.at_work = True
            return self.waiting.popleft()

    # -----------------------------------------------------------------------------------------------------------------
    # Connections

    def process_request(self, request, client_address):
        while len(self.deadlines) >= self.max_connections:  # those that come meanwhile are kept by the kernel
            time.sleep(0.05)
            self.service_actions()
        self.deadlines[request] = time.monotonic() + self.timeout_s
        super().process_request(request, client_address)

    def service_actions(self):  # serve_forever calls it twice a second
        for request, deadline in list(self.deadlines.items()):
            if time.monotonic() > deadline:
                with contextlib.suppress(OSError):  # its thread may have closed it meanwhile
                    request.shutdown(socket.SHUT_RD)  # which ends whatever read waits for more

    def shutdown_request(self, request):
        self.deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # clients leave when they like
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """One request on its connection; subclasses add do_GET and do_POST. Errors are JSON: {"error": "one line"}."""

    server_version, sys_version = "nanodiff", ""
    disable_nagle_algorithm = True  # an event should not wait for the next one

    def setup(self):
        self.timeout = self.server.timeout_s + 2  # of writing an answer or an event; a read is ended by the deadline
        super().setup()

    def parse_request(self) -> bool:
        """Refuses, with 403, whatever was not asked for by our own page or by a program of this person's."""
        head, after = io.BytesIO(), self.rfile  # http.server itself would take 6 MB of headers, and 25 MB to hold them
        while head.tell() <= MAX_BODY and (line := after.readline(MAX_BODY)):
            head.write(line)
            if line in (b"\r\n", b"\n"):
                break
        if head.tell() > MAX_BODY:
            self.command = self.request_version = self.requestline = ""
            return self.refuse(431, f"the headers have more than {MAX_BODY} bytes")
        head.seek(0)
        self.rfile = head
        accepted = super().parse_request()
        self.rfile = after
        if not accepted:
            return False
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(hosts) != 1 or hosts[0].strip().lower() not in self.server.hosts:
            return self.refuse(403, f"Host is {', '.join(hosts)[:80]!r}; accepted: {self.server.hosts}")
        if any(origin.strip().lower() not in self.server.origins for origin in origins):
            return self.refuse(403, f"Origin is {', '.join(origins)[:80]!r}; accepted: {self.server.origins}")
        return True

    def read_body(self) -> bytes | None:
        """The body of a request, JSON by its type; None where it was refused."""
        lengths = self.headers.get_all("Content-Length", [])
        if self.headers.get_content_type() != "application/json":  # others a foreign page may send without asking
            return self.refuse(415, f"Content-Type is {self.headers.get_content_type()}; accepted: application/json")
        if len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
            return self.refuse(411, "a request needs one Content-Length, in bytes")
        if len(lengths[0]) > 18 or int(lengths[0]) > MAX_BODY:
            return self.refuse(413, f"the request has {lengths[0][:18]} bytes; accepted: {MAX_BODY}")
        body = self.rfile.read(int(lengths[0]))
        if len(body) < int(lengths[0]):
            return self.refuse(408, f"only {len(body)} bytes of {lengths[0]} came within {self.server.timeout_s:g} s")
        return body

    def start(self, status: int, content_type: str, headers: dict) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": content_type} | SECURITY | headers).items():
            self.send_header(name, str(value))
        self.end_headers()

    def reply(self, status: int, content, content_type: str = "application/json", **headers) -> None:
        """A whole answer: bytes as they are, or anything else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.start(status, content_type, headers | {"Content-Length": len(data)})
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, error: str, **headers) -> None:
        self.reply(status, {"error": error}, **headers)
        # To close while the client still sends would reset the connection, and the answer be lost with it
        self.connection.shutdown(socket.SHUT_WR)
        drained = 0
        while drained < MAX_DRAIN and (data := self.rfile.read1(2**16)):
            drained += len(data)

    def send_error(self, code, message=None, explain=None):  # http.server's own refusals, otherwise in HTML
        self.reply(int(code), {"error": message or self.responses[code][0]})

    def stream(self, job: Job) -> None:
        """Let a job wait for its turn and send its events on as they come, as server-sent events; 503 where too many
        wait. A client that has left is noticed within a fifth of a second, or when an event cannot be sent."""
        if not self.server.join(job):
            self.refuse(503, f"{self.server.max_queue} others wait already; try again in a while", Retry_After=5)
            return
        self.server.deadlines[self.connection] = float("inf")  # its request is complete
        try:
            self.start(200, "text/event-stream", {})
            while not self.client_left():
                with contextlib.suppress(queue.Empty):
                    event = job.events.get(timeout=0.2)
                    if event is None:
                        return
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        finally:
            self.server.leave(job)

    def client_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def log_message(self, format, *args):
        pass
