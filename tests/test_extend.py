"""docs/extend.md: its diffs apply to the code of today, and what they add is there."""

import re
import shutil
from pathlib import Path

from helpers import python

ROOT = Path(__file__).parents[1]
ADDED = """
import grpo, search, torch
from pathlib import Path
from types import SimpleNamespace
from flatlab.world.texts import load_prompts
from flatlab.sandbox.client import get_backend, pick_backend
cfg = grpo.Config(reward="thrifty", loss="tis")
assert grpo.REWARDS["thrifty"](0.5, type("E", (), {"turns": [1, 2]})) == 0.46
logp = torch.zeros(2, requires_grad=True)
loss = grpo.LOSSES["tis"]
value, clipped = loss.function(logp, torch.tensor([0.0, -2.0]), torch.ones(2), None, cfg)
assert clipped.tolist() == [False, True] and loss.weight(1, 4, 1, cfg) == 0.25
assert grpo.ENTROPY_BONUS == 0.01
said = SimpleNamespace(output="mean 1", timed_out=False, exit_code=0)
box = SimpleNamespace(run=lambda command, timeout: said if command[-1] == "a.csv" else None)
tool = grpo.agent_loop(cfg).keywords["act"]
reply = "describe a.csv"
assert tool(SimpleNamespace(sandbox=box), reply, 1) == (reply, "mean 1", "ok", None)
assert tool(None, "no block", 1)[2] == "rejected"
texts = load_prompts("configs/prompts/agent.yaml")
assert texts.path.resolve().is_relative_to(Path.cwd().resolve()), texts.path
told = dict(workspace="/w", artefact="a.csv", ends_at_score=False)
system = texts.fill("system", **told)
assert system.endswith("\\nTry the simplest rule first.") and "describe data/train.csv" in system
assert "epsilon_greedy" in search.SELECT
parent = type("Parent", (), {"code": {"a.py": "x"}, "op": "improve", "valid": True})
choice = search.Choice("0.0", "exploit")
assert search.OPERATORS["simplify"].applies(choice, parent)
node = SimpleNamespace(op="simplify", idea="")
assert "half as long" in texts.fill("node", summary="", parents=[], node=node, phase="exploit")
wanted = dict(mode="sequence", k=3, tau=0.1)
facts = dict(about="", summary="", parent=None, tried=[])
assert "an expert would try" in texts.fill("strategies", **facts, **wanted)
assert get_backend("gvisor").is_container and pick_backend("gvisor")[0] == "gvisor"
"""


def apply(path: Path, diff: str):
    """Applies hunks (separated by @@) whose old lines stand in the file as they are."""
    text = path.read_text()
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-"))
        new = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+"))
        if not old:  # only additions: at the end
            text += f"\n{new}\n"
            continue
        assert text.count(old) == 1, f"{path.name} does not hold once:\n{old}"
        text = text.replace(old, new)
    path.write_text(text)


def test_the_diffs_of_the_documentation(tmp_path):
    for name in (
        "grpo.py",
        "search.py",
        "learning.py",
        "env.py",
        "policy.py",
        "tasks.py",
        "viz.py",
        "configs",
    ):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    shutil.copytree(ROOT / "flatlab", tmp_path / "flatlab")
    text = (ROOT / "docs/extend.md").read_text()
    file = ""
    count = 0
    for name, diff in re.findall(
        r"`([a-z_/]+\.(?:py|yaml))`[,:\n ]|```diff\n(.*?)```", text, re.DOTALL
    ):
        if name:
            file = name
        else:
            apply(tmp_path / file, diff)
            count += 1
    assert count == 14
    done = python("-c", ADDED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1500:]
