"""The local server answers this machine's user alone, does one job at a time, and notices clients that leave."""

import contextlib
import json
import socket
import threading
import time

import pytest

from nanodiff.web.server import MAX_BODY, LocalHandler, LocalServer

TYPE = "Content-Type: application/json"


class Handler(LocalHandler):
    """/ says hello; /echo gives back what it read; /work streams what server.work sends."""

    def do_GET(self):
        self.reply(200, b'{"hello": "there"}')

    def do_POST(self):
        body = self.read_body()
        if body is not None and self.path == "/echo":
            self.reply(200, body)
        elif body is not None:
            self.stream(self.server.work)


@pytest.fixture
def server():
    server = LocalServer(0, Handler, max_queue=1)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=30)


def read_all(client) -> bytes:
    """What comes until the other side closes; it may reset the connection if we had more to say."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(2**16):
            data += piece
    return data


def ask(server, method="GET", path="/", *headers, body=b"", host=None):
    """(status, headers in lower case, body) of a request in raw bytes; host=() sends none."""
    hosts = [f"Host: 127.0.0.1:{server.server_port}"] if host is None else [f"Host: {h}" for h in host]
    with connect(server) as client:
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *hosts, *headers, "", ""])
        client.sendall(head.encode() + body)
        head, _, content = read_all(client).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), content


def post(server, *headers, body=b"{}", path="/echo"):
    return ask(server, "POST", path, TYPE, f"Content-Length: {len(body)}", *headers, body=body)


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_only_our_names_are_known(server):
    """A foreign name that leads here is DNS rebinding."""
    for host in ("127.0.0.1:{}", "localhost:{}", "LocalHost:{}", "[::1]:{}"):
        assert ask(server, host=[host.format(server.server_port)])[0] == 200
    one = ["evil.example:{}", "127.0.0.1", "127.0.0.1:1", "localhost:{}.evil.example", ""]
    for hosts in [[host] for host in one] + [[], ["127.0.0.1:{}", "evil.example:{}"]]:
        for method in ("GET", "POST"):
            status, _, content = ask(server, method, host=[host.format(server.server_port) for host in hosts])
            assert status == 403 and "Host" in json.loads(content)["error"]


def test_other_pages_are_refused(server):
    own = f"Origin: http://localhost:{server.server_port}"
    assert ask(server, "GET", "/", own)[0] == post(server, own)[0] == 200
    for foreign in ("http://evil.example", "null", "https://127.0.0.1:{}", "http://127.0.0.1", ""):
        origin = "Origin: " + foreign.format(server.server_port)
        assert ask(server, "GET", "/", origin)[0] == post(server, origin)[0] == post(server, own, origin)[0] == 403
    # What a form or a script of another page may send without asking first
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert ask(server, "POST", "/echo", f"Content-Type: {kind}", "Content-Length: 2", body=b"{}")[0] == 415


def test_no_answer_is_open_to_other_pages(server):
    refused = ask(server, "GET", "/", "Origin: http://evil.example")
    for status, headers, _ in (ask(server), refused, post(server), ask(server, "OPTIONS"), ask(server, "BREW")):
        assert "access-control" not in headers, status
        for header in ("cache-control: no-store", "x-content-type-options: nosniff", "default-src 'none'"):
            assert header in headers, status


def test_bodies(server):
    big = b"x" * MAX_BODY
    assert post(server, body=big)[2] == big
    for length, status in ((MAX_BODY + 1, 413), ("9" * 30, 413), ("-1", 411), ("two", 411), ("", 411), ("２", 411)):
        assert ask(server, "POST", "/echo", TYPE, f"Content-Length: {length}")[0] == status
    assert ask(server, "POST", "/echo", TYPE, "Transfer-Encoding: chunked")[0] == 411


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


def start_job(server):
    """A client that has asked for work and reads nothing yet."""
    client = connect(server)
    head = f"POST /work HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n{TYPE}\r\nContent-Length: 1\r\n\r\n"
    client.sendall(head.encode() + b"1")
    return client


def test_events_arrive_in_order_and_then_the_end(server):
    server.work = lambda send: [send(i=i) for i in range(100)]
    with start_job(server) as client:
        head, _, stream = read_all(client).decode().partition("\r\n\r\n")
    assert "text/event-stream" in head and stream.endswith("\n\n")
    events = [json.loads(part.removeprefix("data: ")) for part in stream.split("\n\n")[:-1]]
    assert events == [{"ahead": 0}] + [{"i": i} for i in range(100)]


def test_as_many_wait_as_may(server):
    ready = threading.Event()
    server.work = lambda send: ready.wait(30)
    with start_job(server):
        wait_for(lambda: len(server.line) == 1)
        with start_job(server) as second:
            wait_for(lambda: len(server.line) == 2)
            status, headers, _ = post(server, path="/work")
            assert status == 503 and "retry-after: 5" in headers
            assert ask(server)[0] == 200  # the rest goes on
            ready.set()
            assert b'data: {"ahead": 1}' in read_all(second)


def test_a_client_that_leaves_is_noticed_and_its_job_is_skipped(server):
    started = []

    def work(send):
        started.append(1)
        while True:
            send(tick=1)
            time.sleep(0.01)

    server.work = work
    with start_job(server):
        wait_for(lambda: started)
        second = start_job(server)
        wait_for(lambda: len(server.line) == 2)
        second.close()
        wait_for(lambda: len(server.line) == 1)
    wait_for(lambda: not server.line)
    assert len(started) == 1
