"""The scripted expert that the stand-in model imitates: tables of solutions, and episodes played with them.

It is deliberately mediocre: good and bad solutions, mistakes of which it repairs some, little looking back. So a model
that imitates it has much to gain. It is told exactly what env.py says and asked exactly what prompts.py asks.
A further task is one more table: see TABLES.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import env
from flatlab.episode.task import Task, improvement
from flatlab.tree import prompts
from tasks import load_task

# ---------------------------------------------------------------------------------------------- tables

# Programs use the standard library only, so that one runs in about 20 ms, and share their lines, so that the BPE of
# the stand-in turns a line into two or three tokens.


@dataclass(frozen=True)
class Table:
    looks: tuple[str, ...]  # commands that only look
    solutions: tuple[tuple[float, str, str], ...]  # (weight, strategy in words, bash text)
    mistakes: tuple[
        tuple[float, str, str], ...
    ]  # (weight, text of a right program, what stands there by mistake)

    @property
    def total(self) -> float:
        return sum(weight for weight, _, _ in self.solutions)


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
    """Rules x feature sets. Accuracy: nobody 0.68, everybody 0.32, majority by sex 0.78, by all three 0.79."""
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
    """First move x later rule. The partner copies the first move, so only "first 0, then always 0" earns 1.44."""
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


TABLES = {"titanic": titanic_table, "battleOfSexes": battle_table}

# The strategy stands on a line of its own, with the same characters in the prompt and in the reply. The BPE cuts such a
# line into the same tokens wherever it stands, so following a strategy is copying a line.
STRATEGY = "Strategy: {}\n"
REASONING = "Reasoning: the common ones first, then what nobody would try.\n"  # of --vs-variant cot
PROSE = "The table shows it all.\nThat should do."  # a reply that forgets the block
# Per cent of the episodes; all but free are for search.
SHARES = {"free": 38, "draft": 25, "child": 10, "debug": 6, "crossover": 3, "list": 18}

# ---------------------------------------------------------------------------------------------- the world


class World:
    """One task with the observations of every action that the expert knows, each played once in a real sandbox.

    What a program prints does not depend on what was done before (it overwrites all that it uses), and what `validate`
    says only on the last program that wrote the artefact: a few hundred sandboxes serve thousands of episodes.
    """

    def __init__(self, task: Task, table: Table, backend: str):
        self.task, self.table, self.backend = task, table, backend
        self.seen: dict[str, tuple[str, env.Step]] = {}
        with env.Env(task, backend) as box:
            self.prompt = box.reset()
            self.nothing = box.step(block("validate"))  # the answer while no artefact is there

    def actions(self) -> list[str]:
        """Every text that `play` can be asked for."""
        programs = [program for _, _, program in self.table.solutions]
        spoiled = [
            program.replace(right, wrong)
            for program in programs
            for _, right, wrong in self.table.mistakes
            if right in program
        ]
        return [block(text) for text in dict.fromkeys([*self.table.looks, *programs, *spoiled])] + [
            PROSE
        ]

    def play(self, reply: str) -> tuple[str, env.Step]:
        """(observation after the reply in a fresh workspace, the step of a `validate` right after it)."""
        if reply not in self.seen:
            with env.Env(self.task, self.backend) as box:
                box.reset()
                self.seen[reply] = box.step(reply).observation, box.step(block("validate"))
        return self.seen[reply]

    def node(self, words: str, program: str) -> SimpleNamespace:
        """A finished node of a search that did this, as prompts.py wants it; its error is what search.expand keeps."""
        said, step = self.play(block(program))
        error = "\n".join([said] * ("[exit code" in said) + [step.score.message])
        command, _, code = program.partition(" <<'EOF'\n")
        return SimpleNamespace(
            idea=words,
            op="draft",
            valid=step.score.valid,
            score=step.score.value,
            status="submit",
            code={command.split()[-1]: code.partition("EOF")[0]},
            error=error,
        )


def worlds(backend: str, progress) -> dict[str, World]:
    """The world of every task, all actions played, as many at once as there are cores. progress(done, total)."""
    made = {
        name: World(load_task(name, "", ""), table(), backend) for name, table in TABLES.items()
    }
    todo = [(world, action) for world in made.values() for action in world.actions()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(lambda job: job[0].play(job[1]), todo), 1):
            progress(done, len(todo))
    return made


def block(text: str) -> str:
    return f"```bash\n{text}\n```"


# ---------------------------------------------------------------------------------------------- episodes


def episode(rng: random.Random, world: World) -> list[tuple[str, str]]:
    """One scripted conversation as [(role, text), ...]; it starts with a prompt and ends with a reply."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    return list_strategies(rng, world) if kind == "list" else solve(rng, world, kind)


def solve(rng: random.Random, world: World, kind: str) -> list[tuple[str, str]]:
    """An attempt at the task: "free", with a strategy that the prompt names ("draft", "child" of a node), after a failed
    one with the same strategy ("debug"), or after two others ("crossover")."""
    table = world.table
    _, words, program = (
        pick(rng, table.solutions) if kind in ("free", "crossover") else rng.choice(table.solutions)
    )
    talk = [("user", world.prompt + request(rng, world, kind, words, program))]
    state = world.nothing  # what `validate` would answer now

    def say(reply: str, observation: str) -> None:
        talk.extend([("assistant", reply), ("user", observation)])

    def write(text: str) -> None:
        nonlocal state
        observation, after = world.play(block(text))
        if after.observation != world.nothing.observation:  # it did write the artefact
            state = after
        say(STRATEGY.format(words) + block(text), observation)

    if rng.random() < 0.25:
        look = block(rng.choice(table.looks))
        say(look, world.play(look)[0])
    if rng.random() < 0.03:
        say(PROSE, world.play(PROSE)[0])
    spoiled = rng.random() < 0.29
    write(spoil(rng, table, program) if spoiled else program)
    if spoiled and state is world.nothing and rng.random() < 0.15:  # it read the error message
        write(program)
    if rng.random() < 0.85:
        say(block("validate"), state.observation)
        if not state.score.valid:
            if rng.random() < 0.4:
                write(program)
                say(block("validate"), state.observation)
        elif kind == "free" and rng.random() < (
            0.25 if improvement(state.score.value, world.task) < 0.1 else 0.05
        ):
            _, words, program = pick(rng, table.solutions)
            write(program)
            say(block("validate"), state.observation)
    return [*talk, ("assistant", block("submit"))]


def request(rng: random.Random, world: World, kind: str, words: str, program: str) -> str:
    """What search.py appends to the prompt: the parent nodes, if any, and the strategy."""
    if kind == "free":
        return ""
    node, parents, files = SimpleNamespace(idea=words, op="draft", decision={}), [], ""
    if kind == "child":
        parents = [world.node(*rng.choice(world.table.solutions)[1:])]
        node.op = "improve"
        node.decision["phase"] = rng.choice(["explore", "exploit"])
    elif kind == "debug":
        parents = [world.node(words, spoil(rng, world.table, program))]
        node.op = "debug"
    elif kind == "crossover":
        parents = [world.node(*row[1:]) for row in rng.sample(world.table.solutions, 2)]
        node.op, node.idea = "crossover", ""
    if parents:
        files = "".join(
            f"\n{name} ({len(code)} bytes)"
            for name, code in parents[0].code.items()
            if name not in world.task.artefacts
        )  # the parent's artefact was removed
    return f"{files}\n\n{prompts.situation(node, parents, 1500)}"


def copy_lesson(rng: random.Random, world: World) -> list[tuple[str, str]]:
    """A strategy of random words, so that nothing but looking it up in the prompt helps; only its line is answered."""
    known = [word for _, words, _ in world.table.solutions for word in words.split()]
    words = " ".join(rng.choices(known, k=rng.randint(2, 6)))
    return [
        (
            "user",
            world.prompt + request(rng, world, rng.choice(["draft", "draft", "child"]), words, ""),
        ),
        ("assistant", STRATEGY.format(words).strip()),
    ]


def list_strategies(rng: random.Random, world: World) -> list[tuple[str, str]]:
    """Answers prompts.ask: k different strategies with their probabilities, in the mode that was asked for."""
    variant = rng.choices(["standard", "cot", "multi"], [8, 1, 1])[0]
    table, k = world.table, 2 if variant == "multi" else rng.choice([3, 5, 5, 5])
    mode = rng.choice(["uniform", "tail", "local", "sequence"])
    names = {words: weight / table.total for weight, words, _ in table.solutions}
    parent = SimpleNamespace(op="baseline", idea="", valid=True, score=world.task.baseline)
    if rng.random() < 0.5:
        parent = world.node(*rng.choice(table.solutions)[1:])
    siblings = [
        world.node(*row[1:]) for row in rng.sample(table.solutions, rng.choice([0, 0, 1, 2, 3]))
    ]
    left = [
        words for words in names if words not in {parent.idea, *(node.idea for node in siblings)}
    ]
    if (
        mode == "local"
    ):  # the same words, but for a few; without a parent, variations of the most common strategy
        model = parent.idea or max(names, key=names.get)
        near = sorted(
            left, key=lambda words: len(set(words.split()) ^ set(model.split())) + rng.random()
        )[: 2 * k]
        chosen = rng.sample(near, min(k, len(near)))
    else:
        chosen = rng.sample(left, min(k, len(left)))
    most = {"tail": 0.09, "local": 0.3}.get(mode, 1 / k)
    stated = [1 / k if mode == "uniform" else rng.uniform(0.01, most) for _ in chosen]
    answer = "\n".join(
        f"Strategy: {words}" + ("" if mode == "sequence" else f"\nProbability: {p:.2f}")
        for words, p in zip(chosen, stated)
    )
    return [
        ("user", prompts.ask(world.task, mode, k, 0.1, variant, parent, siblings)),
        ("assistant", REASONING * (variant == "cot") + answer),
    ]


def pick(rng: random.Random, rows):
    return rng.choices(rows, weights=[row[0] for row in rows])[0]


def spoil(rng: random.Random, table: Table, program: str) -> str:
    """The program with one planted mistake."""
    _, right, wrong = pick(rng, [row for row in table.mistakes if row[1] in program])
    return program.replace(right, wrong)
