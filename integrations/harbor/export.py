"""A built-in task as a Harbor task folder."""

import json
import shlex
from pathlib import Path

from flatlab.errors import UserError
from flatlab.sandbox.backend import IMAGE
from flatlab.task.definition import Task, improvement, is_plain

TOML = """\
schema_version = "1.4"
artifacts = {artifacts}

[task]
name = "flatlab/{name}"

[agent]
timeout_sec = 3600.0

[verifier]
environment_mode = "separate"
timeout_sec = {timeout}

[environment]
network_mode = "no-network"
"""
INSTRUCTION = "{prompt}\n\nAll paths are relative to /app, where you work.\n"
DOCKERFILE = f"""\
FROM {IMAGE}
ENV PATH=/home/agent/miniconda3/envs/mlgym_generic/bin:$PATH
WORKDIR /app
COPY files/ ./
"""
HIDE = 'RUN find / -xdev -path "*-packages/{}/*" -delete\n'
COPY = "[ -L /app/{0} ] || cp /app/{0} {1}\n"  # a link might lead to the answers
TEST = """\
#!/bin/bash
cd /tests/workspace
{copies}\
{grader} > /tmp/grade.txt
python3 -I ../reward.py {metric} {baseline} {improvement} $? < /tmp/grade.txt
"""


def export_harbor(task: Task, folder: Path) -> None:
    """Writes a built-in task to a new folder. The reward is that of reward.py on the last split.

    Raises UserError for another kind of task, and for a folder that exists.
    """
    is_special = task.needs_gpu or task.needs_network or not all(map(is_plain, task.artefacts))
    if task.source != "built-in" or is_special:
        raise UserError(
            f"{task.name} is not a built-in task of plain files without GPU and network."
        )
    if folder.exists():
        raise UserError(f"{folder} exists: name a folder that does not.")
    copies = ""
    for name in task.artefacts:
        copies += COPY.format(name, task.proxies.get(name, ("", name))[1])
    test = TEST.format(
        copies=copies,
        grader=shlex.join(task.grader_argv(task.splits[-1])),
        metric=shlex.quote(task.metric),
        baseline=task.baseline,
        improvement=improvement(task.baseline + 1, task),
    )
    artifacts = json.dumps([f"/app/{name}" for name in task.artefacts])
    dockerfile = DOCKERFILE + "".join(map(HIDE.format, task.hide_package_data))
    files = {
        "task.toml": TOML.format(artifacts=artifacts, name=task.name, timeout=task.grade_timeout),
        "instruction.md": INSTRUCTION.format(prompt=task.prompt),
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
        "tests/reward.py": Path(__file__).with_name("reward.py"),
    }
    files |= {f"environment/files/{path}": source for path, source in task.public.items()}
    pristine = task.grading_files(dict.fromkeys(task.artefacts, b""))  # empty: not to be written
    files |= {f"tests/workspace/{path}": source for path, source in pristine.items() if source}
    for path, source in files.items():
        data = source.encode() if isinstance(source, str) else source.read_bytes()
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    print(f"{folder} is {task.name} for Harbor: harbor run -p {folder} -a AGENT -m MODEL")
