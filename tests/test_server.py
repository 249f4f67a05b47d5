"""The local server answers this machine's user alone, works on one request at a time, and notices who leaves."""

import contextlib
import http.client
import json
import threading
import time

import pytest
from conftest import refused

from nanodiff.web.server import LocalHandler, LocalServer


class Handler(LocalHandler):
    """GET says hello; POST streams what server.work sends."""

    def do_GET(self):
        self.reply(b"hello", "text/plain")

    def do_POST(self):
        self.body()
        self.stream(self.server.work)


@contextlib.contextmanager
def served(handler):
    server = LocalServer(0, handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def server():
    with served(Handler) as server:
        yield server


def ask(server, method="GET", path="/", content=None, host=None, **headers):
    """(client, answer) of a request, of which the body has not been read. By default a browser's, from our page."""
    client = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    host = host or f"127.0.0.1:{server.server_port}"
    client.request(method, path, content, {"Host": host, "Origin": f"http://{host}"} | headers)
    return client, client.getresponse()


def test_only_our_names_are_answered_and_only_our_own_page_may_post(server):
    """A foreign name that leads here is DNS rebinding; of a POST the browser says which page on the web it is from."""
    port = server.server_port
    own = f"http://127.0.0.1:{port}"
    assert server.server_address[0] == "127.0.0.1"
    refused("port=.*0 for any", LocalServer, port, Handler)  # a taken one
    server.work = lambda send: send(drawn=1)
    for method in ("GET", "POST"):
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            assert ask(server, method, host=host)[1].status == 200
        for host in (f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"localhost:{port}.evil.example"):
            assert ask(server, method, host=host)[1].status == 403
    for origin in ("http://evil.example", "null", own + ".evil.example", own.replace("http", "https"), " "):
        assert ask(server, "POST", Origin=origin)[1].status == 403
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("POST", "/")
    assert client.getresponse().status == 403


def test_a_client_that_does_not_read_is_left_in_silence(server, monkeypatch, capsys):
    monkeypatch.setattr(Handler, "timeout", 0.2)
    sent = []
    picture = "x" * 100_000
    server.work = lambda send: sent.append([send(picture=picture) for _ in range(12)])
    first = ask(server, "POST")
    assert first
    assert ask(server, "POST")[1].status == 200  # the lock is free again
    assert sent == []
    assert capsys.readouterr().err == ""


def test_a_second_request_is_told_that_we_are_busy_until_the_first_client_leaves(server):
    left = threading.Event()

    def work(send):
        try:
            while True:
                send(tick=1)
                time.sleep(0.01)
        except ConnectionError:
            left.set()

    server.work = work
    first, answer = ask(server, "POST")
    answer.readline()
    _, second = ask(server, "POST")
    assert second.status == 503
    assert "busy" in json.loads(second.read())["error"]
    _, page = ask(server)
    assert page.read() == b"hello"
    assert page.headers["X-Frame-Options"] == "DENY"  # the page itself is served
    answer.close()
    first.close()
    assert left.wait(10)
    server.work = lambda send: [send(drawn=1), send(drawn=2)]
    assert ask(server, "POST")[1].read() == b'{"drawn": 1}\n{"drawn": 2}\n'
