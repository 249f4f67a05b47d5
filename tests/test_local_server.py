"""What a hostile page or program on this machine may try: the server refuses it, in bounded time and memory."""

import contextlib
import json
import os
import signal
import socket
import threading
import time

import pytest

from nanodiff.common import UserError
from nanodiff.web.server import MAX_BODY, Job, LocalHandler, LocalServer

CONNECTIONS, TYPE = 8, "Content-Type: application/json"


class Handler(LocalHandler):
    """/ says hello; /echo gives back what it read; /work streams what a job sends."""

    def do_GET(self):
        self.reply(200, {"hello": "there"})

    def do_POST(self):
        body = self.read_body()
        if body is not None and self.path == "/echo":
            self.reply(200, body)
        elif body is not None:
            self.stream(Job(body))


@pytest.fixture
def server():
    server = LocalServer(0, Handler, max_queue=1, max_connections=CONNECTIONS, timeout_s=1.0)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def connect(server):
    client = socket.create_connection(("127.0.0.1", server.server_port))
    client.settimeout(30)
    return client


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
        with contextlib.suppress(ConnectionError):
            client.sendall(head.encode() + body)
        head, _, content = read_all(client).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), content


def post(server, *headers, body=b"{}", path="/echo"):
    length = [] if any(h.lower().startswith(("content-length", "transfer")) for h in headers) else [len(body)]
    return ask(server, "POST", path, TYPE, *(f"Content-Length: {n}" for n in length), *headers, body=body)


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------------
# Who asks


@pytest.mark.parametrize("host", ["127.0.0.1:{}", "localhost:{}", "LocalHost:{}", "[::1]:{}"])
def test_our_names_are_known(server, host):
    status, _, content = ask(server, host=[host.format(server.server_port)])
    assert status == 200 and json.loads(content) == {"hello": "there"}


@pytest.mark.parametrize(
    "hosts",
    [["evil.example:{}"], ["127.0.0.1"], ["127.0.0.1:1"], ["localhost:{}.evil.example"], ["evil@localhost:{}"], [],
     ["127.0.0.1:{0}", "evil.example:{0}"], [""]],
)  # fmt: skip
def test_a_foreign_name_that_leads_here_is_refused(server, hosts):
    for method in ("GET", "POST"):
        status, _, content = ask(server, method, host=[h.format(server.server_port) for h in hosts])
        assert status == 403 and "Host" in json.loads(content)["error"]


def test_other_pages_are_refused(server):
    own = f"Origin: http://localhost:{server.server_port}"
    assert ask(server, "GET", "/", own)[0] == 200 and post(server, own)[0] == 200
    for foreign in (
        "http://evil.example",
        "null",
        "https://127.0.0.1:{}",
        "http://127.0.0.1:1",
        "http://127.0.0.1",
        "",
    ):
        origin = "Origin: " + foreign.format(server.server_port)
        assert ask(server, "GET", "/", origin)[0] == post(server, origin)[0] == 403
        assert post(server, own, origin)[0] == 403
    # what a form or a script of another page may send without being allowed to first
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json5"):
        assert ask(server, "POST", "/echo", f"Content-Type: {kind}", "Content-Length: 2", body=b"{}")[0] == 415
    assert ask(server, "POST", "/echo", "Content-Length: 2", body=b"{}")[0] == 415


def test_no_answer_is_open_to_other_pages(server):
    refused = ask(server, "GET", "/", "Origin: http://evil.example")
    for status, headers, _ in (ask(server), refused, post(server), ask(server, "OPTIONS"), ask(server, "BREW")):
        assert "access-control" not in headers and "python" not in headers, status
        for header in ("cache-control: no-store", "x-content-type-options: nosniff", "default-src 'none'"):
            assert header in headers, status


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


def test_bodies(server):
    assert post(server, body=b'{"a": 1}')[2] == b'{"a": 1}'
    assert post(server, "Content-Length: 3", body=b'{"a": 1}')[2] == b'{"a'  # what lies beyond is not looked at
    big = b"x" * MAX_BODY
    assert post(server, body=big)[2] == big and post(server, body=big + b"x")[0] == 413
    assert post(server, body=b"x" * 10_000_000)[0] == 413  # the answer arrives though nobody wanted the body
    assert post(server, "Content-Length: " + 30 * "9")[0] == 413
    for lie in ("-1", "+2", "2.0", "two", "", "0x2", "２"):
        assert post(server, f"Content-Length: {lie}")[0] == 411
    assert post(server, "Content-Length: 2", "Content-Length: 2")[0] == 411
    assert post(server, "Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\n\r\n")[0] == 411
    status, _, content = post(server, "Content-Length: 100", body=b"{}")  # the rest never comes
    assert status == 408 and "only 2 bytes of 100" in json.loads(content)["error"]


def test_nonsense_gets_one_line_of_json(server):
    many = [f"X-{i}: 1" for i in range(200)]
    asked = [
        ("BREW", "/"),
        ("GET", "/" + 70_000 * "a"),
        ("GET", "/ /"),
        ("GET", "/", *many),
        ("GET", "/", 70_000 * "a"),
    ]
    for (status, _, content), wanted in zip((ask(server, *args) for args in asked), (501, 414, 400, 431, 431)):
        assert status == wanted and "\n" not in json.loads(content)["error"]
    assert ask(server)[0] == 200


def test_the_silent_and_the_slow_are_shut_out(server):
    clients = [connect(server) for _ in range(CONNECTIONS)]
    for client in clients[1:4]:
        client.sendall(b"GET / HTTP/1.1\r\nHo")
    with contextlib.suppress(ConnectionError):  # one that sends a byte now and then: no single wait is long
        for byte in 1000 * b"a":
            clients[0].sendall(bytes([byte]))
            time.sleep(0.02)
    for client in clients:
        assert b" 200 " not in read_all(client)  # which ends
        client.close()
    wait_for(lambda: not server.deadlines)
    assert ask(server)[0] == 200


def test_two_hundred_clients_at_once(server):
    answers, most = [], [0]

    def client():
        answers.append(ask(server)[0])
        most.append(sum("process_request_thread" in t.name for t in threading.enumerate()))

    threads = [threading.Thread(target=client) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 200
    assert 0 < max(most) <= CONNECTIONS + 1  # one may be about to end
    wait_for(lambda: not server.deadlines)


def test_a_port_in_use_is_one_line(server):
    with pytest.raises(UserError, match=f"port={server.server_port}.*0 for any"):
        LocalServer(server.server_port, Handler)


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


def start_job(server):
    """A client that has asked for work and reads nothing yet."""
    client = connect(server)
    head = f"POST /work HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n{TYPE}\r\nContent-Length: 1\r\n\r\n"
    client.sendall(head.encode() + b"1")
    return client


def test_events_arrive_in_order_and_then_the_end(server):
    with start_job(server) as client:
        job = server.next_job()
        for i in range(100):
            job.send(i=i)
        job.finish()
        head, _, stream = read_all(client).decode().partition("\r\n\r\n")
    assert "text/event-stream" in head and stream.endswith("\n\n")
    events = [json.loads(part.removeprefix("data: ")) for part in stream.split("\n\n")[:-1]]
    assert events == [{"ahead": 0}] + [{"i": i} for i in range(100)]


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs POSIX signals")
def test_ctrl_c_ends_the_wait_for_a_job(server):
    """Also where the wait itself is not interrupted: the signal came just before it, or, as here, to another thread."""

    def interrupt():
        waits.wait()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        if not ended.wait(20):
            too_late.set()
            server.join(Job(b""))  # so that a failure is no hang

    waits, ended, too_late = threading.Event(), threading.Event(), threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers have another
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # by this thread, not by that
    try:
        with pytest.raises(KeyboardInterrupt):
            waits.set()
            server.next_job()
        assert not too_late.is_set()
    finally:
        ended.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        thread.join()


def test_as_many_wait_as_may(server):
    with start_job(server):
        job = server.next_job()
        with start_job(server) as second:
            wait_for(lambda: server.waiting)
            status, headers, content = post(server, path="/work")
            assert status == 503 and "retry-after: 5" in headers and "wait already" in json.loads(content)["error"]
            assert ask(server)[0] == 200  # the rest goes on
            job.finish()
            job = server.next_job()
            job.finish()
            assert b'data: {"ahead": 1}' in read_all(second)


@pytest.mark.parametrize("at_work", [True, False])
def test_a_client_that_leaves_is_noticed(server, at_work):
    first, second = start_job(server), None
    job = server.next_job()
    if not at_work:
        second = start_job(server)
        wait_for(lambda: server.waiting)
        job = server.waiting[0]
        second.close()
        wait_for(lambda: not server.waiting)  # its place is free for another
    first.close()
    assert job.gone.wait(30)
    wait_for(lambda: not server.deadlines)


def test_a_client_that_does_not_read_is_left(server):
    with start_job(server):
        job = server.next_job()
        for _ in range(200):
            job.send(big="x" * 2**18)  # more than the kernel takes
        assert job.gone.wait(30)
