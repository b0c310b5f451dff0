"""Text to tokens with a model's chat template; text never turns into control tokens."""

import contextlib

from flatlab.errors import UserError


class ChatTokens:
    """The tokenizer of a Hugging Face model, and the tokens that end a turn."""

    def __init__(self, model: str):
        """model: folder or name. Its tokenizer names an end token, and its generation_config.json,
        if there is one, may name others. Raises UserError if it has no chat template.
        """
        from transformers import AutoTokenizer, GenerationConfig

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        if not self.tokenizer.chat_template:
            raise UserError(f"{model} has no chat template: choose an instruct model.")
        more = None
        with contextlib.suppress(OSError):  # there is no such file
            more = GenerationConfig.from_pretrained(model).eos_token_id
        more = more if isinstance(more, list) else [more]
        self.stop_tokens = {self.tokenizer.eos_token_id, *more} - {None}
        self._frames = {}

    def encode(self, text: str) -> list[int]:
        """Text to tokens; `<|im_end|>` and the like inside the text stay ordinary characters."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def render(self, messages: list[dict]) -> list[int]:
        """Messages ({"role", "content"}) to prompt tokens, ending where the next reply begins."""
        frame = self._frame([message["role"] for message in messages])
        tokens = list(frame[0])
        for message, after in zip(messages, frame[1:], strict=True):
            tokens += self.encode(message["content"]) + after
        return tokens

    def observation_tokens(self, text: str, ended: bool) -> list[int]:
        """What follows a sampled reply: the end of its turn, `text` as a user turn, the opening of
        the next reply.

        ended: the model ended its turn itself, so that token is already there.
        """
        _, _, before, after = self._frame(["user", "assistant", "user"])
        if ended and before[:1] == [self.end_of_turn()]:
            before = before[1:]
        return before + self.encode(text) + after

    def end_of_turn(self) -> int:
        """The token with which the template ends a reply; the tokenizer's if it has none."""
        _, _, before, _ = self._frame(["user", "assistant", "user"])
        is_stop = bool(before) and before[0] in self.stop_tokens
        return before[0] if is_stop else self.tokenizer.eos_token_id

    def _frame(self, roles: list[str]) -> list[list[int]]:
        """The template's own tokens around the contents of such messages: len(roles) + 1 lists."""
        key = tuple(roles)
        if key not in self._frames:
            mark = "\x02"
            messages = [{"role": role, "content": mark} for role in roles]
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            self._frames[key] = [
                self.tokenizer(piece, add_special_tokens=False).input_ids
                for piece in text.split(mark)
            ]
        return self._frames[key]
