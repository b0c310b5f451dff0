"""docs/extend.md: its diffs apply to the code of today, and what they add is there."""

import re
import shutil
from pathlib import Path

from helpers import output_of

ROOT = Path(__file__).parents[1]
ADDED = """
import inspect
import grpo, search, torch
from pathlib import Path
from types import SimpleNamespace
from flatlab.view import plots
from flatlab.world.prompts import load_prompts
from flatlab.sandbox.client import get_backend, pick_backend
cfg = grpo.Config(reward="thrifty", loss="tis")
assert grpo.REWARDS["thrifty"](SimpleNamespace(improvement=0.5, turns=[1, 2])) == 0.46
logp = torch.zeros(2, requires_grad=True)
loss = grpo.LOSSES["tis"]
value, clipped = loss.function(logp, torch.tensor([0.0, -2.0]), torch.ones(2), None, cfg)
assert clipped.tolist() == [False, True] and loss.weight(1, 4, 1, cfg) == 0.25
over_best = grpo.ADVANTAGES["over_best"]
assert over_best([0.5, 0.25, 1.0]) == [-0.5, -0.75, 0.5] and over_best([1, 1, 0]) == [0, 0, -1]
assert "torch.optim.RMSprop" in inspect.getsource(grpo.train)
rates = [grpo.learning_rate(step, SimpleNamespace(lr=1, steps=10)) for step in (0, 5, 10)]
assert rates == [0.2, 0.5, 0]
assert "turns longest" in plots.PANELS["training"]
said = SimpleNamespace(output="mean 1", stopped="", exit_code=0)
box = SimpleNamespace(run=lambda command, timeout: said if command[-1] == "a.csv" else None)
box.workspace = "/w"
assert "play, act=act_or_describe" in inspect.getsource(grpo.train)
tool = grpo.act_or_describe
reply = "describe a.csv"
assert tool(SimpleNamespace(sandbox=box), reply, 1) == (reply, "mean 1", "ok", None)
task = SimpleNamespace(program="", collect="")
assert tool(SimpleNamespace(task=task, sandbox=box), "no block", 1)[2] == "rejected"
texts = load_prompts("configs/prompts/agent.yaml")
assert texts.path.resolve().is_relative_to(Path.cwd().resolve()), texts.path
told = dict(task=task, workspace="/w", artefact="a.csv", program="", ends_at_score=False)
system = texts.fill("system", **told)
assert system.endswith("\\nTry the simplest rule first.") and "describe data/train.csv" in system
assert "epsilon_greedy" in search.SELECT
parent = type("Parent", (), {"code": {"a.py": "x"}, "op": "improve", "valid": True})
choice = search.Choice("0.0", "exploit")
assert search.OPERATORS["simplify"].applies(choice, parent)
node = SimpleNamespace(op="simplify", idea="")
assert "half as long" in texts.fill("node", summary="", parents=[], node=node, phase="exploit")
assert get_backend("gvisor").is_container and pick_backend("gvisor")[0] == "gvisor"
"""


def changes(diff: str) -> list[tuple[str, str]]:
    """(old lines, new lines) of each hunk; hunks are separated by @@. No old lines: at the end."""
    hunks = [hunk.splitlines() for hunk in diff.split("@@\n")]
    return [
        tuple("\n".join(line[1:] for line in hunk if line[:1] in kept) for kept in (" -", " +"))
        for hunk in hunks
    ]


def apply(files: list[Path], diff: str) -> Path:
    """Changes the one file in which all old lines of a diff stand as they are, and returns it."""
    hunks = changes(diff)
    [path] = [
        path for path in files if all(path.read_text().count(old) == 1 for old, _ in hunks if old)
    ]
    text = path.read_text()
    for old, new in hunks:
        text = text.replace(old, new) if old else f"{text}\n{new}\n"
    path.write_text(text)
    return path


def test_the_diffs_of_the_documentation(tmp_path):
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(ROOT / "flatlab", tmp_path / "flatlab")
    files = [*tmp_path.glob("*.py"), *tmp_path.glob("flatlab/**/*.py")]
    files.append(tmp_path / "configs/prompts/agent.yaml")
    count = 0
    for section in (ROOT / "docs/extend.md").read_text().split("\n## "):
        for diff in re.findall(r"```diff\n(.*?)```", section, re.DOTALL):
            path = apply(files, diff)
            assert f"`{path.relative_to(tmp_path)}`" in section
            count += 1
    assert count == 16
    output_of("-c", ADDED, cwd=tmp_path)
