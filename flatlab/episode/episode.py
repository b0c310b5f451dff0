"""One episode: the tokens that the model saw and said, the turns, and the loop between policy and environment."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

from flatlab.episode.grading import Score
from flatlab.errors import SandboxFault

THREADS = ThreadPoolExecutor(
    128, "sandbox"
)  # they wait for sandboxes and do not compute; started as needed


@dataclass(frozen=True)
class Sample:
    tokens: list[int]  # the reply as sampled, its end token included when stop_reason is "stop"
    logprobs: list[
        float
    ]  # log-probability of each token under the sampling distribution (temperature applied)
    text: str  # decoded for people and for the action extractor; never tokenised again
    stop_reason: str  # "stop" (the model ended its turn) or "length" (cut at max_tokens)
    version: int  # number of syncs before the request was sent


@dataclass
class Segment:
    """A sequence to train on: what the model saw and said. mask is 1, and logprobs set, where it said it here."""

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]


@dataclass
class Episode:
    task: str
    seed: int
    prompt: str = ""
    segments: list[Segment] = field(
        default_factory=list
    )  # several only when old observations had to be shortened
    turns: list[dict] = field(default_factory=list)
    status: str = (
        ""  # "submit", "turn_limit", "context_limit", "time_limit"; "fault": drop and count it
    )
    score: Score | None = None  # on the first split; None only for a fault
    test_score: Score | None = None
    fault: str = ""
    seconds: float = 0.0

    @property
    def reply_tokens(self) -> int:
        return sum(turn["reply_tokens"] for turn in self.turns)

    @property
    def seconds_env(self) -> float:
        return sum(turn["seconds_env"] for turn in self.turns)

    def to_dict(self) -> dict:
        """The whole transcript for the run directory; without the tokens."""
        record = {
            key: value
            for key, value in asdict(replace(self, segments=[])).items()
            if key != "segments"
        }
        return record | {"reply_tokens": self.reply_tokens}


class History:
    """The tokens of an episode: the prompt, then replies as they were sampled, each followed by an observation."""

    def __init__(self, policy, prompt: str, max_observation_tokens: int):
        self.policy, self.limit = policy, max_observation_tokens
        self.prompt = policy.render([{"role": "user", "content": prompt}])
        self.turns, self.segment = [], Segment([], [], [])
        self.append(self.prompt)

    def append(self, tokens: list[int], logprobs: list[float] | None = None) -> None:
        self.segment.tokens += tokens
        self.segment.mask += [int(logprobs is not None)] * len(tokens)
        self.segment.logprobs += logprobs or [0.0] * len(tokens)

    def add(self, sample, observation: str) -> None:
        """Appends a reply and what came of it, head and tail only when that is long."""
        text = self.cap(observation)
        after = self.policy.observation_tokens(text, sample.stop_reason == "stop")
        self.turns.append([sample, text, after])
        self.append(sample.tokens, sample.logprobs)
        self.append(after)

    def cap(self, text: str) -> str:
        if len(text) > 16 * self.limit:  # no need to tokenise what is left out anyway
            text = f"{text[: 8 * self.limit]}\n[...]\n{text[-8 * self.limit :]}"
        tokens, tail = self.policy.encode(text), self.limit // 3
        if len(tokens) <= self.limit:
            return text
        head = self.policy.decode(tokens[: self.limit - tail])
        return f"{head}\n[... {len(tokens) - self.limit} tokens left out ...]\n{self.policy.decode(tokens[-tail:])}"

    def fit(self, budget: int) -> Segment | None:
        """Cuts observations, oldest first, to one line until at most `budget` tokens are left.

        Returns the segment that this ends, if any; the new one repeats the replies but does not train on them again.
        Raises OverflowError when all that does not help.
        """
        excess, cut = len(self.segment.tokens) - budget, False
        for turn in self.turns:
            sample, text, after = turn
            line = text.strip().partition("\n")[0][:60] + " [...]"
            short = self.policy.observation_tokens(line, sample.stop_reason == "stop")
            if excess > 0 and len(short) < len(after):
                excess, cut = excess - len(after) + len(short), True
                turn[1:] = [line, short]
        if excess > 0:
            raise OverflowError
        if not cut:
            return None
        ended, self.segment = self.segment, Segment([], [], [])
        self.append(
            self.prompt
            + [token for sample, _, after in self.turns for token in [*sample.tokens, *after]]
        )
        return ended


async def in_thread(function, *args):
    return await asyncio.get_running_loop().run_in_executor(THREADS, function, *args)


async def play(
    env,
    policy,
    episode,
    time_limit,
    max_turns,
    max_reply_tokens,
    max_observation_tokens,
    temperature,
    extra,
):
    """Turns until something ends them; fills episode.turns and .segments. Returns the status."""
    prompt = await in_thread(env.prompt if env.sandbox else env.reset)
    deadline = time.monotonic() + time_limit  # a slow start of the sandbox is not the agent's time
    episode.prompt = f"{prompt}\n\n{extra}" if extra else prompt
    history = History(policy, episode.prompt, max_observation_tokens)
    try:
        for turn in range(max_turns):
            start = time.monotonic()
            if start >= deadline:
                return "time_limit"
            if ended := history.fit(policy.context - max_reply_tokens):
                episode.segments.append(trimmed(ended))
            sample = await asyncio.wait_for(
                policy.sample(
                    list(history.segment.tokens),
                    max_reply_tokens,
                    temperature=temperature,
                    seed=(episode.seed * 1009 + turn) % 2**31,
                ),
                deadline - start,
            )
            step = await in_thread(env.step, sample.text, max(1.0, deadline - time.monotonic()))
            history.add(sample, step.observation)
            episode.turns.append(
                {
                    "reply": sample.text,
                    "action": step.action,
                    "observation": step.observation,
                    "status": step.status,
                    "score": step.score.value if step.score else None,
                    "stop_reason": sample.stop_reason,
                    "version": sample.version,
                    "reply_tokens": len(sample.tokens),
                    "seconds_env": step.seconds,
                    "seconds_model": time.monotonic() - start - step.seconds,
                }
            )
            if step.done:
                return "submit"
        return "turn_limit"
    except OverflowError:
        return "context_limit"
    except asyncio.TimeoutError:
        return "time_limit"
    finally:
        if any(history.segment.mask):
            episode.segments.append(trimmed(history.segment))


def trimmed(segment: Segment) -> Segment:
    """Without what follows the last trained token."""
    end = len(segment.mask) - segment.mask[::-1].index(1)
    return Segment(segment.tokens[:end], segment.mask[:end], segment.logprobs[:end])


async def run_episode(
    env,
    policy,
    *,
    seed: int = 0,
    max_turns: int = 10,
    max_reply_tokens: int = 512,
    max_observation_tokens: int = 512,
    temperature: float | None = None,
    time_limit: float = 600.0,
    extra_user_text: str = "",
    score_test: bool = False,
    keep_open: bool = False,
) -> Episode:
    """Plays one episode to its end and scores it exactly once, however it ends.

    env: an Env; when its sandbox is running already, the episode goes on from there. It is closed at the end unless
    keep_open. extra_user_text is appended to the prompt. time_limit: seconds from there to the scoring. score_test:
    grade on the last split, too. Raises what the policy raises, and CancelledError, after closing the sandbox.
    """
    episode, begin = Episode(env.task.name, seed), time.monotonic()
    try:
        episode.status = await play(
            env,
            policy,
            episode,
            time_limit,
            max_turns,
            max_reply_tokens,
            max_observation_tokens,
            temperature,
            extra_user_text,
        )
        episode.score = await in_thread(env.score)
        if score_test:
            episode.test_score = await in_thread(env.score, env.task.splits[-1])
    except SandboxFault as fault:
        episode.status, episode.score, episode.test_score = "fault", None, None
        episode.fault = str(fault)
    finally:
        if not keep_open:
            await asyncio.shield(in_thread(env.close))
    episode.seconds = time.monotonic() - begin
    return episode
