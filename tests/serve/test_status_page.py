"""The status page in a browser: its numbers, and a prompt that is answered in pieces."""

import contextlib
import json
import os
import shutil
import subprocess
import time

import pytest
from byte_decoder import serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--no-first-run")


class Page:
    """A page in Chromium, by the DevTools protocol over pipes."""

    def __init__(self, to_browser, from_browser):
        self.to_browser, self.from_browser, self.count, self.session = (
            to_browser,
            from_browser,
            0,
            {},
        )
        self.messages, self.left = [], b""

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.left:
                self.left += os.read(self.from_browser, 2**16)
            first, _, self.left = self.left.partition(b"\0")
            answer = json.loads(first)
            if answer.get("id") == self.count:
                return answer["result"]
            self.messages.append(answer)

    def run(self, expression):
        options = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < end, (expression, self.run("document.body.innerText"))
            time.sleep(0.05)


@contextlib.contextmanager
def opened(address, folder):
    """Yields a page, and ends the browser."""
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    # Chromium reads commands from 3 and writes answers to 4.
    script = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}'
    command = ["bash", "-c", script, CHROMIUM, *FLAGS]
    command += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    fds = (to_read, from_write)
    with subprocess.Popen(command, pass_fds=fds, stderr=subprocess.DEVNULL) as process:
        for one in fds:
            os.close(one)
        try:
            page = Page(to_write, from_read)
            target = page.call("Target.createTarget", url="about:blank")["targetId"]
            attached = page.call("Target.attachToTarget", targetId=target, flatten=True)
            page.session = {"sessionId": attached["sessionId"]}
            for domain in ("Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.call("Page.navigate", url=address)
            yield page
        finally:
            process.kill()
            for one in (to_write, from_read):
                os.close(one)


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_shows_numbers_and_answers_a_prompt(tmp_path):
    with serving(keys=("secret",)) as (service, address), opened(address, tmp_path) as page:
        page.wait("document.readyState == 'complete' && at('state').textContent == 'ready'")
        assert page.run("at('running').textContent") == "0 of 4"
        assert page.run("at('pages').textContent") == "0 · 0 · 32"
        page.run("at('prompt').value = 'one'; at('tokens').value = 20")
        page.run("at('temperature').value = 0; at('send').click()")
        page.wait("at('answer').textContent.includes('the API key is missing or wrong')")
        page.run("at('key').value = 'secret'; at('key').dispatchEvent(new Event('change'))")
        page.wait("at('model').textContent == 'tiny'")
        page.run("at('send').click()")
        page.wait("at('send').disabled == false && at('answer').textContent.length > 0")
        page.run("at('kind').value = 'chat/completions'; at('send').click()")
        page.wait("at('send').disabled == false && at('answer').textContent.length > 0")
        page.wait("at('first').textContent.endsWith('s')")
        assert service.thread.stats.answer_tokens > 20
        asked = {m["params"]["request"]["url"] for m in page.messages if "request" in m["params"]}
        assert all(url.startswith(address) for url in asked), "no resource of another host"
        errors = [m for m in page.messages if m["method"] == "Runtime.exceptionThrown"]
        assert not errors
