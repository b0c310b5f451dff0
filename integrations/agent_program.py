"""Episodes that an agent program plays which someone already has: grpo.py --agent COMMAND.

Each episode starts the program on this machine and serves it an OpenAI-style endpoint, which keeps
the tokens and log-probs of every reply. `python env.py --attach` runs a command in the episode's
sandbox. docs/extend.md says what a program has to do.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from env import Step
from flatlab.errors import UserError
from flatlab.model.chat import Sample
from flatlab.model.endpoint import go_around_proxies, text_of
from flatlab.world.episode import (
    act_command,
    in_thread,
    invoke,
    reply_seed,
    step_record,
    turn_record,
)

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
twin_of = functools.lru_cache(1)(lambda policy: policy.twin())


def join(messages: list[dict]) -> str:
    return "\n\n".join(message["content"] for message in messages)


def check_fields(body: dict) -> None:
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
    check_fields(body)
    for name in ("max_tokens", "max_completion_tokens"):
        wanted = body.get(name)
        limit = limit if wanted is None else min(limit, int(wanted))
    if limit < 1:
        raise ValueError("max_tokens must be positive")
    messages = [message | {"content": text_of(message["content"])} for message in body["messages"]]
    groups = itertools.groupby(messages, lambda message: message["role"] == "assistant")
    parts = [list(group) for _, group in groups]
    if len(parts) % 2 == 0 or parts[0][0]["role"] == "assistant":
        raise ValueError("the first and the last message must not be the model's")
    texts = list(map(join, parts))
    tokens = policy.render(parts[0])
    for text, following in zip(texts[1::2], texts[2::2], strict=True):
        sample = samples.get(text) or Sample(policy.encode(text), [], text, "length", 0)
        after = policy.observation_tokens(following, sample.stop_reason == "stop")
        tokens = tokens + sample.tokens + after
    return tokens, parts, limit


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


def check_programs(episodes: list) -> None:
    """Raises UserError if every program has ended before its first request."""
    if episodes and all(e.status == "exit" and not e.turns for e in episodes):
        raise UserError(
            f"In none of {len(episodes)} episodes did the program of --agent ask the policy. "
            f"The last one ended with {episodes[-1].fault}"
        )


async def play(env, policy, episode, options, history, command: str) -> str:
    """A loop for run_episode(): starts a program and answers it until it ends.

    Returns the status of the episode, which is "exit" if the program ended without `submit`.
    """
    deadline = time.monotonic() + 60 * options.episode_minutes
    over = asyncio.Future()  # status of the episode
    numbers = itertools.count()
    samples = {}
    turn = {}  # record of the latest reply
    one_command = asyncio.Lock()

    def end(status: str) -> None:
        if not over.done():
            over.set_result(status)

    async def or_end(work):
        """Awaits what the program is not to blame for: an error ends the episode."""
        try:
            return await work
        except Exception as error:
            if not over.done():
                over.set_exception(error)
            raise web.HTTPInternalServerError from error

    async def chat(request):
        """Answers a request. The run sets the sampling, whatever the request says."""
        nonlocal turn
        data = await request.read()
        run = asyncio.get_running_loop().run_in_executor
        try:
            facts = data, twin_of(policy), samples, options.max_reply_tokens
            tokens, parts, limit = await run(READER, invoke, read, *facts)
        except Exception as error:  # a missing field, or an error of the chat template
            raise web.HTTPBadRequest(text=f"This request cannot be read: {error!r}") from error
        if len(tokens) + limit > policy.context:
            text = f"{len(tokens)} tokens: over the maximum context length."
            raise web.HTTPBadRequest(text=text)
        number = next(numbers)
        if number == 0:
            system = [message for message in parts[0] if message["role"] == "system"]
            episode.system = join(system)
            episode.prompt = join([message for message in parts[0] if message not in system])
        if number >= options.max_turns:
            end("turn_limit")
            raise web.HTTPForbidden
        seed = reply_seed(episode.seed, number)
        sample = await or_end(policy.sample(tokens, limit, seed=seed))
        samples[sample.text] = sample
        turn["observation"] = join(parts[-1])
        turn = turn_record(sample, Step("", "", None, "rejected", 0.0))  # until a command runs
        episode.add(tokens, sample, turn)
        message = {"role": "assistant", "content": sample.text}
        choice = {"index": 0, "message": message, "finish_reason": sample.stop_reason}
        usage = {
            "prompt_tokens": len(tokens),
            "completion_tokens": len(sample.tokens),
            "total_tokens": len(tokens) + len(sample.tokens),
        }
        kind = {"id": f"{number}", "object": "chat.completion", "model": "flatlab"}
        return web.json_response(kind | {"choices": [choice], "usage": usage})

    async def act(request):
        command = str((await request.json())["command"])
        async with one_command:  # commands that wait at the end of the episode never start
            left = max(1.0, deadline - time.monotonic())
            step = await or_end(in_thread(env.step, command, left, act_command))
        turn.update(step_record(step))
        if step.ended:
            end(step.ended)
        observation = history.cap(step.observation)
        return web.json_response({"observation": observation, "status": step.status})

    key = secrets.token_hex()
    app = web.Application(client_max_size=TOKEN_BYTES * policy.context)
    app.router.add_post(f"/{key}/v1/chat/completions", chat)
    app.router.add_post(f"/{key}/v1/act", act)
    variables = {
        "OPENAI_API_KEY": key,
        "FLATLAB_SYSTEM": episode.system,
        "FLATLAB_PROMPT": episode.prompt.replace("\0", " "),  # a variable cannot hold it
    }
    go_around_proxies()
    async with served(app) as port:
        variables["OPENAI_BASE_URL"] = f"http://127.0.0.1:{port}/{key}/v1"
        with started(command, variables) as (program, stderr):
            while not over.done():
                await asyncio.wait([over], timeout=POLL_SECONDS)
                if program.poll() is not None:
                    end("exit")
                if time.monotonic() >= deadline:
                    end("time_limit")
            if over.result() == "exit":
                episode.fault = f"exit code {program.returncode}: {end_of(stderr)}"
    return over.result()
