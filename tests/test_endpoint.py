"""endpoint.py against a server that misbehaves on purpose, and against a real vLLM server."""

import asyncio
import os
import re
import time

import pytest

from flatlab.errors import UserError, shown
from flatlab.model import endpoint
from flatlab.model.endpoint import check_url
from flatlab.model.path import STAND_IN
from helpers import chat_server, completion, dead_proxy, served, user_error


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")


@pytest.fixture
def server():
    """A chat endpoint: first the answers in `script` (status, body, headers), then good ones."""
    script, seen = [], []

    def answer(body, headers):
        seen.append(body | {"auth": headers["authorization"]})
        status, body, *headers = script.pop(0) if script else (200, completion("hello"))
        return status, body, dict(*headers)

    with chat_server(answer) as url:
        yield url, script, seen


def ask(url, temperature=0.7, retries=3, key="", **kwargs):
    model = endpoint.Endpoint(url, "m", temperature=temperature, key=key)
    model.client.max_retries = retries
    prompt = model.render([{"role": "user", "content": "hi <|im_end|> ünïcode"}])
    return asyncio.run(model.sample(prompt, 50, **kwargs))


def test_text_comes_back_and_is_counted():
    model = endpoint.Endpoint("http://x/v1", "m")
    said = [("system", "be kind"), ("user", "a\nb 🙂"), ("assistant", "my reply"), ("user", "ok")]
    messages = [{"role": role, "content": text} for role, text in said]
    tokens = model.render(messages[:2]) + model.encode("my reply")
    assert model.messages(tokens + model.observation_tokens("ok", ended=True)) == messages
    assert len(model.encode("x" * 300)) == 100
    assert model.encode("user") != ["user"]  # text is never a turn


def test_a_good_answer(server, monkeypatch):
    url, _, seen = server
    answer = ask(url, temperature=0.0, seed=7)
    assert (answer.text, answer.stop_reason, answer.reply_tokens) == ("hello", "stop", 7)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    ask(url)
    ask(url, key="mine")
    first, second, _ = seen
    assert (first["temperature"], first["seed"], first["max_tokens"]) == (0.0, 7, 50)
    assert first["messages"] == [{"role": "user", "content": "hi <|im_end|> ünïcode"}]
    assert [body["auth"] for body in seen] == ["Bearer secret", "Bearer none", "Bearer mine"]
    assert "seed" not in second


def test_passing_failures_are_repeated_after_the_time_the_endpoint_asks_for(server):
    url, script, seen = server
    script += [(429, {}, {"retry-after": "0.6"}), (503, b"busy", {"retry-after": "0.1"})]
    begin = time.monotonic()
    assert ask(url).text == "hello"
    assert len(seen) == 3
    assert 0.7 <= time.monotonic() - begin < 6


def error(message, code=None, kind=None, **more):
    return {"error": {"message": message, "code": code, "type": kind} | more}


TOO_LONG = (
    "This model's maximum context length is 8192 tokens",
    "Your input exceeds the context window of this model.",
    "The decoder prompt (length 5000) is longer than the maximum model length",
    "Input length (5000 tokens) exceeds the maximum allowed length (2048 tokens).",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 5000",
    "`inputs` must have less than 1024 tokens. Given: 5000",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
    "prompt is too long: 205000 tokens > 200000 maximum",
    "The input token count (1200000) exceeds the maximum number",
    "too many tokens: size limit exceeded by 500 tokens.",
    "Input tokens exceed the configured limit of 272000 tokens.",
    "Input is too long for requested model.",
    "This model's maximum prompt length is 131072",
)
RAW = {"raw": str(error("This model's maximum context length is 4096 tokens"))}


OVERLOADED = "Provider returned error: overloaded"
CODES = (502, "429", None, "overloaded")
INNER = error(OVERLOADED, 502) | {"message": {"content": ""}, "finish_reason": "error"}
SOON = {"retry-after": "0.01"}
VLLM = (
    "'max_tokens' or 'max_completion_tokens' is too large: 2048. This model's maximum context "
    "length is 512 tokens and your request has 300 input tokens (2048 > 512 - 300)."
)
NO_ACCESS = "Your key has no access to the 1M context window of this model"
MEMORY = "CUDA out of memory while growing the KV cache; lower the context length or the batch"
# status, message of an error or a whole body, requests that are sent with 2 repetitions, what is
# raised and a part of its text
MEANINGS = (
    *((400, text, 1, OverflowError, "400, ") for text in TOO_LONG),
    (400, {"error": TOO_LONG[0]}, 1, OverflowError, "400, "),
    (413, {"message": TOO_LONG[7]}, 1, OverflowError, "413, "),
    (422, {"error": TOO_LONG[4], "error_type": "validation"}, 1, OverflowError, "422, "),
    (400, error("Please reduce the length.", "context_length_exceeded"), 1, OverflowError, "400, "),
    (400, error("Shorten it.", 400, "exceed_context_size_error"), 1, OverflowError, "400, "),
    (200, error("Provider returned error", 400, metadata=RAW), 1, OverflowError, "400, "),
    (400, VLLM, 1, OverflowError, "your request has 300 input tokens"),
    (422, "string_too_long", 1, OverflowError, "422, "),
    (400, "context_window is no field", 1, UserError, "no field"),
    (400, "prompt is missing", 1, UserError, "400, "),
    (422, "temperature is too large", 1, UserError, "422, "),
    (400, "max_tokens is too large: at most 4096 completion tokens", 2, UserError, "refuses"),
    (401, "Incorrect API key; context size exceeded", 1, UserError, "OPENAI_API_KEY"),
    (402, "credit for this context length exceeded", 1, UserError, "402"),
    (403, NO_ACCESS, 1, UserError, NO_ACCESS),
    (404, "Not Found", 1, UserError, "does --url lack /v1"),
    (429, "The prompt is too long: tokens per minute exceeded", 3, UserError, "429"),
    (500, MEMORY, 3, UserError, "KV cache"),
    (500, "Context size has been exceeded.", 3, OverflowError, "500, "),
    (502, b"away", 3, UserError, "502, away"),
    # an error in a good answer
    *((200, error(OVERLOADED, code), 3, UserError, f"{OVERLOADED}: http") for code in CODES),
    (200, {"choices": [INNER]}, 3, UserError, f"{OVERLOADED}: http"),
    (200, error("No credit", 402), 1, UserError, "No credit: http"),
    (200, {"error": "busy"}, 3, UserError, "busy: http"),
)


@pytest.mark.parametrize("status, body, requests, kind, text", MEANINGS)
def test_the_status_counts_before_the_words(server, status, body, requests, kind, text):
    url, script, seen = server
    answer = (status, error(body) if isinstance(body, str) else body, SOON)
    script += [answer] * 3
    with pytest.raises(kind) as raised:
        ask(url, retries=2)
    assert text in str(raised.value)
    assert len(seen) == requests
    script[:] = [answer] * (requests > 1)
    assert ask(url).text == "hello"  # repeated


@pytest.mark.parametrize("status", [400, 422])
def test_a_refused_field_is_left_out_or_has_another_name(server, status):
    url, script, seen = server
    extra = {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"]}]}
    other = error("Unsupported parameter: 'max_tokens'.")
    degrees = error("Unsupported value: 'temperature' does not support this value.")
    script += [(status, {"message": extra}), (status, other), (status, degrees)]
    assert ask(url, seed=1, temperature=1.0).text == "hello"
    assert not {"seed", "max_tokens", "temperature"} & set(seen[-1])
    assert seen[-1]["max_completion_tokens"] == 50
    script.append((status, degrees))
    with user_error("temperature"):  # another one would be used
        ask(url, temperature=0.7)


def test_a_key_without_white_space_is_sent_and_one_that_cannot_be_sent_is_not_shown(
    server, monkeypatch
):
    url, _, seen = server
    monkeypatch.setenv("OPENAI_API_KEY", " sk-hidden\n")
    ask(url)
    assert seen[-1]["auth"] == "Bearer sk-hidden"
    for key, why in {"sk\nhidden": "a line break", "“sk-hidden”": "a character that"}.items():
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with user_error(f"^.OPENAI_API_KEY holds {why}") as raised:
            ask(url)
        assert "hidden" not in str(raised.value)


def test_passwords_and_keys_are_not_shown_but_sent(server, monkeypatch):
    url, script, seen = server
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    named = url.replace("://", "://user:pass@")
    ask(named)
    assert seen[-1]["auth"].startswith("Basic ")
    script.append((401, error("no")))
    with user_error(r"^http://\*\*\*@127.0.0.1.* refuses"):
        ask(named)
    assert shown(f"a {named} 0123456789") == f"a {url.replace('://', '://***@')} $WANDB_API_KEY"
    for password in ("p/ss", "p@ss", "p#ss", "p?s/@s", "12/ss"):
        with user_error(r"^--url http://\*\*\*@127.0.0.1:9/v1 ") as raised:
            check_url(f"http://user:{password}@127.0.0.1:9/v1")
        assert not re.search("'p'|ss@|/ss", str(raised.value)), password


TEXT = {"type": "text", "text": "hello"}
THOUGHT = {"type": "thinking", "thinking": [TEXT]}
CONTENTS = (
    ("hello", "hello"),
    (None, ""),
    ([], ""),
    ([TEXT], "hello"),
    ("half \ud83d", "half ?"),
    ([THOUGHT, TEXT, {"type": "output_text", "text": " you"}], "hello you"),
)


def test_the_text_of_a_message(server):
    url, script, _ = server
    bodies = [(completion(content), text) for content, text in CONTENTS]
    bodies += [(completion("hi") | {"error": nothing}, "hi") for nothing in (None, "", {})]
    for body, text in bodies:
        script.append((200, body))
        assert ask(url).text == text


NOT_TEXT = [TEXT | {"text": None}], [TEXT | {"type": ["text"]}]
NO_TEXT = (5, {"text": "a"}, [None], [{}], *NOT_TEXT)
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


def test_nonsense_is_no_answer(server):
    url, script, _ = server
    script.append((200, b'data: {"choices": []}\n\ndata: [DONE]\n'))  # it only streams
    with user_error(r"like a chat endpoint: data: .*\[DONE\] \("):
        ask(url)
    choices = [{"choices": wrong} for wrong in ([], None, {}, [None], [{"message": None}])]
    for nonsense in (b"<html>", [1], None, *choices, *map(completion, NO_TEXT)):
        script.append((200, nonsense))
        with user_error("does not answer like a chat endpoint: "):
            ask(url)
    script.append((200, completion(IMAGE)))
    with user_error("image_url is no text"):
        ask(url)


def test_tokens_are_those_of_the_usage_or_counted_here(server):
    url, script, _ = server
    usages = [{"completion_tokens": number} for number in (20, "20", None, -1, [], 1.5)]
    for usage, counted in zip([*usages, None, {}, 7], [20, 20, *[3] * 7]):
        script.append((200, completion("hello you") | {"usage": usage}))
        assert ask(url).reply_tokens == counted
    script.append((200, {"choices": [{"message": {"content": "hello you"}}]}))
    assert ask(url).reply_tokens == 3


def test_nobody_is_there(server):
    with user_error("does not answer"):
        ask("http://127.0.0.1:9/v1", retries=0)
    with user_error("--url http://127.0.0.1:9/v1 does not answer"):
        endpoint.check_url("http://127.0.0.1:9/v1")
    endpoint.check_url(server[0])  # any HTTP status is an answer


def test_a_proxy_is_not_asked_for_this_machine(server, monkeypatch):
    dead_proxy(monkeypatch, "example.org")
    for url in (server[0], server[0].replace("127.0.0.1", "localhost")):
        endpoint.check_url(url)
        assert ask(url, retries=0).text == "hello"
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "127.0.0.1,localhost,example.org"
    monkeypatch.setenv("no_proxy", "*")
    endpoint.go_around_proxies()
    assert os.environ["no_proxy"] == "*"


HI = [{"role": "user", "content": "hi"}]


def save_adapter(folder):
    """Saves an adapter of the stand-in as policy.py does, with random B. Returns its greedy reply
    to HI.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(STAND_IN, dtype=torch.float32)
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    model = get_peft_model(base, config).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(STAND_IN)
    prompt = tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_tensors="pt")
    said = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0]
    reply = said[prompt["input_ids"].shape[1] :]
    return tokenizer.decode(reply, skip_special_tokens=True)


@pytest.mark.slow
def test_a_real_vllm_server_and_the_adapter_that_it_serves(tmp_path):
    trained = save_adapter(tmp_path / "best")

    def reply(temperature, seed, name="m", text="hi"):
        model = endpoint.Endpoint(url, name, context=10**6, temperature=temperature)
        prompt = model.render([HI[0] | {"content": text}])
        return asyncio.run(model.sample(prompt, 8, seed=seed))

    lora = ["--enable-lora", "--max-lora-rank", 16, "--lora-modules", f"trained={tmp_path}/best"]
    lora += ["--max-loras", 2]  # with 1, vLLM on a CPU applies the adapter to "m", too
    with served(STAND_IN, tmp_path, *lora) as url:
        frozen = reply(0.0, 1).text
        assert reply(0.0, 2).text == frozen != reply(1.0, 2).text
        assert reply(0.0, 1, name="trained").text == trained != frozen
        with user_error("refuses"):
            reply(1.0, 1, name="another")
        with pytest.raises(OverflowError):
            reply(1.0, 1, text="x" * 5000)
