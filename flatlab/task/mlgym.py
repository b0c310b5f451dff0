"""Tasks of an MLGym checkout, in which nothing is imported, run or written.

What MLGym's own files do not say, such as the direction of a metric, its hidden files and a good
score, is in configs/tasks/mlgym.yaml.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import read_mapping
from flatlab.task.builtin import tree_files, validated
from flatlab.task.definition import TASKS_DIR, Task

GRADE_WITH_ANY_CONFIG = """
for file in config.yaml src/config.yaml *.yaml src/*.yaml
do [ -f "$file" ] && exec python3 evaluate.py --config_fname "$file"; done
echo '{"error": "there is no configuration (*.yaml)"}'
"""
# The class of an MLGym task -> (artefacts, grader's argv). mlgym.yaml has those of other tasks.
MLGYM_CLASSES = {
    "CSVSubmissionTasks": (
        ["submission.csv"],
        ["python3", "evaluate.py", "--submission_file", "submission.csv"],
    ),
    "PythonSubmissionTasks": ([], ["python3", "evaluate.py"]),
    "ModelSubmissionTasks": (
        ["checkpoints/", "src/", "*.yaml"],
        ["sh", "-c", GRADE_WITH_ANY_CONFIG],
    ),
    "LMSubmissionTasks": ([], ["torchrun", "--nproc_per_node=gpu", "--standalone", "evaluate.py"]),
}


def mlgym_names(root: Path) -> list[str]:
    """Names of the tasks in an MLGym checkout. Raises UserError if `root` is not one."""
    folder = root / "configs" / "tasks"
    if not folder.is_dir():
        raise UserError(f"{root} is not a checkout of MLGym: it has no configs/tasks.")
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_mlgym(root: Path, name: str) -> Task:
    """Loads a task of an MLGym checkout. Raises UserError naming what is wrong or missing."""
    path = root / "configs" / "tasks" / f"{name}.yaml"
    spec = read_mapping(path) | read_mapping(TASKS_DIR / "mlgym.yaml").get(name, {})
    if "broken" in spec:
        raise UserError(f"MLGym's task {name} {spec['broken']}.")
    kind = spec.get("task_entrypoint", "CSVSubmissionTasks")
    try:
        artefacts, grader = MLGYM_CLASSES[kind]
        description = spec["description"]
        scores = {key.lower(): value for key, value in spec["baseline_scores"][0].items()}
        baseline = scores[spec["metric"].lower()]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be graded: it needs a known task_entrypoint, baseline_scores, "
            "description, and the keys metric and higher_is_better "
            f"({type(error).__name__}: {error})."
        ) from error
    public, hidden, docs = find_files(root, name, spec)
    requirements = None
    if not spec.get("use_generic_conda", True):
        requirements = root / str(spec.get("requirements_path"))
        if not requirements.is_file():
            raise UserError(f"{path} names requirements that are missing: {requirements}.")
    note = f"evaluate.py is not in the workspace: it runs elsewhere. {spec.get('note', '')}".strip()
    timeout = spec.get("training_timeout") or 3600
    defaults = {"artefacts": artefacts, "grade_timeout": timeout}
    facts = {
        "name": name,
        "prompt": description.replace("{dataset_docs}", "\n\n".join(docs)).strip() + f"\n\n{note}",
        "baseline": baseline,
        "public": public,
        "hidden": hidden,
        "grader": spec.get("grader_command", grader),
        "splits": ["test"],
        "step_timeout": timeout,
        "source": "mlgym",
        "imported": spec.get("artefacts", []) if kind == "PythonSubmissionTasks" else [],
        "requirements": requirements,
    }
    return validated(Task, defaults | spec | facts, path)


def find_files(root: Path, name: str, spec: dict) -> tuple[dict, dict, list[str]]:
    """(public files, hidden files, texts about the data sets). Raises UserError."""
    files = {}
    docs = []
    for starter in spec.get("starter_code", []):
        hint = f"`git checkout -- {starter}` in {root} restores it"
        files |= tree_files(root / starter, Path(starter).name, hint)
    for config in spec.get("dataset_configs", []):
        data = read_mapping(root / "configs" / config)
        docs.append(f"{data.get('name', config).upper()}\n{data.get('description', '').strip()}")
        if data.get("is_local"):
            folder = root / data.get("data_path", "data")
            missing = spec.get("missing", "see MLGym's README")
            hint = f"task {name} needs it: {missing}"
            if (folder.parent / "_helpers" / "_generate_split.py").is_file():
                hint = f"`python _generate_split.py` in {folder.parent / '_helpers'} makes it"
            files |= tree_files(folder, "data", hint)
    patterns = ["evaluate.py", *spec.get("hidden", [])]
    public, hidden = {}, {}
    for path, file in files.items():
        is_hidden = any(fnmatchcase(path, pattern) for pattern in patterns)
        (hidden if is_hidden else public)[path] = file
    return public, hidden, docs
