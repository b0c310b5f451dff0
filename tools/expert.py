"""The scripted expert that the stand-in model imitates: tables of solutions and their episodes.

The expert is deliberately mediocre. It picks good and bad solutions, makes mistakes and repairs
some of them, so a model that imitates it has much to gain. Its prompts are those of
configs/prompts/tiny.yaml. To add a task, add a table to
TABLES.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

from tqdm import tqdm

import env
from flatlab.options import EpisodeOptions
from flatlab.task.definition import Task
from flatlab.task.value import improvement
from flatlab.tree import requests
from flatlab.world.prompts import load_prompts
from tasks import load_task

PROMPTS = "configs/prompts/tiny.yaml"

# ---- tables

# Programs use only the standard library, so one runs in about 20 ms. They share most lines, so the
# stand-in's BPE turns a line into two or three tokens.


@dataclass(frozen=True)
class Table:
    """Solutions of one task: rows are (weight, strategy in words, bash text).

    looks: commands that change nothing. mistakes: rows of (weight, text of a program, wrong text).
    """

    looks: tuple[str, ...]
    solutions: tuple[tuple[float, str, str], ...]
    mistakes: tuple[tuple[float, str, str], ...]


def titanic_program(key: str, rule: str) -> str:
    return f"""cat > solve.py <<'EOF'
import csv
train = list(csv.DictReader(open('data/train.csv')))
test = list(csv.DictReader(open('data/test.csv')))
def key(r):
    return {key}
cells = {{}}
for r in train:
    cells.setdefault(key(r), []).append(int(r['survived']))
def predict(r):
    seen = cells.get(key(r), [0])
    return {rule}
with open('submission.csv', 'w') as out:
    out.write('id,survived\\n')
    for r in test:
        out.write(r['id'] + ',' + str(predict(r)) + '\\n')
EOF
python3 solve.py"""


def titanic_table() -> Table:
    """Rules x feature sets.

    Accuracy: nobody survives 0.68, everybody 0.32, majority by sex 0.78, by all three 0.79.
    """
    features = {
        "nothing": (1, "0"),
        "age": (2, "r['age']"),
        "class": (3, "r['class']"),
        "sex": (3, "r['sex']"),
        "class and age": (2, "(r['class'], r['age'])"),
        "sex and age": (2, "(r['sex'], r['age'])"),
        "sex and class": (2, "(r['sex'], r['class'])"),
        "all three": (2, "(r['sex'], r['class'], r['age'])"),
    }
    rules = {
        "majority": (7, "int(sum(seen) > 0.5 * len(seen))"),
        "share over 0.3": (2, "int(sum(seen) > 0.3 * len(seen))"),
        "share over 0.7": (2.5, "int(sum(seen) > 0.7 * len(seen))"),
        "minority": (3, "int(sum(seen) < 0.5 * len(seen))"),
        "last one seen": (3, "seen[-1]"),
    }
    solutions = [
        (30.0, "nobody survives", titanic_program("0", "0")),
        (12.0, "everybody survives", titanic_program("0", "1")),
    ]
    for rule, (rule_weight, rule_text) in rules.items():
        for names, (weight, key) in features.items():
            solutions.append(
                (rule_weight * weight / 2, f"{rule} by {names}", titanic_program(key, rule_text))
            )
    return Table(
        looks=(
            "ls data",
            "head -n 3 data/train.csv",
            "head -n 3 data/test.csv",
            "wc -l data/train.csv data/test.csv",
        ),
        solutions=tuple(solutions),
        mistakes=(
            (2, "r['survived']", "r['Survived']"),
            (2, "'id,survived\\n'", "'id,label\\n'"),
            (2, "in test:", "in test[1:]:"),
            (2, "\npython3 solve.py", ""),
            (1, "import csv\n", ""),
            (1, "def predict(r):", "def predict(r)"),
        ),
    )


def battle_program(first: str, later: str) -> str:
    return f"""cat > strategy.py <<'EOF'
import random
def row_strategy(history):
    if len(history) == 0:
        return {first}
    return {later}
EOF"""


def battle_table() -> Table:
    """First moves x later rules. The partner copies the first move; always 0 earns 1.44."""
    later = {
        "always 0": (5, 2, "0"),
        "always 1": (2, 3, "1"),
        "copy the partner": (1.5, 3, "history[-1][1]"),
        "oppose the partner": (1, 2, "1 - history[-1][1]"),
        "alternate": (1.5, 2, "1 - history[-1][0]"),
        "random 0.2": (0.8, 1, "int(random.random() < 0.2)"),
        "random 0.5": (1.5, 2, "int(random.random() < 0.5)"),
        "random 0.8": (1, 1, "int(random.random() < 0.8)"),
        "every second 1": (1, 1, "len(history) % 2"),
        "every third 1": (0.7, 1, "int(len(history) % 3 == 0)"),
    }
    solutions = []
    for words, (after_0, after_1, text) in later.items():
        solutions.append((after_0, f"first 0, then {words}", battle_program("0", text)))
        solutions.append((after_1, f"first 1, then {words}", battle_program("1", text)))
    return Table(
        looks=("ls", "python3 --version"),
        solutions=tuple(solutions),
        mistakes=(
            (2, "def row_strategy(history):", "def row_strategy(history)"),
            (2, "row_strategy", "strategy"),
            (2, "> strategy.py", "> player.py"),
            (2, "(history):", "():"),
            (2, "import random", "import game"),
        ),
    )


def heights_program(unit: int, limit: str, measure: str, size: str, moves: str) -> str:
    """Hill climbing on 30 heights of mean `unit`, from the parent's file if there is one.

    measure: the function that is made small. moves: pairs of steps (from, to) of one trial.
    """
    name = measure.removeprefix("def ").partition("(")[0]
    return f"""cat > solve.py <<'EOF'
import json, os, random
from operator import mul
u = {unit}
n = 30
h = [u] * n
if os.path.exists('best.json'):
    h = json.load(open('best.json'))
random.seed(hash(str(h)))
{measure}
best = {name}(h)
for t in range(100):
    g = h[:]
    i = random.randrange(n)
    j = random.randrange(n)
    d = int(2 * u * {size} * random.random())
    for a, b in {moves}:
        m = min(d, g[a], {limit} - g[b])
        g[a] -= m
        g[b] += m
    if {name}(g) < best:
        h = g
        best = {name}(g)
json.dump(h, open('best.json', 'w'))
json.dump(h, open('solution.json', 'w'))
EOF
python3 solve.py"""


OVERLAP = """def overlap(h):
    g = [2 * u - x for x in h]
    low = max(sum(map(mul, h[k:], g)) for k in range(n))
    return max(low, max(sum(map(mul, g[k:], h)) for k in range(n)))"""
AUTOCONVOLUTION = """def peak(h):
    g = h[::-1]
    low = max(sum(map(mul, h[:k], g[n - k:])) for k in range(1, n))
    return max(low, max(sum(map(mul, h[k:], g)) for k in range(n)))"""


def heights_table(unit: int, limit: str, measure: str) -> Table:
    """Ways to move height between steps x how much, each tried 100 times from the parent's file.

    Overlap: from the constant, which scores 0.5, one program ends between 0.499 and 0.412. Small
    amounts pay later: four programs in a row reach 0.394. Autoconvolution: one program ends between
    2.0 and 1.68. `hash` depends on the seed of the sandbox.
    """
    moves = {
        "single moves": "[(i, j)]",
        "neighbour moves": "[(i, i - 1)]",
        "mirrored moves": "[(i, j), (-1 - i, -1 - j)]",
        "block moves": "[(i - k, j - k) for k in range(4)]",
        "many moves": "[(k, (k * i + j) % n) for k in range(n)]",
        "shifts": "[(k, k - 1) for k in range(i, n)]",
    }
    solutions = []
    for words, pairs in moves.items():
        for size in ("1.0", "0.3", "0.1", "0.03", "0.01"):
            program = heights_program(unit, limit, measure, size, pairs)
            solutions.append((1.0, f"{words} of {size}", program))
    return Table(
        looks=("ls", "ls -l", "cat data/sample_solution.json"),
        solutions=tuple(solutions),
        mistakes=(
            (2, "        g[a] -= m\n", ""),
            (2, "'solution.json'", "'answer.json'"),
            (2, "\npython3 solve.py", ""),
            (2, f"u = {unit}", f"u = {unit / 10**9:g}"),
            (1, ", random\n", "\n"),
            (1, "(h):\n", "(h)\n"),
        ),
    )


def overlap_table() -> Table:
    return heights_table(500_000_000, "2 * u", OVERLAP)


def autocorrelation_table() -> Table:
    return heights_table(100_000_000, "10 * u", AUTOCONVOLUTION)


TABLES = {
    "titanic": titanic_table,
    "battleOfSexes": battle_table,
    "erdosOverlap": overlap_table,
    "autocorrelation": autocorrelation_table,
}

# A strategy is a line of its own, the same in the prompt and in the reply. The BPE cuts such a line
# into the same tokens everywhere, so following a strategy means copying a line.
STRATEGY = "Strategy: {}\n"
PROSE = "The table shows it all.\nThat should do."  # a reply without a bash block
# Percentages of the episodes. All kinds but "free" occur in a search.
SHARES = {"free": 38, "draft": 25, "child": 10, "debug": 6, "crossover": 3, "list": 18}

# ---- the world


class World:
    """One task, with the observation of every action of the expert, each played once in a sandbox.

    A program overwrites all it uses, so its output does not depend on earlier actions. `validate`
    depends only on the last program that wrote the artefact. A few hundred sandboxes therefore
    serve thousands of episodes.
    """

    def __init__(self, task: Task, table: Table, backend: str):
        self.task = task
        self.table = table
        self.backend = backend
        self.seen: dict[str, tuple[str, env.Step, str]] = {}
        with env.Env(task, backend) as box:
            self.prompt = box.reset(EpisodeOptions(prompts=PROMPTS))
            self.nothing = box.step(block("validate"))  # the answer without an artefact

    def actions(self) -> list[str]:
        """Every reply that `play` can be asked for."""
        programs = [program for _, _, program in self.table.solutions]
        spoiled = []
        for program in programs:
            for _, right, wrong in self.table.mistakes:
                if right in program:
                    spoiled.append(program.replace(right, wrong))
        texts = dict.fromkeys([*self.table.looks, *programs, *spoiled])
        return [*map(block, texts), PROSE]

    def play(self, reply: str) -> tuple[str, env.Step, str]:
        """The observation in a fresh workspace, the step of a `validate` after it, and the prompt
        of an attempt that starts from the files.
        """
        if reply not in self.seen:
            with env.Env(self.task, self.backend) as box:
                box.restart()
                observation = box.step(reply).observation
                step = box.step(block("validate"))
                box.restore(box.snapshot())
                prompt = box.prompt(EpisodeOptions(prompts=PROMPTS))
                self.seen[reply] = observation, step, prompt
        return self.seen[reply]

    def node(self, words: str, program: str) -> SimpleNamespace:
        """A finished search node that ran this program, as the prompts of a search expect it."""
        said, step, prompt = self.play(block(program))
        errors = [step.score.message]
        if "[exit code" in said:
            errors.insert(0, said)
        command, _, code = program.partition(" <<'EOF'\n")
        file_name = command.split()[-1]
        return SimpleNamespace(
            idea=words,
            op="draft",
            valid=step.score.valid,
            score=step.score.value,
            status="submit",
            code={file_name: code.partition("EOF")[0]},
            error="\n".join(errors),
            prompt_of_child=prompt,
        )


def worlds(backend: str, names: tuple[str, ...]) -> dict[str, World]:
    """The worlds of these tasks, with all actions played, one per core at a time."""
    made = {}
    for name in names:
        made[name] = World(load_task(name, "", ""), TABLES[name](), backend)
    todo = [(world, action) for world in made.values() for action in world.actions()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        played = pool.map(lambda job: job[0].play(job[1]), todo)
        for _ in tqdm(played, "programs of the expert", len(todo), mininterval=5):
            pass
    return made


def block(text: str) -> str:
    return f"```bash\n{text}\n```"


# ---- episodes


def episode(rng: random.Random, world: World) -> list[tuple[str, str]]:
    """One scripted conversation as [(role, text), ...], from a prompt to a reply."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    return list_strategies(rng, world) if kind == "list" else solve(rng, world, kind)


def solve(rng: random.Random, world: World, kind: str) -> list[tuple[str, str]]:
    """An attempt at the task.

    kind: "free"; "draft" or "child" of a node, with a strategy in the prompt; "debug" after a
    failed attempt with the same strategy; "crossover" of two nodes.
    """
    table = world.table
    if kind in ("free", "crossover"):
        _, words, program = pick(rng, table.solutions)
    else:
        _, words, program = rng.choice(table.solutions)
    talk = [("user", request(rng, world, kind, words, program))]
    state = world.nothing  # the step of a `validate` at this point

    def say(reply: str, observation: str) -> None:
        talk.extend([("assistant", reply), ("user", observation)])

    def write(text: str) -> None:
        nonlocal state
        observation, after, _ = world.play(block(text))
        if after.observation != world.nothing.observation:  # it wrote the artefact
            state = after
        say(STRATEGY.format(words) + block(text), observation)

    def validate() -> None:
        say(block("validate"), state.observation)

    if rng.random() < 0.25:
        look = block(rng.choice(table.looks))
        say(look, world.play(look)[0])
    if rng.random() < 0.03:
        say(PROSE, world.play(PROSE)[0])
    is_spoiled = rng.random() < 0.29
    write(spoil(rng, table, program) if is_spoiled else program)
    if is_spoiled and state is world.nothing and rng.random() < 0.15:  # it reads the error message
        write(program)
    if rng.random() < 0.85:
        validate()
        if not state.score.valid:
            if rng.random() < 0.4:
                write(program)
                validate()
        elif kind == "free" and rng.random() < second_try(state.score.value, world.task):
            _, words, program = pick(rng, table.solutions)
            write(program)
            validate()
    return [*talk, ("assistant", block("submit"))]


def second_try(score: float, task: Task) -> float:
    """Probability of trying another solution after a valid score: higher near the baseline."""
    return 0.25 if improvement(score, task) < 0.1 else 0.05


def request(rng: random.Random, world: World, kind: str, words: str, program: str) -> str:
    """The first message: the task, the parent nodes, if any, and the strategy, as in search.py."""
    if kind == "free":
        return world.prompt
    table = world.table
    node = SimpleNamespace(idea=words, op="draft", decision={})
    parents = []
    prompt = world.prompt
    if kind == "child":
        parents = [world.node(*rng.choice(table.solutions)[1:])]
        node.op = "improve"
        node.decision["phase"] = rng.choice(["explore", "exploit"])
    elif kind == "debug":
        parents = [world.node(words, spoil(rng, table, program))]
        node.op = "debug"
    elif kind == "crossover":
        parents = [world.node(*row[1:]) for row in rng.sample(table.solutions, 2)]
        node.op = "crossover"
        node.idea = ""
    if parents:
        prompt = parents[0].prompt_of_child
    situation = requests.situation(load_prompts(PROMPTS), world.task, node, parents, 1500)
    return f"{prompt}\n\n{situation}"


def copy_lesson(rng: random.Random, world: World) -> list[tuple[str, str]]:
    """A prompt with a strategy of random words, which the reply repeats."""
    known = [word for _, words, _ in world.table.solutions for word in words.split()]
    words = " ".join(rng.choices(known, k=rng.randint(2, 6)))
    kind = rng.choice(["draft", "draft", "child"])
    prompt = request(rng, world, kind, words, "")
    return [("user", prompt), ("assistant", STRATEGY.format(words).strip())]


def list_strategies(rng: random.Random, world: World) -> list[tuple[str, str]]:
    """Answers requests.ask with k different strategies and their probabilities."""
    table = world.table
    k = rng.choice([2, 3, 3, 5, 5, 5, 5, 5, 5])
    mode = rng.choice(["uniform", "tail", "local", "sequence"])
    parent = None
    idea = ""
    if rng.random() < 0.5:
        parent = world.node(*rng.choice(table.solutions)[1:])
        idea = parent.idea
    rows = rng.sample(table.solutions, rng.choice([0, 0, 1, 2, 3]))
    siblings = [world.node(*row[1:]) for row in rows]
    tried = {idea, *(node.idea for node in siblings)}
    left = [words for _, words, _ in table.solutions if words not in tried]
    if mode == "local":
        left = most_similar(rng, table, idea, left)[: 2 * k]
    chosen = rng.sample(left, min(k, len(left)))
    highest = {"tail": 0.09, "local": 0.3}.get(mode, 1 / k)
    lines = []
    for words in chosen:
        probability = 1 / k if mode == "uniform" else rng.uniform(0.01, highest)
        lines.append(f"Strategy: {words}")
        if mode != "sequence":
            lines.append(f"Probability: {probability:.2f}")
    texts = load_prompts(PROMPTS)
    about = requests.task_text(texts, world.task, {})
    wanted = {"about": about, "mode": mode, "k": k, "tau": 0.1}
    question = requests.ask(texts, world.task, parent, siblings, **wanted)
    return [("user", question), ("assistant", "\n".join(lines))]


def most_similar(rng: random.Random, table: Table, idea: str, left: list[str]) -> list[str]:
    """`left` sorted by the number of words that differ from `idea`, else from the commonest one."""
    if not idea:
        _, idea, _ = max(table.solutions)
    target = set(idea.split())
    distance = {words: len(set(words.split()) ^ target) + rng.random() for words in left}
    return sorted(left, key=distance.get)


def pick(rng: random.Random, rows):
    """A random row, by the weights in the first column."""
    return rng.choices(rows, weights=[row[0] for row in rows])[0]


def spoil(rng: random.Random, table: Table, program: str) -> str:
    """The program with one planted mistake."""
    possible = [row for row in table.mistakes if row[1] in program]
    _, right, wrong = pick(rng, possible)
    return program.replace(right, wrong)
