"""report.html: one self-contained page about one run or several. Opens offline, without a server.

Everything a model or a command wrote is data: the index is JSON with every < > & escaped, the long texts are compressed
blocks that the page unpacks when they are asked for, and the page puts both into text nodes only. Its security policy
names the hash of its one script, so that no other script can run, and forbids every request.
"""

import base64
import hashlib
import io
import json
import re
import time
import zlib
from pathlib import Path

from flatlab.runs import plots, search_plots
from flatlab.runs.reader import RunData, number, transcripts
from flatlab.runs.store import plain, write_whole

TEMPLATE = Path(__file__).resolve().parents[2] / "configs" / "report.html"
BLOCK = 1 << 20  # characters of texts that are compressed together
LONGEST = 200_000  # characters of one text; the run directory has all of it


def script_json(value) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(plain(value, finite=True))  # ASCII: U+2028 and U+2029 are escaped as well
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def cut(text) -> str:
    """Very long texts without their middle."""
    text = str(text or "")
    if len(text) <= LONGEST:
        return text
    gap = f"\n[... {len(text) - LONGEST} characters left out: see episodes/ ...]\n"
    return text[: LONGEST // 2] + gap + text[-LONGEST // 2 :]


def texts_of(item: dict) -> dict:
    """What the page shows of one transcript once it is opened."""
    decision = item.get("decision") or {}
    candidates = decision.get("scores") if isinstance(decision.get("scores"), dict) else {}
    found = {
        "prompt": cut(item["prompt"]),
        "error": cut(item["error"]),
        "idea": cut(item.get("idea")),
        "diff": cut(item.get("diff")),
        "code": {str(name): cut(text) for name, text in (item.get("code") or {}).items()},
        "reason": cut(decision.get("reason")),
        "notes": {key: cut(decision[key]) for key in ("reflection", "memory") if decision.get(key)},
        "candidates": sorted(
            ([str(id), v] for id, value in candidates.items() if (v := number(value)) is not None),
            key=lambda p: -p[1],
        )[:12],
        "ideas": [
            [cut(idea[0]), number(idea[1])]
            for idea in item.get("ideas") or []
            if isinstance(idea, list) and len(idea) == 2
        ],
        "turns": [
            {
                "reply": cut(turn.get("reply")),
                "observation": cut(turn.get("observation")),
                "status": str(turn.get("status") or ""),
                "score": number(turn.get("score")),
                "seconds": number(turn.get("seconds_env", turn.get("seconds"))),
            }
            | (
                {"action": cut(turn["action"])}
                if turn.get("action") and str(turn["action"]) not in str(turn.get("reply"))
                else {}
            )
            for turn in item["turns"]
        ],
    }
    return {key: value for key, value in found.items() if value}


def pack(texts: list[dict]) -> tuple[list[str], list[tuple[int, int]]]:
    """Blocks of compressed JSON lists, and for each text its (block, place)."""
    blocks, where, parts, size = [], [], [], 0

    def close():
        blocks.append(base64.b64encode(zlib.compress(f"[{','.join(parts)}]".encode(), 6)).decode())
        parts.clear()

    for text in texts:
        line = json.dumps(plain(text, finite=True))
        if parts and size + len(line) > BLOCK:
            close()
            size = 0
        where.append((len(blocks), len(parts)))
        parts.append(line)
        size += len(line)
    if parts:
        close()
    return blocks, where


def items_of(record: RunData, run: int, items: list[dict]) -> list[dict]:
    """The index: what the list, the tree and the filters need of each transcript."""
    places = search_plots.layout(record.rows) if record.kind == "search" else {}
    scores = [item["score"] for item in items if item["score"] is not None]
    baseline = number(record.result.get("baseline"))
    low, high = search_plots.colour_limits(
        record, [*scores, *([] if baseline is None else [baseline])] or [0.0, 1.0]
    )
    rows, tasks = [], {item["task"] for item in items if "task" in item}
    for item in items:
        row = {
            "run": run,
            "id": item["id"],
            "outcome": item["outcome"],
            "status": item["status"],
            "score": item["score"],
            "turns": len(item["turns"]),
            "tokens": item["tokens"],
            "seconds": item["seconds"],
        }
        if item["score"] is not None:
            shade = min(1.0, max(0.0, (item["score"] - low) / (high - low)))
            row["shade"] = round(
                1 - shade if record.result.get("higher_is_better") is False else shade, 3
            )
        if len(tasks) > 1:
            row["task"] = item["task"]
        if record.kind == "search":
            y, x, parent = places.get(item["id"], (0.0, 0, "0"))
            row |= {
                "x": x,
                "y": y,
                "parent": parent,
                "op": item["op"],
                "sampling_mode": item["sampling_mode"],
                "idea": item["idea"][:160],
                "second": item["second"],
            }
        rows.append({key: value for key, value in row.items() if value not in (None, "")})
    return rows


def run_of(record: RunData) -> dict:
    """What the page says about a run."""
    path = search_plots.best_path(record) if record.kind == "search" else []
    return {
        "name": record.name,
        "kind": record.kind,
        "heading": plots.heading(record),
        "metric": str(record.result.get("metric", "score")),
        "lower": record.result.get("higher_is_better") is False,
        "baseline": number(record.result.get("baseline")),
        "status": record.status,
        "path": path,
        "root": list(search_plots.layout(record.rows)["0"][:2])
        if record.kind == "search"
        else None,
        "result": [[key, text_of(value)] for key, value in record.result.items()],
        "config": [[key, text_of(value)] for key, value in record.config.items()],
    }


def text_of(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {text_of(v)}" for key, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(text_of, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def picture(title: str, width: float, height: float, draw) -> dict:
    """A plot as a data: address."""
    with plots.figure_of(width, height) as figure:
        draw(figure)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=130)
    return {
        "title": title,
        "src": "data:image/png;base64," + base64.b64encode(out.getvalue()).decode(),
        "wide": width > 9,
    }


def pictures(records: list[RunData]) -> list[dict]:
    """One picture per panel, so that they can stand below each other on a phone."""
    from flatlab.runs import compare

    groups_by_place, found = compare.groups_of(records), []
    for (kind, task), groups in groups_by_place.items():
        if len(records) == 1:
            groups = [plots.Group(records[0].name, plots.BLUE, records)]
        for panel in compare.PANELS[kind][0]:

            def draw(figure, panel=panel, groups=groups):
                plots.draw_panel(figure.subplots(), panel, groups)
                if len(groups) > 1:
                    figure.legend(
                        handles=[compare.line_of(group) for group in groups],
                        loc="outside lower center",
                        ncols=2,
                        fontsize=9,
                    )

            title = (
                " against ".join(filter(None, [panel[0], panel[1]]))
                if "Best" in panel[0]
                else panel[0]
            )
            found.append(
                picture(
                    f"{task}: {title}" if len(groups_by_place) > 1 else title,
                    6,
                    4.2 if len(groups) > 1 else 3.8,
                    draw,
                )
            )
    for kind in sorted({kind for kind, _ in groups_by_place}):
        rows = compare.comparison(records, kind)
        if len(rows) > 1:
            size = compare.sheet_size(rows)
            found.append(
                picture(
                    "Heat map, ranks, performance profiles",
                    *size,
                    lambda figure: compare.draw_sheet(figure, records, kind),
                )
            )
    return found


def page(records: list[RunData], watching=False) -> str:
    """The whole page as text."""
    index, texts = [], []
    for run, record in enumerate(records):
        items = transcripts(record)
        index += items_of(record, run, items)
        texts += map(texts_of, items)
    blocks, where = pack(texts)
    for row, place in zip(index, where):
        row["at"] = place
    title = records[0].name if len(records) == 1 else f"{len(records)} runs"
    data = {
        "title": title,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "watching": watching and any(r.running for r in records),
        "runs": [run_of(record) for record in records],
        "plots": pictures(records),
        "items": index,
    }
    if len(records) > 1:
        from flatlab.runs import compare

        data["table"] = compare.table(records)
    template = TEMPLATE.read_text()
    hashes = {
        tag: base64.b64encode(
            hashlib.sha256(re.search(f"<{tag}>(.*?)</{tag}>", template, re.S)[1].encode()).digest()
        ).decode()
        for tag in ("style", "script")
    }
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes['style']}'; "
        f"script-src 'sha256-{hashes['script']}'"
    )
    parts = {
        "POLICY": policy,
        "DATA": script_json(data),
        "BLOCKS": "\n".join(
            f'<script type="text/plain" class="block">{block}</script>' for block in blocks
        ),
    }
    # in one pass: data may hold these words
    return re.sub(r"@@(POLICY|DATA|BLOCKS)@@", lambda found: parts[found[1]], template)


def write(records: list[RunData], path: Path, watching=False) -> Path:
    """Write the page; a browser sees the old one or the new one."""
    write_whole(path, page(records, watching))
    return path
