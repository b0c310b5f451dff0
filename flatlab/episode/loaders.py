"""Loading tasks: the built-in ones, those of an MLGym checkout, and competitions that MLE-Dojo prepared."""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from flatlab.cache import cache_dir, content_key, store
from flatlab.episode.task import Task, last_json_object
from flatlab.errors import UserError

TASKS_DIR = Path(__file__).resolve().parents[2] / "configs" / "tasks"
PROMPT_CHARS = 8000  # of a competition's description; the whole text is in the workspace


def nearest(name: str, known: list[str]) -> str:
    lowered = {other.lower(): other for other in known}
    close = [
        lowered[match]
        for match in difflib.get_close_matches(name.lower(), list(lowered), n=3, cutoff=0.4)
    ]
    return (
        f"did you mean {' or '.join(close)}?  Known tasks: {', '.join(known)}"
        if close
        else f"known tasks: {', '.join(known)}"
    )


def read_yaml(path: Path) -> dict:
    """Read a YAML file of keys and values. Raises UserError naming the file."""
    import yaml

    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"Cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(spec, dict):
        raise UserError(f"{path} must hold keys and values.")
    return spec


def tree_files(path: Path, prefix: str, hint: str) -> dict[str, Path]:
    """Workspace path -> host file for a file, or for all files in a folder. Raises UserError ending with the hint."""
    if path.is_dir():
        return {
            f"{prefix}/{file.relative_to(path).as_posix()}": file
            for file in sorted(path.rglob("*"))
            if file.is_file() and "__pycache__" not in file.parts
        }
    if not path.is_file():
        raise UserError(f"The file or folder {path} is missing; {hint}.")
    return {prefix: path}


# key of task.yaml -> (types, is it required). The first group is MLGym's format, the second one is what honest
# scoring needs on top: what is hidden, which parts there are, which way is up, and which files count as the answer.
YAML_KEYS = {
    "id": (str, True),
    "name": (str, True),
    "description": (str, True),
    "training_timeout": ((int, float), True),  # seconds for one action
    "starter_code": (list, False),  # files that go to the root of the workspace
    "evaluation_paths": (list, True),  # the grader; only the first is used
    "baseline_scores": (
        list,
        True,
    ),  # per split, in the order of `splits`: {split: ..., <metric>: ...}
    "data": (list, False),  # files that go to data/ in the workspace
    "hidden": (list, False),  # files that only the grading sandbox gets
    "forget": (list, False),  # folders of Python packages that hold the answers, see Task
    "artefacts": (list, True),
    "metric": (str, True),
    "higher_is_better": (bool, True),
    "reference": ((int, float), False),
    "splits": (list, True),
    "evaluation_args": (list, False),  # of the grader, before --split
    "evaluation_timeout": ((int, float), False),  # seconds for one grading
    "needs_gpu": (bool, False),
    "needs_network": (bool, False),
    "trivial": (dict, False),
    "degenerate": (str, False),  # see Task
}


def builtin_names(root: Path | None = None) -> list[str]:
    """Names of the tasks in configs/tasks/: every folder there with a task.yaml."""
    return sorted(path.parent.name for path in (root or TASKS_DIR).glob("*/task.yaml"))


def load_builtin(root: Path, name: str) -> Task:
    """Load <root>/<name>/task.yaml. Raises UserError naming the key or the file that is wrong or missing."""
    folder = root / name
    spec = read_task_yaml(folder / "task.yaml")

    def files(names, prefix):
        return {
            path: file
            for name in names
            for path, file in tree_files(
                (folder / name).resolve(),
                prefix + Path(name).name,
                f"`git checkout -- {folder}` restores it",
            ).items()
        }

    grader = spec["evaluation_paths"][0]
    public = files(spec.get("starter_code", []), "") | files(spec.get("data", []), "data/")
    hidden = files([grader, *spec.get("hidden", [])], "")
    first, metric = spec["baseline_scores"][0], spec["metric"]
    numbers = [first.get(metric), spec.get("reference", 0)]
    if first.get("split") != spec["splits"][0] or not all(
        isinstance(n, (int, float)) and math.isfinite(n) for n in numbers
    ):
        raise UserError(
            f"Task {name}: the first of baseline_scores must hold split: {spec['splits'][0]} and {metric}, a "
            "number, and so must reference where it is given."
        )
    task = Task(
        name=name,
        prompt=spec["description"].strip(),
        metric=metric,
        higher_is_better=spec["higher_is_better"],
        baseline=float(first[metric]),
        reference=spec.get("reference"),
        artefacts=tuple(spec["artefacts"]),
        public=public,
        hidden=hidden,
        # -I: nothing is imported from the workspace
        grader=(
            "python3",
            "-I",
            Path(grader).name,
            *map(str, spec.get("evaluation_args", [])),
            "--split",
            "{split}",
        ),
        splits=tuple(spec["splits"]),
        step_timeout=float(spec["training_timeout"]),
        grade_timeout=float(spec.get("evaluation_timeout", 60)),
        needs_gpu=spec.get("needs_gpu", False),
        needs_network=spec.get("needs_network", False),
        degenerate=spec.get("degenerate", ""),
        trivial=spec.get("trivial", {}),
        forget=tuple(spec.get("forget", ())),
    )
    for path in public | hidden:
        if task.is_artefact(path):  # else a file that was there before could be graded
            raise UserError(
                f"Task {name}: {path} is an artefact, so it cannot be one of the task's own files."
            )
    return task


def read_task_yaml(path: Path) -> dict:
    """Read and check a task.yaml against YAML_KEYS. Raises UserError naming the file and the key."""
    spec = read_yaml(path)
    for key in spec:
        if key not in YAML_KEYS:
            raise UserError(
                f"{path} has the unknown key {key!r}; {nearest(str(key), list(YAML_KEYS))}."
            )
    for key, (types, required) in YAML_KEYS.items():
        if key not in spec and required:
            raise UserError(f"{path} lacks the key {key}.")
        if key in spec and (
            not isinstance(spec[key], types) or (required and spec[key] in ([], ""))
        ):
            raise UserError(f"{path} has the wrong kind of value for {key}: {spec[key]!r}.")
        for value in spec.get(key, []) if types is list and key != "evaluation_args" else ():
            if not isinstance(value, dict if key == "baseline_scores" else str):
                raise UserError(f"{path} has the wrong kind of value in {key}: {value!r}.")
    for key in ("training_timeout", "evaluation_timeout"):
        if not 0 < spec.get(key, 1) < math.inf:
            raise UserError(
                f"{path}: {key} must be a number of seconds above 0, not {spec[key]!r}."
            )
    for artefact in spec["artefacts"]:
        if artefact.startswith("/") or ".." in artefact.split("/"):
            raise UserError(f"{path}: the artefact {artefact!r} does not lie in the workspace.")
    for name, text in spec.get("trivial", {}).items():
        if not isinstance(text, str):
            raise UserError(
                f"{path} has the wrong kind of value for {name!r} in trivial: {text!r}."
            )
    return spec


# ---------------------------------------------------------------------------------------------- MLGym

# The class of an MLGym task -> (what is graded, how). Tasks with other files have them in mlgym.yaml.
MLGYM_CLASSES = {
    "CSVSubmissionTasks": (
        ["submission.csv"],
        ["python3", "evaluate.py", "--submission_file", "submission.csv"],
    ),
    "PythonSubmissionTasks": ([], ["python3", "evaluate.py"]),
    "ModelSubmissionTasks": (
        ["checkpoints/", "src/", "*.yaml"],
        [
            "sh",
            "-c",
            """
        for file in config.yaml src/config.yaml *.yaml src/*.yaml
        do [ -f "$file" ] && exec python3 evaluate.py --config_fname "$file"; done
        echo '{"error": "there is no configuration (*.yaml)"}'""",
        ],
    ),
    "LMSubmissionTasks": ([], ["torchrun", "--nproc_per_node=gpu", "--standalone", "evaluate.py"]),
}


def mlgym_names(root: Path) -> list[str]:
    """Names of the tasks in an MLGym checkout: the files in configs/tasks. Raises UserError when it is not one."""
    if not (root / "configs" / "tasks").is_dir():
        raise UserError(f"{root} is not a checkout of MLGym: it has no configs/tasks.")
    return sorted(path.stem for path in (root / "configs" / "tasks").glob("*.yaml"))


def load_mlgym(root: Path, name: str) -> Task:
    """Load a task of an MLGym checkout, in which nothing is imported, run or written. Raises UserError."""
    path = root / "configs" / "tasks" / f"{name}.yaml"
    spec = read_yaml(path) | read_yaml(TASKS_DIR / "mlgym.yaml").get(name, {})
    if "broken" in spec:
        raise UserError(f"MLGym's task {name} {spec['broken']}.")
    kind = spec.get("task_entrypoint", "CSVSubmissionTasks")
    try:
        artefacts, grader = MLGYM_CLASSES[kind]
        artefacts, metric = spec.get("artefacts", artefacts), spec["metric"]
        scores = {key.lower(): value for key, value in spec["baseline_scores"][0].items()}
        baseline, up, prompt = (
            float(scores[metric.lower()]),
            spec["higher_is_better"],
            spec["description"],
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} cannot be graded: it needs a known task_entrypoint, baseline_scores, description, and "
            f"the keys metric and higher_is_better ({type(error).__name__}: {error})."
        ) from error
    files, docs = {}, []
    for starter in spec.get("starter_code", []):
        files |= tree_files(
            root / starter, Path(starter).name, f"`git checkout -- {starter}` in {root} restores it"
        )
    for config in spec.get("dataset_configs", []):
        data = read_yaml(root / "configs" / config)
        docs.append(f"{data.get('name', config).upper()}\n{data.get('description', '').strip()}")
        if data.get("is_local"):
            folder, missing = (
                root / data.get("data_path", "data"),
                spec.get("missing", "see MLGym's README"),
            )
            script = folder.parent / "_helpers" / "_generate_split.py"
            folder = generated_split(script) if script.is_file() and not folder.exists() else folder
            files |= tree_files(folder, "data", f"task {name} needs it: {missing}")
    hide = ["evaluate.py", *spec.get("hidden", [])]
    hidden = {
        file: files[file] for file in files if any(fnmatchcase(file, pattern) for pattern in hide)
    }
    note = f"evaluate.py is not in the workspace: it runs elsewhere. {spec.get('note', '')}".strip()
    proxies = {
        file: (TASKS_DIR / "proxy.py", file.removesuffix(".py") + "_agent.py")
        for file in artefacts
        if kind == "PythonSubmissionTasks"
    }
    timeout = float(spec.get("training_timeout") or 3600)
    return Task(
        name=name,
        prompt=prompt.replace("{dataset_docs}", "\n\n".join(docs)).strip() + f"\n\n{note}",
        metric=metric,
        higher_is_better=up,
        baseline=baseline,
        reference=spec.get("reference"),
        artefacts=tuple(artefacts),
        public={file: files[file] for file in files if file not in hidden},
        hidden=hidden,
        grader=tuple(spec.get("grader", grader)),
        splits=("test",),
        step_timeout=timeout,
        grade_timeout=float(spec.get("evaluation_timeout", timeout)),
        needs_gpu=spec.get("needs_gpu", False),
        needs_network=spec.get("needs_network", False),
        source="mlgym",
        proxies=proxies,
        requirements=root / spec["requirements_path"]
        if not spec.get("use_generic_conda", True)
        else None,
        degenerate=spec.get("degenerate", ""),
        trivial=spec.get("trivial", {}),
    )


def generated_split(script: Path) -> Path:
    """Run the user's script, which writes ../data, in a copy of its folder. Returns the folder of the result, kept in
    the cache under the content of script and inputs. Raises UserError when the script fails."""
    folder = (
        cache_dir()
        / "mlgym"
        / content_key(*sorted(path for path in script.parent.iterdir() if path.is_file()))
    )
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as copy:
        shutil.copytree(script.parent, f"{copy}/helpers")
        done = subprocess.run(
            [sys.executable, script.name], cwd=f"{copy}/helpers", capture_output=True, text=True
        )
        if done.returncode or not Path(copy, "data").is_dir():
            last = (done.stderr.strip().splitlines() or ["it wrote no data"])[-1]
            raise UserError(
                f"{script} failed ({last}); it needs scikit-learn and a pandas below version 3: "
                f"{sys.executable} -m pip install 'pandas<3' scikit-learn"
            )
        with suppress(OSError):  # somebody else was quicker; the content is the same
            Path(copy, "data").rename(folder)
    return folder


# ---------------------------------------------------------------------------------------------- MLE-Dojo


def mledojo_names(root: Path) -> list[str]:
    """Names of the competitions in a folder that MLE-Dojo prepared: <root>/<name>/data/public and private."""
    names = sorted(path.parent.parent.name for path in root.glob("*/data/public"))
    if not names:
        raise UserError(
            f"{root} holds no competition that MLE-Dojo prepared: there is no <name>/data/public in it."
        )
    return names


def load_mledojo(root: Path, name: str) -> Task:
    """Load a prepared competition. private/ is hidden; answers with ids are split into validation and test halves.

    Baseline: the score of the sample submission, or the last place where that cannot be graded. Reference: the median
    of the leaderboards, where that is better. Raises UserError.
    """
    hint, data = f"let MLE-Dojo prepare {name} again", root / name / "data"
    public, hidden = (
        tree_files(data / "public", "data", hint),
        tree_files(data / "private", "private", hint),
    )
    for needed in ("data/description.txt", "data/sample_submission.csv", "private/test_answer.csv"):
        if needed not in public | hidden:
            raise UserError(f"{data / needed.replace('data/', 'public/')} is missing; {hint}.")
    hidden |= {
        "metric.py": mledojo_metric(root, name),
        "grade_mledojo.py": TASKS_DIR / "grade_mledojo.py",
    }
    facts = describe_mledojo(hidden | {"submission.csv": public["data/sample_submission.csv"]})
    up, median, baseline = (
        facts["higher_is_better"],
        facts["median"],
        facts.get("score", facts["last"]),
    )
    if baseline is None:
        raise UserError(
            f"The sample submission of {name} cannot be graded ({facts['error']}); {hint}."
        )
    text = public["data/description.txt"].read_text(encoding="utf-8", errors="replace").strip()
    more = "\n[the rest is in data/description.txt]" if len(text) > PROMPT_CHARS else ""
    return Task(
        name=name,
        metric="score",
        higher_is_better=up,
        baseline=baseline,
        prompt=f"{text[:PROMPT_CHARS]}{more}\n\nThe data is in data/. Write submission.csv in the form of "
        f"data/sample_submission.csv. {'Higher' if up else 'Lower'} scores are better.",
        reference=median
        if median is not None and (median > baseline) == up and median != baseline
        else None,
        artefacts=("submission.csv",),
        public=public,
        hidden=hidden,
        grader=(
            "python3",
            "-I",
            "grade_mledojo.py",
            "--split",
            "{split}" if facts["halves"] else "all",
        ),
        splits=("validation", "test") if facts["halves"] else ("test",),
        step_timeout=600.0,
        grade_timeout=600.0,
        source="mledojo",
    )


def mledojo_metric(root: Path, name: str) -> Path:
    """The competition's metric.py: in the checkout $MLEDOJO_REPO, or in one that the prepared data lies in."""
    for place in (os.environ.get("MLEDOJO_REPO"), root, *root.parents):
        path = Path(place or "") / "mledojo" / "competitions" / name / "utils" / "metric.py"
        if place and path.is_file():
            return path.resolve()
    raise UserError(
        f"The metric of {name} is missing: set $MLEDOJO_REPO to a checkout of MLE-Dojo that has "
        f"mledojo/competitions/{name}/utils/metric.py."
    )


def describe_mledojo(files: dict[str, Path]) -> dict:
    """What grade_mledojo.py --describe says about a competition, kept in the cache under the content of the files. They
    are all the user's own, so it runs here, without a sandbox. Raises UserError when it fails."""
    stored = cache_dir() / "mledojo" / f"{content_key(*files.values())}.json"
    if not stored.exists():
        with tempfile.TemporaryDirectory() as folder:
            for path, source in files.items():
                Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, path).symlink_to(source)
            argv = [sys.executable, "-I", "grade_mledojo.py", "--describe"]
            done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise UserError(
                f"The metric {files['metric.py']} cannot be run by {sys.executable}: "
                f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}"
            )
        store(stored, last_json_object(done.stdout))
    return json.loads(stored.read_text(encoding="utf-8"))
