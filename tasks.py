"""What is asked and how it is scored: loading tasks, reading a grade, and the one measure of improvement."""
from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

TASKS_DIR = Path(__file__).resolve().parent / "configs" / "tasks"
PROMPT_CHARS = 8000         # of a competition's description; the whole text is in the workspace
HASHED_BYTES = 64 << 20     # a larger file goes into a content key with name, size and time only
AT_THE_TOP = 0.98           # a trivial rule with this improvement, or this share of the way to a perfect score
PERFECT = {"accuracy": 1.0, "validation_accuracy": 100.0, "r2": 1.0}
MESSAGE_CHARS = 500         # an error message of a grader is cut here: it goes into the agent's context


class UserError(Exception):
    """One clear sentence for the person at the keyboard. A script's main prints it and exits with code 2."""


@dataclass(frozen=True)
class Task:
    """One task. Paths on the left of `public` and `hidden` are relative to the workspace of the sandbox."""

    name: str
    prompt: str                     # what is asked; how to reply and what lies in the workspace is added by env.py
    metric: str                     # key of the score in the grader's JSON line
    higher_is_better: bool
    baseline: float                 # score of doing nothing clever, on splits[0]
    reference: float | None         # a good known score; improvement is measured in units of |reference - baseline|
    artefacts: tuple[str, ...]      # what the agent has to write: "a.csv", "folder/" (all in it), "*.yaml" (if there)
    public: dict[str, Path]         # goes into the agent's sandbox; one that is an artefact is a starter for it
    hidden: dict[str, Path]         # answers and the pristine grader: only ever in a grading sandbox
    grader: tuple[str, ...]         # argv in the grading sandbox's workspace; "{split}" is replaced
    splits: tuple[str, ...]         # validate shows the first; the last one is scored once, at the end
    step_timeout: float             # seconds for one action of the agent
    grade_timeout: float            # seconds for one grading
    needs_gpu: bool = False
    needs_network: bool = False
    source: str = "built-in"        # "built-in" | "mlgym" | "mledojo"
    requirements: Path | None = None    # pip requirements of agent and grader, beyond what the image holds
    # Folders of Python packages, such as sklearn/datasets/data, that the agent's sandbox shows as empty: answers lie there.
    forget: tuple[str, ...] = ()
    degenerate: str = ""            # a known reason why the score says little; degenerate(task) knows measured ones too
    trivial: dict[str, str] = field(default_factory=dict)   # name -> text of the artefact: rules that need no idea
    # artefact -> (proxy, name): the grading sandbox holds the proxy under the artefact's name, and what the agent wrote
    # under the other name. For graders that import the agent's code; the proxy runs that code in a child process.
    proxies: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def is_artefact(self, path: str) -> bool:
        """Whether the workspace path belongs to an artefact. The grading sandbox gets the agent's version of such a
        path and the host's version of any other one, so that a public file can be changed, but not for the grader."""
        return any(path.startswith(artefact) if artefact.endswith("/")
                   else path.count("/") == artefact.count("/") and fnmatchcase(path, artefact)
                   for artefact in self.artefacts)

    def grading_files(self, artefacts: dict[str, bytes]) -> dict[str, bytes | Path]:
        """What the grading sandbox's workspace holds: the agent's version of the artefacts, the host's of all else."""
        files = {path: source for path, source in self.public.items() if not self.is_artefact(path)}
        for path, data in artefacts.items():
            proxy, name = self.proxies.get(path, (data, path))
            files |= {path: proxy, name: data}
        return files | self.hidden

    def grader_argv(self, split: str) -> list[str]:
        """The grading command for one of `splits`. Raises ValueError for any other split."""
        if split not in self.splits:
            raise ValueError(f"task {self.name} has the splits {', '.join(self.splits)}, not {split!r}")
        return [part.replace("{split}", split) for part in self.grader]


# ---------------------------------------------------------------------------------------------- loading


def load_task(name: str, mlgym_root: str | Path | None = None, mledojo_root: str | Path | None = None) -> Task:
    """Find the task called `name` in an MLGym checkout, a folder prepared by MLE-Dojo, or configs/tasks, in this order.
    Without an argument the roots are $MLGYM_ROOT and $MLEDOJO_ROOT; "" is none. Raises UserError, with what to do."""
    sources = [(builtin_names, load_builtin, TASKS_DIR)]        # (names it offers, how to load one, where)
    for given, variable, names, load in ((mledojo_root, "MLEDOJO_ROOT", mledojo_names, load_mledojo),
                                         (mlgym_root, "MLGYM_ROOT", mlgym_names, load_mlgym)):
        root = os.environ.get(variable, "") if given is None else given
        if root:
            sources.insert(0, (names, load, Path(root).expanduser().resolve()))
    known = []
    for names, load, root in sources:
        if name in names(root):
            return load(root, name)
        known += names(root)
    raise UserError(f"Unknown task {name!r}; {_nearest(name, sorted(set(known)))}.")


def _nearest(name: str, known: list[str]) -> str:
    lowered = {other.lower(): other for other in known}
    close = [lowered[match] for match in difflib.get_close_matches(name.lower(), list(lowered), n=3, cutoff=0.4)]
    return f"did you mean {' or '.join(close)}?  Known tasks: {', '.join(known)}" if close \
        else f"known tasks: {', '.join(known)}"


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


def _tree(path: Path, prefix: str, hint: str) -> dict[str, Path]:
    """Workspace path -> host file for a file, or for all files in a folder. Raises UserError ending with the hint."""
    if path.is_dir():
        return {f"{prefix}/{file.relative_to(path).as_posix()}": file for file in sorted(path.rglob("*"))
                if file.is_file() and "__pycache__" not in file.parts}
    if not path.is_file():
        raise UserError(f"The file or folder {path} is missing; {hint}.")
    return {prefix: path}


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatlab"


def _store(path: Path, value: dict) -> None:
    """Write a JSON file of the cache, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(value, indent=1), encoding="utf-8")
    part.replace(path)


def content_key(*parts: str | Path) -> str:
    """A short name for the content of texts and files: it changes whenever one of them does."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path) and part.stat().st_size > HASHED_BYTES:       # too slow: what stands for it is
            part = f"{part.name} {part.stat().st_size} {part.stat().st_mtime_ns}"
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(b"%d " % len(data) + data)
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- built-in tasks

# key of task.yaml -> (types, is it required). The first group is MLGym's format, the second one is what honest
# scoring needs on top: what is hidden, which parts there are, which way is up, and which files count as the answer.
YAML_KEYS = {
    "id": (str, True), "name": (str, True), "description": (str, True),
    "training_timeout": ((int, float), True),       # seconds for one action
    "starter_code": (list, False),                  # files that go to the root of the workspace
    "evaluation_paths": (list, True),               # the grader; only the first is used
    "baseline_scores": (list, True),                # per split, in the order of `splits`: {split: ..., <metric>: ...}
    "data": (list, False),                          # files that go to data/ in the workspace
    "hidden": (list, False),                        # files that only the grading sandbox gets
    "forget": (list, False),                        # folders of Python packages that hold the answers, see Task
    "artefacts": (list, True), "metric": (str, True), "higher_is_better": (bool, True),
    "reference": ((int, float), False), "splits": (list, True),
    "evaluation_args": (list, False),               # of the grader, before --split
    "evaluation_timeout": ((int, float), False),    # seconds for one grading
    "needs_gpu": (bool, False), "needs_network": (bool, False),
    "trivial": (dict, False), "degenerate": (str, False),       # see Task
}


def builtin_names(root: Path | None = None) -> list[str]:
    """Names of the tasks in configs/tasks/: every folder there with a task.yaml."""
    return sorted(path.parent.name for path in (root or TASKS_DIR).glob("*/task.yaml"))


def load_builtin(root: Path, name: str) -> Task:
    """Load <root>/<name>/task.yaml. Raises UserError naming the key or the file that is wrong or missing."""
    folder = root / name
    spec = read_task_yaml(folder / "task.yaml")

    def files(names, prefix):
        return {path: file for name in names for path, file in _tree(
            (folder / name).resolve(), prefix + Path(name).name, f"`git checkout -- {folder}` restores it").items()}

    grader = spec["evaluation_paths"][0]
    public = files(spec.get("starter_code", []), "") | files(spec.get("data", []), "data/")
    hidden = files([grader, *spec.get("hidden", [])], "")
    first, metric = spec["baseline_scores"][0], spec["metric"]
    numbers = [first.get(metric), spec.get("reference", 0)]
    if first.get("split") != spec["splits"][0] or not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
        raise UserError(f"Task {name}: the first of baseline_scores must hold split: {spec['splits'][0]} and {metric}, a "
                        "number, and so must reference where it is given.")
    task = Task(
        name=name, prompt=spec["description"].strip(), metric=metric, higher_is_better=spec["higher_is_better"],
        baseline=float(first[metric]), reference=spec.get("reference"), artefacts=tuple(spec["artefacts"]),
        public=public, hidden=hidden,
        # -I: nothing is imported from the workspace
        grader=("python3", "-I", Path(grader).name, *map(str, spec.get("evaluation_args", [])), "--split", "{split}"),
        splits=tuple(spec["splits"]), step_timeout=float(spec["training_timeout"]),
        grade_timeout=float(spec.get("evaluation_timeout", 60)), needs_gpu=spec.get("needs_gpu", False),
        needs_network=spec.get("needs_network", False), degenerate=spec.get("degenerate", ""),
        trivial=spec.get("trivial", {}), forget=tuple(spec.get("forget", ())))
    for path in public | hidden:
        if task.is_artefact(path):                  # else a file that was there before could be graded
            raise UserError(f"Task {name}: {path} is an artefact, so it cannot be one of the task's own files.")
    return task


def read_task_yaml(path: Path) -> dict:
    """Read and check a task.yaml against YAML_KEYS. Raises UserError naming the file and the key."""
    spec = read_yaml(path)
    for key in spec:
        if key not in YAML_KEYS:
            raise UserError(f"{path} has the unknown key {key!r}; {_nearest(str(key), list(YAML_KEYS))}.")
    for key, (types, required) in YAML_KEYS.items():
        if key not in spec and required:
            raise UserError(f"{path} lacks the key {key}.")
        if key in spec and (not isinstance(spec[key], types) or (required and spec[key] in ([], ""))):
            raise UserError(f"{path} has the wrong kind of value for {key}: {spec[key]!r}.")
        for value in spec.get(key, []) if types is list and key != "evaluation_args" else ():
            if not isinstance(value, dict if key == "baseline_scores" else str):
                raise UserError(f"{path} has the wrong kind of value in {key}: {value!r}.")
    for key in ("training_timeout", "evaluation_timeout"):
        if not 0 < spec.get(key, 1) < math.inf:
            raise UserError(f"{path}: {key} must be a number of seconds above 0, not {spec[key]!r}.")
    for artefact in spec["artefacts"]:
        if artefact.startswith("/") or ".." in artefact.split("/"):
            raise UserError(f"{path}: the artefact {artefact!r} does not lie in the workspace.")
    for name, text in spec.get("trivial", {}).items():
        if not isinstance(text, str):
            raise UserError(f"{path} has the wrong kind of value for {name!r} in trivial: {text!r}.")
    return spec


# ---------------------------------------------------------------------------------------------- MLGym

# The class of an MLGym task -> (what is graded, how). Tasks with other files have them in mlgym.yaml.
MLGYM_CLASSES = {
    "CSVSubmissionTasks": (["submission.csv"], ["python3", "evaluate.py", "--submission_file", "submission.csv"]),
    "PythonSubmissionTasks": ([], ["python3", "evaluate.py"]),
    "ModelSubmissionTasks": (["checkpoints/", "src/", "*.yaml"], ["sh", "-c", """
        for file in config.yaml src/config.yaml *.yaml src/*.yaml
        do [ -f "$file" ] && exec python3 evaluate.py --config_fname "$file"; done
        echo '{"error": "there is no configuration (*.yaml)"}'"""]),
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
        baseline, up, prompt = float(scores[metric.lower()]), spec["higher_is_better"], spec["description"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be graded: it needs a known task_entrypoint, baseline_scores, description, and "
                        f"the keys metric and higher_is_better ({type(error).__name__}: {error}).") from error
    files, docs = {}, []
    for starter in spec.get("starter_code", []):
        files |= _tree(root / starter, Path(starter).name, f"`git checkout -- {starter}` in {root} restores it")
    for config in spec.get("dataset_configs", []):
        data = read_yaml(root / "configs" / config)
        docs.append(f"{data.get('name', config).upper()}\n{data.get('description', '').strip()}")
        if data.get("is_local"):
            folder, missing = root / data.get("data_path", "data"), spec.get("missing", "see MLGym's README")
            script = folder.parent / "_helpers" / "_generate_split.py"
            folder = generated_split(script) if script.is_file() and not folder.exists() else folder
            files |= _tree(folder, "data", f"task {name} needs it: {missing}")
    hide = ["evaluate.py", *spec.get("hidden", [])]
    hidden = {file: files[file] for file in files if any(fnmatchcase(file, pattern) for pattern in hide)}
    note = f"evaluate.py is not in the workspace: it runs elsewhere. {spec.get('note', '')}".strip()
    proxies = {file: (TASKS_DIR / "proxy.py", file.removesuffix(".py") + "_agent.py")
               for file in artefacts if kind == "PythonSubmissionTasks"}
    timeout = float(spec.get("training_timeout") or 3600)
    return Task(
        name=name, prompt=prompt.replace("{dataset_docs}", "\n\n".join(docs)).strip() + f"\n\n{note}", metric=metric,
        higher_is_better=up, baseline=baseline, reference=spec.get("reference"), artefacts=tuple(artefacts),
        public={file: files[file] for file in files if file not in hidden}, hidden=hidden,
        grader=tuple(spec.get("grader", grader)), splits=("test",), step_timeout=timeout,
        grade_timeout=float(spec.get("evaluation_timeout", timeout)), needs_gpu=spec.get("needs_gpu", False),
        needs_network=spec.get("needs_network", False), source="mlgym", proxies=proxies,
        requirements=root / spec["requirements_path"] if not spec.get("use_generic_conda", True) else None,
        degenerate=spec.get("degenerate", ""), trivial=spec.get("trivial", {}))


def generated_split(script: Path) -> Path:
    """Run the user's script, which writes ../data, in a copy of its folder. Returns the folder of the result, kept in
    the cache under the content of script and inputs. Raises UserError when the script fails."""
    folder = cache_dir() / "mlgym" / content_key(*sorted(path for path in script.parent.iterdir() if path.is_file()))
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as copy:
        shutil.copytree(script.parent, f"{copy}/helpers")
        done = subprocess.run([sys.executable, script.name], cwd=f"{copy}/helpers", capture_output=True, text=True)
        if done.returncode or not Path(copy, "data").is_dir():
            last = (done.stderr.strip().splitlines() or ["it wrote no data"])[-1]
            raise UserError(f"{script} failed ({last}); it needs scikit-learn and a pandas below version 3: "
                            f"{sys.executable} -m pip install 'pandas<3' scikit-learn")
        with suppress(OSError):                     # somebody else was quicker; the content is the same
            Path(copy, "data").rename(folder)
    return folder


# ---------------------------------------------------------------------------------------------- MLE-Dojo


def mledojo_names(root: Path) -> list[str]:
    """Names of the competitions in a folder that MLE-Dojo prepared: <root>/<name>/data/public and private."""
    names = sorted(path.parent.parent.name for path in root.glob("*/data/public"))
    if not names:
        raise UserError(f"{root} holds no competition that MLE-Dojo prepared: there is no <name>/data/public in it.")
    return names


def load_mledojo(root: Path, name: str) -> Task:
    """Load a prepared competition. private/ is hidden; answers with ids are split into validation and test halves.

    Baseline: the score of the sample submission, or the last place where that cannot be graded. Reference: the median
    of the leaderboards, where that is better. Raises UserError.
    """
    hint, data = f"let MLE-Dojo prepare {name} again", root / name / "data"
    public, hidden = _tree(data / "public", "data", hint), _tree(data / "private", "private", hint)
    for needed in ("data/description.txt", "data/sample_submission.csv", "private/test_answer.csv"):
        if needed not in public | hidden:
            raise UserError(f"{data / needed.replace('data/', 'public/')} is missing; {hint}.")
    hidden |= {"metric.py": mledojo_metric(root, name), "grade_mledojo.py": TASKS_DIR / "grade_mledojo.py"}
    facts = describe_mledojo(hidden | {"submission.csv": public["data/sample_submission.csv"]})
    up, median, baseline = facts["higher_is_better"], facts["median"], facts.get("score", facts["last"])
    if baseline is None:
        raise UserError(f"The sample submission of {name} cannot be graded ({facts['error']}); {hint}.")
    text = public["data/description.txt"].read_text(encoding="utf-8", errors="replace").strip()
    more = "\n[the rest is in data/description.txt]" if len(text) > PROMPT_CHARS else ""
    return Task(
        name=name, metric="score", higher_is_better=up, baseline=baseline,
        prompt=f"{text[:PROMPT_CHARS]}{more}\n\nThe data is in data/. Write submission.csv in the form of "
               f"data/sample_submission.csv. {'Higher' if up else 'Lower'} scores are better.",
        reference=median if median is not None and (median > baseline) == up and median != baseline else None,
        artefacts=("submission.csv",), public=public, hidden=hidden,
        grader=("python3", "-I", "grade_mledojo.py", "--split", "{split}" if facts["halves"] else "all"),
        splits=("validation", "test") if facts["halves"] else ("test",), step_timeout=600.0, grade_timeout=600.0,
        source="mledojo")


def mledojo_metric(root: Path, name: str) -> Path:
    """The competition's metric.py: in the checkout $MLEDOJO_REPO, or in one that the prepared data lies in."""
    for place in (os.environ.get("MLEDOJO_REPO"), root, *root.parents):
        path = Path(place or "") / "mledojo" / "competitions" / name / "utils" / "metric.py"
        if place and path.is_file():
            return path.resolve()
    raise UserError(f"The metric of {name} is missing: set $MLEDOJO_REPO to a checkout of MLE-Dojo that has "
                    f"mledojo/competitions/{name}/utils/metric.py.")


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
            raise UserError(f"The metric {files['metric.py']} cannot be run by {sys.executable}: "
                            f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        _store(stored, _last_json_object(done.stdout))
    return json.loads(stored.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------- scores


def parse_grade(stdout: str, task: Task) -> tuple[float | None, str]:
    """Read the score out of a grader's stdout: its last line that is a JSON object.

    Returns (score, "") or, when there is no usable score, (None, one sentence that is safe to show the agent).
    """
    grade = _last_json_object(stdout)
    if grade is None:
        return None, "The grader printed no result."
    if "error" in grade:
        return None, str(grade["error"])[:MESSAGE_CHARS]
    by_lower_case = {key.lower(): value for key, value in grade.items()}
    value = grade.get(task.metric, by_lower_case.get(task.metric.lower()))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None, f"The grader's result has no number called {task.metric}."
    try:
        value = float(value)
    except OverflowError:           # an integer beyond all floats
        value = math.inf
    if not math.isfinite(value):
        return None, f"The {task.metric} is not a finite number."
    return value, ""


def parse_position(stdout: str, task: Task) -> float | None:
    """The place on the leaderboards, 0 to 1, that grade_mledojo.py prints beside the score; None for other tasks."""
    value = (_last_json_object(stdout) or {}).get("position") if task.source == "mledojo" else None
    return float(value) if isinstance(value, (int, float)) else None


def _last_json_object(text: str) -> dict | None:
    for line in reversed(text.splitlines()):
        if line.strip().startswith("{"):
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                continue
    return None


def improvement(score: float, task: Task | tuple[float, bool, float | None]) -> float:
    """How much better than the baseline: 0 at the baseline, 1 at the reference, negative below, unbounded above.

    `task` is a Task or (baseline, higher_is_better, reference). Without a reference the unit is |baseline|, or 1
    where that is 0. This is the only place that knows about the direction of a metric: rewards, selection, tables
    and plots all call it.
    """
    baseline, higher_is_better, reference = \
        (task.baseline, task.higher_is_better, task.reference) if isinstance(task, Task) else task
    gain = score - baseline if higher_is_better else baseline - score
    unit = abs(baseline) if reference is None else abs(reference - baseline)
    return gain / (unit or 1.0)


# ---------------------------------------------------------------------------------------------- sanity


def degenerate(task: Task) -> str | None:
    """Why the scores of a task say little, as its sanity check found or as is known; None when nothing is known."""
    stored = sanity_file(task)
    found = json.loads(stored.read_text(encoding="utf-8"))["degenerate"] if stored.exists() else None
    return "; ".join(filter(None, (task.degenerate, found))) or None


def sanity_file(task: Task) -> Path:
    """Where the result of the sanity check is kept; another file as soon as anything in the task changes."""
    facts = task.metric, task.higher_is_better, task.baseline, task.reference, task.artefacts, task.grader, task.trivial
    key = content_key(repr(facts), *task.public.values(), *task.hidden.values())
    return cache_dir() / "sanity" / f"{task.name}-{key}.json"


def trivial_rules(task: Task) -> dict[str, dict[str, bytes]]:
    """name -> artefacts: the files as given, the task's own trivial rules, the sample submission, CSV rules."""
    rules = {name: {task.artefacts[0]: text.encode()} for name, text in task.trivial.items()}
    if set(task.artefacts) <= set(task.public):
        rules["as given"] = {artefact: task.public[artefact].read_bytes() for artefact in task.artefacts}
    if task.artefacts == ("submission.csv",):
        rules |= {path: {"submission.csv": file.read_bytes()} for path, file in task.public.items()
                  if Path(path).name == "sample_submission.csv"}
        if {"data/train.csv", "data/test.csv"} <= set(task.public):
            files = task.public["data/train.csv"], task.public["data/test.csv"]
            argv = [sys.executable, TASKS_DIR / "trivial_csv.py", *files]
            done = subprocess.run(argv, capture_output=True, text=True)
            rules |= {name: {"submission.csv": text.encode()} for name, text in json.loads(done.stdout or "{}").items()}
    return rules


def at_the_top(score: float, task: Task) -> bool:
    """Whether a trivial rule's score leaves no room above it."""
    perfect = PERFECT.get(task.metric)
    return task.reference is not None and improvement(score, task) >= AT_THE_TOP or \
        perfect is not None and improvement(score, (task.baseline, task.higher_is_better, perfect)) >= AT_THE_TOP


def main(task: str, /, mlgym_root: str | None = None, mledojo_root: str | None = None, backend: str = "auto"):
    """Check a task: score its trivial rules, and say whether one of them is already at the top. The result is kept.

    Args:
        task: Name of the task.
        mlgym_root: A checkout of MLGym; $MLGYM_ROOT by default.
        mledojo_root: A folder of competitions prepared by MLE-Dojo; $MLEDOJO_ROOT by default.
        backend: docker, local or auto.
    """
    import env                      # not at the top: env.py imports this file
    task = load_task(task, mlgym_root, mledojo_root)
    world, split, rows = env.Env(task, backend), task.splits[0], []
    print(f"{task.name} ({task.source}): {task.metric}, {'higher' if task.higher_is_better else 'lower'} is better, "
          f"on the {split} part\n\n{'':32}{'score':>12}{'improvement':>13}")

    def show(name, score, note=""):
        numbers = f"{'-':>12}" if score is None else f"{score:12.4f}{improvement(score, task):13.2f}"
        print(f"{name:32}{numbers:25}  {note}".rstrip())

    show("baseline", task.baseline)
    if task.reference is not None:
        show("median of the leaderboards" if task.source == "mledojo" else "reference", task.reference)
    for name, artefacts in trivial_rules(task).items():
        score = env.grade(task, artefacts, split, world.make_sandbox)
        show(name, score.value, score.message)
        rows.append({"rule": name, "score": score.value, "message": score.message})
    top = [row for row in rows if row["score"] is not None and at_the_top(row["score"], task)]
    reason = f"the rule {top[0]['rule']!r} scores {top[0]['score']:.4g}" if top else None
    _store(sanity_file(task), {"split": split, "rows": rows, "degenerate": reason})
    found = degenerate(task)
    print(f"\n{'degenerate: ' + found if found else 'not degenerate, as far as these rules tell'}")


if __name__ == "__main__":
    import tyro

    from parts.boot import SandboxFault     # it imports nothing of ours
    from tasks import UserError, main       # this file as env.py knows it: else there would be two classes Task
    try:
        tyro.cli(main)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except SandboxFault as fault:
        print(f"The sandbox broke: {fault}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
