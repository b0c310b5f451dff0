"""Text to tokens with a model's chat template; text never turns into control tokens.

A conversation grows by appending: the prompt from render(), each reply as it was sampled, and after
it observation_tokens(). This equals the template applied to the whole conversation, except that a
reply keeps all of its tokens, also where the template would leave out its thoughts later.
"""

import contextlib
import copy
import os
import re
from dataclasses import dataclass
from pathlib import Path

from flatlab.errors import UserError
from flatlab.model.fields import end_tokens

MARK = "\x02"  # stands for a text while the template is applied


@dataclass(frozen=True)
class Sample:
    """One reply of the policy."""

    tokens: list[int]  # as sampled; with the end token if stop_reason is "stop"
    logprobs: list[float]  # of each token under the sampling distribution, temperature applied
    text: str  # for people and for the action extractor; never tokenised again
    stop_reason: str  # "stop" (the model ended its turn) or "length" (cut at max_tokens)
    version: int  # Policy.version when the request was sent
    counted: int | None = None  # tokens, as an endpoint counts them
    note: str = ""  # sentence about an endpoint's answer that has no text or was filtered

    @property
    def reply_tokens(self) -> int:
        """Number of tokens, for counts and budgets."""
        return len(self.tokens) if self.counted is None else self.counted


class ChatTokens:
    """The tokenizer of a Hugging Face model, and the tokens that end a turn.

    stop_tokens: those that end a reply. end_of_turn: the one with which the template ends it.
    """

    def __init__(self, model: str):
        """model: folder or name. Its tokenizer names an end token, and its generation_config.json,
        if there is one, may name others. Raises UserError if it has no chat template, or one that
        cannot be used turn by turn.
        """
        from transformers import AutoTokenizer
        from transformers.utils import cached_file

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        if not self.tokenizer.chat_template:
            raise UserError(f"{model} has no chat template: choose an instruct model.")
        file = f"{model}/generation_config.json"
        if not Path(model).is_dir():
            with contextlib.suppress(OSError):  # there is no such file
                file = cached_file(model, "generation_config.json") or file
        more = end_tokens(Path(file)) if os.path.lexists(file) else []  # also a link to nothing
        self.stop_tokens = {self.tokenizer.eos_token_id, *more} - {None}
        self._control = {
            number: str(token)
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.special
        }
        # What a template must not see: it would become a control token, or it is the mark.
        hidden = [MARK, *self._control.values()]
        self._hidden = re.compile("|".join(map(re.escape, hidden)))
        self._read_template(model)

    def _read_template(self, model: str) -> None:
        """Sets how the template ends a reply, and whether it has a system role."""
        from jinja2 import TemplateError

        last = self._frames(marks("user", "assistant"), begins_reply=False)[-1]
        parts = self._frames(marks("user", "assistant", "user"))
        if len(parts) != 4:
            raise UserError(f"The chat template of {model} does not show each message once.")

        # First tokens after the last reply, and after a reply that is followed by a message
        endings = map(self._encode_frame, (last, parts[2]))
        last, after = [next(iter(tokens), None) for tokens in endings]
        self.end_of_turn = self.tokenizer.eos_token_id
        self._closing = None
        if last in self._control or after in self.stop_tokens:
            self.end_of_turn = last if last in self._control else after
            self._closing = after
        self.stop_tokens.add(self.end_of_turn)
        # Some templates refuse a system message, leave it out, or put it into the last message.
        self.has_system_role = False
        with contextlib.suppress(TemplateError):
            prompt = self._frames(marks("system", "user"))
            talk = self._frames(marks("system", "user", "assistant", "user"))
            self.has_system_role = len(prompt) == 3 and prompt[:2] == talk[:2]

    def twin(self):
        """A copy for another thread: a tokenizer serves one thread at a time."""
        twin = copy.copy(self)
        twin.tokenizer = copy.deepcopy(self.tokenizer)
        return twin

    def _frames(self, messages: list[dict], begins_reply: bool = True) -> list[str]:
        """The template applied to these messages, in the parts around each mark."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=begins_reply
        )
        return text.split(MARK)

    def encode(self, text: str) -> list[int]:
        """Text to tokens; `<|im_end|>` and the like inside the text stay ordinary characters."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def _encode_frame(self, text: str) -> list[int]:
        """Text of the template to tokens; `<|im_end|>` and the like are control tokens."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def render(self, messages: list[dict]) -> list[int]:
        """Messages ({"role", "content"}) to prompt tokens, ending where the next reply begins.

        The first message may have the role "system". Where the template has no such role (Gemma),
        or would move the message as the conversation grows (Mistral), its text and an empty line
        are put before the first user message.
        """
        if messages[0]["role"] == "system" and not self.has_system_role:
            system, first, *rest = messages
            content = f"{system['content']}\n\n{first['content']}"
            messages = [{"role": first["role"], "content": content}, *rest]
        return self._tokens(messages)

    def observation_tokens(self, text: str, ended: bool) -> list[int]:
        """Tokens after a sampled reply: the end of its turn, `text` as a user turn, the opening of
        the next reply.

        ended: the model ended its turn itself, so that token is already there.
        """
        messages = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": MARK},
            {"role": "user", "content": text},
        ]
        tokens = self._tokens(messages, skip=1)
        return tokens[1:] if ended and tokens[0] == self._closing else tokens

    def _tokens(self, messages: list[dict], skip: int = 0) -> list[int]:
        """The tokens of these messages, without the first `skip` of those that hold the mark and
        what is before them.

        The template's text is tokenised with the contents in it, as in training of the model. Only
        contents that hold the text of a control token are tokenised by themselves.
        """
        hidden = []
        shown = []
        for message in messages:
            if self._hidden.search(message["content"]):
                hidden.append(message["content"])
                message = message | {"content": MARK}
            shown.append(message)
        frames = self._frames(shown)
        tokens = self._encode_frame(frames[skip])
        for content, frame in zip(hidden[skip:], frames[skip + 1 :], strict=True):
            tokens += self.encode(content) + self._encode_frame(frame)
        return tokens


def marks(*roles: str) -> list[dict]:
    """Messages of these roles with the mark as their contents."""
    return [{"role": role, "content": MARK} for role in roles]
