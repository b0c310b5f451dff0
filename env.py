"""The world of an agent: its replies, its sandbox, the grading of its work, whole episodes, and forks.

    with Env(load_task("titanic")) as env:
        print(env.reset())                                      # the prompt
        print(env.step("```bash\nls\n```").observation)
        print(env.score())                                      # what the artefact is worth, whatever the agent says

    python env.py --task titanic        play an episode yourself: the same commands, observations and score

Covered (tests/test_env.py, test_sandbox.py, test_attacks.py and test_faults.py try to break each line, in every backend
that is there):
- answers and graders are absent from the agent's sandbox; grades come from a fresh one with the pristine files
- an artefact is a regular file below a size limit, without a link on its path, written by this episode, and it never
  replaces a file of the grader
- two sandboxes share no files and no processes; a local one shows nothing of the project, the home, or the rest of /tmp
- no network; no way to more rights: unprivileged user, no capabilities, no_new_privs
- the runner in the sandbox cannot be killed, traced, or imitated by printed text
- time limits, also for commands that ignore SIGTERM, become daemons or hold the output pipe; endless output; waiting
  for input
- memory, number of processes, size of files; local: size of the workspace, /tmp and /dev/shm, all gone at the end
- a killed owner leaves no process and no container

Not covered:
- holes in the kernel or in Docker, hardware side channels, the load of the machine
- local: memory is limited per process, not in sum. Where we run as an ordinary user, the commands have the runner's
  user: they cannot kill or trace it, but can lower its limits; that ends the episode as a fault
- local where namespaces are refused (Landlock instead): other processes are visible, UDP and sockets in the file system
  are open, processes, memory and disk are not limited in sum. `pick_backend` takes that only for the stand-in model.
  The data of Python packages stays visible there, and scikit-learn's holds the answers of digits and diabetes
- docker: the disk is limited per file, not in sum
- fork copies files, cwd and exported variables, not running processes
- tasks that are allowed the network, or a Hugging Face cache: their test labels are one download away, and a local
  sandbox then reaches the services of this machine
- MLGym graders that run code of the agent's (its src/, baseline.py, pickled checkpoints) in their own process: a score
  can be made up there. configs/tasks/mlgym.yaml marks these tasks `degenerate`, and every result carries that
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from flatlab.episode import mledojo_actions
from flatlab.episode.actions import extract_action, typed_edits, unfinished
from flatlab.episode.episode import Episode, Segment, in_thread, run_episode  # noqa: F401
from flatlab.episode.grading import Score, collect, grade
from flatlab.episode.task import Task
from flatlab.episode.texts import (
    first_message,
    position_text,
    run_text,
    score_text,
)
from flatlab.errors import ArtefactError, SandboxFault, UserError
from flatlab.sandbox import snapshot
from flatlab.sandbox.backend import IMAGE
from flatlab.sandbox.images import Needs, task_sandbox
from flatlab.sandbox.sandbox import KINDS, Sandbox, pick_backend, readable
from flatlab.sandbox.warm_pool import WARM_POOL  # noqa: F401  used by grpo.py
from tasks import load_task

LISTED_FILES = 60  # in the prompt


# ---------------------------------------------------------------------------------------------- environment


@dataclass(frozen=True)
class Step:
    observation: str
    done: bool
    score: Score | None  # after `validate`
    status: str  # "ok", "error" (exit code), "timeout", "rejected", "validate", "invalid", "submit"
    seconds: float
    action: str | None = None


def check_needs(task: Task, backend: str, network: bool = False, hf_cache: str = "") -> None:
    """Raises UserError when a task needs what its sandbox will not have. For before a model is loaded."""
    if task.needs_network and not network and not (hf_cache and backend == "docker"):
        raise UserError(
            f"Task {task.name} takes data from the network while it runs: allow it with --network"
            + (", or mount what it needs with --hf-cache." if backend == "docker" else ".")
        )
    if hf_cache and not Path(hf_cache).expanduser().is_dir():
        raise UserError(f"There is no folder {hf_cache} to mount as the Hugging Face cache.")
    if task.needs_gpu and backend != "docker":
        raise UserError(
            f"Task {task.name} needs a GPU, and only Docker gives one to a sandbox: use --backend docker."
        )
    if task.needs_gpu and not os.environ.get("DOCKER_HOST") and not Path("/dev/nvidiactl").exists():
        raise UserError(
            f"Task {task.name} needs a GPU, and this machine has none that works (no /dev/nvidiactl)."
        )


class Env:
    """One task in one sandbox. seed: Python's hash seed in there. limits: memory, disk, cpus, processes (see Sandbox).

    network: what the task does may reach the network; hf_cache: a folder that it may read instead (Docker only).
    The constructor and the first reset raise UserError when the task needs what there is not. Every method may raise
    SandboxFault; nothing that the agent does raises anything else.
    """

    def __init__(
        self,
        task: Task,
        backend: str = "auto",
        seed: int = 0,
        image: str = IMAGE,
        network: bool = False,
        hf_cache: str = "",
        **limits,
    ):
        self.task, self.seed, self.image, self.limits = (
            task,
            seed,
            image,
            {"memory": 4 << 30, **limits},
        )
        self.backend = backend if backend in KINDS else pick_backend(backend, image)[0]
        self.network, self.hf_cache = network, hf_cache
        check_needs(task, self.backend, network, hf_cache)
        self.sandbox: Sandbox | None = None
        self.grading: Sandbox | None = None  # while one runs
        self.closed, self.history = False, []

    def __enter__(self) -> Env:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def make_sandbox(self) -> Sandbox:
        """A sandbox for the agent or a grading; of the task it holds at most `premounted` files."""
        task = self.task
        needs = Needs(
            task.name,
            task.public,
            frozenset(path for path in task.public if task.is_artefact(path)),
            task.requirements,
        )
        return task_sandbox(
            self.backend,
            needs,
            self.image,
            install=self.network,
            env={"PYTHONHASHSEED": str(self.seed % 2**32)},
            network=self.network and task.needs_network,
            gpu=task.needs_gpu,
            hf_cache=self.hf_cache,
            hide=tuple({str(path.resolve().parent) for path in task.hidden.values()}),
            hide_package_data=task.forget,
            **self.limits,
        )

    def open(self) -> Sandbox:
        self.sandbox = self.make_sandbox()
        if self.closed:  # meanwhile, by another thread
            self.sandbox.close()
            raise SandboxFault("the environment is closed")
        return self.sandbox

    def reset(self) -> str:
        """Starts over in a new sandbox with the task's public files. Returns the prompt."""
        self.history = []
        if self.sandbox:
            self.sandbox.close()
        box = self.open()
        box.put(
            {path: file for path, file in self.task.public.items() if path not in box.premounted}
        )
        return self.prompt()

    def prompt(self) -> str:
        """The first message for the workspace as it is now."""
        reply = self.sandbox.call("listing", most=LISTED_FILES)[0]
        files = [(readable(path), size) for path, size in reply["files"]]
        task = self.task
        if task.source == "mledojo":
            task = replace(task, prompt=f"{task.prompt}\n\n{mledojo_actions.ACTIONS_TEXT}")
        return first_message(
            task, self.sandbox.workspace, files, reply["count"], self.network and task.needs_network
        )

    def step(self, reply: str, timeout: float | None = None) -> Step:
        """Runs the action of one reply. timeout: seconds, the task's own when None."""
        begin, timeout = (
            time.monotonic(),
            min(timeout or self.task.step_timeout, self.task.step_timeout),
        )
        request = mledojo_actions.json_action(reply) if self.task.source == "mledojo" else None
        action, problem = (
            (json.dumps(request), "") if request else extract_action(typed_edits(reply))
        )
        word, score = (action or "").strip(), None
        if action is None:
            observation, status = f"Nothing was run. {problem}", "rejected"
        elif request:
            observation, status, score = mledojo_actions.act(self, request, timeout)
        elif word == "submit":
            observation, status = "Submitted.", "submit"
        elif word == "validate":
            score = self.score()
            observation = score_text(score, self.task) + position_text(score)
            status = "validate" if score.valid else "invalid"
        else:
            result = self.sandbox.run(action, timeout)
            observation = run_text(result, timeout, self.limits["memory"])
            status = "timeout" if result.timed_out else "error" if result.exit_code else "ok"
        name = request["action"] if request else word if word in ("validate", "submit") else "bash"
        mledojo_actions.remember(self, name, status, score)
        return Step(
            readable(observation),
            status == "submit",
            score,
            status,
            time.monotonic() - begin,
            action,
        )

    def score(self, split: str | None = None) -> Score:
        """Grades the artefacts as they are now, on a split of the task (None: the first, "test": the last)."""
        split = split or self.task.splits[0]
        self.sandbox.call("sweep")  # nothing may swap the artefact from now on
        try:
            artefacts = collect(self.task, self.sandbox)
        except ArtefactError as error:
            return Score(None, self.task.metric, split, False, f"no submission, {error}")
        return grade(self.task, artefacts, split, self.grading_sandbox)

    def grading_sandbox(self) -> Sandbox:
        """One that `close` ends, too: a grading may take half an hour."""
        if not self.closed:
            self.grading = self.make_sandbox()
        if self.closed:
            if self.grading:
                self.grading.close()
            raise SandboxFault("the environment is closed")
        return self.grading

    def snapshot(self) -> bytes:
        """All that was written, as one tar (see snapshot.py). Ends background processes here."""
        return snapshot.take(self.sandbox)

    def restore(self, files: bytes, clear_artefacts: bool = True) -> None:
        """A new sandbox with what a snapshot holds. What was written there as artefact does not count for this
        environment, so it is removed (a given file comes back), unless clear_artefacts is False."""
        if self.sandbox:
            self.sandbox.close()
        box = self.open()
        snapshot.put_back(box, files)
        if clear_artefacts:
            files = box.call("listing", most=10**9)[0]["files"]
            box.remove(
                [path for path, _ in files if self.task.is_artefact(path)]
                + list(self.task.artefacts)
            )
            box.put(
                {
                    path: file
                    for path, file in self.task.public.items()
                    if self.task.is_artefact(path)
                }
            )

    def fork(self, clear_artefacts: bool = True) -> Env:
        """An independent copy: all files that were written, cwd, exported variables. See `restore`."""
        twin = Env(
            self.task,
            self.backend,
            self.seed,
            self.image,
            self.network,
            self.hf_cache,
            **self.limits,
        )
        try:
            twin.restore(self.snapshot(), clear_artefacts)
        except BaseException:
            twin.close()
            raise
        return twin

    def close(self) -> None:
        self.closed = True
        for box in (self.sandbox, self.grading):
            if box:
                box.close()


# ---------------------------------------------------------------------------------------------- by hand


def read_block(ask) -> str:
    """Lines from a person until heredocs, quotes and edits are closed. ask(prompt) returns a line. Raises EOFError."""
    lines = [ask("$ ")]
    while unfinished("\n".join(lines)):
        lines.append(ask("> "))
    return "\n".join(lines)


def by_hand(
    task: str = "titanic",
    backend: str = "auto",
    image: str = IMAGE,
    mlgym_root: str | None = None,
    mledojo_root: str | None = None,
    network: bool = False,
    hf_cache: str = "",
) -> None:
    """Play an episode at the terminal, as an agent does. `submit` or Ctrl-D ends it.

    Args:
        task: Name of the task.
        backend: docker, local or auto.
        image: Docker image of the sandboxes.
        mlgym_root: A checkout of MLGym; $MLGYM_ROOT by default.
        mledojo_root: A folder of competitions prepared by MLE-Dojo; $MLEDOJO_ROOT by default.
        network: Let tasks that need the network have it.
        hf_cache: A Hugging Face cache of this machine to mount, read-only (Docker).
    """
    what = load_task(task, mlgym_root, mledojo_root)
    name, why = pick_backend(backend, image, True)
    with Env(what, name, 0, image, network, hf_cache) as env:
        print(f"[sandbox: {why}]\n\n{env.reset()}\n")
        done = False
        while not done:
            try:
                text = read_block(ask)
            except EOFError:
                print("submit")
                text = "submit"
            step = env.step(
                text if text.lstrip().startswith("{") else f"{'`' * 9}bash\n{text}\n{'`' * 9}"
            )
            print(f"{step.observation}\n[{step.status}, {step.seconds:.3f} s]")
            done = step.done
        for split in what.splits:
            print(f"{split} part: {final_text(env.score(split), what)}")


def ask(prompt: str) -> str:
    """input(), which also shows lines that are piped in rather than typed. Raises EOFError."""
    line = input(prompt)
    if not sys.stdin.isatty():
        print(line)
    return line


def final_text(score: Score, task: Task) -> str:
    if not score.valid:
        return f"no score: {score.message}"
    way = "higher" if task.higher_is_better else "lower"
    return f"{score.metric} {score.value:.4f} (baseline {task.baseline:.4f}, {way} is better)"


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(by_hand)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except SandboxFault as fault:
        print(f"The sandbox broke: {fault}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
