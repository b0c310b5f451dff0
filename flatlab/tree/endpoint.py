"""A model behind an OpenAI-compatible endpoint, with the interface of policy.Policy: for search and evaluation.

    policy = Endpoint("http://localhost:8000/v1", "Qwen/Qwen3-4B-Instruct-2507")         # a vLLM server, say
    answer = await policy.sample(policy.render(messages), max_tokens=500)

What can pass (429, 5xx, no connection, timeouts) is tried again; what cannot (400, 401, 404) is one clear sentence at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from flatlab.episode.episode import Sample
from flatlab.errors import UserError

TOO_LONG = ("context length", "context_length", "maximum context")  # how endpoints say it


@dataclass(frozen=True)
class Answer(Sample):
    prompt_tokens: int  # as the endpoint counts them
    reply_tokens: int


class Endpoint:
    """A chat model behind an OpenAI-compatible endpoint (search and evaluation; nothing to train on: log-probs are 0).

    It takes text, the rest of the system counts tokens. So a "token" here is a piece of at most 3 characters, or the
    opening of a turn: turns and their texts can be read back from such a list, and its length is a safe estimate of the
    real number, which comes with every answer.

    url: with the /v1. key: of $OPENAI_API_KEY when empty. retries: of what can pass (429, 5xx, timeouts, no connection), with growing
    pauses, or as long as the endpoint asks for in Retry-After.
    """

    ROLES = ("system", "user", "assistant")  # tokens 0, 1, 2

    def __init__(
        self,
        url: str,
        model: str,
        context: int = 16384,
        temperature: float = 1.0,
        retries: int = 8,
        timeout: float = 600.0,
        key: str = "",
    ):
        if not re.match(r"https?://[^/:\s]+(:\d+)?(/\S*)?$", url):
            raise UserError(
                f"--url {url} is no address of an endpoint; one looks like http://localhost:8000/v1"
            )
        self.url, self.model, self.context, self.temperature, self.version = (
            url.rstrip("/"),
            model,
            context,
            temperature,
            0,
        )
        self.retries, self.timeout, self.key = (
            retries,
            timeout,
            key or os.environ.get("OPENAI_API_KEY", ""),
        )
        self.pieces, self.numbers = list(self.ROLES), {}
        self.limit_name, self.with_seed, self._client = "max_tokens", True, None

    def encode(self, text: str) -> list[int]:
        pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
        for piece in pieces:
            if piece not in self.numbers:
                self.numbers[piece] = len(self.pieces)
                self.pieces.append(piece)
        return [self.numbers[piece] for piece in pieces]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.pieces[token] for token in tokens if token >= len(self.ROLES))

    def render(self, messages: list[dict]) -> list[int]:
        turns = [
            [self.ROLES.index(message["role"]), *self.encode(message["content"])]
            for message in messages
        ]
        return [token for turn in turns for token in turn] + [self.ROLES.index("assistant")]

    def observation_tokens(self, text: str, ended: bool) -> list[int]:
        return [self.ROLES.index("user"), *self.encode(text), self.ROLES.index("assistant")]

    def messages(self, tokens: list[int]) -> list[dict]:
        """The turns in such a list, without the opening of the reply at its end."""
        starts = [i for i, token in enumerate(tokens) if token < len(self.ROLES)]
        return [
            {"role": self.ROLES[tokens[a]], "content": self.decode(tokens[a + 1 : b])}
            for a, b in zip(starts, starts[1:])
        ]

    async def sample(
        self,
        tokens: list[int],
        max_tokens: int,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> Answer:
        """One reply. Raises OverflowError when the endpoint finds the prompt too long, UserError when it refuses or stays away."""
        body = {
            "model": self.model,
            "messages": self.messages(tokens),
            "max_tokens": max_tokens,
            "temperature": self.temperature if temperature is None else temperature,
            "seed": seed,
        }
        answer = await self._post(body)
        try:
            choice, used = answer["choices"][0], answer.get("usage") or {}
            text = choice["message"].get("content") or ""
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(
                f"{self.url} does not answer like a chat endpoint: {str(answer)[:200]}"
            ) from None
        reply = self.encode(text)
        return Answer(
            reply,
            [0.0] * len(reply),
            text,
            "length" if choice.get("finish_reason") == "length" else "stop",
            0,
            used.get("prompt_tokens") or len(tokens),
            used.get("completion_tokens") or len(reply),
        )

    async def _post(self, body: dict) -> dict:
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=self.timeout,
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                limits=httpx.Limits(max_connections=256),
            )
        problem = ""
        for attempt in range(self.retries + 1):
            limit = body["max_tokens"]
            asked = (
                {k: v for k, v in body.items() if k not in ("max_tokens", "seed")}
                | {self.limit_name: limit}
                | ({"seed": body["seed"]} if self.with_seed and body["seed"] is not None else {})
            )
            pause = min(60.0, 2.0**attempt) * random.uniform(0.5, 1.0)
            try:
                response = await self._client.post(f"{self.url}/chat/completions", json=asked)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code == 200:
                    try:
                        return response.json()
                    except ValueError:
                        raise UserError(
                            f"{self.url} does not answer in JSON: {response.text[:200]!r}"
                        ) from None
                problem = f"{response.status_code}, {' '.join(response.text.split())[:300]}"
                if response.status_code == 400 and self._can_adapt(response.text, asked):
                    continue
                if response.status_code not in (408, 409, 425, 429) and response.status_code < 500:
                    if response.status_code == 400 and any(
                        words in response.text for words in TOO_LONG
                    ):
                        raise OverflowError(problem)
                    raise UserError(
                        f"{self.url} refuses the request for model {self.model!r}: {problem}"
                    )
                pause = retry_after(response.headers.get("retry-after")) or pause
            if attempt < self.retries:
                await asyncio.sleep(pause)
        raise UserError(f"{self.url} does not answer after {self.retries + 1} attempts: {problem}")

    def _can_adapt(self, text: str, asked: dict) -> bool:
        """Some endpoints call the limit of a reply otherwise, some take no seed: whether to ask again in another way.
        Judged by what was asked: requests that run meanwhile find out the same."""
        if any(words in text for words in TOO_LONG):
            return False
        if "max_completion_tokens" in text and "max_tokens" in asked:
            self.limit_name = "max_completion_tokens"
            return True
        if "seed" in text and "seed" in asked:
            self.with_seed = False
            return True
        return False


def retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date; at most ten minutes."""
    try:
        return max(0.0, min(600.0, float(header)))
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, min(600.0, parsedate_to_datetime(header).timestamp() - time.time()))
    except (TypeError, ValueError):
        return None
