"""A model behind an OpenAI-compatible endpoint, with the interface of policy.Policy.

    policy = Endpoint("http://localhost:8000/v1", "Qwen/Qwen3-4B-Instruct-2507")  # a vLLM server
    answer = await policy.sample(policy.render(messages), max_tokens=500)

It is for search and evaluation. There is nothing to train: log-probabilities are 0. The openai
client repeats requests that failed for a passing reason (429, 5xx, timeouts, no connection).
"""

import os
from dataclasses import dataclass

from flatlab.errors import UserError
from flatlab.model.chat import Sample

TOO_LONG = ("context length", "context_length", "maximum context")  # how endpoints say it
PIECE = 3  # characters; see Endpoint


@dataclass(frozen=True)
class Answer(Sample):
    reply_tokens: int  # as the endpoint counts them


def check_url(url: str) -> None:
    """Raises UserError if nothing answers within 5 seconds."""
    import httpx

    try:
        httpx.get(url, timeout=5)
    except httpx.ReadTimeout:
        return  # slow, but there
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"--url {url} does not answer: {error}") from None


class Endpoint:
    """A chat model behind an OpenAI-compatible endpoint.

    An endpoint takes text, while the rest of the system counts tokens. A "token" here is a piece of
    at most 3 characters, or the opening of a turn. The turns and their texts can be read back from
    such a list, and its length is a safe estimate of the number of real tokens.

    Args:
        url: address of the endpoint, with its /v1.
        context: tokens of prompt and reply together.
        retries: number of times a request is repeated, with growing pauses or after the time that
            the endpoint asks for (Retry-After).
    """

    ROLES = ("system", "user", "assistant")  # tokens 0, 1, 2

    def __init__(
        self,
        url: str,
        model: str,
        context: int = 16384,
        temperature: float = 1.0,
        retries: int = 10,
    ):
        import openai

        self.url = url
        self.model = model
        self.context = context
        self.temperature = temperature
        key = os.environ.get("OPENAI_API_KEY") or "none"  # local servers take any
        self.client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=retries)
        # Some endpoints take no seed, and some have another name for the limit (max_tokens).
        self.refused = set()
        # a token's number is its place here; no piece is as long as the name of a role
        self.numbers = {role: number for number, role in enumerate(self.ROLES)}

    def encode(self, text: str) -> list[int]:
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        return [self.numbers.setdefault(piece, len(self.numbers)) for piece in pieces]

    def decode(self, tokens: list[int]) -> str:
        pieces = list(self.numbers)
        return "".join(pieces[token] for token in tokens if token >= len(self.ROLES))

    def render(self, messages: list[dict]) -> list[int]:
        """The tokens of a conversation, ending with the opening of the reply."""
        tokens = []
        for message in messages:
            tokens.append(self.ROLES.index(message["role"]))
            tokens += self.encode(message["content"])
        return [*tokens, self.ROLES.index("assistant")]

    def observation_tokens(self, text: str, ended: bool) -> list[int]:
        return self.render([{"role": "user", "content": text}])

    def messages(self, tokens: list[int]) -> list[dict]:
        """The conversation in such a list, without the opening of the reply at its end."""
        starts = [i for i, token in enumerate(tokens) if token < len(self.ROLES)]
        turns = []
        for start, end in zip(starts, starts[1:]):
            content = self.decode(tokens[start + 1 : end])
            turns.append({"role": self.ROLES[tokens[start]], "content": content})
        return turns

    async def sample(self, tokens: list[int], max_tokens: int, seed: int | None = None) -> Answer:
        """One reply.

        Raises OverflowError if the endpoint finds the prompt too long, and UserError if it refuses
        the request or cannot be reached.
        """
        completion = await self.request(self.messages(tokens), max_tokens, seed)
        try:
            choice = completion.choices[0]
            text = choice.message.content or ""
        except (AttributeError, IndexError, TypeError):
            raise UserError(
                f"{self.url} does not answer like a chat endpoint: {str(completion)[:200]}"
            ) from None
        reply = self.encode(text)
        usage = completion.usage
        return Answer(
            tokens=reply,
            logprobs=[0.0] * len(reply),
            text=text,
            stop_reason="length" if choice.finish_reason == "length" else "stop",
            version=0,
            reply_tokens=usage.completion_tokens if usage else len(reply),
        )

    async def request(self, messages: list[dict], max_tokens: int, seed: int | None):
        """The endpoint's completion. Raises as `sample` does."""
        import openai

        name = "max_completion_tokens" if "max_tokens" in self.refused else "max_tokens"
        settings = {name: max_tokens}
        if seed is not None and "seed" not in self.refused:
            settings["seed"] = seed
        try:
            return await self.client.chat.completions.create(
                model=self.model, messages=messages, temperature=self.temperature, **settings
            )
        except openai.APIStatusError as error:
            text = " ".join(error.response.text.split())[:300]
            if error.status_code == 400:
                if any(words in text for words in TOO_LONG):
                    raise OverflowError(text) from None
                refused = {name for name in ("max_tokens", "seed") if name in text} & set(settings)
                if refused:
                    self.refused |= refused
                    return await self.request(messages, max_tokens, seed)
            raise UserError(
                f"{self.url} refuses the request for model {self.model!r}: {error.status_code}, "
                f"{text} (the API key is that of $OPENAI_API_KEY)"
            ) from None
        except (openai.APIError, ValueError) as error:
            reason = error.__cause__ or error
            raise UserError(
                f"{self.url} does not answer: {type(reason).__name__} {reason}"
            ) from None
