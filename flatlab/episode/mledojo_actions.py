"""MLE-Dojo's five actions, for agents that know them: a reply that is a JSON object instead of a bash block.

{"action": "execute_code", "params": {"code": "..."}}
"""

from __future__ import annotations

import json
import re

from flatlab.errors import ArtefactError, SandboxFault

ACTIONS_TEXT = """Instead of a bash block, a reply may be one JSON object {"action": ..., "params": {...}}:
request_info (info_type: overview, sample_submission, data_structure, data_path, output_path, name, metadata or all),
validate_code (code: is run, what it submits is dropped), execute_code (code: is run, what it submits is scored),
get_history, reset. Code runs in the workspace and writes submission.csv there."""
SAMPLE_ROWS = 3
JSON_BLOCK = re.compile(r"^ {0,3}```[ \t]*json[ \t]*\n(.*?)^ {0,3}```[ \t]*$", re.S | re.M | re.I)


def json_action(reply: str) -> dict | None:
    """{"action": ..., its parameters} from a reply that is a JSON object or has one in its only ```json block."""
    reply = reply.rpartition("</think>")[2]
    blocks = list(JSON_BLOCK.finditer(reply))
    text = blocks[0][1] if len(blocks) == 1 else reply.strip()
    if len(blocks) == 1 and "<think>" in reply[: blocks[0].start()]:
        return None  # it never stopped thinking
    try:
        request = json.loads(
            text, strict=False
        )  # with line breaks in strings, as models write them
        params = request.get("params", request)
        return {**params, "action": str(request["action"])}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def act(env, request: dict, timeout: float) -> tuple:
    """(observation, status, score) of one of the five actions in an environment."""
    name, score = request["action"], None
    if name not in ACTIONS:
        return (
            f"Nothing was run. There is no action {name[:40]!r}; there are {', '.join(ACTIONS)}.",
            "rejected",
            None,
        )
    return ACTIONS[name](env, request, timeout)


def remember(env, name: str, status: str, score) -> None:
    """Adds an action that ran to what get_history shows: code, bash blocks, and gradings."""
    if status == "rejected" or name in ("request_info", "get_history", "reset", "submit"):
        return
    value = score.value if score else None
    row = {"step": len(env.history) + 1, "action": name, "status": status, "score": value}
    env.history.append(row)


def request_info(env, request, timeout):
    task, box = env.task, env.sandbox
    files = box.call("listing", most=200)[0]["files"]
    sample = next((path for path in task.public if path.endswith("sample_submission.csv")), None)
    facts = {
        "overview": lambda: task.prompt,
        "sample_submission": lambda: (
            "".join(first_lines(task.public[sample])) if sample else "there is none"
        ),
        "data_structure": lambda: "\n".join(f"{path} ({size} bytes)" for path, size in files),
        "data_path": lambda: f"{box.workspace}/data",
        "output_path": lambda: box.workspace,
        "name": lambda: task.name,
        "metadata": lambda: (
            f"{task.metric}: {'higher' if task.higher_is_better else 'lower'} is better, "
            f"baseline {task.baseline:.4f}"
        ),
    }
    wanted = str(request.get("info_type", "overview"))
    if wanted == "all":
        return "\n\n".join(f"{name}:\n{fact()}" for name, fact in facts.items()), "ok", None
    if wanted not in facts:
        return (
            f"There is no info_type {wanted[:40]!r}; there are {', '.join(facts)} and all.",
            "rejected",
            None,
        )
    return facts[wanted](), "ok", None


def first_lines(path) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line for line, _ in zip(file, range(SAMPLE_ROWS + 1))]


def run_code(env, request, timeout, keep: bool):
    """Runs code on its own: (observation, status). What an earlier one submitted is out of its reach, and comes back
    when it submits nothing, or with keep=False."""
    from flatlab.episode.texts import run_text

    code, box, before = str(request.get("code", "")), env.sandbox, {}
    if not code.strip():
        return "Nothing was run. The action needs code.", "rejected"
    for path in env.task.artefacts:
        try:
            before[path] = box.get(path)
        except ArtefactError:
            continue
    name = f"execution_{len(env.history) + 1}.py"
    try:
        box.remove(list(env.task.artefacts))
        box.put({name: code.encode("utf-8", "replace")})
    except SandboxFault as fault:
        if box.broken:
            raise
        return (
            f"Nothing was run. {name} cannot be written into {box.workspace}: {fault}",
            "rejected",
        )  # by the agent's own doing
    result = box.run(["sh", "-c", 'cd "$0" && exec python3 "$1"', box.workspace, name], timeout)
    present = {path for path, _ in box.call("listing", most=10**6)[0]["files"]}
    if not keep or result.exit_code or not set(env.task.artefacts) & present:
        try:
            box.remove(list(env.task.artefacts))
            box.put(before)
        except (
            SandboxFault
        ):  # the code has made a folder of the artefact's place, or moved the workspace
            if box.broken:
                raise
    status = "timeout" if result.timed_out else "error" if result.exit_code else "ok"
    return run_text(result, timeout, env.limits["memory"]), status


def validate_code(env, request, timeout):
    return *run_code(env, request, timeout, keep=False), None


def execute_code(env, request, timeout):
    from flatlab.episode.texts import position_text, score_text

    said, status = run_code(env, request, timeout, keep=True)
    if status != "ok":
        return said, status, None
    score = env.score()
    best = [row["score"] for row in env.history if row["score"] is not None] + (
        [score.value] if score.valid else []
    )
    line = f"\nbest so far: {(max if env.task.higher_is_better else min)(best):.4f}" if best else ""
    return (
        f"{said}\n{score_text(score, env.task)}{position_text(score)}{line}",
        "validate" if score.valid else "invalid",
        score,
    )


def get_history(env, request, timeout):
    return "\n".join(json.dumps(row) for row in env.history) or "Nothing was run yet.", "ok", None


def reset(env, request, timeout):
    return env.reset(), "ok", None


ACTIONS = {
    call.__name__: call for call in (request_info, validate_code, execute_code, get_history, reset)
}
