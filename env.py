"""The world of an agent: what it sees, what it may do, and how its work is graded.

    with Env(load_task("titanic")) as env:              # also: async with
        print(env.reset())                              # the prompt
        print(env.step("```bash\nls\n```").observation)
        print(env.score())                              # grades the artefact as it is now

    python env.py --task titanic      play an episode yourself: same commands, observations, score

An episode of a model is `run_episode` in flatlab/world/episode.py; sandboxes are in
flatlab/sandbox, gradings in flatlab/task/grading.py.

docs/clusters.md lists what the sandboxes cover and what they do not.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from flatlab.errors import ArtefactError, SandboxFault, UnknownTask, UserError
from flatlab.options import EpisodeOptions, SandboxOptions
from flatlab.sandbox import snapshot
from flatlab.sandbox.client import Sandbox, pick_backend, readable
from flatlab.task.definition import Task
from flatlab.task.grading import Score, given_work, grade, read_artefacts
from flatlab.task.machine import open_sandbox, resolve_backend
from flatlab.task.sanity import check_grader, warning
from flatlab.world.actions import act_bash, score_sentence
from flatlab.world.blocks import find_bash
from flatlab.world.episode import in_thread
from flatlab.world.prompts import episode_facts, first_messages
from tasks import load_task

ALL_FILES = 10**9
CHECK_SECONDS = 20  # limit of `true` in a fresh sandbox

# ------------------------------------------------------------------------------------ environment


@dataclass(frozen=True)
class Step:
    observation: str
    ended: str  # reason of the end of the episode, which becomes its status; "" while it goes on
    score: Score | None  # set by `validate`
    status: str  # "ok", "error" (exit code), "timeout", "rejected", "validate", "invalid", "submit"
    seconds: float
    action: str | None = None

    @property
    def done(self) -> bool:
        return bool(self.ended)


class Env(AbstractContextManager, AbstractAsyncContextManager):
    """One task in one sandbox.

    Args:
        task: From load_task.
        sandbox: The name of a backend, or SandboxOptions as open_tasks leaves them.
        seed: Python's hash seed in the sandbox.
        message: Text at the end of the first message.
        ends_at_score: A valid score ends the episode, and the texts say so.
        limits: memory, disk, cpus, processes, see flatlab.sandbox.backend.Spec.

    Raises UserError if the task needs something this machine lacks (a GPU, the network, a
    package). Every method may raise SandboxFault; nothing an agent does raises anything else.
    """

    def __init__(
        self,
        task: Task,
        sandbox: SandboxOptions | str = "auto",
        seed: int = 0,
        message: str = "",
        ends_at_score: bool = False,
        **limits,
    ):
        if isinstance(sandbox, str):
            sandbox = resolve_backend(task, SandboxOptions(sandbox))
        self.task = task
        self.options = sandbox
        self.seed = seed
        self.message = message
        self.ends_at_score = ends_at_score
        self.limits = limits
        self.sandbox: Sandbox | None = None
        self.opened: list[Sandbox] = []  # sandboxes of the agent and of gradings
        self.closed = False
        self.given = b""  # digest of what the agent started from, see given_work
        self.acted = False  # an agent's commands or files are in the sandbox

    def __exit__(self, *_) -> None:
        self.close()

    async def __aexit__(self, *_) -> None:
        await asyncio.shield(in_thread(self.close))

    def make_sandbox(self) -> Sandbox:
        """A new sandbox, for the agent or for a grading. `close` ends it."""
        if not self.closed:
            box = open_sandbox(self.task, self.options, self.seed, **self.limits)
            self.opened.append(box)
        if self.closed:  # maybe by another thread in the meantime
            self.close()
            raise SandboxFault("the environment is closed")
        return box

    def open(self) -> Sandbox:
        """Replaces the agent's sandbox by a new one."""
        if self.sandbox:
            self.sandbox.close()
        self.sandbox = self.make_sandbox()
        self.given = b""
        self.acted = False
        return self.sandbox

    def reset(self, options: EpisodeOptions | None = None, policy=None) -> str:
        """Starts over, see restart(). Returns prompt()."""
        self.restart()
        return self.prompt(options, policy)

    def restart(self) -> None:
        """Starts over in a new sandbox with the task's public files."""
        box = self.open()
        files = self.task.public.items()
        box.put({path: file for path, file in files if path not in box.mounts})
        self.given = given_work(self.task, box)

    def prompt(self, options: EpisodeOptions | None = None, policy=None) -> str:
        """The system message and the first message for the workspace as it is now, as the policy
        would read them, or an agent with an endless context. See prompts.first_messages.
        """
        options = options or EpisodeOptions()
        facts = episode_facts(self, options)
        return "\n\n".join(filter(None, first_messages(self, options, facts, policy)))

    def step(self, reply: str, timeout: float | None = None, act: Callable = act_bash) -> Step:
        """Runs the action of one reply.

        timeout: seconds, at most the task's step_timeout, which is the default. act: how the reply
        is read and run, see act_bash.
        """
        begin = time.monotonic()
        timeout = min(timeout or self.task.step_timeout, self.task.step_timeout)
        if not self.acted:
            self.sandbox.call("state")  # raises if the sandbox broke while the agent did nothing
        self.acted = True
        action, observation, status, score = act(self, reply, timeout)
        seconds = time.monotonic() - begin
        ended = self.ending(status, score)
        return Step(readable(observation), ended, score, status, seconds, action)

    def ending(self, status: str, score: Score | None) -> str:
        """Reason why the episode ends after a step: submit, validated, or "" if it goes on."""
        if status == "submit":
            return "submit"
        return "validated" if self.ends_at_score and score and score.valid else ""

    def score(self, split: str | None = None) -> Score:
        """Grades the artefacts as they are now.

        split: one of the task's splits. The default is the first, which `validate` shows.
        """
        split = split or self.task.splits[0]
        self.sandbox.call("sweep")  # ends background processes: none may swap the artefact now
        try:
            artefacts = read_artefacts(self.task, self.sandbox, self.given)
        except ArtefactError as error:
            return Score(
                None, self.task.metric, split, False, f"no submission, {readable(str(error))}"
            )
        return grade(self.task, artefacts, split, self.make_sandbox)

    def crash_score(self, fault: SandboxFault, split: str | None = None) -> Score | None:
        """Score of an agent that broke its sandbox, or a grading by its artefact: not valid.

        None if the sandbox would have broken without the agent: before its first command, or while
        a fresh sandbox cannot run `true` either.
        """
        if not self.acted:
            return None
        self.sandbox.close()  # what it runs may keep the machine busy
        try:
            code = self.make_sandbox().run(["true"], CHECK_SECONDS).exit_code
        except SandboxFault:
            return None
        if code:
            return None
        message = f"the agent broke its sandbox: {fault}"
        return Score(None, self.task.metric, split or self.task.splits[0], False, message)

    def snapshot(self) -> bytes:
        """All files that were written, as one tar. Ends the background processes of the sandbox."""
        return snapshot.take(self.sandbox)

    def restore(self, files: bytes, clear_artefacts: bool = True) -> None:
        """Starts over in a new sandbox with the files of a snapshot.

        Artefacts in the snapshot do not count for this environment: they are removed, and public
        files among them come back as they were given. If the task collects its artefact, the
        workspace counts only after a change. clear_artefacts=False keeps all as it is.
        """
        box = self.open()
        self.acted = True
        snapshot.put_back(box, files)
        if not clear_artefacts:
            return
        listed = box.call("listing", most=ALL_FILES)[0]["files"]
        stale = [path for path, _ in listed if self.task.is_artefact(path)]
        box.remove([*stale, *self.task.artefacts])
        public = self.task.public.items()
        box.put({path: file for path, file in public if self.task.is_artefact(path)})
        self.given = given_work(self.task, box)

    def close(self) -> None:
        """Ends the sandbox and a running grading. Calls in other threads raise SandboxFault."""
        self.closed = True
        for box in self.opened:
            box.close()


def open_tasks(
    names: Iterable[str],
    sandbox: SandboxOptions,
    stand_in: bool = False,
    left_out: dict | None = None,
    roots: dict | None = None,
) -> tuple[list[Task], SandboxOptions]:
    """Loads the tasks, decides on the kind of their sandboxes, prints both and tries the graders.
    Returns the tasks, and the options of the sandboxes with this kind.

    Raises UserError if a task does not exist, needs something that its sandbox lacks, or has a
    broken grader. With `left_out`, such tasks are left out if they exist, and their reasons stand
    there by name. roots: arguments of load_task.
    """
    find_bash()
    tasks, said = [], ""
    for name in names:
        try:
            task = load_task(name, **roots or {})
            print(f"task     {task.outline}")
            image = task.image or sandbox.image
            backend, why = pick_backend(sandbox.backend, image, stand_in)
            sandbox = replace(sandbox, backend=backend)
            if not said:
                said = why
                print(f"sandbox  {why}")
            resolve_backend(task, sandbox)  # checks what the task needs
            check_grader(task, partial(open_sandbox, task, sandbox))
            if task.name in {other.name for other in tasks}:
                raise UserError(f"Two tasks have the name {task.name}: their scores would mix.")
            tasks.append(task)
        except UserError as error:
            if left_out is None or isinstance(error, UnknownTask):
                raise
            left_out[name] = str(error)
            print(f"left out {name}: {error}")
    if not tasks:
        raise UserError(f"None of these tasks can be played here. {' '.join(left_out.values())}")
    if text := warning(tasks):
        print(f"warning  a score says little on {text}")
    return tasks, sandbox


def check_context(tasks: list[Task], cfg, policy, left_out: dict | None = None) -> None:
    """Raises UserError if the first message of a task is too long. With `left_out`, such tasks
    stand there by name, with the reason. policy: counts tokens, and has a context.
    """
    for task in tasks:
        with Env(task, cfg.sandbox) as env:
            try:
                env.reset(cfg.episode, policy)
            except UserError as error:
                if left_out is None:
                    raise
                left_out[task.name] = str(error)
                print(f"left out {task.name}: {error}")


# ---------------------------------------------------------------------------------------- by hand

HOW_TO_PLAY = """\
Type a command and press Enter to run it. For several lines, type ```bash, the lines, and ```.
`validate` shows the score; `submit` or Ctrl-D ends the episode.
Below is what an agent reads. The limits of turns and minutes that it names hold for agents only.
"""


def read_reply() -> str:
    """One reply from a person: a command, or several lines between ```bash and ```.

    Raises EOFError at the end of the input.
    """
    first = input("$ ")
    if not first.startswith("```"):
        return f"```bash\n{first}\n```"
    return "\n".join([first, *iter(lambda: input("> "), "```"), "```"])


def by_hand(
    task: str = "titanic",
    prompts: str | None = None,
    sandbox: SandboxOptions = SandboxOptions(),  # noqa: B008
) -> None:
    """Play an episode at the terminal, as an agent does. `submit` or Ctrl-D ends it.

    Args:
        task: Name of the task, see `python tasks.py`.
        prompts: File of the texts that an agent reads; default: configs/prompts/agent.yaml.
        sandbox: The kind of sandbox and what it offers.
    """
    [task], sandbox = open_tasks([task], sandbox, True)
    with Env(task, sandbox) as env:
        prompt = env.reset(EpisodeOptions(prompts=prompts))
        print(f"\n{HOW_TO_PLAY}\n{prompt}\n")
        ended = ""
        while not ended:
            try:
                reply = read_reply()
            except EOFError:
                print("submit")
                reply = "```bash\nsubmit\n```"
            step = env.step(reply)
            print(f"{step.observation}\n[{step.status}, {step.seconds:.3f} s]")
            ended = step.ended
        for split in env.task.splits:
            print(f"[{split} part] {score_sentence(env.score(split), env.task)}")


if __name__ == "__main__":
    from flatlab.runs import cli

    cli.one_sentence(lambda: cli.call(by_hand))
