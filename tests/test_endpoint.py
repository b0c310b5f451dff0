"""endpoint.py against a server that misbehaves on purpose, and against a real vLLM server."""

import asyncio
import os
import time

import pytest

from flatlab.errors import UserError
from flatlab.model import endpoint
from flatlab.view import reader
from helpers import LOCAL, PROJECT, chat_server, completion, dead_proxy, python, served, user_error
from policy import TINY


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")


@pytest.fixture
def server():
    """A chat endpoint: first the answers in `script` (status, body, headers), then good ones."""
    script, seen = [], []

    def answer(body, headers):
        seen.append(body | {"auth": headers["authorization"]})
        return script.pop(0) if script else (200, completion("hello"), {})

    with chat_server(answer) as url:
        yield url, script, seen


def ask(url, temperature=0.7, retries=3, key="", **kwargs):
    model = endpoint.Endpoint(url, "m", retries=retries, temperature=temperature, key=key)
    prompt = model.render([{"role": "user", "content": "hi <|im_end|> ünïcode"}])
    return asyncio.run(model.sample(prompt, 50, **kwargs))


def test_text_comes_back_and_is_counted():
    model = endpoint.Endpoint("http://x/v1", "m")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a\nb 🙂"}]
    tokens = model.render(messages)
    assert model.messages(tokens) == messages
    reply = model.encode("my reply")
    longer = tokens + reply + model.observation_tokens("what was printed", ended=True)
    assert model.messages(longer) == messages + [
        {"role": "assistant", "content": "my reply"},
        {"role": "user", "content": "what was printed"},
    ]
    assert len(model.encode("x" * 300)) == 100
    assert model.encode("user") != [1]  # text is never a turn


def test_a_good_answer(server, monkeypatch):
    url, _, seen = server
    answer = ask(url, temperature=0.0, seed=7)
    assert (answer.text, answer.stop_reason, answer.reply_tokens) == ("hello", "stop", 7)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    ask(url)
    ask(url, key="mine")
    first, second, third = seen
    assert (first["temperature"], first["seed"], first["max_tokens"]) == (0.0, 7, 50)
    assert first["auth"] == "Bearer secret"
    assert first["messages"] == [{"role": "user", "content": "hi <|im_end|> ünïcode"}]
    assert (second["auth"], third["auth"]) == ("Bearer none", "Bearer mine")
    assert "seed" not in second


def test_passing_failures_are_repeated_after_the_time_the_endpoint_asks_for(server):
    url, script, seen = server
    script += [(429, {}, {"retry-after": "0.6"}), (503, b"busy", {"retry-after": "0.1"})]
    begin = time.monotonic()
    assert ask(url).text == "hello"
    assert len(seen) == 3
    assert 0.7 <= time.monotonic() - begin < 6
    script += [(502, b"away", {"retry-after": "0.01"})] * 3
    with user_error("refuses.*502, away"):
        ask(url, retries=2)
    assert len(seen) == 6


def test_a_request_that_is_refused_is_not_repeated(server):
    url, script, seen = server
    for status in (400, 401, 404, 422):
        script.append((status, {"error": {"message": "no such thing"}}, {}))
        with user_error(f"refuses.*{status}.*no such thing"):
            ask(url)
    assert len(seen) == 4


def error(message, code=None, kind=None):
    return {"error": {"message": message, "code": code, "type": kind}}


SGLANG = "Input length (5000 tokens) exceeds the maximum allowed length (2048 tokens)."
TGI = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 5000"
ANTHROPIC = "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"
LLAMA = "request (5000 tokens) exceeds the available context size (4096 tokens)"
RAW = {"raw": str(error("This model's maximum context length is 4096 tokens"))}


@pytest.mark.parametrize(
    "status, body",
    [
        (400, {"error": "This model's maximum context length is 8192 tokens"}),
        (400, error("Please reduce the length of the messages.", "context_length_exceeded")),
        (400, error("Your input exceeds the context window of this model.")),
        (400, error("The decoder prompt (length 5000) is longer than the maximum model length")),
        (400, error("Please shorten it.", 400, "exceed_context_size_error")),
        (500, error("Context size has been exceeded.", 500, "server_error")),
        (400, {"object": "error", "message": SGLANG, "type": "BadRequestError"}),
        (422, {"error": TGI, "error_type": "validation"}),
        (422, {"error": "`inputs` must have less than 1024 tokens. Given: 5000"}),
        (400, {"error": {"type": "invalid_request_error", "message": ANTHROPIC}}),
        (413, error("prompt is too long: 205000 tokens > 200000 maximum")),
        (400, error("The input token count (1200000) exceeds the maximum number", 400)),
        (400, {"message": "too many tokens: size limit exceeded by 500 tokens."}),
        (400, error("Input tokens exceed the configured limit of 272000 tokens.")),
        (400, {"message": "Input is too long for requested model."}),
        (400, error("This model's maximum prompt length is 131072")),
        (200, error("Provider returned error", 400) | {"metadata": RAW}),
        (200, error(LLAMA, 502)),
    ],
)
def test_a_prompt_that_is_too_long_ends_an_episode_in_all_words(server, status, body):
    url, script, seen = server
    if "metadata" in body:
        body["error"]["metadata"] = body.pop("metadata")
    script.append((status, body, {}))
    with pytest.raises(OverflowError):  # no user error
        ask(url)
    assert len(seen) == 1


def test_other_limits_are_no_long_prompt(server):
    url, script, seen = server
    most = "max_tokens is too large: 5000. This model supports at most 4096 completion tokens"
    for body in (error(most), error("temperature is too large"), error("prompt is missing")):
        script[:] = [(400, body, {})] * 2
        with user_error("refuses"):
            ask(url)
        script.clear()
    seen.clear()
    limit = error("Request too large: tokens per min. The prompt is too long.", 429)
    script += [(429, limit, {"retry-after": "0.01"})]
    assert ask(url).text == "hello"
    assert len(seen) == 2


@pytest.mark.parametrize("code", [502, "429", None, "overloaded"])
def test_an_error_in_a_good_answer_is_repeated_as_its_code_says(server, code):
    url, script, seen = server
    body = error("Provider returned error: overloaded", code)
    inner = {"choices": [body | {"message": {"content": ""}, "finish_reason": "error"}]}
    soon = {"retry-after": "0.01"}
    script += [(200, body, soon), (200, inner, soon)]
    assert ask(url).text == "hello"
    assert len(seen) == 3
    script += [(200, body, soon)] * 2
    with user_error("^Provider returned error: overloaded: http.* refuses"):
        ask(url, retries=1)
    script += [(200, error("No credit", 402), {}), (200, {"error": "busy"}, soon)]
    with user_error("^No credit: http.* refuses.* 402"):
        ask(url)
    with user_error("^busy: http.* refuses"):
        ask(url, retries=0)
    script += [(200, completion("hi") | {"error": nothing}, {}) for nothing in (None, "", {})]
    assert [ask(url).text for _ in range(3)] == ["hi"] * 3


TEXT = {"type": "text", "text": "hello"}
THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}


@pytest.mark.parametrize(
    "content, text",
    [
        ("hello", "hello"),
        (None, ""),
        ([], ""),
        ([TEXT], "hello"),
        ("half \ud83d", "half ?"),
        ([THOUGHT, TEXT, {"type": "output_text", "text": " you"}], "hello you"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url is no text"),
        *((content, "") for content in (5, {"text": "a"}, [None], [{}])),
        ([{"type": "text", "text": None}], ""),
        ([{"type": ["text"], "text": "a"}], ""),
    ],
)
def test_the_text_of_a_message(server, content, text):
    url, script, _ = server
    body = completion("")
    body["choices"][0]["message"]["content"] = content
    script.append((200, body, {}))
    try:
        assert ask(url).text == text
    except UserError as error:
        assert "does not answer like a chat endpoint: " in str(error)
        assert text in str(error)
        with pytest.raises((TypeError, ValueError, KeyError)):
            endpoint.text_of(content)


@pytest.mark.parametrize(
    "usage, count",
    [
        ({"completion_tokens": 20}, 20),
        ({"completion_tokens": "20"}, 20),
        *((usage, 3) for usage in (None, {}, 7)),
        *(({"completion_tokens": wrong}, 3) for wrong in (None, -1, [], 1.5)),
    ],
)
def test_usage_in_any_form(server, usage, count):
    url, script, _ = server
    script.append((200, completion("hello you") | {"usage": usage}, {}))
    assert ask(url).reply_tokens == count


def test_nonsense_is_no_answer_and_one_without_usage_is_counted_here(server):
    url, script, _ = server
    ends = [{"choices": wrong} for wrong in ([], None, {}, [None], [{"message": None}])]
    for nonsense in (b"<html>", [1], None, *ends):
        script.append((200, nonsense, {}))
        with user_error("does not answer like a chat endpoint: "):
            ask(url)
    script.append((200, {"choices": [{"message": {"content": "hello you"}}]}, {}))
    assert ask(url).reply_tokens == 3


def test_it_adapts_to_other_names_of_the_limit(server):
    url, script, seen = server
    limit = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    for error in (limit, "unknown field seed"):
        script.append((400, {"error": error}, {}))
    assert ask(url, seed=1).text == "hello"
    assert seen[2]["max_completion_tokens"] == 50
    assert "seed" not in seen[2]
    assert "max_tokens" not in seen[2]


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


@pytest.mark.slow
def test_a_search_asks_an_endpoint(server, tmp_path):
    url, _, seen = server
    flags = f"--url {url} --model m --task titanic --nodes 2 --max-turns 1 --name served"
    done = python(PROJECT / "search.py", *flags.split(), "--backend", LOCAL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    run = reader.read_run(tmp_path / "logs/served")
    assert [row["actions"][0]["reply"] for row in run.rows] == ["hello"] * 2
    assert {body["model"] for body in seen} == {"m"}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter for the stand-in as policy.py saves it, with random B; and its PyTorch model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    model = get_peft_model(base, config).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    folder = tmp_path_factory.mktemp("adapter") / "best"
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def vllm_server(adapter, tmp_path_factory):
    """The address of a real server with the stand-in as "m" and the adapter as "trained"."""
    folder, _ = adapter
    lora = ["--enable-lora", "--max-lora-rank", 16, "--lora-modules", f"trained={folder}"]
    lora += ["--max-loras", 2]  # with 1, vLLM on a CPU applies the adapter to "m", too
    with served(TINY, tmp_path_factory.mktemp("server"), *lora) as url:
        yield url


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.slow
def test_a_real_vllm_server(vllm_server):
    def reply(temperature, seed, name="m", text="hi"):
        model = endpoint.Endpoint(vllm_server, name, context=10**6, temperature=temperature)
        prompt = model.render([{"role": "user", "content": text}])
        return asyncio.run(model.sample(prompt, 12, seed=seed))

    frozen = reply(0.0, 1)
    assert frozen.reply_tokens <= 12
    assert reply(0.0, 2).text == frozen.text
    assert reply(1.0, 2).text != frozen.text
    with user_error("refuses"):
        reply(1.0, 1, name="another")
    with pytest.raises(OverflowError):
        reply(1.0, 1, text="x" * 5000)


@pytest.mark.slow
def test_the_server_applies_a_saved_adapter(vllm_server, adapter):
    """Its greedy reply is that of peft, and another one without the adapter."""
    from transformers import AutoTokenizer

    _, model = adapter
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    prompt = tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_tensors="pt")
    length = prompt["input_ids"].shape[1]
    said = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0]
    trained = tokenizer.decode(said[length:], skip_special_tokens=True)

    def greedy(name):
        model = endpoint.Endpoint(vllm_server, name, temperature=0.0)
        return asyncio.run(model.sample(model.render(HI), 8)).text

    assert greedy("trained") == trained
    assert greedy("m") != trained
