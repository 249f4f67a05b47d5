"""Headless Chromium for tests, by the W3C WebDriver protocol: JSON over HTTP, so that no package is needed."""

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.request

CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update "
    "disable-sync hide-scrollbars"
).split()


class Browser:
    """A window of `size` (width, height) CSS pixels. `profile` is a folder for what it stores."""

    def __init__(self, profile, size=(1200, 800)):
        self.driver = subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        line = next(line for line in self.driver.stdout if "started successfully on port" in line)
        port = re.search(r"port (\d+)", line)[1]
        self.url = f"http://127.0.0.1:{port}/session"
        args = [f"--{flag}" for flag in FLAGS] + [f"--user-data-dir={profile}"]
        options = {"goog:chromeOptions": {"args": args}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.call("POST", "", {"capabilities": {"alwaysMatch": {"browserName": "chrome"} | options}})
        self.url += "/" + session["sessionId"]
        # A window cannot be as narrow as a phone; the emulation of one can
        metrics = dict(
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=size[0] < 500,
        )
        emulate = dict(cmd="Emulation.setDeviceMetricsOverride", params=metrics)
        self.call("POST", "/goog/cdp/execute", emulate)

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url):
        self.call("POST", "/url", dict(url=url))

    def run(self, script, *args):
        """The value of a script's `return`."""
        return self.call("POST", "/execute/sync", dict(script=script, args=args))

    def wait(self, expression, timeout_s=30):
        """The first true value of a JavaScript expression."""
        end = time.monotonic() + timeout_s
        while not (value := self.run(f"return {expression}")):
            assert time.monotonic() < end, f"in vain: {expression}; {self.logs()}"
            time.sleep(0.05)
        return value

    def press(self, *keys):
        """Keys one after the other, as text or as WebDriver's code points."""
        actions = [dict(type=kind, value=key) for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", dict(actions=[dict(type="key", id="keys", actions=actions)]))

    def logs(self):
        """Messages of the console since the last time: errors of scripts, and what the page's policy blocked."""
        return [entry["message"] for entry in self.call("POST", "/se/log", dict(type="browser"))]

    def close(self):
        with contextlib.suppress(OSError):
            self.call("DELETE", "")
        self.driver.terminate()
        self.driver.wait()
        self.driver.stdout.close()
