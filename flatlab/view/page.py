"""report.html: one self-contained page about one run or several. It opens without a server.

What a model or a command wrote is data. The index is JSON with every < > & escaped. Long texts are
compressed blocks that the page unpacks when they are opened. The page puts both into text nodes
only. Its security policy names the hash of its one script, so no other script can run, and it
forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

from flatlab.files import write_whole
from flatlab.runs.fingerprint import ROOT
from flatlab.runs.reader import RunData, read_part, result_text, transcript_parts
from flatlab.runs.store import plain
from flatlab.train.metrics import final_table
from flatlab.view import compare, plots, search_plots

TEMPLATE = ROOT / "configs" / "report.html"
LISTED = ("id", "outcome", "status", "score", "stderr", "tokens", "seconds")
LISTED += ("task", "op", "mark", "sampling_mode", "second")
TEXTS = ("system", "prompt", "error", "idea", "diff", "code", "ideas", "decision", "turns")
LONG = ("final", "hidden_scores")  # of the result: not in its table
BLOCK = 32  # texts that are compressed together
PAGE_BYTES = 10_000_000  # about the largest page: of longer runs it holds a sample


def write(runs: list[RunData], path: Path) -> Path:
    """Writes the page."""
    write_whole(path, page(runs))
    return path


def page(runs: list[RunData]) -> str:
    """The whole page as text."""
    index, blocks, notes = [], [], []
    for number, run in enumerate(runs):
        rows, note = sample(run, number, blocks, PAGE_BYTES / len(runs))
        index += rows
        notes += [note] if note else []
    data = {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [run_of(run) for run in runs],
        "plots": pictures(runs),
        "items": index,
        "sample": " ".join(notes),
        "table": compare.table(runs) if len(runs) > 1 else final_table(runs[0].result),
    }
    template = TEMPLATE.read_text()
    style, script = hash_of("style", template), hash_of("script", template)
    tags = [f'<script type="text/plain" class="block">{block}</script>' for block in blocks]
    parts = {
        "POLICY": f"default-src 'none'; img-src data:; style-src {style}; script-src {script}",
        "DATA": script_json(data),
        "BLOCKS": "\n".join(tags),
    }
    # in one pass, because the data may hold these words
    return re.sub(r"@@(POLICY|DATA|BLOCKS)@@", lambda mark: parts[mark[1]], template)


def hash_of(tag: str, template: str) -> str:
    """The source expression that allows the only element `tag` of the template."""
    content = re.search(f"<{tag}>(.*?)</{tag}>", template, re.S)[1]
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def script_json(value) -> str:
    """JSON for a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(plain(value, finite=True))  # ASCII: U+2028 and U+2029 are escaped as well
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# ------------------------------------------------------------------ long texts


def sample(run: RunData, number: int, blocks: list[str], limit: float) -> tuple[list[dict], str]:
    """Adds the texts of a run to the blocks: all, or those of every second, fourth, ... step or
    node, so that index and texts take at most about `limit` bytes.

    number: of the run on the page. Returns the rows of the index and a sentence about what is not
    shown. The last step and the path to the best node always are. The index of a search is
    complete, because the tree needs it.
    """
    parts = transcript_parts(run)
    noun = "step"
    always = {*range(len(parts))[-1:]}
    index = {}  # number of the part -> its rows
    if run.kind != "grpo":
        noun = "node"
        rows = items_of(run, number, [row | {"turns": row["actions"]} for row in parts])
        index = {i: [row] for i, row in enumerate(rows)}
        path = search_plots.best_path(run)
        always = {i for i, row in enumerate(parts) if row["id"] in path}
    shown = set()
    first = len(blocks)
    stride = 2 << len(parts).bit_length()
    # each round about doubles the size
    while stride > 1 and (not shown or 2 * size_of(index, blocks[first:]) <= limit):
        stride //= 2
        new = sorted((always | {*range(0, len(parts), stride)}) - shown)
        shown.update(new)
        texts = []
        for i in new:
            items = read_part(run, parts[i])
            index[i] = index.get(i) or items_of(run, number, items)
            for row, item in zip(index[i], items):
                row["at"] = (len(blocks) + len(texts) // BLOCK, len(texts) % BLOCK)
                texts.append({key: item[key] for key in TEXTS if item.get(key)})
        blocks += pack(texts)
    note = ""
    if len(shown) < len(parts):
        note = (
            f"{run.name} is long: this page shows the transcripts of every {stride}th {noun} and "
            f"some more, {len(shown)} of {len(parts)}. "
            f"python viz.py {run.dir} --list lists all, and --episode prints one."
        )
    return [row for i in sorted(index) for row in index[i]], note


def size_of(index: dict, blocks: list[str]) -> int:
    """Bytes on the page."""
    return len(script_json(list(index.values()))) + sum(map(len, blocks))


def pack(texts: list[dict]) -> list[str]:
    """Compressed JSON lists of BLOCK texts each."""
    blocks = []
    for start in range(0, len(texts), BLOCK):
        block = json.dumps(plain(texts[start : start + BLOCK], finite=True))
        blocks.append(base64.b64encode(zlib.compress(block.encode())).decode())
    return blocks


# ------------------------------------------------------------------ the index


def items_of(run: RunData, number: int, items: list[dict]) -> list[dict]:
    """What the list, the tree and the filters need of each transcript."""
    tree, limits = {}, None
    shades = (0, 1) if run.higher_is_better else (1, 0)  # 0: the worst colour
    if run.kind == "search":
        tree = search_plots.layout(run.rows)
        limits = search_plots.colour_limits(run)
    rows = []
    for item in items:
        row = {"run": number, "turns": len(item["turns"])}
        row |= {key: item.get(key) for key in LISTED}
        if tree:
            x, y = tree[item["id"]]
            row |= {"x": x, "y": y, "parent": item["parent"], "idea": item["idea"][:160]}
            if item["score"] is not None:
                row["shade"] = round(float(np.interp(item["score"], limits, shades)), 3)
        rows.append({key: value for key, value in row.items() if value not in (None, "")})
    return rows


def run_of(run: RunData) -> dict:
    """What the page says about a run."""
    root = search_plots.layout(run.rows)["0"] if run.kind == "search" else None
    result = run.result.items()
    return {
        "name": run.name,
        "kind": run.kind,
        "heading": plots.heading(run),
        "metric": run.result["metric"],
        "lower": not run.higher_is_better,
        "baseline": run.baseline,
        "status": run.status,
        "path": search_plots.best_path(run),
        "root": root,
        "result": [[key, result_text(value)] for key, value in result if key not in LONG],
        "config": [[key, result_text(value)] for key, value in run.config.items()],
    }


# ------------------------------------------------------------------ pictures


def pictures(runs: list[RunData]) -> list[dict]:
    """The curves of one run, or the pictures that compare several."""
    with tempfile.TemporaryDirectory() as folder:
        if len(runs) == 1:
            paths = [compare.plot_curves(runs[0], Path(folder) / "curves.png")]
        else:
            paths = compare.plot_many(runs, Path(folder))
        return [picture(path) for path in paths]


def picture(path: Path) -> dict:
    png = base64.b64encode(path.read_bytes()).decode()
    return {"title": path.stem, "src": f"data:image/png;base64,{png}"}
