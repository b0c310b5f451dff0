"""Fakes and short forms that several test files share. Importing this file starts nothing."""

import asyncio
import contextlib
import gc
import gzip
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest

from competition import write
from env import Env
from flatlab.errors import UserError
from flatlab.model.chat import Sample
from flatlab.options import EpisodeOptions, changed
from flatlab.runs.cli import one_sentence, parse_configs
from flatlab.runs.store import read_episodes, transcript_reader
from flatlab.task.grading import Score
from flatlab.tree.nodes import Node
from flatlab.world.episode import Episode, run_episode

PROJECT = Path(__file__).resolve().parents[1]
LOCAL = "local"
TINY_TEXTS = "configs/prompts/tiny.yaml"
AGENT_TEXTS = "configs/prompts/agent.yaml"


def block(text):
    """A reply with one bash block."""
    return f"```bash\n{text}\n```"


def code_of(page, language, words):
    """The block of code on a page of the project that holds these words."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", (PROJECT / page).read_text(), re.M | re.S)
    [code] = [code for code in blocks if words in code]
    return code


def slow(*case):
    """A case of a test that runs with the slow tests only."""
    return pytest.param(*case, marks=pytest.mark.slow)


def user_error(sentence):
    """The block raises a UserError with this sentence, a regular expression."""
    return pytest.raises(UserError, match=sentence)


@contextlib.contextmanager
def within(seconds):
    """The block does not take longer."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def do(world, text):
    """The step of an environment for one bash block."""
    return world.step(block(text))


# Predict by the sex alone; WRONG is wrong for everybody.
RIGHT = (
    """awk -F, 'NR==1 {print "id,survived"; next} {print $1 "," ($3 == "female")}' """
    "data/test.csv > submission.csv"
)
WRONG = RIGHT.replace("($3 ==", "($3 !=")
# Forty processes that map a hundred megabytes five times each: they take a while to end.
LARGE = """python3 - <<'E'
import mmap, os, time
size = 100 << 20
fd = os.open("/dev/shm/big", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, size)
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
ready, end = os.pipe()
for _ in range(40):
    if not os.fork():
        os.setsid()
        maps = [mmap.mmap(fd, size, mmap.MAP_SHARED | 0x8000) for _ in range(5)]  # all at once
        os.write(end, b"x")
        time.sleep(1000)
for _ in range(40):
    os.read(ready, 1)
E"""


def half_break(prompt, seed):
    """The replies of an agent on titanic. In every other episode its result is bad, and then it
    breaks its sandbox (with the fixture `hasty`).
    """
    number = prompt.count("<user>") - 1
    commands = (WRONG, LARGE, "submit") if (seed - number) % 2 else (RIGHT, "ls", "submit")
    return block(commands[number])


def copy_of(world, clear_artefacts=True):
    """Another environment with the written files, working directory and exported variables."""
    twin = Env(world.task, world.options, world.seed)
    twin.restore(world.snapshot(), clear_artefacts)
    return twin


def refuses(main, table, monkeypatch, capsys):
    """Each command line of the table is refused with its words, in one sentence and code 2, before
    an engine starts.
    """
    for flags, words in table.items():
        code, out, err = run_here(main, *flags.split(), monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2 and words in " ".join(err.split()), (flags, err)
        assert "Traceback" not in err and "engine" not in out


ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_here(main, *flags, monkeypatch, capsys):
    """Runs main() of a script in this process, as its command line does.

    Returns the exit code, stdout and stderr.
    """
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, flags)])
    handlers = {number: signal.getsignal(number) for number in ENDINGS}
    code = 0
    try:
        one_sentence(main)
    except SystemExit as end:
        code = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    gc.collect()  # drawing leaves cycles of frames that hold the run and its lock
    return code, *capsys.readouterr()


async def play_once(world, policy, seed=0, score_test=False, **options):
    """One episode in an Env, which is closed afterwards. options: those of EpisodeOptions."""
    episode = Episode(world.task.name, seed)
    limits = {"max_turns": 10, "max_reply_tokens": 512, "max_observation_tokens": 512}
    async with world:
        options = EpisodeOptions(**limits | {"prompts": TINY_TEXTS} | options)
        return await run_episode(world, policy, options, episode, score_test)


class FakePolicy:
    """Says scripted replies, the last one again and again; one is a text or f(prompt, seed).

    One token per character; 1 ends a reply, 2 and 3 open and close a user turn. `requests` holds
    the tokens of all prompts, `samples` the replies.
    """

    version = 7
    marks = {1: "", 2: "<user>", 3: ""}

    def __init__(self, *replies, context=100_000, stop_reason="stop", wait=0.0):
        self.replies = list(replies)
        self.context = context
        self.stop_reason = stop_reason
        self.wait = wait
        self.requests = []
        self.samples = []

    @property
    def prompts(self):
        return list(map(self.decode, self.requests))

    def render(self, messages):
        tokens = []
        for message in messages:
            text = self.encode(message["content"])
            tokens += [*text, 1] if message["role"] == "assistant" else [2, *text, 3]
        return tokens

    def encode(self, text):
        text.encode()  # as every real tokenizer: not what cannot be encoded
        return [ord(c) + 10 for c in text]

    def twin(self):
        return self

    def decode(self, tokens):
        letters = [self.marks.get(token, chr(max(0, token - 10))) for token in tokens]
        return "".join(letters)

    def observation_tokens(self, text, ended):
        end = [] if ended else [1]
        return [*end, 2, *self.encode(text), 3]

    async def sample(self, tokens, max_tokens, seed=None):
        assert len(tokens) + max_tokens <= self.context
        self.requests.append(list(tokens))
        await asyncio.sleep(self.wait)
        text = self.replies[min(len(self.requests), len(self.replies)) - 1]
        if callable(text):
            text = text(self.decode(tokens), seed)[:max_tokens]
        said = self.encode(text)
        if self.stop_reason == "stop":
            said.append(1)
        sample = Sample(said, [-0.5] * len(said), text, self.stop_reason, self.version)
        self.samples.append(sample)
        return sample


def trained(episode):
    """(tokens before a trained reply, the reply, its log-probs) of all sequences."""
    replies = []
    for s in episode.segments:
        for number in sorted(set(s.reply) - {-1}):
            start = s.reply.index(number)
            end = start + s.reply.count(number)
            replies.append((s.tokens[:start], s.tokens[start:end], s.logprobs[start:end]))
    return replies


def make_model(folder: Path, vocabulary=0, **sizes) -> str:
    """Saves an untrained Qwen3 with a byte tokenizer and a ChatML template; returns the folder.

    It has 0.8 M parameters; `sizes` overrides fields of its config.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    bytes_only = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **{
                "vocab_size": vocabulary or len(tokenizer),
                "hidden_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 384,
                "tie_word_embeddings": True,
                "max_position_embeddings": 4096,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": None,
                **sizes,
            }
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def search_config(**flags):
    import search

    return changed(search.Config(), **{"prompts": TINY_TEXTS} | flags)


def parsed(config_class, words: str):
    """The Config of a command line that makes one run."""
    [cfg] = parse_configs(config_class, words.split())
    return cfg


def python(*arguments, cwd=PROJECT, timeout=600, **options):
    """Runs `python ARGUMENTS`, in the root of the project if no other folder is named."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, timeout=timeout, capture_output=True, text=True, **options
    )


def output_of(*arguments, **options):
    """The output of a `python ARGUMENTS` that succeeds. options: see python()."""
    done = python(*arguments, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_grader(task, folder, artefacts, split):
    """Output of a grader that runs in a folder, without the protection of a sandbox."""
    for path, source in task.grading_files(artefacts).items():
        write(folder, {path: source.read_bytes() if isinstance(source, Path) else source})
    names = {"python3": sys.executable, "{split}": split}
    argv = [names.get(part, part) for part in task.grader]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60).stdout


def run_csv_grader(task, folder, artefacts, split):
    """Output of grade_csv.py, run in this process: that takes a millisecond."""
    import grade_csv

    write(folder, artefacts)
    write(folder, {"answers.csv": task.hidden["answers.csv"].read_bytes()})
    argv = [part.replace("{split}", split) for part in task.grader[2:]]
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        with patch.object(sys, "argv", argv):
            grade_csv.main()
    return said.getvalue()


def ignore_sigint():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start(folder, script, flags):
    """Starts a script of the project, in the background: it ignores SIGINT. Its output is piped."""
    return subprocess.Popen(
        [sys.executable, str(PROJECT / script), *flags.split()],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"MLGYM_ROOT": ""},
        preexec_fn=ignore_sigint,
    )


def run_until(folder, is_far, script, flags, number):
    """Runs a script, and sends it a signal once is_far(). Returns its exit code and stderr; no
    process that it started is left.
    """
    process = start(folder, script, flags)
    while not is_far():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    return process.returncode, err


def done(folder, script, flags):
    """The output of a script that succeeds."""
    process = start(folder, script, flags)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def killed_and_continued(folder, is_far, script, flags):
    """The output of a script that goes on with a run that was killed once is_far().

    The same command then finds nothing left to do.
    """
    run_until(folder, is_far, script, flags, signal.SIGKILL)
    out = done(folder, script, flags)
    assert "was finished before: nothing is left to run" in done(folder, script, flags)
    return out


def completion(text):
    """Answer of a chat endpoint."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    choice["finish_reason"] = "stop"
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    named = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
    return named | {"choices": [choice], "usage": usage}


@contextlib.contextmanager
def chat_server(answer):
    """The address of an endpoint. answer(body, headers): (status, body, headers) of a reply."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, body, headers = answer(asked, self.headers)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()


def dead_proxy(monkeypatch, exceptions):
    """Names a proxy that does not answer. exceptions: of $NO_PROXY."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", exceptions)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def served(model, folder, *flags):
    """`vllm serve` of a model in a process of its own: the address under which it is called "m".

    It needs up to two minutes to start. Its output goes to folder/server.log.
    """
    port = free_port()
    command = (
        f"-m vllm.entrypoints.openai.api_server --model {model} --served-model-name m "
        f"--host 127.0.0.1 --port {port} --max-model-len 2048 --dtype float32 --enforce-eager "
        "--generation-config vllm --max-num-seqs 8"
    )
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    output = Path(folder, "server.log")
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command.split(), *map(str, flags)],
            stdout=log,
            stderr=log,
            env=os.environ | settings,
            start_new_session=True,
        )
    try:
        while process.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.5)
        assert process.poll() is None, output.read_text()[-2000:]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


# ------------------------------------------------------------------ what runs leave behind


def segments_of(directory, name):
    """The sampled sequences of each episode in transcripts/<name>.jsonl, see Segment."""
    with gzip.open(Path(directory) / "transcripts" / f"{name}.tokens.jsonl.gz") as lines:
        return [json.loads(line)["segments"] for line in lines]


def attempts_of(directory, when):
    """The rows of a step, an evaluation or a node, each with its texts."""
    transcript_of = transcript_reader(Path(directory))
    rows = [row for row in read_episodes(Path(directory)) if row["when"] == when]
    return [row | transcript_of(row) for row in rows]


MADE_BY = {"code": "a", "prompts": "d", "task": "b", "model": "c"}  # see fingerprint()
CONFIG = {"task": "titanic", "model": "tiny", "seed": 1, "steps": 5, "lr": 1e-5}
RESULT = {
    "kind": "training",
    "task": "titanic",
    "metric": "accuracy",
    "higher_is_better": True,
    "baseline": 0.6,
    "reference": 0.8,
    "selected_on_test": False,
    "value": None,
    "exact": False,
    "tested_id": None,
    "best_id": None,
    "split": "validation",
}
# Stands for a task where an Episode is judged
SCALE = SimpleNamespace(**RESULT, splits=("validation",))


def step_row(step, **more):
    """A row of metrics.jsonl with a few of its keys."""
    row = {"step": step, "reward_mean": 0.1 * step, "reward_std": 0.2, "value_mean": 0.5}
    row |= {"value_stderr": 0.1, "valid_share": 0.75}
    return row | {"seconds": 2.0} | more


def turn(reply="hello", observation="seen hello", status="ok", score=None, **more):
    """A turn of a transcript."""
    texts = {"reply": reply, "action": None, "observation": observation, "status": status}
    texts |= {"note": "", "restarts": False, "score": score, "stop_reason": "stop"}
    texts |= {"seconds_env": 0.25, "version": 0}
    return texts | more


def graded(value, split="validation"):
    """A Score of the task SCALE; None: no submission."""
    message = "no file" if value is None else ""
    return Score(value, "accuracy", split, value is not None, message)


def episode(value, reply="hello", status="submit", observation="seen hello", **more):
    """A finished Episode of two turns with this score; None: it failed. status "fault": the sandbox
    broke.
    """
    made = Episode("titanic", 0, status=status, prompt="Predict who survived.")
    made.turns = [turn(reply, observation) for _ in range(2)]
    made.tokens, made.seconds = 9, 1.5
    return ended(made, value, more)


def node(id, score, op="draft", **more):
    """A finished Node with this score; None: it failed."""
    made = Node(
        "titanic",
        0,
        id,
        when=id.replace(".", ""),
        parent=id.rpartition(".")[0],
        order=int(id.replace(".", "")),
        op=op,
        sampling_mode="tail",
        idea=f"idea {id}",
        status="turn_limit" if score is None else "validated",
        code={"solve.py": f"import csv\nprint('{id}')\n"},
        tokens=50,
        seconds=1.0,
        decision={"reason": "highest bound", "scores": {"0": 1.0}},
        system="Be brief.",
        prompt=f"first message of {id}",
        turns=[turn("hello", f"output of {id}")],
        ended=True,
    )
    if score is None:
        made.turns = [turn("hello", "KeyError: 'missing'", "error")]
    return ended(made, score, more)


def ended(made, score, more):
    """Judges an Episode, and sets the fields of `more`."""
    if made.status == "fault":
        made.fault = "it broke"
        made.judge(SCALE, None)
    else:
        made.judge(SCALE, graded(score))
        made.reward = max(-1.0, made.value)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def search_result(nodes, **more):
    """Content of result.json for these nodes."""
    pick = max if more.get("higher_is_better", True) else min
    best = pick((n for n in nodes if n.valid), key=lambda n: n.score, default=None)
    result = {
        "kind": "search",
        "nodes": len(nodes),
        "tokens": sum(n.tokens for n in nodes),
        "best_id": best.id if best else None,
        "value": best.value if best else -1.0,
    }
    return RESULT | result | more
