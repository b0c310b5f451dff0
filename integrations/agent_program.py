"""Episodes that an agent program plays which someone already has: grpo.py --agent COMMAND.

Each episode starts the program on this machine and serves it an OpenAI-style endpoint, which keeps
the tokens and log-probs of every reply. `python env.py --attach` runs a command in the episode's
sandbox. docs/extend.md says what a program has to do.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import secrets
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from env import Step
from flatlab.errors import UserError
from flatlab.model.chat import Sample
from flatlab.world.actions import act_command
from flatlab.world.episode import Segment, in_thread, reply_seed, step_record, turn_record

# Precedes the command in its shell. The input of this shell ends when this process does, however it
# ends, and then the program is killed. The program itself has no input.
WATCH = "exec 3<&0 0</dev/null; (read _ <&3; kill -9 0) & exec 3<&-; "
NOT_STARTED = (126, 127)  # exit codes of a shell that cannot run a command
TOKEN_BYTES = 16  # of a request's body for each token of the context, at most
STDERR_BYTES = 1000  # of the end of a program's stderr, in the transcript
# Tokenises requests beside the event loop. It has one thread, because a tokenizer serves one.
READER = ThreadPoolExecutor(1, "agent_program")


class ChatRequest(BaseModel):
    """Settings of sampling in a request have no effect: those of the run hold."""

    messages: list[dict]
    stream: Literal[False] = False
    tools: None = None


class Action(BaseModel):
    command: str


def text_of(messages: list[dict]) -> str:
    return "\n\n".join(message["content"] or "" for message in messages)


def read(messages: list[dict], policy, samples: dict) -> tuple[list[int], list[list[dict]]]:
    """(tokens that the next reply follows, messages: the first ones, a reply, those after it, ...).

    Earlier replies keep the tokens that were sampled. Only a text that the model did not write in
    this episode is tokenised. samples: by text, and by (number of tokens before it, text).
    Raises ValueError if the first or the last message is the model's.
    """
    groups = itertools.groupby(messages, lambda message: message["role"] == "assistant")
    parts = [list(group) for _, group in groups]
    if len(parts) % 2 == 0 or parts[0][0]["role"] == "assistant":
        raise ValueError("the first and the last message must not be the model's")
    texts = list(map(text_of, parts))
    tokens = policy.render(parts[0])
    for text, following in zip(texts[1::2], texts[2::2], strict=True):
        sample = samples.get((len(tokens), text)) or samples.get(text)
        if not sample:
            sample = Sample(policy.encode(text), [], text, "length", 0)
        after = policy.observation_tokens(following, sample.stop_reason == "stop")
        tokens = [*tokens, *sample.tokens, *after]
    return tokens, parts


@functools.lru_cache(1)
def twin_of(policy):
    return policy.twin()


def refuse_large_bodies(app: FastAPI, most: int) -> None:
    """Answers 413 to a body of more than `most` bytes, or of unknown length, without reading it."""

    @app.middleware("http")
    async def check_length(request, answer):
        length = request.headers.get("content-length", "0" if request.method == "GET" else "inf")
        if float(length) > most:
            text = f"A request may have {most} bytes: over the maximum context length."
            return PlainTextResponse(text, 413)
        return await answer(request)


@contextlib.asynccontextmanager
async def served(app: FastAPI):
    """Inside of the block, serves the app on a port of 127.0.0.1, which it yields."""
    config = uvicorn.Config(app, log_config=None, log_level="critical", timeout_graceful_shutdown=0)
    config.load()
    server = uvicorn.Server(config)  # without serve(), which takes over Ctrl-C
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        await server.startup([listener])
        try:
            yield port
        finally:
            await server.shutdown()


@contextlib.asynccontextmanager
async def started(command: str, variables: dict[str, str], stderr: bytearray):
    """Runs a command in a shell, and yields its process. After the block it and its children are
    dead, and `stderr` holds the end of what they printed there, which also goes to the terminal.

    Raises UserError if it cannot be started.
    """
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    # Not a pipe of asyncio's: wait() would also wait for a child that keeps it open.
    errors, writing_errors = os.pipe()
    os.set_blocking(errors, False)
    try:
        program = await asyncio.create_subprocess_shell(
            WATCH + command,
            stdin=reading,
            stderr=writing_errors,
            env=os.environ | variables,
            start_new_session=True,
        )
    except OSError as error:  # the prompt is too long for a variable, for example
        os.close(writing)
        os.close(errors)
        raise UserError(f"The command of --agent cannot be started: {error}") from None
    finally:
        os.close(reading)
        os.close(writing_errors)
    loop.add_reader(errors, copy_stderr, errors, stderr)
    try:
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        os.close(writing)
        await program.wait()
        copy_stderr(errors, stderr)
        loop.remove_reader(errors)
        os.close(errors)


def copy_stderr(pipe: int, end: bytearray) -> None:
    """Copies what a pipe holds to stderr; `end` keeps its last bytes."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        data = os.read(pipe, 1 << 16)
        if not data:  # it is closed
            asyncio.get_running_loop().remove_reader(pipe)
    os.write(2, data)
    end += data
    del end[:-STDERR_BYTES]


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
    seconds = 60 * options.episode_minutes
    deadline = time.monotonic() + seconds
    over = asyncio.Future()  # status of the episode
    numbers = itertools.count()
    samples = {}
    turn = {}  # of the latest reply
    stderr = bytearray()
    one_command = asyncio.Lock()
    episode.segments.append(Segment())

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
            raise HTTPException(500) from error

    async def chat(request: ChatRequest):
        nonlocal turn
        try:
            tokens, parts = await asyncio.get_running_loop().run_in_executor(
                READER, read, request.messages, twin_of(policy), samples
            )
        except Exception as error:  # what the messages lack, or what the chat template says
            raise HTTPException(400, f"These messages cannot be read: {error!r}") from error
        limit = options.max_reply_tokens
        if len(tokens) + limit > policy.context:
            raise HTTPException(400, f"{len(tokens)} tokens: over the maximum context length.")
        number = next(numbers)
        if number == 0:
            system = [message for message in parts[0] if message["role"] == "system"]
            episode.system = text_of(system)
            episode.prompt = text_of([message for message in parts[0] if message not in system])
        if number >= options.max_turns:
            end("turn_limit")
            raise HTTPException(403)
        seed = reply_seed(episode.seed, number)
        sample = await or_end(policy.sample(tokens, limit, seed=seed))
        samples[sample.text] = samples[len(tokens), sample.text] = sample
        turn["observation"] = text_of(parts[-1])
        turn = turn_record(sample, Step("", False, None, "rejected", 0.0))  # until a command runs
        episode.turns.append(turn)
        sequence = episode.segments[-1]
        if sequence.tokens != tokens[: len(sequence.tokens)]:  # the program did not go on with it
            sequence = Segment()
            episode.segments.append(sequence)
        sequence.append(tokens[len(sequence.tokens) :])
        sequence.append_reply(sample, len(episode.turns) - 1)
        return {
            "id": f"{number}",
            "object": "chat.completion",
            "model": "flatlab",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": sample.text},
                    "finish_reason": sample.stop_reason,
                }
            ],
            "usage": {
                "prompt_tokens": len(tokens),
                "completion_tokens": len(sample.tokens),
                "total_tokens": len(tokens) + len(sample.tokens),
            },
        }

    async def act(request: Action):
        async with one_command:  # those that wait at the end of the episode never start
            left = max(1.0, deadline - time.monotonic())
            step = await or_end(in_thread(env.step, request.command, left, act_command))
        turn.update(step_record(step))
        if step.done:
            end("submit")
        return {"observation": history.cap(step.observation), "status": step.status}

    key = secrets.token_hex()
    app = FastAPI(openapi_url=None)  # a description of the addresses would tell the key
    refuse_large_bodies(app, TOKEN_BYTES * policy.context)
    app.post(f"/{key}/v1/chat/completions")(chat)
    app.post(f"/{key}/v1/act")(act)
    variables = {
        "OPENAI_API_KEY": key,
        "FLATLAB_SYSTEM": episode.system,
        "FLATLAB_PROMPT": episode.prompt.replace("\0", " "),  # a variable cannot hold it
    }
    async with served(app) as port:
        variables["OPENAI_BASE_URL"] = f"http://127.0.0.1:{port}/{key}/v1"
        async with started(command, variables, stderr) as program:
            exited = asyncio.ensure_future(program.wait())
            exited.add_done_callback(lambda _: end("exit"))
            try:
                status = await asyncio.wait_for(over, seconds)
            except TimeoutError:
                return "time_limit"
    if program.returncode in NOT_STARTED and not episode.turns:
        raise UserError(f"The command of --agent cannot be started: {command}")
    if status == "exit":
        episode.fault = f"exit code {program.returncode}: {stderr.decode(errors='replace').strip()}"
    return status
