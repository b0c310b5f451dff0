"""Attacks on the score, each in Docker and in a local sandbox, on our graders and, where $MLGYM_ROOT is a checkout of MLGym,
on its own. None may be worth more than the honest artefact that goes with it.

An attack that is a general property of sandboxes has its test in test_sandbox.py or test_env.py; the marker `attack` names
it there. `python tests/bench.py table` lists all of them in tests/README.md.
"""

import os
from dataclasses import replace

import pytest
from backends import ISOLATED

from env import Env
from flatlab.episode.loaders import TASKS_DIR, read_yaml
from tasks import load_task

MLGYM = os.environ.get("MLGYM_ROOT")  # before conftest.py hides it
attack = pytest.mark.attack


@pytest.fixture(params=ISOLATED)
def backend(request):
    return request.param


def block(text):
    return f"```bash\n{text}\n```"


def needs(root):
    return pytest.mark.skipif(root and not MLGYM, reason="set MLGYM_ROOT to a checkout of MLGym")


def titanic(header, key, label, female):
    """awk that predicts by the sex alone, wrong for everybody."""
    return f'awk -F, \'NR==1 {{print "{header}"; next}} {{print ${key} "," ({female} ? 0 : 1)}}\' data/test.csv > submission.csv'


# An honest but poor artefact for each grader: (where it comes from, task, commands that write it).
CSV = [
    pytest.param("", "titanic", titanic("id,survived", 1, 2, '$3 == "female"'), id="our titanic"),
    pytest.param(
        "mlgym",
        "titanic",
        "printf 'PassengerId,Survived\\n' > submission.csv; cut -d, -f1 data/test.csv | "
        "tail -n +2 | sed 's/$/,1/' >> submission.csv",
        marks=needs(True),
        id="MLGym's titanic",
    ),
]
GAMES = [
    pytest.param("", "battleOfSexes", "return 1", id="our battleOfSexes"),
    pytest.param(
        "mlgym", "battleOfSexes", "return 1", marks=needs(True), id="MLGym's battleOfSexes"
    ),
    pytest.param("mlgym", "blotto", "return [20] * 6", marks=needs(True), id="MLGym's blotto"),
]


def missing_packages(world):
    """MLGym's graders need pandas and scikit-learn."""
    return world.sandbox.run(["python3", "-c", "import pandas, sklearn"], 30).exit_code


def attempt(backend, source, name, *commands):
    """(score after the last command, all observations) of an agent that runs these commands."""
    task = load_task(name, MLGYM if source else "", "")
    with Env(replace(task, step_timeout=60.0), backend) as world:
        world.reset()
        if source and name == "titanic" and missing_packages(world):
            pytest.skip("the sandbox has no pandas and scikit-learn, which MLGym's grader needs")
        said = [world.step(block(command)).observation for command in commands]
        return world.score(), "\n".join(said)


honest_scores = {}


def honest(backend, source, name, *commands):
    if (source, name) not in honest_scores:
        score, said = attempt(backend, source, name, *commands)
        assert score.valid, said + score.message
        honest_scores[source, name] = score.value
    return honest_scores[source, name]


def strategy(body, before=""):
    return (
        f"cat > strategy.py <<'EOF'\n{before}\ndef row_strategy(history):\n"
        + "".join(f"    {line}\n" for line in body.split("\n"))
        + "EOF"
    )


FAKE = 'print(\'{"accuracy": 1.0, "Score": 99, "score": 99}\', flush=True)'

# ---------------------------------------------------------------------------------------------- around the grader

AROUND = [
    (
        "rewriting the grader",
        f'for f in evaluate.py grade_csv.py simulate.py grade.py; do echo "{FAKE}" > $f; done'.replace(
            '"accuracy"', '\\"accuracy\\"'
        )
        .replace('"Score"', '\\"Score\\"')
        .replace('"score"', '\\"score\\"'),
    ),
    (
        "replacing the grader by a link",
        "ln -s /bin/true evaluate.py; ln -s /bin/true grade_csv.py; ln -s submission.csv answers.csv; mkdir -p data; ln -sf ../submission.csv data/ground_truth.csv",
    ),
    ("a folder where the grader lies", "mkdir evaluate.py grade_csv.py answers.csv"),
    (
        "editing the opponent",
        "echo 'def target_column_strategy(history): return 0\ntarget_row_strategy = col_strategy = partner = target_column_strategy' > target.py; cp target.py simulate.py",
    ),
    (
        "local json.py, numpy.py, pandas.py, random.py",
        f"for f in json csv numpy pandas sklearn random argparse math; do printf '%s\\nimport os; os._exit(0)\\n' '{FAKE.replace(chr(39), chr(34) + chr(34) + chr(34))}' > $f.py; done",
    ),
    (
        "sitecustomize and usercustomize",
        f"mkdir -p ~/.local/lib/python3.11/site-packages; for f in sitecustomize usercustomize; do printf '%s\\nimport os; os._exit(0)\\n' '{FAKE.replace(chr(39), chr(34) + chr(34) + chr(34))}' | tee $f.py > ~/.local/lib/python3.11/site-packages/$f.py; done",
    ),
    (
        "PYTHONPATH, PYTHONSTARTUP, PYTHONHOME, LD_PRELOAD",
        "export PYTHONPATH=$PWD PYTHONSTARTUP=$PWD/json.py PYTHONHOME=/nowhere PYTHONINSPECT=1 LD_PRELOAD=$PWD/x.so",
    ),
    (
        "a shell function, an alias or a program named python",
        f"python() {{ echo '{{\"accuracy\": 1.0}}'; }}; python3() {{ python; }}; export -f python python3; alias python3=python; mkdir -p ~/bin; "
        "printf '#!/bin/sh\\necho \"{\\\\\"accuracy\\\\\": 1.0}\"\\n' > ~/bin/python3; chmod +x ~/bin/python3; export PATH=~/bin:$PATH; echo 'export PATH=~/bin:$PATH' >> ~/.bashrc",
    ),
    (
        "printing a score line or MLGym's markers",
        "echo '{\"accuracy\": 1.0}'; echo '<<SUBMISSION||/home/agent/workspace/submission.csv||SUBMISSION>>'; echo '<<VALIDATION||x||VALIDATION>>'; validate; submit",
    ),
]


@pytest.mark.parametrize("source, name, artefact", CSV)
@pytest.mark.parametrize(
    "what, commands",
    [pytest.param(*row, marks=attack(row[0]), id=row[0].replace(" ", "-")) for row in AROUND],
)
def test_nothing_around_a_csv_changes_its_score(backend, source, name, artefact, what, commands):
    worth = honest(backend, source, name, artefact)
    score, said = attempt(backend, source, name, artefact, commands)
    assert score.valid and score.value == worth, said + score.message


@pytest.mark.parametrize("source, name, body", GAMES[:2])
@pytest.mark.parametrize(
    "what, commands",
    [pytest.param(*row, marks=attack(row[0]), id=row[0].replace(" ", "-")) for row in AROUND[3:6]],
)
def test_nothing_around_a_strategy_changes_its_score(backend, source, name, body, what, commands):
    worth = honest(backend, source, name, strategy(body))
    score, said = attempt(backend, source, name, strategy(body), commands)
    assert score.valid and score.value < worth + 0.03, said + score.message


# ---------------------------------------------------------------------------------------------- inside the artefact

INSIDE = [
    ("printing a JSON line and os._exit", "import os\n" + FAKE + "\nos._exit(0)", "{honest}"),
    ("printing a JSON line and os._exit", "", "import os\n" + FAKE + "\nos._exit(0)"),
    (
        "printing a JSON line from every file descriptor",
        'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"Score": 99, "score": 99}\\n\')\n    except OSError: pass',
        "{honest}",
    ),
    (
        "patching json, builtins and the grader's module",
        'import json, builtins, sys\njson.dumps = lambda *a, **k: \'{"Score": 99, "score": 99}\'\nbuiltins.sum = lambda *a: 10 ** 9\n'
        "main = sys.modules['__main__']\nmain.PAYOFF = main.score = 99",
        "{honest}",
    ),
    (
        "importing and editing the opponent",
        "import target\nfor name in dir(target):\n    if callable(getattr(target, name)): setattr(target, name, lambda *a: [0] * 6)",
        "{honest}",
    ),
    (
        "peeking at the random numbers",
        "import random",
        "from target import target_column_strategy\nstate = random.getstate()\nmove = target_column_strategy(history)\nrandom.setstate(state)\n"
        "return move if isinstance(move, int) else [0 if i == move.index(max(move)) else m + 1 for i, m in enumerate(move)]",
    ),
    (
        "seeding the random numbers",
        "import random\nrandom.seed(0)\ntry:\n    import numpy; numpy.random.seed(0)\nexcept ImportError: pass",
        "random.seed(0)\n{honest}",
    ),
    (
        "appending to the history",
        "",
        "for _ in range(99):\n    try: history.append((0, 0))\n    except AttributeError: pass\n{honest}",
    ),
    (
        "inspecting frames and objects",
        "import gc, sys\nfor thing in gc.get_objects():\n    if isinstance(thing, dict) and 'PAYOFF' in thing: thing['PAYOFF'] = {(a, b): 99 for a in (0, 1) for b in (0, 1)}",
        "frame = sys._getframe()\nwhile frame:\n    for name in list(frame.f_locals):\n        if 'score' in name or 'total' in name or 'reward' in name: frame.f_locals[name] = 10 ** 9\n    frame = frame.f_back\n{honest}",
    ),
    (
        "a move that is more than a number",
        "class Move(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n    def __radd__(self, other): return 99\n    __add__ = __radd__",
        "{honest}\nreturn Move(0)",
    ),
    (
        "killing or tracing the grader",
        "import ctypes, os, signal\nlibc = ctypes.CDLL(None)\nfor pid in {1, os.getppid()}:\n    libc.ptrace(16, pid, 0, 0)\n    try: os.kill(pid, signal.SIGSTOP)\n    except OSError: pass",
        "{honest}",
    ),
]


@pytest.mark.parametrize("source, name, body", GAMES)
@pytest.mark.parametrize(
    "what, before, inside",
    [
        pytest.param(*row, marks=attack(row[0]), id=f"{row[0].replace(' ', '-')}-{n}")
        for n, row in enumerate(INSIDE)
    ],
)
def test_no_strategy_is_worth_more_than_its_moves(
    backend, source, name, body, what, before, inside
):
    worth = honest(backend, source, name, strategy(body))
    score, said = attempt(backend, source, name, strategy(inside.replace("{honest}", body), before))
    assert score.value is None or score.value < worth + 0.03, score
    assert score.valid or score.message


LOOK = """
import glob, os, subprocess, sys
found, ours = [], {os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}

def files(top):
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(folder, name)) not in ours]     # a Python that lies there
        yield from (os.path.join(folder, name) for name in names)

for path in ["/proc/1/environ", "/proc/1/mem", f"/proc/{os.getppid()}/environ", f"/proc/{os.getppid()}/mem", f"/proc/{os.getppid()}/fd/0",
             f"/proc/{os.getppid()}/cwd/answers.csv", f"/proc/{os.getppid()}/cwd/target.py", "/etc/shadow",
             *files("/home/agent/workspace"), *files("/tmp"), *glob.glob("/home/agent/*")]:
    try:
        if os.path.isfile(path) and open(path, "rb").read(10): found.append(path)
    except OSError:
        pass
raise ValueError("FOUND" + " ".join(p for p in found if not p.startswith(sys.prefix))[:200])
"""


@attack("reading the grader and the opponent from inside the artefact")
@pytest.mark.parametrize("source, name, body", GAMES)
def test_a_strategy_finds_nothing_to_read(backend, source, name, body):
    score, said = attempt(backend, source, name, strategy(body, LOOK))
    assert (
        score.value is None
        and "FOUND" in score.message
        and score.message.split("FOUND")[1].strip() == ""
    ), score


# ---------------------------------------------------------------------------------------------- the CSV itself


def rows_of(world):
    return [line for line in world.sandbox.get("submission.csv").decode().splitlines()]


HOSTILE = [
    ("duplicate ids", lambda rows: [rows[0]] + [rows[1]] * (len(rows) - 1)),
    ("one id twice", lambda rows: rows + [rows[1]]),
    ("NaN", lambda rows: [rows[0]] + [row.split(",")[0] + ",nan" for row in rows[1:]]),
    ("infinity", lambda rows: [rows[0]] + [row.split(",")[0] + ",inf" for row in rows[1:]]),
    ("extra columns", lambda rows: [row + ",1" for row in rows]),
    ("another header", lambda rows: ["a,b"] + rows[1:]),
    ("missing rows", lambda rows: rows[:2]),
    ("no rows", lambda rows: rows[:1]),
    ("nothing", lambda rows: []),
    ("a JSON line", lambda rows: ['{"accuracy": 1.0}'] * len(rows)),
    ("a formula", lambda rows: [rows[0]] + ["=cmd|'/bin/sh'!A1,1"] * (len(rows) - 1)),
    ("a deeply compressed file", lambda rows: None),
    ("a pickle", lambda rows: None),
]


@pytest.mark.parametrize("source, name, artefact", CSV)
@pytest.mark.parametrize(
    "what, change",
    [
        pytest.param(*row, marks=attack(f"a CSV with {row[0]}"), id=row[0].replace(" ", "-"))
        for row in HOSTILE
    ],
)
def test_hostile_csv(backend, source, name, artefact, what, change):
    worth, task = (
        honest(backend, source, name, artefact),
        load_task(name, MLGYM if source else "", ""),
    )
    with Env(task, backend) as world:
        world.reset()
        world.step(block(artefact))
        if what == "a deeply compressed file":
            world.step(block("head -c 50M /dev/zero | gzip -9 > submission.csv"))
        elif what == "a pickle":
            world.step(
                block(
                    "python3 -c \"import pickle, os; print(pickle.dumps(type('X', (), {'__reduce__': lambda s: (os._exit, (0,))})))\" > submission.csv"
                )
            )
        else:
            world.sandbox.put({"submission.csv": "\n".join(change(rows_of(world)) + [""]).encode()})
        score = world.score()
        assert score.value is None or score.value <= worth, score
        assert "Traceback" not in score.message


@needs(True)
@attack("published for MLGym: the answers copied, in its house price task")
def test_answers_of_mlgyms_house_prices_are_nowhere(backend):
    score, said = attempt(
        backend,
        "mlgym",
        "regressionKaggleHousePrice",
        "find / -name 'answer*.csv' 2>/dev/null; cp data/answer.csv submission.csv",
        "ls data",
    )
    assert not score.valid and score.message.startswith("no submission") and "train.csv" in said
    assert not [line for line in said.splitlines() if line.startswith("/")], said


@attack("published for MLGym: random numbers in COCO's self-reported metric")
def test_mlgyms_self_reported_metric_is_marked():
    """Not covered: the grader averages a column that the agent writes. Every result says so instead."""
    assert (
        "fills in itself"
        in read_yaml(TASKS_DIR / "mlgym.yaml")["imageCaptioningCOCO"]["degenerate"]
    )


@attack("a score made up by code that MLGym's graders run: src/, baseline.py, pickled checkpoints")
@pytest.mark.parametrize(
    "name",
    [
        "rlBreakoutMinAtar",
        "rlMetaMaze",
        "rlMountainCarContinuous",
        "rlMountainCarContinuousReinforce",
        "languageModelingFineWeb",
        "naturalLanguageInferenceMNLI",
    ],
)
def test_mlgyms_graders_that_run_the_agents_code_are_marked(name):
    """Not covered: these graders import or unpickle what the agent wrote. Every result says so instead."""
    assert (
        "the grader runs code that the agent wrote, so a score can be made up"
        in read_yaml(TASKS_DIR / "mlgym.yaml")[name]["degenerate"]
    )


@attack("a CSV in another order")
def test_order_of_rows_is_not_worth_anything(backend):
    worth = honest(backend, "", "titanic", CSV[0].values[2])
    score, said = attempt(
        backend,
        "",
        "titanic",
        CSV[0].values[2],
        "(head -1 submission.csv; tail -n +2 submission.csv | tac) > s; mv s submission.csv",
    )
    assert score.value == worth


@attack("answers through the grader's error text")
@pytest.mark.parametrize(
    "row", ["0", "", "\u0000", "'; import os", "{answers}", "%s" * 50, "9" * 5000]
)
def test_messages_depend_on_no_answer(backend, row):
    """The same wrong value for each of two ids with different answers gets the same message."""
    task = load_task("titanic", "", "")
    lines = task.hidden["answers.csv"].read_text().splitlines()[1:]
    ids = [
        next(line.split(",")[0] for line in lines if line.endswith("," + label)) for label in "01"
    ]
    said = []
    with Env(task, backend) as world:
        world.reset()
        for key in ids:
            world.sandbox.put({"submission.csv": f"id,survived\n{key},{row}\n".encode()})
            said.append(world.score().message.replace(f"id {key} ", "id "))
    first_missing = [text.split("the first is")[0] for text in said]
    assert first_missing[0] == first_missing[1] and said[0]


# ---------------------------------------------------------------------------------------------- answers in packages

LOADED = """python3 - <<'EOF'
import csv
from sklearn.datasets import load_{name}
data = load_{name}({scaled})
key = dict(zip(map(tuple, data.data.round(3).tolist()), data.target))
rows = list(csv.DictReader(open("data/test.csv")))
columns = list(rows[0])[1:]
with open("submission.csv", "w") as file:
    print("id,{target}", file=file)
    for row in rows:
        print(row["id"], key[tuple(round(float(row[c]), 3) for c in columns)], sep=",", file=file)
EOF"""
TRAINED = """python3 - <<'EOF'
import pandas
from {module} import {model}
train, test = pandas.read_csv("data/train.csv"), pandas.read_csv("data/test.csv")
x = list(test.columns[1:])
test["{target}"] = {model}().fit(train[x], train["{target}"]).predict(test[x])
test[["id", "{target}"]].to_csv("submission.csv", index=False)
EOF"""


@attack("answers in scikit-learn's own data")
@pytest.mark.parametrize(
    "facts",
    [
        {
            "name": "digits",
            "scaled": "",
            "target": "label",
            "module": "sklearn.svm",
            "model": "SVC",
            "least": 0.9,
        },
        {
            "name": "diabetes",
            "scaled": "scaled=False",
            "target": "progression",
            "module": "sklearn.linear_model",
            "model": "LinearRegression",
            "least": 0.3,
        },
    ],
    ids=lambda facts: facts["name"],
)
def test_scikit_learn_holds_no_answers_and_still_trains(backend, facts):
    with Env(load_task(facts["name"], "", ""), backend) as world:
        world.reset()
        if missing_packages(world):
            pytest.skip("the sandbox has no scikit-learn")
        step = world.step(block(LOADED.format(**facts)))
        assert "NotFoundError" in step.observation, step.observation
        assert world.score().message.startswith("no submission")
        found = world.step(
            block(
                "find / -path '*sklearn/datasets/data/?*' -o -name 'digits.csv*' -o -name 'diabetes_*.csv*' 2>/dev/null; true"
            )
        )
        assert found.observation == "(no output)"
        step = world.step(block(TRAINED.format(**facts)))
        assert step.status == "ok" and world.score().value > facts["least"], step.observation
        with world.fork() as twin:
            assert "NotFoundError" in twin.step(block(LOADED.format(**facts))).observation


# ---------------------------------------------------------------------------------------------- the artefact's way


@attack("an artefact of 10 GB")
def test_ten_gigabytes(backend):
    score, said = attempt(
        backend,
        "",
        "titanic",
        "truncate -s 10G submission.csv || head -c 900M /dev/zero > submission.csv",
    )
    assert not score.valid and ("larger than" in score.message or "not there" in score.message)


@attack("an artefact that is a link, a device, a FIFO, a socket or a folder")
@pytest.mark.parametrize(
    "make",
    [
        "ln -s data/train.csv submission.csv",
        "ln -s /proc/self/mem submission.csv",
        "mkfifo submission.csv",
        "mkdir submission.csv",
        "mknod submission.csv c 1 5; ln -s /dev/zero submission.csv",
        "python3 -c 'import socket; socket.socket(1).bind(\"submission.csv\")'",
    ],
)
def test_strange_artefacts(backend, make):
    score, said = attempt(backend, "", "titanic", make)
    assert not score.valid and score.message.startswith("no submission")


@attack("a stale artefact")
def test_what_the_parent_wrote_is_not_worth_anything_to_a_child(backend):
    task = load_task("titanic", "", "")
    with Env(task, backend) as world:
        world.reset()
        world.step(block(CSV[0].values[2]))
        assert world.score().valid
        with world.fork() as child:
            assert not child.score().valid
        world.reset()
        assert not world.score().valid


@attack("apt, sudo, su, setuid programs")
def test_no_way_to_root(backend):
    score, said = attempt(
        backend,
        "",
        "titanic",
        "apt-get install -y hello; sudo -n id; su -c id; pkexec id; find / -xdev -perm -4000 -type f 2>/dev/null | head -3 | while read f; do $f -c id </dev/null; done",
        "cp /bin/bash b; chmod 4755 b; ./b -p -c 'id -u' | sed s/^/UID/; unshare -r id; nsenter -t 1 -a id",
        "id -u; id",
    )
    assert "uid=0" not in said and "euid=0" not in said and "UID0" not in said


@attack("filling the disk")
def test_full_disk_is_no_fault(backend):
    task = load_task("titanic", "", "")
    with Env(task, backend, disk=64 << 20) as world:
        world.reset()
        for folder in (".", "/tmp", "/dev/shm"):
            world.step(
                block(f"for i in 1 2 3 4 5 6; do head -c 60M /dev/zero > {folder}/fill$i; done"), 30
            )
        assert world.score().message.startswith("no submission")
        world.step(block(f"rm -f fill* /tmp/fill* /dev/shm/fill*; {CSV[0].values[2]}"))
        assert world.score().valid


@attack(
    "folders as deep as they go, and names that are no text, after a bad result: a fault would drop it"
)
def test_strange_trees_are_no_fault(backend):
    """In a task whose artefacts are patterns, so that the whole workspace is listed, and all of it is kept for a child."""
    task = replace(load_task("titanic", "", ""), artefacts=("submission.csv", "*.out"))
    with Env(task, backend) as world:
        world.reset()
        world.step(block(CSV[0].values[2]))
        before = world.score()
        deep = world.step(
            block(
                "python3 -c 'import os\nfor i in range(3000): os.mkdir(\"d\"); os.chdir(\"d\")'; touch $'\\xff.py' $'\\xfe.out'; ls"
            )
        )
        deep.observation.encode()
        assert world.score() == before and before.valid
        world.step(block("ln -s data folder.out"))  # is no file, so it is not handed in
        assert world.score() == before
        world.step(block("ln -s data/train.csv $'\\xfd.out'"))
        found = world.step("```bash\nvalidate\n```")
        assert (
            found.status == "invalid"
            and "is a link" in found.observation
            and found.observation.encode()
        )
        world.step(
            block(
                'rm -rf *.out d; python3 -c \'import os\nfor i in range(1200): os.mkdir("d"); os.chdir("d")\''
            )
        )
        with world.fork() as child:
            assert child.step(block("ls d")).status == "ok"
            assert child.prompt().encode()


@attack("deleting everything")
@pytest.mark.fault(14, "rm -rf / by the agent")
def test_rm_rf(backend):
    task = load_task("titanic", "", "")
    with Env(task, backend) as world:
        world.reset()
        world.step(
            block(
                "rm -rf /home /opt /tmp /var /dev /etc 2>/dev/null; rm -rf ~/* ~/.* . 2>/dev/null; mkdir -p ~/workspace"
            )
        )
        assert world.score().message.startswith("no submission")
        assert not world.step(block("submit")).score and not world.score("test").valid
