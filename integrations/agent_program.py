"""Episodes that an agent program plays which someone already has: grpo.py --agent COMMAND.

Each episode starts the program on this machine and serves it an OpenAI-style endpoint, which keeps
the tokens and log-probs of every reply. `python env.py --attach` runs a command in the episode's
sandbox. docs/agents.md says what a program has to do.
"""

import asyncio
import itertools
import os
import secrets
import signal
import time
from contextlib import suppress
from typing import Literal

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from env import Step
from flatlab.episode.episode import Sample, Segment, in_thread, reply_seed, step_record, turn_record


class ChatRequest(BaseModel):
    """Settings of sampling in a request have no effect: those of the run hold."""

    messages: list[dict]
    stream: Literal[False] = False
    tools: None = None


class Action(BaseModel):
    command: str


def read(messages: list[dict], policy, samples: dict) -> tuple[list[int], list[str]]:
    """(tokens that the next reply follows, texts: the prompt, a reply, what follows it, ...).

    Earlier replies keep the tokens that were sampled. Only a text that the model did not write in
    this episode is tokenised. samples: by text, and by (number of tokens before it, text).
    """
    groups = itertools.groupby(messages, lambda message: message["role"] == "assistant")
    parts = [list(group) for _, group in groups]
    texts = ["\n\n".join(message["content"] or "" for message in part) for part in parts]
    tokens = policy.render(parts[0])
    for text, following in zip(texts[1::2], texts[2::2], strict=True):
        sample = samples.get((len(tokens), text)) or samples.get(text)
        if not sample:
            sample = Sample(policy.encode(text), [], text, "length", 0)
        after = policy.observation_tokens(following, sample.stop_reason == "stop")
        tokens = [*tokens, *sample.tokens, *after]
    return tokens, texts


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
    episode.segments.append(Segment())

    async def chat(request: ChatRequest):
        nonlocal turn
        try:
            tokens, texts = read(request.messages, policy, samples)
        except Exception as error:  # what the messages lack, or what the chat template says
            raise HTTPException(400, f"These messages cannot be read: {error!r}") from error
        limit = options.max_reply_tokens
        if len(tokens) + limit > policy.context:
            raise HTTPException(400, f"{len(tokens)} tokens: over the maximum context length.")
        number = next(numbers)
        if number == 0:
            episode.system, episode.prompt = "", texts[0]
        if number >= options.max_turns:
            over.set_result("turn_limit")
            raise HTTPException(403)
        sample = await policy.sample(tokens, limit, seed=reply_seed(episode.seed, number))
        samples[sample.text] = samples[len(tokens), sample.text] = sample
        turn["observation"] = texts[-1]
        turn = turn_record(sample, Step("", False, None, "rejected", 0.0))  # until a command runs
        episode.turns.append(turn)
        sequence = episode.segments[-1]
        if sequence.tokens != tokens[: len(sequence.tokens)]:  # the program did not go on with it
            sequence = Segment()
            episode.segments.append(sequence)
        sequence.append(tokens[len(sequence.tokens) :])
        sequence.append(sample.tokens, sample.logprobs)
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
        left = max(1.0, deadline - time.monotonic())
        step = await in_thread(env.step, f"```bash\n{request.command}\n```", left)
        turn.update(step_record(step))
        if step.done:
            over.set_result("submit")
        return {"observation": history.cap(step.observation), "status": step.status}

    async def fail(request, error):
        """Ends the episode: the program is not to blame for a fault, say."""
        over.set_exception(error)
        raise error

    key = secrets.token_hex()
    app = FastAPI(exception_handlers={Exception: fail})
    app.post(f"/{key}/v1/chat/completions")(chat)
    app.post(f"/{key}/v1/act")(act)
    config = uvicorn.Config(
        app, port=0, log_config=None, log_level="critical", timeout_graceful_shutdown=0
    )
    config.load()
    server = uvicorn.Server(config)  # without serve(), which takes over Ctrl-C
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    variables = {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/{key}/v1",
        "OPENAI_API_KEY": key,
        "FLATLAB_PROMPT": episode.prompt,
    }
    program = await asyncio.create_subprocess_shell(
        command, env=os.environ | variables, start_new_session=True
    )
    exited = asyncio.ensure_future(program.wait())
    exited.add_done_callback(lambda _: over.done() or over.set_result("exit"))
    try:
        return await asyncio.wait_for(over, seconds)
    except TimeoutError:
        return "time_limit"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        await exited
        await server.shutdown()
