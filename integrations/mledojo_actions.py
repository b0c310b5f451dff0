"""MLE-Dojo's five actions, for agents that know them: a JSON object instead of a bash block.

    world.message = mledojo_actions.ACTIONS_TEXT        # ends the first message
    world.step('{"action": "execute_code", "params": {"code": "..."}}', act=mledojo_actions.act)

Needs a task of MLE-Dojo.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from weakref import WeakKeyDictionary

from flatlab.errors import ArtefactError, SandboxFault
from flatlab.task.grading import Score
from flatlab.world.episode import act_bash, run_text, score_text, without_thought

ACTIONS_TEXT = """\
Instead of a bash block, a reply may be one JSON object {"action": ..., "params": {...}}:
request_info (info_type: overview, sample_submission, data_structure, data_path, output_path, \
name, metadata or all),
validate_code (code: is run, what it submits is dropped), execute_code (code: is run, what it \
submits is scored),
get_history, reset. Code runs in the workspace and writes submission.csv there."""
SUBMISSION = "submission.csv"
SAMPLE_LINES = 4  # of the sample submission, with its header
LISTED_FILES = 200
JSON_BLOCK = re.compile(r"^ {0,3}```[ \t]*json[ \t]*\n(.*?)^ {0,3}```[ \t]*$", re.S | re.M | re.I)
ACTIONS = ("request_info", "validate_code", "execute_code", "get_history", "reset")
# get_history shows the other actions that ran: code, bash blocks, and gradings.
NOT_IN_HISTORY = ("request_info", "get_history", "reset", "submit")
histories = WeakKeyDictionary()  # sandbox -> rows of get_history; a reset opens a new sandbox


def history(env) -> list[dict]:
    """What ran in the environment's present sandbox."""
    return histories.setdefault(env.sandbox, [])


def json_action(reply: str) -> dict | None:
    """{"action": ..., its parameters} of a reply that is a JSON object or has one ```json block."""
    text = without_thought(reply)
    blocks = JSON_BLOCK.findall(text)
    if len(blocks) == 1:
        text = blocks[0]
    try:
        request = json.loads(text, strict=False)  # models write line breaks inside strings
        params = request.get("params", request)
        return {**params, "action": str(request["action"])}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def act(env, reply: str, timeout: float) -> tuple[str | None, str, str, Score | None]:
    """Runs the JSON action or the bash block of a reply: (action, observation, status, score).

    timeout: seconds, for code.
    """
    request = json_action(reply)
    if request is None:
        action, observation, status, score = act_bash(env, reply, timeout)
        name = "validate" if score else "submit" if status == "submit" else "bash"
    else:
        action = json.dumps(request)
        name = request["action"]
        observation, status, score = run_action(env, request, timeout)
    if status != "rejected" and name not in NOT_IN_HISTORY:
        value = score.value if score else None
        row = {"step": len(history(env)) + 1, "action": name, "status": status, "score": value}
        history(env).append(row)
    return action, observation, status, score


# ------------------------------------------------------------------------------------ the actions


def run_action(env, request: dict, timeout: float) -> tuple[str, str, Score | None]:
    """Runs one of the five actions: (observation, status, score or None)."""
    match request["action"]:
        case "request_info":
            return *request_info(env, request), None
        case "validate_code":
            return *run_code(env, request, timeout, keep=False), None
        case "execute_code":
            return execute_code(env, request, timeout)
        case "get_history":
            rows = [json.dumps(row) for row in history(env)]
            return "\n".join(rows) or "Nothing was run yet.", "ok", None
        case "reset":
            return env.reset(), "ok", None
        case name:
            names = ", ".join(ACTIONS)
            text = f"Nothing was run. There is no action {name[:40]!r}; there are {names}."
            return text, "rejected", None


def request_info(env, request: dict) -> tuple[str, str]:
    task = env.task
    workspace = env.sandbox.workspace
    files, _ = env.files(LISTED_FILES)
    sample = task.public["data/sample_submission.csv"].read_text("utf-8", "replace")
    facts = {
        "overview": task.prompt,
        "sample_submission": "".join(sample.splitlines(True)[:SAMPLE_LINES]),
        "data_structure": "\n".join(f"{path} ({size} bytes)" for path, size in files),
        "data_path": f"{workspace}/data",
        "output_path": workspace,
        "name": task.name,
        "metadata": f"{task.metric}: {task.direction}, baseline {task.baseline:.4f}",
    }
    facts["all"] = "\n\n".join(f"{name}:\n{fact}" for name, fact in facts.items())
    wanted = str(request.get("info_type", "overview"))
    if wanted not in facts:
        text = f"There is no info_type {wanted[:40]!r}; there are {', '.join(facts)}."
        return text, "rejected"
    return facts[wanted], "ok"


def execute_code(env, request: dict, timeout: float) -> tuple[str, str, Score | None]:
    observation, status = run_code(env, request, timeout, keep=True)
    if status != "ok":
        return observation, status, None
    score = env.score()
    text = f"{observation}\n{score_text(score, env.task)}"
    values = [row["score"] for row in history(env) if row["score"] is not None]
    if score.valid:
        values.append(score.value)
    if values:
        best = max(values) if env.task.higher_is_better else min(values)
        text += f"\nbest so far: {best:.4f}"
    return text, "validate" if score.valid else "invalid", score


def run_code(env, request: dict, timeout: float, keep: bool) -> tuple[str, str]:
    """Runs code as a program: (observation, status).

    The code does not see earlier submissions. They come back if it submits nothing or fails, and
    always with keep=False.
    """
    code = str(request.get("code", ""))
    if not code.strip():
        return "Nothing was run. The action needs code.", "rejected"
    box = env.sandbox
    before = submission(box)
    name = f"execution_{len(history(env)) + 1}.py"
    if problem := replace_submission(box, {name: code.encode("utf-8", "replace")}):
        # The agent has made a folder of the file's place, or moved the workspace.
        text = f"Nothing was run. {name} cannot be written into {box.workspace}: {problem}"
        return text, "rejected"
    result = box.run(["sh", "-c", 'cd "$0" && exec python3 "$1"', box.workspace, name], timeout)
    if not keep or result.exit_code or not submission(box):
        replace_submission(box, before)
    return run_text(env, result, timeout)


def submission(box) -> dict[str, bytes]:
    """The submission as it is now; {} without one."""
    with suppress(ArtefactError):
        return {SUBMISSION: box.get(SUBMISSION)}
    return {}


def replace_submission(box, files: dict[str, bytes]) -> str:
    """Removes the submission and writes files; returns why that is impossible, or ""."""
    try:
        box.remove([SUBMISSION])
        box.put(files)
    except SandboxFault as fault:
        if box.broken:
            raise
        return str(fault)
    return ""
