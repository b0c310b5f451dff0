"""A model behind an OpenAI-compatible endpoint, with the interface of policy.Policy.

    policy = Endpoint("http://localhost:8000/v1", "Qwen/Qwen3-4B-Instruct-2507")  # a vLLM server
    answer = await policy.sample(policy.render(messages), max_tokens=500)

It is for search and evaluation. There is nothing to train: log-probabilities are 0. The openai
client repeats requests that failed for a passing reason (429, 5xx, timeouts, no connection).
"""

import asyncio
import contextlib
import json
import os
import re

from flatlab.errors import Refusal, UserError, shown
from flatlab.model.chat import Sample

# Statuses that may be about the text of one request: its content or its length. Earlier llama.cpp
# says with 500 that it is too long.
REFUSALS = (400, 403, 413, 422, 451)
TOO_LONG = re.compile("context size.*exceeded", re.IGNORECASE)
# Codes and types of an error about the text of a request, in a body without a status
FILTERED = re.compile(r"filter|moderation|policy|safety|sensitive|inspection|flagged|prohibited")
ADAPTABLE = ("max_tokens", "seed", "temperature")  # fields that some endpoints refuse
HINTS = {
    401: " (the API key is that of $OPENAI_API_KEY)",
    403: " (the API key is that of $OPENAI_API_KEY)",
    404: " (does --url lack /v1?)",
}
TEXTS = ("text", "input_text", "output_text")  # kinds of parts of a message
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
LOCAL = "127.0.0.1,localhost,::1"
PIECE = 3  # characters; see Endpoint
NO_TEXT = "(no text)"
RETRIES = 10  # of a request, with growing pauses or after the time in Retry-After


def text_of(content) -> str:
    """The text of a message's content: a text, None, or a list of parts, without its thoughts.

    Raises ValueError, TypeError or KeyError if it is something else, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part["type"] in TEXTS:
            texts.append(part["text"])
        elif part["type"] not in THOUGHTS:
            raise ValueError(f"{part['type']} is no text")
    return "".join(texts)


def go_around_proxies() -> None:
    """Lets requests for this machine go around a proxy, here and in the programs started here."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if known != "*" and not known.startswith(LOCAL):
        hosts = f"{LOCAL},{known}"
        os.environ.update(no_proxy=hosts, NO_PROXY=hosts)


def check_url(url: str) -> None:
    """Raises UserError if nothing answers within 5 seconds."""
    import httpx

    go_around_proxies()
    try:
        httpx.get(url, timeout=5)
    except httpx.ReadTimeout:
        return  # slow, but there
    except httpx.InvalidURL:
        raise UserError(
            f"--url {shown(url)} is no address; a password has %2F for /, %23 for #, %3F for ?."
        ) from None
    except httpx.HTTPError as error:
        raise UserError(f"--url {shown(url)} does not answer: {error}") from None


def api_key(key: str = "") -> str:
    """The key, or that of $OPENAI_API_KEY, without white space around it. Raises UserError if it
    cannot be sent; the key itself is not in the text.
    """
    key = (key or os.environ.get("OPENAI_API_KEY") or "").strip()
    if re.search("[^ -~]", key):
        raise UserError("$OPENAI_API_KEY holds a line break or a character that is not ASCII.")
    return key or "none"  # local servers take any


async def correct_status(response) -> None:
    """Notes what an error says. Gives a good answer with an error in its body the status of this
    error, so that the client repeats what failed for a passing reason.
    """
    await response.aread()
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # see `read`
        body = response.json()
        error = body.get("error") or body["choices"][0]["error"]
        error = error if isinstance(error, dict) else {"message": error}
        code = str(error.get("code"))
        if error["message"]:
            said = " ".join(str(error["message"]).split())
            response.extensions["said"] = f"{said[:300]}: "
            if response.is_success:
                other = 400 if FILTERED.search(f"{code} {error.get('type')}".lower()) else 500
                response.status_code = int(code) if re.fullmatch(r"[45]\d\d", code) else other


def redirected(response) -> str:
    """A hint if the request was redirected, which may have made it a GET without a body."""
    if not response.history:
        return ""
    target = str(response.url).removesuffix("/chat/completions")
    return f" (it redirects to {shown(target)}: give this address as --url)"


class Endpoint:
    """A chat model behind an OpenAI-compatible endpoint.

    An endpoint takes text, while the rest of the system counts tokens. A "token" here is a text of
    at most 3 characters, or the role of a turn at its opening. The turns can be read back from such
    a list, and its length is a safe estimate of the number of real tokens.

    Args:
        url: address of the endpoint, with its /v1.
        context: tokens of prompt and reply together.
        key: the one of the endpoint; if empty, that in $OPENAI_API_KEY.
    """

    ROLES = ("system", "user", "assistant")  # longer than any piece of a text

    def __init__(
        self,
        url: str,
        model: str,
        context: int = 16384,
        temperature: float = 1.0,
        key: str = "",
    ):
        import openai

        self.url = url
        self.model = model
        self.context = context
        self.temperature = temperature
        go_around_proxies()
        self.client = openai.AsyncOpenAI(
            base_url=url,
            api_key=api_key(key),
            max_retries=RETRIES,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"response": [correct_status]}),
        )
        self.dropped = set()  # fields of ADAPTABLE that it refuses; max_tokens has another name
        self.sent = 0  # first requests of conversations
        self.waiting = 0  # those without an answer so far
        self.refused = set()  # numbers of those that it refused
        self.works = False  # it has answered one

    def encode(self, text: str) -> list[str]:
        return [text[i : i + PIECE] for i in range(0, len(text), PIECE)]

    def decode(self, tokens: list[str]) -> str:
        return "".join(token for token in tokens if token not in self.ROLES)

    def render(self, messages: list[dict]) -> list[str]:
        """The tokens of a conversation, ending with the opening of the reply."""
        tokens = []
        for message in messages:
            tokens += [message["role"], *self.encode(message["content"])]
        return [*tokens, "assistant"]

    def observation_tokens(self, text: str, ended: bool) -> list[str]:
        return self.render([{"role": "user", "content": text}])

    def messages(self, tokens: list[str]) -> list[dict]:
        """The conversation in such a list, without the opening of the reply at its end.

        Some endpoints refuse an empty message, as a reply without text is.
        """
        turns = []
        for token in tokens:
            if token in self.ROLES:
                turns.append({"role": token, "content": ""})
            else:
                turns[-1]["content"] += token
        for turn in turns:
            if not turn["content"].strip():
                turn["content"] = NO_TEXT
        return turns[:-1]

    async def sample(self, tokens: list[str], max_tokens: int, seed: int | None = None) -> Sample:
        """One reply.

        Raises Refusal if the endpoint refuses this request alone, and UserError if it cannot be
        used: it cannot be reached, or refuses three conversations in a row, or all in flight before
        it has answered one.
        """
        messages = self.messages(tokens)
        if len(messages) > 2:  # not the first request of a conversation
            return self.read(await self.request(messages, max_tokens, seed))
        number = self.sent
        self.sent += 1
        self.waiting += 1
        try:
            sample = self.read(await self.request(messages, max_tokens, seed))
            self.works = True
            return sample
        except Refusal as error:
            refusal = error
            self.refused.add(number)
        finally:
            self.waiting -= 1
        while not self.works and self.waiting:
            await asyncio.sleep(0.1)
        rows = [{first, first + 1, first + 2} for first in range(number - 2, number + 1)]
        if not self.works or any(row <= self.refused for row in rows):
            raise UserError(str(refusal)) from None
        raise refusal

    def read(self, response) -> Sample:
        """The reply in an HTTP response. Raises UserError if it is not that of a chat endpoint, or
        Refusal if the endpoint has answered before.
        """
        try:
            body = json.loads(response.text)
            choice = body["choices"][0]
            message = choice["message"]
            content = text_of(message.get("content"))
            text = content or text_of(message.get("refusal") or None)
            text = text.encode(errors="replace").decode()  # half an emoji could not be sent again
            usage = body.get("usage")
            counted = str(usage.get("completion_tokens")) if isinstance(usage, dict) else ""
            finish = choice.get("finish_reason")
            others = [name for name, value in message.items() if value and name != "role"]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            beginning = " ".join(response.text.split())[:200]
            raise (Refusal if self.works else UserError)(
                f"{shown(self.url)} does not answer like a chat endpoint: {beginning} ({error})"
                f"{redirected(response)}"
            ) from None
        is_cut = finish in ("length", "max_tokens")
        note = ""
        if not content or finish == "content_filter":
            note = f"The endpoint sent {' and '.join(others) or 'nothing'}, finish_reason {finish}"
            note += " (--max-reply-tokens)." if is_cut else "."
        reply = self.encode(text)
        stop_reason = "length" if is_cut else "stop"
        counted = int(counted) if counted.isdecimal() else None
        return Sample(reply, [0.0] * len(reply), text, stop_reason, 0, counted, note)

    async def request(self, messages: list[dict], max_tokens: int, seed: int | None):
        """The HTTP response of the endpoint. Raises Refusal or UserError."""
        import openai

        name = "max_completion_tokens" if "max_tokens" in self.dropped else "max_tokens"
        settings = {name: max_tokens, "temperature": self.temperature, "seed": seed}
        dropped = self.dropped | ({"seed"} if seed is None else set())
        settings = {name: value for name, value in settings.items() if name not in dropped}
        try:
            answer = await self.client.chat.completions.with_raw_response.create(
                model=self.model, messages=messages, **settings
            )
            return answer.http_response
        except openai.APIStatusError as error:
            status = error.status_code
            text = shown(" ".join(error.response.text.split()))
            named = {name for name in ADAPTABLE if re.search(rf"\b{name}\b", text)}
            if self.temperature != 1:
                named -= {"temperature"}  # without it, another temperature would be used
            named &= set(settings)
            # Later texts may name a field, too: the reply's length, or a word of the prompt.
            if status in (400, 422) and named and (named <= self.dropped or not self.works):
                self.dropped |= named
                return await self.request(messages, max_tokens, seed)
            hint = redirected(error.response) or HINTS.get(status, "")
            said = shown(error.response.extensions.get("said", ""))
            is_refusal = status in REFUSALS or status == 500 and TOO_LONG.search(text)
            raise (Refusal if is_refusal else UserError)(
                f"{said}{shown(self.url)} refuses the request for model {self.model!r}: {status}, "
                f"{text[:300]}{hint}"
            ) from None
        except (openai.APIError, ValueError) as error:
            reason = error.__cause__ or error
            raise UserError(
                f"{shown(self.url)} does not answer: {type(reason).__name__} {reason}"
            ) from None
