"""The page in a real browser: click, search, compare; no text becomes markup, no request leaves."""

import base64
import json
import random
import shutil
import subprocess
import time
import zlib
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from subprocess import DEVNULL
from urllib.request import urlopen

import pytest
from websockets.sync.client import connect

from flatlab.runs import reader, store
from flatlab.view import page
from helpers import MADE_BY, RESULT, episode, node, search_result, step_row, turn

pytestmark = pytest.mark.usefixtures("quick_provenance")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium here (Debian, Ubuntu: apt install chromium)"
)
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=http://example.com/x "
    "onerror=\"document.title='owned'\"> <!-- \u2028 ${1} &amp; \ud800 @@DATA@@"
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
        """The value of an expression; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def type(self, id, text, event="input"):
        field = f"document.getElementById({json.dumps(id)})"
        self.js(f"{field}.value = {json.dumps(text)}; {field}.dispatchEvent(new Event('{event}'))")

    def until(self, code, seconds=20):
        end = time.monotonic() + seconds
        while not (value := self.js(code)):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.03)
        return value

    def open(self, path, fragment=""):
        """Loads the page until its list is there."""
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri() + fragment)
        self.until(
            "document.readyState == 'complete' && "
            "document.querySelectorAll('#list tr.row').length > 0"
        )

    def complaints(self):
        """Console errors and warnings, exceptions, and requests for anything but the page."""
        self.js("1")
        complaints = []
        for event in self.events:
            method, params = event["method"], event["params"]
            bad = method == "Runtime.exceptionThrown"
            if method == "Runtime.consoleAPICalled":
                bad = params["type"] in ("error", "warning", "assert")
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
    run = store.open_run(folder, config | {"model": "tiny", "name": Path(folder).name}, MADE_BY)
    run.result(**search_result(nodes, status="finished", **result))
    (run.dir / "journal.jsonl").write_text("".join(map(store.json_line, nodes)))
    run.lock.close()
    return reader.read_run(folder)


def training_run(folder, episodes_per_step):
    run = store.open_run(
        folder, {"task": "titanic", "seed": 0, "steps": len(episodes_per_step)}, MADE_BY
    )
    run.result(**RESULT)
    for step, episodes in enumerate(episodes_per_step):
        run.log(step_row(step))
        run.save_episodes(step, episodes)
    run.lock.close()
    return reader.read_run(folder)


# ------------------------------------------------------------------ without a browser


def test_hostile_text_can_not_end_the_data_block(tmp_path):
    html = page.page(
        [search_run(tmp_path / "run", [node("0.0", 0.7, idea=HOSTILE, error=HOSTILE)])]
    )
    data = html.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&") & set(data)
    assert "\u2028" not in data
    assert json.loads(data)["items"][0]["idea"] == HOSTILE[:160]
    assert html.count("<script") == 3
    assert "owned" not in html.replace(data, "")


def test_all_texts_are_in_the_page(tmp_path):
    html = page.page(
        [
            training_run(
                tmp_path / "run",
                [[episode(0.7, "a" * 150_000), episode(None), episode(0.8, "b" * 300_000)]],
            )
        ]
    )
    blocks = [
        json.loads(zlib.decompress(base64.b64decode(part.split("</script>")[0])))
        for part in html.split('class="block">')[1:]
    ]
    index = json.loads(html.split('id="data">')[1].split("</script>")[0])["items"]
    texts = [blocks[item["at"][0]][item["at"][1]] for item in index]
    assert [item["id"] for item in index] == ["0.0", "0.1", "0.2"]
    assert [item["outcome"] for item in index] == ["valid", "failed", "valid"]
    assert texts[0]["turns"][0]["reply"] == "a" * 150_000
    assert texts[2]["turns"][0]["reply"] == "b" * 300_000
    assert "score" not in index[1]
    assert texts[1]["error"] == "no file"


def sampled(run, monkeypatch, limit):
    """The data of a page that may hold so many bytes of transcripts, and how many it holds."""
    monkeypatch.setattr(page, "PAGE_BYTES", limit)
    html = page.page([run])
    data, *blocks = html.split('id="data">')[1].split('class="block">')
    data = json.loads(data.split("</script>")[0])
    size = len(page.script_json(data["items"]))
    return data, size + sum(len(block.split("</script>")[0]) for block in blocks)


def test_the_page_of_a_long_training_shows_a_sample_of_its_steps_and_says_so(tmp_path, monkeypatch):
    rng = random.Random(0)
    steps = [[episode(0.7, str(rng.random()) * 30) for _ in range(5)] for _ in range(40)]
    run = training_run(tmp_path / "run", steps)
    whole, size = sampled(run, monkeypatch, 10_000_000)
    assert len(whole["items"]) == 200
    assert whole["sample"] == ""
    data, part = sampled(run, monkeypatch, size // 3)
    assert part < 1.1 * size / 3
    shown = {item["id"].partition(".")[0] for item in data["items"]}
    assert shown == {*map(str, range(0, 40, 4)), "39"}
    assert "every 4th step and some more, 11 of 40" in data["sample"]


def test_the_page_of_a_large_search_has_all_nodes_and_the_texts_of_the_best(tmp_path, monkeypatch):
    rng = random.Random(0)
    nodes = [node(f"0.{i}", 0.6, diff=str(rng.random()) * 30) for i in range(60)]
    nodes.append(node("0.37.0", 0.9))
    run = search_run(tmp_path / "run", nodes)
    data, _ = sampled(run, monkeypatch, 25_000)
    assert len(data["items"]) == 61
    texts = {item["id"] for item in data["items"] if "at" in item}
    assert {"0.37", "0.37.0"} < texts
    assert f"{len(texts)} of 61" in data["sample"]
    assert len(texts) < 40


def test_colours_know_the_direction(tmp_path):
    for higher, shades in ((True, [0, 1]), (False, [1, 0])):
        nodes = [node("0.0", 0.5), node("0.1", 0.9)]
        record = search_run(tmp_path / str(higher), nodes, higher_is_better=higher)
        items = page.items_of(record, 0, reader.transcripts(record))
        assert [round(item["shade"]) for item in items] == shades


# ------------------------------------------------------------------ in a browser


@needs_browser
def test_click_search_filter_and_compare_nodes(tmp_path, browser):
    nodes = [
        node("0.0", 0.7),
        node("0.1", None),
        node("0.0.0", 0.75, "improve", code={"solve.py": "needle in the code\n"}),
        node("0.0.1", 0.65, "merge", mark="d"),  # a mark that only matplotlib has
    ]
    path = page.write([search_run(tmp_path / "run", nodes)], tmp_path / "report.html")
    browser.open(path)
    assert browser.js("document.querySelectorAll('.tree .node').length") == 5
    assert browser.js("document.querySelectorAll('.plots img').length") == 1
    assert browser.js(
        "[...document.querySelectorAll('.node.best')].map(n => n.dataset.id || '0')"
    ) == ["0", "0.0", "0.0.0"]

    browser.js(
        "document.querySelector('.node[data-id=\"0.0.0\"]').dispatchEvent("
        "new MouseEvent('click', {bubbles: true}))"
    )
    detail = browser.until(
        "document.querySelector('#detail .column') && document.getElementById('detail').innerText"
    )
    for text in (
        "needle in the code",
        "idea 0.0.0",
        "highest bound",
        "output of 0.0.0",
        "+new line",
        "0.75",
    ):
        assert text in detail
    assert browser.js("location.hash") == "#0/0.0.0"

    browser.js("document.getElementById('compare').click()")
    browser.js("document.querySelector('tr.row[data-index=\"1\"]').click()")
    browser.until("document.querySelectorAll('#detail .column').length == 2")
    both = browser.js("document.getElementById('detail').innerText")
    assert "KeyError: 'missing'" in both
    assert "- needle in the code" in both
    assert "+ import csv" in both
    browser.open(path, "#0/0.0.0~0/0.1")  # such an address can be sent around
    browser.until("document.querySelectorAll('#detail .column').length == 2")
    browser.js("document.getElementById('close').click()")
    assert browser.js("document.querySelectorAll('#detail .column').length") == 0

    browser.type("search", "NEEDLE")
    browser.until("document.querySelectorAll('tr.row').length == 1")
    assert browser.js("document.querySelectorAll('.node.dim').length") == 3
    browser.type("search", "0.0")
    browser.until("document.querySelectorAll('tr.row').length == 3")
    browser.type("search", "")
    browser.until("document.querySelectorAll('tr.row').length == 4")
    browser.type("filter", "outcome:failed", "change")
    browser.until("document.querySelectorAll('tr.row').length == 1")
    assert browser.complaints() == []


@needs_browser
def test_the_page_of_an_evaluation_says_its_mean_and_shows_no_tree(tmp_path, browser):
    numbers = {"node_mean": 0.5, "node_stderr": 0.1, "split": "validation", "evaluation": True}
    nodes = [node("0.0", 0.4), node("0.1", 0.6)]
    run = search_run(tmp_path / "run", nodes, **numbers)
    browser.open(page.write([run], tmp_path / "report.html"))
    said = browser.js("document.getElementById('subtitle').innerText")
    assert "2 episodes" in said
    assert "mean 0.5000 ± 0.1000 (validation)" in said
    assert browser.js("document.querySelectorAll('.tree').length") == 0
    assert browser.js("document.querySelector('#transcripts h2').innerText") == "Episodes"
    assert browser.complaints() == []


@needs_browser
def test_two_runs_on_one_page(tmp_path, browser):
    records = [
        search_run(tmp_path / name, [node("0.0", 0.7), node("0.1", None)])
        for name in ("one", "two")
    ]
    browser.open(page.write(records, tmp_path / "report.html"), "#0/0.0~1/0.0")
    browser.until("document.querySelectorAll('#detail .column').length == 2")
    assert browser.js("document.querySelectorAll('.tree').length") == 2
    assert "one 0.0" in browser.js("document.body.innerText")
    assert "two 0.0" in browser.js("document.body.innerText")
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
        ideas=[[HOSTILE, 0.1]],
        actions=[turn(HOSTILE, HOSTILE, HOSTILE, action=HOSTILE)],
        decision={"reason": HOSTILE, "scores": {HOSTILE: 1.0}, "memory": HOSTILE},
    )
    browser.open(
        page.write([search_run(tmp_path / "run", [bad], metric=HOSTILE)], tmp_path / "report.html"),
        "#0/0.0",
    )
    browser.until("document.querySelector('#detail .column') !== null")
    browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.until("document.getElementById('detail').innerText.split('owned').length > 8")
    assert browser.js("document.title") == "run"
    assert browser.js("document.querySelectorAll('script').length") == 3
    assert browser.js("[...document.images].every(i => i.src.startsWith('data:'))")
    assert browser.complaints() == []
    # and if a hole were found: the page's policy runs no script but its own, and requests nothing
    hole = '<img src=http://127.0.0.1:9/x onerror="document.title=1">'
    hole += '<svg onload="document.title=1"></svg>'
    browser.js(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(hole)})")
    time.sleep(0.2)
    assert browser.js("document.title") == "run"
    assert not [
        e
        for e in browser.events
        if e.get("method") == "Network.responseReceived" and "127.0.0.1" in json.dumps(e)
    ]
