"""GRPO for an agent program that you already have: grpo.py, with episodes that the program plays.

    python integrations/agent_program.py --task titanic --agent 'python my_agent.py'
    python integrations/agent_program.py --attach 'ls -l'      from the program: runs a command

Each episode starts the program on this machine and serves it an OpenAI-style endpoint, which keeps
the tokens and log-probs of every reply. `--attach` runs a command in the sandbox of the episode
whose program calls, and prints what an agent sees. docs/extend.md says what a program has to do.
The same command again resumes a run.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpo  # noqa: E402

# isort: split
from aiohttp import web  # noqa: E402

from env import Step  # noqa: E402
from flatlab.errors import UserError, shown  # noqa: E402
from flatlab.model.chat import Sample  # noqa: E402
from flatlab.model.endpoint import go_around_proxies, text_of  # noqa: E402
from flatlab.runs import cli  # noqa: E402
from flatlab.world.actions import act_command  # noqa: E402
from flatlab.world.episode import (  # noqa: E402
    in_thread,
    invoke,
    reply_seed,
    step_record,
    turn_record,
)
from policy import Policy  # noqa: E402

# Precedes the command in its shell. The input of this shell ends when this process does, however it
# ends, and then the program is killed. The program itself has no input.
WATCH = "exec 3<&0 0</dev/null; (read _ <&3; kill -9 0) & exec 3<&-; "
TOKEN_BYTES = 16  # limit of a request's body for each token of the context
# Fields of a request that are read or change no answer; the run sets temperature and seed
FREE = (
    "messages model max_tokens max_completion_tokens temperature seed user metadata store "
    "service_tier safety_identifier prompt_cache_key prompt_cache_retention stream_options "
    "parallel_tool_calls"
).split()
# Values with which a field changes no answer: of these numbers, and of all other fields
NEUTRAL = {"n": 1, "top_p": 1, "top_k": -1, "repetition_penalty": 1}
OFF = (None, False, [], {}, "", "auto", "none", ["text"], {"type": "text"})
STDERR_BYTES = 1000  # end of a program's stderr in the transcript
POLL_SECONDS = 0.05  # between looks whether a program has ended
# Reads requests beside the event loop. It has one thread, because a tokenizer serves one.
READER = ThreadPoolExecutor(1, "agent_program")
tokenizer_copy = functools.lru_cache(1)(lambda policy: policy.twin())


@dataclass(frozen=True)
class Config(grpo.Config):
    """The options of grpo.py, and the program."""

    agent: str | None = None  # command of the program, see docs/extend.md; required


def check(cfg: Config, model) -> None:
    """Raises UserError for settings that are wrong."""
    if not cfg.agent:
        raise UserError("--agent is missing: the command of your program, in quotes.")
    if cfg.episode.thoughts != "keep":
        raise UserError("--thoughts is not for a program: it chooses what the model reads itself.")
    grpo.check(cfg, model)


# ------------------------------------------------------------------ requests


def contents_of(messages: list[dict]) -> str:
    return "\n\n".join(message["content"] for message in messages)


def check_body(body: dict) -> None:
    """Raises ValueError for a field that would change the form or the end of an answer."""
    for name, value in body.items():
        harmless = (None, NEUTRAL[name]) if name in NEUTRAL else OFF
        if name not in FREE and value not in harmless:
            raise ValueError(f"{name}={value!r:.100} is not honoured here")


def read(data: bytes, policy, samples: dict, limit: int) -> tuple[list, list[list[dict]], int]:
    """(tokens that the next reply follows, messages: the first ones, a reply, those after it, ...,
    most tokens of the reply) of the body of a request.

    Earlier replies keep the tokens that were sampled. Only a text that the model did not write in
    this episode is tokenised. samples: by text. Raises ValueError if the first or the last message
    is the model's.
    """
    body = json.loads(data)
    check_body(body)
    for name in ("max_tokens", "max_completion_tokens"):
        wanted = body.get(name)
        if wanted is None:
            continue
        if not (isinstance(wanted, (int, float)) and 1 <= wanted < math.inf):
            raise ValueError(f"{name}={wanted!r:.100} is no number of tokens")
        limit = min(limit, int(wanted))
    messages = [message | {"content": text_of(message["content"])} for message in body["messages"]]
    groups = itertools.groupby(messages, lambda message: message["role"] == "assistant")
    parts = [list(group) for _, group in groups]
    if len(parts) % 2 == 0 or parts[0][0]["role"] == "assistant":
        raise ValueError("the first and the last message must not be the model's")
    texts = list(map(contents_of, parts))
    tokens = policy.render(parts[0])
    for text, following in zip(texts[1::2], texts[2::2], strict=True):
        sample = samples.get(text) or Sample(policy.encode(text), [], text, "length", 0)
        after = policy.observation_tokens(following, sample.stop_reason == "stop")
        tokens = tokens + sample.tokens + after
    if len(tokens) + limit > policy.context:
        raise ValueError(f"{len(tokens)} tokens: over the maximum context length")
    return tokens, parts, limit


# ------------------------------------------------------------------ one episode


class ProgramEndpoint:
    """The policy and the sandbox of one episode, as its program reaches them."""

    def __init__(self, env, policy, episode, options, history):
        self.env = env
        self.policy = policy
        self.episode = episode
        self.options = options
        self.history = history
        self.deadline = time.monotonic() + 60 * options.episode_minutes
        self.over = asyncio.Future()  # status of the episode
        self.requests = itertools.count()
        self.samples = {}  # by text
        self.turn = {}  # record of the latest reply
        self.one_command = asyncio.Lock()

    def end(self, status: str) -> None:
        if not self.over.done():
            self.over.set_result(status)

    async def or_end(self, work):
        """Awaits what the program is not to blame for: an error ends the episode."""
        try:
            return await work
        except Exception as error:
            if not self.over.done():
                self.over.set_exception(error)
            raise web.HTTPInternalServerError from error

    async def chat(self, request):
        """Answers a request. The run sets the sampling, whatever the request says."""
        data = await request.read()
        run = asyncio.get_running_loop().run_in_executor
        tokenizer = tokenizer_copy(self.policy)
        most = self.options.max_reply_tokens
        try:
            tokens, parts, limit = await run(
                READER, invoke, read, data, tokenizer, self.samples, most
            )
        except Exception as error:  # a missing field, or an error of the chat template
            raise unreadable(error) from error
        number = next(self.requests)
        if number == 0:
            system = [message for message in parts[0] if message["role"] == "system"]
            self.episode.system = contents_of(system)
            self.episode.prompt = contents_of([m for m in parts[0] if m not in system])
        if number >= self.options.max_turns:
            self.end("turn_limit")
            raise web.HTTPForbidden
        seed = reply_seed(self.episode.seed, number)
        sample = await self.or_end(self.policy.sample(tokens, limit, seed=seed))
        self.episode.tokens += sample.reply_tokens
        self.samples[sample.text] = sample
        self.turn["observation"] = contents_of(parts[-1])
        # until a command runs
        self.turn = turn_record(sample, Step("", "", None, "rejected", 0.0))
        self.episode.add(tokens, sample, self.turn)
        return web.json_response(completion(number, tokens, sample))

    async def act(self, request):
        """Runs a command."""
        data = await request.read()
        try:
            command = json.loads(data)["command"]
            command.encode()
        except Exception as error:  # not a text, or not one in UTF-8
            raise unreadable(error) from error
        async with self.one_command:  # commands that wait at the end of the episode never start
            left = max(1.0, self.deadline - time.monotonic())
            step = await self.or_end(in_thread(self.env.step, command, left, act_command))
        self.turn.update(step_record(step))
        if step.ended:
            self.end(step.ended)
        observation = self.history.cap(step.observation)
        return web.json_response({"observation": observation, "status": step.status})

    async def wait_for(self, program) -> str:
        """Waits until something ends the episode; returns its status."""
        while not self.over.done():
            await asyncio.wait([self.over], timeout=POLL_SECONDS)
            if program.poll() is not None:
                self.end("exit")
            if time.monotonic() >= self.deadline:
                self.end("time_limit")
        return self.over.result()


def unreadable(error: Exception) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=f"This request cannot be read: {error!r}")


def completion(number: int, tokens: list[int], sample: Sample) -> dict:
    """A reply in the form of OpenAI's chat completions. tokens: those before it."""
    message = {"role": "assistant", "content": sample.text}
    choice = {"index": 0, "message": message, "finish_reason": sample.stop_reason}
    usage = {
        "prompt_tokens": len(tokens),
        "completion_tokens": len(sample.tokens),
        "total_tokens": len(tokens) + len(sample.tokens),
    }
    kind = {"id": f"{number}", "object": "chat.completion", "model": "flatlab"}
    return kind | {"choices": [choice], "usage": usage}


@contextlib.asynccontextmanager
async def served(app: web.Application):
    """Inside of the block, serves the app on a port of 127.0.0.1, which it yields."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def started(command: str, variables: dict[str, str]):
    """Runs a command in a shell, and yields its process and the file of its stderr. After the block
    it and its children are dead.
    """
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(
            WATCH + command,
            shell=True,
            stdin=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | variables,
            start_new_session=True,
        ) as program,
    ):
        try:
            yield program, stderr
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def end_of(file) -> str:
    """The last STDERR_BYTES of a file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - STDERR_BYTES))
    return file.read().decode(errors="replace").strip()


async def play(env, policy, episode, options, history, command: str) -> str:
    """A loop for run_episode(): starts a program and answers it until it ends.

    Returns the status of the episode, which is "exit" if the program ended without `submit`.
    """
    endpoint = ProgramEndpoint(env, policy, episode, options, history)
    key = secrets.token_hex()
    app = web.Application(client_max_size=TOKEN_BYTES * policy.context)
    app.router.add_post(f"/{key}/v1/chat/completions", endpoint.chat)
    app.router.add_post(f"/{key}/v1/act", endpoint.act)
    go_around_proxies()
    async with served(app) as port:
        variables = {
            "OPENAI_API_KEY": key,
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/{key}/v1",
            "FLATLAB_SYSTEM": episode.system,
            "FLATLAB_PROMPT": episode.prompt.replace("\0", " "),  # a variable cannot hold it
        }
        with started(command, variables) as (program, stderr):
            status = await endpoint.wait_for(program)
            if status == "exit":
                episode.fault = shown(f"exit code {program.returncode}: {end_of(stderr)}")
    return status


# ------------------------------------------------------------------ the run


def update(policy, optimizer, groups: list, cfg: Config, job) -> dict:
    """The update of grpo.py.

    Raises UserError if every program of the step has ended before its first request.
    """
    episodes = [e for group in groups for e in group.episodes]
    if episodes and all(e.status == "exit" and not e.turns for e in episodes):
        raise UserError(
            f"In none of {len(episodes)} episodes did the program of --agent ask the policy. "
            f"The last one ended with {episodes[-1].fault}"
        )
    return grpo.update(policy, optimizer, groups, cfg, job)


async def train(policy, cfg: Config, job) -> None:
    """The loop of grpo.py, with episodes that the program plays."""
    await grpo.train(policy, cfg, job, update, functools.partial(play, command=cfg.agent))


def run_attached(command: str) -> int:
    """Runs a command in the sandbox of the episode whose program calls. Prints what an agent sees.

    Returns 0, or 1 if the command failed.
    """
    import httpx

    url = f"{os.environ.get('OPENAI_BASE_URL')}/act"
    try:
        answer = httpx.post(url, json={"command": command}, timeout=None, trust_env=False)
        step = answer.raise_for_status().json()
    except httpx.HTTPError as error:
        raise UserError(f"--attach is for a program that --agent has started: {error}") from None
    print(step["observation"])
    return int(step["status"] not in ("ok", "validate", "submit"))


def main() -> None:
    if sys.argv[1:2] != ["--attach"]:
        grpo.main(Config, Path(__file__).stem, Policy, train, check)
    elif len(sys.argv) == 3:
        sys.exit(run_attached(sys.argv[2]))
    else:
        raise UserError("--attach takes one command, in quotes: --attach 'ls -l'.")


if __name__ == "__main__":
    cli.run(main)
