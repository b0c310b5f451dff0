"""The page in a real browser: click, search, compare; no text becomes markup, no request leaves."""

import json
import random
import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from subprocess import DEVNULL
from urllib.request import urlopen

import pytest
from websockets.sync.client import connect

from flatlab.runs import store
from flatlab.view import page, reader
from helpers import MADE_BY, RESULT, episode, node, search_result, step_row, turn

pytestmark = pytest.mark.usefixtures("quick_provenance")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium here (Debian, Ubuntu: apt install chromium)"
)
HOSTILE = (
    "</pre></script><script>document.title='owned'</script><img src=http://example.com/x "
    "onerror=\"document.title='owned'\"> <!-- \u2028 ${1} &amp; \ud800 {{ 7 * 7 }}"
)


class Browser:
    """Chromium without a window, driven by its debugging protocol."""

    def __init__(self, folder):
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        flags += " --disable-background-networking --remote-debugging-port=0"
        command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=DEVNULL, stderr=DEVNULL)
        file = Path(folder, "DevToolsActivePort")
        while not file.exists() or not file.read_text():
            assert self.process.poll() is None
            time.sleep(0.05)
        port = file.read_text().split()[0]
        with urlopen(f"http://127.0.0.1:{port}/json") as answer:
            (tab,) = (tab for tab in json.load(answer) if tab["type"] == "page")
        self.stack = ExitStack()
        self.socket = self.stack.enter_context(connect(tab["webSocketDebuggerUrl"], max_size=None))
        self.ids = count(1)
        self.events = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        number = next(self.ids)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def js(self, code):
        """The value of an expression."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def set(self, id, text, event):
        field = f"document.getElementById({json.dumps(id)})"
        self.js(f"{field}.value = {json.dumps(text)}; {field}.dispatchEvent(new Event('{event}'))")

    def until(self, code, seconds=20):
        end = time.monotonic() + seconds
        while not (value := self.js(code)):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.03)
        return value

    def open(self, path, fragment=""):
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri() + fragment)
        self.until("document.readyState == 'complete' && !!document.getElementById('list')")

    def shown(self):
        """The ids of the episodes in the list, in order."""
        code = "[...document.querySelectorAll('#list > .episode:not([hidden])')].map(e => e.id)"
        return self.js(code)

    def complaints(self):
        """Console errors and warnings, exceptions, and requests for anything but the page."""
        self.js("1")
        complaints = []
        for event in self.events:
            method, params = event["method"], event["params"]
            bad = method == "Runtime.exceptionThrown"
            if method == "Log.entryAdded":
                bad = params["entry"]["level"] in ("error", "warning")
            if method == "Network.requestWillBeSent":
                bad = not params["request"]["url"].startswith(("file:", "data:", "about:"))
            if bad:
                complaints.append(params)
        return complaints

    def close(self):
        self.stack.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


def search_run(folder, nodes, **result):
    config = {"task": "titanic", "sampling_mode": "tail", "select": "ucb", "seed": 0}
    run = store.open_run(folder, config | {"model": "tiny"}, MADE_BY)
    run.result(**search_result(nodes, status="finished", **result))
    (run.dir / "journal.jsonl").write_text("".join(map(store.json_line, nodes)))
    for row in nodes:
        read = {"node": row["id"], "system": "Be brief.", "prompt": f"first message of {row['id']}"}
        run.save_episodes(row["order"], [read])
    run.lock.close()
    return reader.read_run(folder)


def training_run(folder, episodes_per_step):
    config = {"task": "titanic", "seed": 0, "steps": len(episodes_per_step)}
    run = store.open_run(folder, config, MADE_BY)
    run.result(**RESULT)
    for step, episodes in enumerate(episodes_per_step):
        run.log(step_row(step))
        run.save_episodes(step, episodes)
    run.lock.close()
    return reader.read_run(folder)


def written(tmp_path, *runs):
    folder = runs[0].dir if len(runs) == 1 else tmp_path
    return page.write(list(runs), folder)[-1]


# ------------------------------------------------------------------ without a browser


def test_the_page_of_a_long_training_shows_a_sample_and_says_so(tmp_path):
    """The last steps and the evaluations are always there."""
    run = training_run(tmp_path / "run", [[episode(0.7)]] * 40)
    store.Run(run.dir, {}, None).save_episodes("eval-000009", [episode(0.6)])
    html = written(tmp_path, run).read_text()
    assert "transcripts of 4 of 41 files of episodes" in html
    assert re.findall(' id="([^"]+)/[0-9]+"', html) == ["37", "38", "39", "eval-9"]


def test_the_page_of_a_large_search_lists_all_nodes_and_has_the_best_transcripts(tmp_path):
    rng = random.Random(0)
    nodes = [node("0.0", 0.6)]
    for number in range(399):
        parent = rng.choice(nodes[-300:])["id"]
        nodes.append(node(f"{parent}.{number}", rng.random(), order=number + 1))
    nodes[234] |= {"score": 2.0, "improvement": 2.0}
    html = written(tmp_path, search_run(tmp_path / "run", nodes)).read_text()
    assert html.count('<details class="episode') == 400
    shown = int(re.search("transcripts of (3[0-9]+) of 400 nodes", html)[1])
    assert html.count("is not on the page") == 400 - shown
    best = html.split(f' id="{nodes[234]["id"]}"')[1].split("</details>")[0]
    assert "is not on the page" not in best


# ------------------------------------------------------------------ in a browser


@needs_browser
def test_click_search_filter_sort_and_compare_nodes(tmp_path, browser):
    nodes = [
        node("0.0", 0.7),
        node("0.1", None),
        node("0.0.0", 0.75, "improve", code={"solve.py": "needle in the code\n"}),
        node("0.0.1", 0.65, "merge", mark="d"),
    ]
    browser.open(written(tmp_path, search_run(tmp_path / "run", nodes)), "#0.1")
    body = browser.js("document.body.innerText")
    assert "Best node (0.0.0): accuracy 0.7500 (validation part" in body
    assert "1 of 4 failed and count as the baseline" in body
    assert browser.js("document.getElementById('0.1').open")
    assert "KeyError: 'missing'" in body
    links = "[...document.querySelectorAll('svg a')].map(a => a.getAttribute('xlink:href'))"
    assert {"#0.0", "#0.1", "#0.0.0", "#0.0.1"} < set(browser.js(links))
    click = "new MouseEvent('click', {bubbles: true, cancelable: true, view: window})"
    link = "document.querySelector('svg a[*|href=\"#0.0.0\"]')"
    browser.js(f"{link}.dispatchEvent({click})")
    browser.until("document.getElementById('0.0.0').open")
    browser.js("document.querySelectorAll('details details').forEach(d => d.open = true)")
    detail = browser.js("document.getElementById('0.0.0').innerText")
    for text in ("Be brief.", "first message of 0.0.0", "needle in the code", "highest bound"):
        assert text in detail
    for text in ("output of 0.0.0", "+new line", "0.75"):
        assert text in detail

    for id in ("0.0.0", "0.1", "0.0"):  # two at most
        browser.js(f"document.getElementById('{id}').querySelector('button').click()")
    pair = browser.js("document.getElementById('pair').innerText")
    assert "output of 0.1" in pair
    assert "output of 0.0\n" in pair
    assert "output of 0.0.0" not in pair
    browser.js("document.querySelectorAll('#pair button').forEach(b => b.click())")
    assert browser.js("document.getElementById('pair').children.length") == 0

    browser.set("find", "NEEDLE", "input")
    assert browser.shown() == ["0.0.0"]
    browser.set("find", "", "input")
    browser.set("status", "failed", "change")
    assert browser.shown() == ["0.1"]
    browser.set("status", "", "change")
    browser.set("sort", "score", "change")
    assert browser.shown() == ["0.0.0", "0.0", "0.0.1", "0.1"]
    assert browser.complaints() == []


@needs_browser
def test_several_runs_on_one_page(tmp_path, browser):
    nodes = [node("0.0", 0.7, seed=1), node("0.1", None, seed=2)]
    numbers = {"node_mean": 0.65, "split": "validation", "evaluation": True}
    runs = [search_run(tmp_path / name, nodes) for name in ("one", "two")]
    runs.append(search_run(tmp_path / "episodes", nodes, **numbers))
    runs.append(training_run(tmp_path / "training", [[episode(0.7)], [episode(0.8)]]))
    browser.open(written(tmp_path, *runs), "#1/0.0")
    assert browser.js("document.querySelectorAll('svg').length") == 2
    assert browser.js("document.getElementById('1/0.0').open")
    assert not browser.js("document.getElementById('0/0.0').open")
    assert len(browser.shown()) == 8
    assert "Mean of all episodes: accuracy 0.6500 ± 0.0500" in browser.js("document.body.innerText")
    assert browser.complaints() == []


@needs_browser
def test_hostile_text_stays_text(tmp_path, browser):
    bad = node(
        "0.0",
        0.7,
        op=HOSTILE,
        sampling_mode=HOSTILE,
        idea=HOSTILE,
        error=HOSTILE,
        code={HOSTILE: HOSTILE},
        diff=HOSTILE,
        status=HOSTILE,
        actions=[turn(HOSTILE, HOSTILE, HOSTILE, action=HOSTILE)],
        decision={"reason": HOSTILE},
    )
    run = search_run(tmp_path / "run", [bad], metric=HOSTILE)
    browser.open(written(tmp_path, run), "#0.0")
    browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.js("document.getElementById('0.0').innerText.split('owned').length") > 16
    assert "{{ 7 * 7 }}" in browser.js("document.getElementById('0.0').innerText")
    assert browser.js("document.title") == "run"
    assert browser.js("document.querySelectorAll('script').length") == 1
    assert browser.js("[...document.images].every(i => i.src.startsWith('data:'))")
    assert browser.complaints() == []
    # and if a hole were found: the page's policy runs no script but its own, and requests nothing
    hole = '<img src=http://127.0.0.1:9/x onerror="document.title=1">'
    hole += '<svg onload="document.title=1"></svg>'
    browser.js(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(hole)})")
    time.sleep(0.2)
    assert browser.js("document.title") == "run"
    answers = [e for e in browser.events if e.get("method") == "Network.responseReceived"]
    assert not [answer for answer in answers if "127.0.0.1" in json.dumps(answer)]
