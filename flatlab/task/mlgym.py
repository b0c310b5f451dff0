"""Tasks of an MLGym checkout, in which nothing is imported, run or written.

What MLGym's own files do not say, such as the direction of a metric, its hidden files, a good score
and how to grade each class of tasks, is in configs/tasks/mlgym.yaml.
"""

import fnmatch
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import read_mapping, validated
from flatlab.task.definition import TASKS_DIR, Task
from flatlab.task.listing import joined, tree_files


def mlgym_names(root: Path) -> list[str]:
    """Names of the tasks in an MLGym checkout. Raises UserError if `root` is not one."""
    folder = root / "configs" / "tasks"
    if not folder.is_dir():
        raise UserError(f"{root} is not a checkout of MLGym: it has no configs/tasks.")
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_mlgym(root: Path, name: str) -> Task:
    """Loads a task of an MLGym checkout. Raises UserError naming what is wrong or missing."""
    path = root / "configs" / "tasks" / f"{name}.yaml"
    more = read_mapping(TASKS_DIR / "mlgym.yaml")
    spec = read_mapping(path) | more.get(name, {})
    if "broken" in spec:
        raise UserError(f"MLGym's task {name} {spec['broken']}.")
    entrypoint = spec.get("task_entrypoint", "CSVSubmissionTasks")
    spec = more[entrypoint] | spec
    scores = {key.lower(): value for key, value in spec["baseline_scores"][0].items()}
    parts = []
    for starter in spec.get("starter_code", []):
        hint = f"`git checkout -- {starter}` in {root} restores it"
        parts.append(tree_files(root / starter, Path(starter).name, hint))
    docs = []
    for config in spec.get("dataset_configs", []):
        data = read_mapping(root / "configs" / config)
        docs.append(f"{data.get('name', config).upper()}\n{data.get('description', '').strip()}")
        if data.get("is_local"):
            hint = f"task {name} needs it: {spec.get('missing', 'see the README of MLGym')}"
            parts.append(tree_files(root / data.get("data_path", "data"), "data", hint))
    files = joined(name, *parts)
    hidden = {}
    for pattern in ["evaluate.py", *spec.get("hidden", [])]:
        matching = fnmatch.filter(files, pattern)
        if not matching and pattern != "evaluate.py":
            raise UserError(f"Task {name} hides {pattern}, but no file in its workspace is that.")
        for path in matching:
            hidden[path] = files.pop(path)
    requirements = None
    if not spec.get("use_generic_conda", True):
        requirements = root / str(spec.get("requirements_path"))
        tree_files(requirements, "", f"{path} names it")  # raises UserError if it is missing
    text = spec["description"].replace("{dataset_docs}", "\n\n".join(docs)).strip()
    note = f"evaluate.py is not in the workspace: it runs elsewhere. {spec.get('note', '')}"
    timeout = spec.get("training_timeout") or 3600
    more = {
        "name": name,
        "prompt": f"{text}\n\n{note}".strip(),
        "baseline": scores[spec["metric"].lower()],
        "public": files,
        "hidden": hidden,
        "grader": spec["grader_command"],
        "splits": ["test"],
        "step_timeout": timeout,
        "source": "mlgym",
        "imported": spec["artefacts"] if entrypoint == "PythonSubmissionTasks" else [],
        "requirements": requirements,
    }
    return validated(Task, {"grade_timeout": timeout} | spec | more, path)
