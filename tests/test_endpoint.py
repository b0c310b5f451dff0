"""endpoint.py against a server that misbehaves on purpose, and against a real vLLM server."""

import asyncio
import contextlib
import os
import re
import time

import pytest

from flatlab.errors import Refusal, UserError, shown
from flatlab.model import endpoint
from flatlab.model.chat import Sample
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


def ask(url, temperature=0.7, retries=3, key="", times=1, **kwargs):
    """The last of some replies of one endpoint."""
    model = endpoint.Endpoint(url, "m", temperature=temperature, key=key)
    model.client.max_retries = retries
    prompt = model.render([{"role": "user", "content": "hi <|im_end|> ünïcode"}])

    async def replies():
        return [await model.sample(prompt, 50, **kwargs) for _ in range(times)]

    return asyncio.run(replies())[-1]


def test_text_comes_back_and_is_counted():
    model = endpoint.Endpoint("http://x/v1", "m")
    said = [("system", "be kind"), ("user", "a\nb 🙂"), ("assistant", "my reply"), ("user", "ok")]
    messages = [{"role": role, "content": text} for role, text in said]
    tokens = model.render(messages[:2]) + model.encode("my reply")
    assert model.messages(tokens + model.observation_tokens("ok", ended=True)) == messages
    assert len(model.encode("x" * 300)) == 100
    assert model.encode("user") != ["user"]  # text is never a turn
    empty = [{"role": "assistant", "content": text} for text in ("", " \n")]  # some refuse it
    said = model.messages([*model.render(empty)])
    assert [message["content"] for message in said] == ["(no text)"] * 2


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


OVERLOADED = "Provider returned error: overloaded"
CODES = (502, "429", None, "overloaded")
INNER = error(OVERLOADED, 502) | {"message": {"content": ""}, "finish_reason": "error"}
SOON = {"retry-after": "0.01"}
VLLM = "This model's maximum context length is 512 tokens and your request has 300 input tokens."
RAW = {"raw": str(error(VLLM))}
NO_ACCESS = "Your key has no access to the 1M context window of this model"
MEMORY = "CUDA out of memory while growing the KV cache; lower the context length or the batch"
# status, message of an error or a whole body, requests that are sent with 2 repetitions, what is
# raised and a part of its text
MEANINGS = (
    (400, VLLM, 1, Refusal, VLLM),
    (400, {"error": VLLM}, 1, Refusal, VLLM),
    (413, {"message": VLLM}, 1, Refusal, VLLM),
    (422, {"error": VLLM, "error_type": "validation"}, 1, Refusal, VLLM),
    (200, error("Provider returned error", 400, metadata=RAW), 1, Refusal, "maximum context"),
    (400, "max_tokens is too large: at most 4096 completion tokens", 2, Refusal, "refuses"),
    (401, "Incorrect API key; context size exceeded", 1, UserError, "OPENAI_API_KEY"),
    (402, "credit for this context length exceeded", 1, UserError, "402"),
    (403, NO_ACCESS, 1, Refusal, NO_ACCESS),
    (404, "Not Found", 1, UserError, "does --url lack /v1"),
    (429, "The prompt is too long: tokens per minute exceeded", 3, UserError, "429"),
    (500, MEMORY, 3, UserError, "KV cache"),
    (500, "Context size has been exceeded.", 3, Refusal, "500, "),
    (502, b"away", 3, UserError, "502, away"),
    # an error in a good answer
    *((200, error(OVERLOADED, code), 3, UserError, f"{OVERLOADED}: http") for code in CODES),
    (200, {"choices": [INNER]}, 3, UserError, f"{OVERLOADED}: http"),
    (200, error("No credit", 402), 1, UserError, "No credit: http"),
    (200, {"error": "busy"}, 3, UserError, "busy: http"),
)


@pytest.mark.parametrize("status, body, requests, kind, text", MEANINGS)
def test_the_status_says_what_is_refused(server, status, body, requests, kind, text):
    url, script, seen = server
    answer = (status, error(body) if isinstance(body, str) else body, SOON)
    script += [answer] * 3
    with user_error("") as raised:
        ask(url, retries=2)  # the first one: the endpoint cannot be used
    assert raised.type is UserError and text in str(raised.value)
    assert len(seen) == requests
    script[:] = [answer] * (requests > 1)
    assert ask(url).text == "hello"  # repeated
    script[:] = [(200, completion("hi"))] + [answer] * 3
    with user_error("") as raised:
        ask(url, retries=2, times=2)
    assert raised.type is kind


FLAGGED = "Your input was flagged"
CODED = ("content_filter", "data_inspection_failed", 400, 403)
REFUSED = (
    *((status, error(FLAGGED)) for status in (400, 403, 422, 451)),
    *((200, error(FLAGGED, code)) for code in CODED),
    (200, error(FLAGGED, kind="ResponsibleAIPolicyViolation")),
)


def outcomes(url, texts):
    """The reply to each of these texts, or the error, of one endpoint that gets them at once."""
    model = endpoint.Endpoint(url, "m")

    async def ask_all():
        prompts = [model.render([{"role": "user", "content": text}]) for text in texts]
        replies = [model.sample(prompt, 50) for prompt in prompts]
        return await asyncio.gather(*replies, return_exceptions=True)

    return asyncio.run(ask_all())


@pytest.fixture
def filtered():
    """filtered(status, body): the address of an endpoint that refuses texts with "bad" at once."""
    with contextlib.ExitStack() as servers:

        def start(status=400, body=error(FLAGGED)):  # noqa: B008
            def answer(request, _):
                if "bad" in request["messages"][0]["content"]:
                    return status, body, {}
                time.sleep(0.2)
                return 200, completion("hello"), {}

            return servers.enter_context(chat_server(answer))

        yield start


@pytest.mark.parametrize("status, body", REFUSED)
def test_a_refusal_is_about_one_request(filtered, status, body):
    replies = outcomes(filtered(status, body), ["bad", "good", "bad", "bad", "good"])
    assert [type(reply) for reply in replies] == [Refusal, Sample, Refusal, Refusal, Sample]
    assert str(replies[0]).startswith(f"{FLAGGED}: http")


def test_an_endpoint_that_refuses_the_first_request_or_three_in_a_row_cannot_be_used(filtered):
    for texts in (["bad"], ["bad"] * 5):
        assert {*map(type, outcomes(filtered(), texts))} == {UserError}
    assert UserError in map(type, outcomes(filtered(), ["good", "bad", "bad", "bad"]))


def test_an_odd_answer_fails_one_episode_once_the_endpoint_has_answered(server):
    url, script, _ = server
    script += [(200, completion("hello")), (200, {"choices": []}), (200, completion("again"))]
    with pytest.raises(Refusal, match="does not answer like a chat endpoint"):
        ask(url, times=2)
    script.clear()
    script += [(200, completion("hello")), *[(200, {"choices": []})] * 3]
    model = endpoint.Endpoint(url, "m")
    prompt = model.render([{"role": "user", "content": "hi"}])

    async def replies():
        for expected in (Sample, Refusal, Refusal, UserError):  # three in a row
            try:
                reply = await model.sample(prompt, 50)
            except UserError as error:
                reply = error
            assert type(reply) is expected

    asyncio.run(replies())


def test_a_refusal_does_not_wait_for_a_first_request_that_was_cancelled():
    def answer(request, _):
        time.sleep(0.3 if "slow" in request["messages"][0]["content"] else 0)
        return 400, error(FLAGGED), {}

    async def replies(url):
        model = endpoint.Endpoint(url, "m")
        slow, bad = [model.render([{"role": "user", "content": text}]) for text in ("slow", "bad")]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(model.sample(slow, 50), 0.1)
        await asyncio.wait_for(model.sample(bad, 50), 10)

    with chat_server(answer) as url, user_error(FLAGGED):
        asyncio.run(replies(url))


def test_a_redirect_is_named(server):
    url, script, _ = server
    for status in (301, 302, 303):
        target = url.replace("/v1", "/v2")
        script.append((status, b"", {"location": f"{target}/chat/completions"}))
        with user_error(f"404.* .it redirects to {target}: give this address as --url"):
            ask(url)


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
    script += [(200, completion("hi")), (status, other)]
    with user_error("Unsupported parameter: 'max_tokens'"):
        ask(url, times=2)  # it took this field before
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
    for key in ("sk\nhidden", "“sk-hidden”"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with user_error("^.OPENAI_API_KEY holds a line break or a character that") as raised:
            ask(url)
        assert "hidden" not in str(raised.value)


def test_passwords_and_keys_are_not_shown_but_sent(server, monkeypatch):
    url, script, seen = server
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    named = url.replace("://", "://user:pass@")
    ask(named)
    assert seen[-1]["auth"].startswith("Basic ")
    script.append((401, error("no")))
    with user_error(r"^no: http://\*\*\*@127.0.0.1.* refuses"):
        ask(named)
    assert shown(f"a {named} 0123456789") == f"a {url.replace('://', '://***@')} $WANDB_API_KEY"
    for password in ("p/ss", "p@ss", "p#ss", "p?s/@s", "12/ss"):
        with user_error(r"^--url http://\*\*\*@127.0.0.1:9/v1 ") as raised:
            check_url(f"http://user:{password}@127.0.0.1:9/v1")
        assert not re.search("'p'|ss@|/ss", str(raised.value)), password


def test_a_key_that_is_a_word_is_no_secret(monkeypatch):
    text = (
        "http://ollama:1/v1 EMPTY lm-studio token-abc123 sk-no-key-required sk-word1 abcdefghijkl"
    )
    words = dict(zip("ABCDEFG", text.split()[1:])) | {"H": "ollama", "I": "1/v1"}
    for name, word in words.items():
        monkeypatch.setenv(f"{name}_KEY", word)
    assert shown(text) == " ".join([*text.split()[:-2], "$E_KEY", "$F_KEY"])


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


def choice(content, finish, **message):
    """A completion whose message has more than a content."""
    body = completion(content)
    body["choices"][0]["finish_reason"] = finish
    body["choices"][0]["message"] |= message
    return body


NO = "I'm sorry, I can't"
# a completion, the text of the reply, and the note
NOTED = (
    (choice("hello", "stop", reasoning_content="Hm"), "hello", ""),
    (choice("hello", "length"), "hello", ""),
    (
        choice("", "length", reasoning="Hm"),
        "",
        "sent reasoning, finish_reason length (--max-reply-tokens).",
    ),
    (choice("", "stop", reasoning_content="Hm"), "", "sent reasoning_content, finish_reason stop."),
    (choice([THOUGHT], "stop"), "", "sent content, finish"),
    (choice(None, "stop", refusal=NO), NO, "sent refusal, finish"),
    (choice(None, "tool_calls", tool_calls=[{}]), "", "sent tool_calls, finish"),
    (choice(None, "content_filter"), "", "sent nothing, finish_reason content_filter."),
    (choice("hel", "content_filter"), "hel", "sent content, finish_reason content_filter."),
)


@pytest.mark.parametrize("body, text, note", NOTED)
def test_an_answer_without_a_text_has_a_note(server, body, text, note):
    url, script, _ = server
    script.append((200, body))
    reply = ask(url)
    assert reply.text == text
    assert note in reply.note and bool(note) == bool(reply.note)


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
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "127.0.0.1,localhost,::1,example.org"
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
        with user_error("refuses"):
            reply(1.0, 1, text="x" * 5000)
