"""One episode, from the prompt to what came of it: tokens, turns, the loop around them, and the
record of the episode.

`env` is an Env of env.py. `policy` is a Policy of policy.py, or anything with its `context`,
`render`, `encode`, `decode`, `observation_tokens` and `sample`. A copy of a script may bring its
own loop and its own history: they are arguments of run_episode().
"""

import asyncio
import gzip
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from types import SimpleNamespace

from flatlab.errors import Refusal, SandboxFault, UserError
from flatlab.model.chat import Sample
from flatlab.options import EpisodeOptions
from flatlab.task.definition import Task
from flatlab.task.grading import Score
from flatlab.task.value import judged
from flatlab.world import prompts
from flatlab.world.actions import act_bash
from flatlab.world.blocks import THOUGHT_ENDS

# Threads wait for sandboxes and do not compute. They are started as needed.
THREADS = ThreadPoolExecutor(512, "sandbox")


@dataclass
class Segment:
    """A sequence of tokens as the model reads it. Beside each token: the number of the reply that
    it was sampled in (-1: it was not sampled here), its log-prob and the policy's version then.
    """

    tokens: list[int] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)

    @property
    def mask(self) -> list[int]:
        """1 on tokens that were sampled here."""
        return [int(number >= 0) for number in self.reply]

    def append(self, tokens: list[int], logprobs=None, number: int = -1, version: int = -1) -> None:
        """Appends tokens. Those of a reply come with log-probs, number and version."""
        self.tokens += tokens
        self.reply += [number] * len(tokens)
        self.logprobs += logprobs or [0.0] * len(tokens)
        self.version += [version] * len(tokens)


@dataclass
class Episode:
    """One attempt at a task and what came of it: the only record of it in memory. On the disk it is
    a row of episodes.jsonl, see row(), and its texts in transcripts/, see transcript().
    """

    task: str
    seed: int
    # in its run: "12/3" (number 3 of step 12), "before/3" and "eval-12/3" (evaluations), "7" (of
    # evaluate.py), "0.2.1" (a node of a search)
    id: str = ""
    when: str = ""  # name of the file in transcripts/
    step: int | None = None  # of training, or round of a search that learns
    group: int | None = None  # number of the group that it is compared with
    # reason of the end: Step.ended, or turn_limit, context_limit, time_limit, refused (by an
    # endpoint), crashed (the agent broke the sandbox), fault (it would have broken without the
    # agent), or exit (of an agent program); "" while it is played
    status: str = ""
    # On the first part of the data: in the task's unit, its standard error if the grader gives one,
    # and see flatlab/task/value.py. None without a valid submission; a failure has the value -1.
    score: float | None = None
    stderr: float | None = None
    improvement: float | None = None
    value: float | None = None
    # The same on the last part, if that was scored
    test_score: float | None = None
    test_stderr: float | None = None
    test_improvement: float | None = None
    test_value: float | None = None
    position: float | None = None  # share of the leaderboards that is not better
    reward: float | None = None  # of training
    reason: str = ""  # why there is no valid submission, in one line
    tokens: int = 0  # sampled
    seconds: float = 0.0

    system: str = ""  # system message; empty if there is none
    prompt: str = ""  # first message of the user
    turns: list[dict] = field(default_factory=list)
    error: str = ""  # the last failed command and the grader's message, without a valid submission
    grader_output: str = ""  # see Score; no prompt may hold it
    record: str = ""  # see Score
    fault: str = ""  # why the sandbox broke, or how an agent program ended
    refusal: str = ""  # sentence of an endpoint that refused a request

    segments: list[Segment] = field(default_factory=list)  # several if earlier text was cut
    packed: bytes = b""  # segments in the form of the disk, see packed_tokens

    TEXTS = ("system", "prompt", "turns", "error", "grader_output", "record", "fault", "refusal")
    UNSAVED = ("segments", "packed")

    @property
    def valid(self) -> bool:
        return self.improvement is not None

    @property
    def outcome(self) -> str:
        """valid, failed or fault."""
        if self.status == "fault":
            return "fault"
        return "valid" if self.valid else "failed"

    def add(self, before: list[int], sample: Sample, turn: dict) -> None:
        """Adds a turn whose reply follows the tokens `before`.

        It continues the last segment if they begin with it; else they begin a new one, which
        repeats earlier replies but does not train on them again.
        """
        segment = self.segments[-1] if self.segments else None
        if segment is None or before[: len(segment.tokens)] != segment.tokens:
            segment = Segment()
            self.segments.append(segment)
        segment.append(before[len(segment.tokens) :])
        segment.append(sample.tokens, sample.logprobs, len(self.turns), sample.version)
        self.turns.append(turn)

    def judge(self, task: Task, score: Score | None, test: Score | None = None) -> None:
        """Writes down what came of it. score: on the first part, None for a fault. test: on the
        last part, if that was scored.
        """
        for prefix, graded in (("", score), ("test_", test)):
            for name, number in judged(graded, task).items() if graded else ():
                setattr(self, prefix + name, number)
        if score:
            self.position = (test or score).position
            self.grader_output = score.grader_output
            self.record = score.record
        is_valid = self.improvement is not None
        self.error = "" if is_valid else error_of(self, score.message if score else "")
        self.reason = "" if is_valid else reason_of(self)

    def row(self) -> dict:
        """Its row of episodes.jsonl: all but the texts, and numbers about its turns.

        scores: of its gradings, in their order. advantage: mean over its trained replies.
        """
        left_out = {*self.UNSAVED, *self.TEXTS}
        names = [column.name for column in fields(self) if column.name not in left_out]
        row = {name: getattr(self, name) for name in names}
        credits = [turn["advantage"] for turn in self.turns if "advantage" in turn]
        trained = [advantage for advantage in credits if advantage is not None]
        return row | {
            "outcome": self.outcome,
            "turns": len(self.turns),
            "trained": len(trained) if credits else None,
            "advantage": fmean(trained) if trained else None,
            "ungraded": bool(self.grader_output),
            "scores": [turn["score"] for turn in self.turns if turn["status"] in GRADINGS],
            "seconds_env": sum(turn["seconds_env"] for turn in self.turns),
        }

    def transcript(self) -> dict:
        """Its line in transcripts/: its texts, nothing cut."""
        return {"id": self.id} | {name: getattr(self, name) for name in self.TEXTS}


GRADINGS = ("validate", "invalid")  # statuses of turns
ERROR_CHARS = 2000
REASON_CHARS = 200
EXCEPTION = re.compile(r"[\w.]+(Error|Exception)\b")
STOPPED = re.compile(r"\[(stopped|exit code 137)")


def error_of(episode: Episode, message: str) -> str:
    """Words of the endpoint that refused to go on, or the last failed command of an episode without
    a score and the grader's message.
    """
    failed = ("error", "timeout", "rejected")
    errors = [turn["observation"] for turn in episode.turns if turn["status"] in failed]
    said = filter(None, [*errors[-1:], message, episode.fault])
    return clip(episode.refusal or "\n".join(said), ERROR_CHARS)


def reason_of(episode: Episode) -> str:
    """The last line of the error that names an exception or says that the commands were stopped, or
    else its first line. The line that shows how a program was run is none.
    """
    said = episode.error.strip().split("\n")
    lines = [line for line in said if not line.startswith("$ python3 ")] or said
    named = [line for line in lines if EXCEPTION.match(line) or STOPPED.match(line)]
    return [lines[0], *named][-1][:REASON_CHARS] or episode.status.replace("_", " ")


def clip(text: str, limit: int) -> str:
    """Head and tail of a text that is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[...]\n{text[-limit // 2 :]}"


def packed_tokens(segments: list[Segment]) -> bytes:
    """The segments of an episode as a line of JSON, with gzip.

    Several of these, one after the other, are a valid gzip file, too.
    """
    rows = []
    for segment in segments:
        logprobs = [p if math.isfinite(p) else None for p in segment.logprobs]
        rows.append(vars(segment) | {"logprobs": logprobs})
    line = json.dumps({"segments": rows}) + "\n"
    return gzip.compress(line.encode(), compresslevel=1, mtime=0)  # 10 times as fast as 9


class History:
    """Text of an episode as the model reads it: the prompt, then replies as sampled, each with its
    observation.

    With --thoughts drop, a reply follows the earlier ones without their thoughts, as the templates
    of thinking models have it. So every reply after a thought begins a segment, and a long episode
    costs more to train.
    """

    def __init__(self, policy, options: EpisodeOptions, prompt: str, system: str = ""):
        self.policy = policy
        self.limit = options.max_observation_tokens
        self.drops_thoughts = options.thoughts == "drop"
        self.first = prompt
        self.messages = prompts.as_messages(system, prompt)
        self.prompt = policy.render(self.messages)
        self.turns = []  # [sample, observation, its tokens]

    def add(self, sample: Sample, observation: str, note: str = "", restarts: bool = False) -> None:
        """Adds a reply and what follows it. A long observation keeps head and tail.

        restarts: the next reply follows the first messages and the note, and nothing else.
        """
        if restarts:
            self.messages[-1]["content"] = f"{self.first}\n\n{note}"
            self.prompt = self.policy.render(self.messages)
            self.turns = []
            return
        text = "\n".join(filter(None, [self.cap(observation), note]))
        after = self.policy.observation_tokens(text, sample.stop_reason == "stop")
        self.turns.append([sample, text, after])

    def cap(self, text: str) -> str:
        """The text with at most `limit` tokens: two thirds of them from its head."""
        most = 8 * self.limit  # characters
        if len(text) > 2 * most:  # saves tokenising what is left out anyway
            text = f"{text[:most]}\n[...]\n{text[-most:]}"
        tokens = self.policy.encode(text)
        if len(tokens) <= self.limit:
            return text
        tail = self.limit // 3
        first = self.policy.decode(tokens[: self.limit - tail])
        last = self.policy.decode(tokens[len(tokens) - tail :])
        return f"{first}\n[... {len(tokens) - self.limit} tokens left out ...]\n{last}"

    def tokens(self) -> list[int]:
        """The tokens that the next reply follows."""
        if self.drops_thoughts and any(THOUGHT_ENDS in sample.text for sample, *_ in self.turns):
            messages = list(self.messages)
            for sample, text, _ in self.turns:
                answer = sample.text.rpartition(THOUGHT_ENDS)[2].lstrip("\r\n")
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": text})
            return self.policy.render(messages)
        tokens = list(self.prompt)
        for sample, _, after in self.turns:
            tokens += sample.tokens + after
        return tokens

    def fit(self, budget: int) -> list[int]:
        """Cuts observations, oldest first, to one line until at most `budget` tokens are left.

        Returns these tokens. Raises OverflowError if they are still too many.
        """
        tokens = self.tokens()
        for turn in self.turns:
            if len(tokens) <= budget:
                break
            sample, text, after = turn
            line = text.strip().partition("\n")[0][:60] + " [...]"
            short = self.policy.observation_tokens(line, sample.stop_reason == "stop")
            if len(short) < len(after):
                turn[1:] = [line, short]
                tokens = self.tokens()
        if len(tokens) > budget:
            raise OverflowError
        return tokens


# ------------------------------------------------------------------ the loop


def invoke(function, *args):
    """function(*args) in a thread that asyncio waits for. Before Python 3.12 its futures could not
    hold a StopIteration and would be waited for without end, so it becomes a RuntimeError.
    """
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError("an iterator had no next value") from error


async def in_thread(function, *args):
    """Awaits a blocking call."""
    return await asyncio.get_running_loop().run_in_executor(THREADS, invoke, function, *args)


async def begin_episode(
    env, policy, episode: Episode, options: EpisodeOptions, history: Callable = History
) -> History:
    """Opens the sandbox if it is not open, and writes the first messages.

    Returns the history that begins with them. history: see run_episode.
    """
    if not env.sandbox:
        await in_thread(env.restart)
    facts = await in_thread(prompts.episode_facts, env, options)
    # A tokenizer serves one thread at a time, so this runs here.
    episode.system, episode.prompt = prompts.first_messages(env, options, facts, policy)
    return history(policy, options, episode.prompt, episode.system)


async def play(
    env,
    policy,
    episode: Episode,
    options: EpisodeOptions,
    history: History,
    act: Callable = act_bash,
) -> str:
    """Plays turns until something ends them. Fills episode.turns and .segments.

    act: how replies are read and run, see Env.step. Returns the episode's status.
    """
    deadline = time.monotonic() + 60 * options.episode_minutes
    try:
        for number in range(options.max_turns):
            began = time.monotonic()
            if began >= deadline:
                return "time_limit"
            before = history.fit(policy.context - options.max_reply_tokens)
            seed = reply_seed(episode.seed, number)
            reply = policy.sample(before, options.max_reply_tokens, seed=seed)
            sample = await asyncio.wait_for(reply, deadline - began)
            episode.tokens += sample.reply_tokens
            left = max(1.0, deadline - time.monotonic())
            try:
                step = await in_thread(env.step, sample.text, left, act)
            except SandboxFault as fault:
                episode.add(before, sample, turn_record(sample, broken(fault)))
                raise
            if sample.note and step.status == "rejected":
                step = replace(step, observation=f"{step.observation} {sample.note}")
            turn = turn_record(sample, step)
            episode.add(before, sample, turn)
            if step.ended:
                return step.ended
            turns_left = options.max_turns - number - 1
            if turns_left:
                left = deadline - time.monotonic()
                turn["note"], turn["restarts"] = await in_thread(
                    prompts.note, options, env, episode.turns, turns_left, left
                )
            history.add(sample, step.observation, turn["note"], turn["restarts"])
        return "turn_limit"
    except OverflowError:
        return "context_limit"
    except Refusal as refusal:
        episode.refusal = str(refusal)
        return "refused"
    except TimeoutError:
        return "time_limit"


def reply_seed(seed: int, number: int) -> int:
    """Seed of the reply with this number in an episode."""
    return (seed * 1009 + number) % 2**31


def turn_record(sample: Sample, step) -> dict:
    """A turn as it is in the transcript."""
    return {
        "reply": sample.text,
        "note": "",  # text after the observation
        "restarts": False,  # the next reply follows the first messages and the note only
        "stop_reason": sample.stop_reason,
        "version": sample.version,
        "reply_tokens": sample.reply_tokens,
        **step_record(step),
    }


def broken(fault: SandboxFault):
    """The step in which a sandbox broke."""
    text = str(fault)
    return SimpleNamespace(action=None, observation=text, status="fault", score=None, seconds=0.0)


def step_record(step) -> dict:
    """The part of a turn that is about its action."""
    return {
        "action": step.action,
        "observation": step.observation,
        "status": step.status,
        "score": step.score.value if step.score else None,
        "stderr": step.score.stderr if step.score else None,
        "grader_output": step.score.grader_output if step.score else "",
        "seconds_env": step.seconds,
    }


def stop_after_faults(statuses: list[str], error: str) -> None:
    """Raises UserError if the last three episodes were faults. error: of the last one."""
    if statuses[-3:] == ["fault"] * 3:
        raise UserError(
            "Three sandboxes in a row broke, so this stops. Run the same command again to "
            f"continue. The last one: {error}"
        )


def crashed(episode: Episode) -> str:
    """Turns a fault into what the agent did. Returns the status."""
    episode.fault = ""  # is in the message of the score
    for turn in episode.turns[-1:]:
        if turn["status"] == "fault":
            turn["status"] = "crashed"
    return "crashed"


async def run_episode(
    env,
    policy,
    options: EpisodeOptions,
    episode: Episode | None = None,
    score_test: bool = False,
    play: Callable = play,
    history: Callable = History,
) -> Episode:
    """Plays one episode to its end and scores once what it left, unless the sandbox broke.

    Args:
        env: An Env. If its sandbox is running already, the episode continues from there. Its seed
            is that of the episode.
        policy: Samples the replies.
        options: Limits and texts. The time limit begins with the prompt, so a slow start of the
            sandbox is free.
        episode: What is filled; a new Episode by default. One that was a fault starts over.
        score_test: Whether to grade on the last split, too; exact tasks have only one.
        play: The agent's loop, see `play`.
        history: Makes the tokens that the model reads, see History.

    A sandbox that breaks ends the episode: with status "crashed" and a score that is not valid if
    the agent broke it, see Env.crash_score, else with status "fault" and no score. Raises what the
    policy raises. The environment stays open: use it as `async with`.
    """
    episode = episode or Episode(env.task.name, env.seed)
    episode.turns, episode.segments = [], []
    episode.fault = episode.refusal = ""
    score = test = None
    began = time.monotonic()
    tested = score_test and not env.task.exact
    try:
        read = await begin_episode(env, policy, episode, options, history)
        status = await play(env, policy, episode, options, read)
        score = await in_thread(env.score)
        if tested:
            test = await in_thread(env.score, env.task.splits[-1])
    except SandboxFault as fault:
        status, test = "fault", None
        episode.fault = str(fault)
        score = await in_thread(env.crash_score, fault)
        if score:
            status = crashed(episode)
            test = score if tested else None
    episode.status = status
    episode.judge(env.task, score, test)
    episode.seconds = time.monotonic() - began
    episode.packed = await in_thread(packed_tokens, episode.segments)
    return episode
