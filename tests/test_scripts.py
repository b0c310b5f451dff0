"""sft.py, evaluate.py and examples/ppo.py. What they share with grpo.py is tested there."""

import asyncio
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import env
import evaluate
import grpo
import helpers
import search
import sft
from examples import ppo
from flatlab.files import read_mapping, read_rows, save_tensors
from flatlab.model.chat import ChatTokens
from flatlab.model.packing import row_tokens
from flatlab.model.path import resolve_model
from flatlab.options import EpisodeOptions, changed
from flatlab.runs import start, store
from flatlab.suites.attempts import read_suite
from flatlab.suites.report import suite_report
from flatlab.task.value import improvement
from flatlab.train.batch import Group, Plan
from flatlab.train.job import TrainingRun
from flatlab.view import plots
from flatlab.view.reader import read_run
from flatlab.view.results import ends
from flatlab.world.episode import Episode, History, Segment, play
from helpers import (
    MADE_BY,
    PROJECT,
    RIGHT,
    FakePolicy,
    attempts_of,
    block,
    chat_server,
    completion,
    done,
    half_break,
    killed_and_continued,
    refuses,
    run_here,
    segments_of,
    turn,
    user_error,
)
from policy import Engine
from test_suite import make_root
from training import CFG, TASK, has_weights, result_of, valid, weights_of

# ------------------------------------------------------------------ sft.py

SFT = changed(sft.Config(seed=0), lr=3e-3, updates=6, micro_tokens=4096, max_observation_tokens=64)


def talk(value, *replies, **more):
    """An episode. replies: turns, or their texts."""
    turns = [turn(x) if isinstance(x, str) else x for x in replies]
    return helpers.episode(value, prompt="Do it.", turns=turns, **more)


@pytest.fixture
def stored(tmp_path, quick_provenance):
    """stored(*episodes) -> the folder of the run that holds them."""

    def stored(*episodes, when="0", name="a"):
        run = store.open_run(tmp_path / name, {}, MADE_BY)
        for number, episode in enumerate(episodes):
            episode.id, episode.when = f"{when}/{number}", when
        run.save_episodes(when, episodes)
        run.lock.close()
        return str(tmp_path / "a")

    return stored


def chosen_replies(where, share):
    """The first replies of the episodes that are imitated."""
    chosen = sft.best_episodes(changed(SFT, runs=(where,), share=share), [TASK])
    return [e["turns"][0]["reply"] for e in chosen]


def test_the_best_different_valid_episodes_that_beat_the_baseline(stored):
    where = stored(
        talk(0.70, "b"),
        talk(0.78, "a"),
        talk(0.705, "a"),  # on other files
        talk(0.5, "worse"),
        talk(None, "nothing"),
        talk(0.79, "x", task="other"),
        talk(0.75, "c"),
        talk(0.74, "d"),
        talk(None, "e", status="fault"),
    )
    # the seeds of evaluations select and compare adapters
    stored(talk(0.79, "judged"), when="eval-9")
    assert chosen_replies(where, 1.0) == ["a", "c", "d", "b"]
    assert chosen_replies(where, 0.5) == ["a", "c"]
    stored(talk(0.79, "a node of a search"), name="a/tail-0")
    assert chosen_replies(where, 0.01) == ["a node of a search"]


@pytest.fixture
def imitate(policy, tmp_path, quick_provenance):
    """imitate(name, *episodes) -> the rows of a run of sft.imitate, from a fresh adapter."""
    begin = weights_of(policy)

    def imitate(name, *episodes):
        for p, values in zip(policy.parameters(), begin):
            p.data.copy_(values)
        run = store.open_run(tmp_path / name, {}, MADE_BY)
        try:
            transcripts = [episode.transcript() for episode in episodes]
            sft.imitate(policy, sft.episodes_from(transcripts, policy, SFT), SFT, run)
        finally:
            run.lock.close()
        return run.rows()

    return imitate


def test_nothing_to_imitate_is_one_sentence(stored):
    with user_error("There is no file or folder nowhere; "):
        chosen_replies("nowhere", 0.5)
    with user_error("--runs: no episode of titanic in .*a beats the baseline"):
        chosen_replies(stored(talk(0.5, "a")), 0.5)


def test_a_context_without_room_is_refused_before_the_engine_starts(
    stored, tmp_path, monkeypatch, capsys
):
    stored(talk(0.78, "a"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sft, "Policy", None)
    flags = "--model tiny --task titanic --context 8 --name b --runs a".split()
    code, _, err = run_here(sft.main, *flags, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, err) == (2, "--runs: no episode fits into --context 8.\n")


def test_the_episodes_that_are_imitated_are_those_of_the_start(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = changed(SFT, name="x", runs=(stored(talk(0.78, "a")),))

    def prepare():
        return sft.prepare(cfg, resolve_model("tiny"), [TASK])[0]

    run = prepare()
    run.log({"step": 0})
    (run.dir / "checkpoints/000000").mkdir()
    run.lock.close()
    stored(talk(0.79, "b"), when="1")
    with user_error("x/result.json names other episodes .*choose another --name"):
        prepare()
    (run.dir / "result.json").unlink()
    with user_error("x/result.json names other episodes .*choose another --name"):
        prepare()


def test_only_replies_that_were_complete_and_run_are_imitated(policy):
    turns = [
        turn("first", "one"),
        turn("cut off", "two", stop_reason="length"),
        turn("third", "y" * 500),
        turn("no block", status="rejected"),
        turn("too slow", status="timeout"),
        turn("last", "four"),
    ]
    [piece] = sft.sequences_from(talk(0.78, *turns).transcript(), policy, SFT)
    sizes = [len(policy.encode(t["reply"])) + (t["stop_reason"] == "stop") for t in turns]
    wanted = zip([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], sizes)
    assert piece.advantage == sum(([number] * size for number, size in wanted), [])


def test_both_end_tokens_end_a_reply(tmp_path):
    """A fine-tuned model may keep the generation_config.json of its base model."""
    folder = shutil.copytree(PROJECT / "configs/tiny", tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert ChatTokens(str(folder)).stop_tokens == {0, 2}
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("blobs/nothing")
    with user_error("generation_config.json cannot be used: FileNotFoundError"):
        ChatTokens(str(folder))


def test_a_small_limit_of_observations_holds(policy):
    for limit in (0, 1, 2):
        history = History(policy, EpisodeOptions(max_observation_tokens=limit), "Do it.")
        assert history.cap("0123456789" * 3).endswith("left out ...]\n")


def test_an_episode_that_does_not_fit_is_cut(policy):
    turns = [turn(c * 700, "o" * 50) for c in "abcd"]
    [piece] = sft.sequences_from(talk(0.78, *turns).transcript(), policy, SFT)
    assert len(piece.tokens) <= policy.context
    assert len(piece.old) == 2 * 701


def test_imitation_raises_the_probability_of_the_replies(policy, imitate, tmp_path):
    first = turn("```bash\npython3 best.py\n```", "ok")
    episodes = [talk(0.78, first, f"submit {i}") for i in range(12)]
    [piece] = sft.sequences_from(talk(0.78, first).transcript(), policy, SFT)

    def mean_logprob():
        with torch.no_grad():
            return policy.logprobs([(piece.tokens, piece.mask)])[0].mean()

    before = mean_logprob()
    imitate("whole", *episodes)
    assert mean_logprob() > before + 0.1
    weights = weights_of(policy)
    policy.load_adapter(tmp_path / "whole/best")
    assert has_weights(policy, weights)


def test_memory_that_runs_out_in_an_imitation_halves_its_passes(policy, imitate, monkeypatch):
    """Its row says so, and the updates are those without the failure."""
    episodes = [talk(0.78, f"submit {i}") for i in range(8)]
    whole = imitate("whole", *episodes)
    monkeypatch.setattr(policy, "micro_tokens", 80)
    monkeypatch.setattr(policy, "room", policy.room)
    calls, plain = [], policy.logprobs

    def fails(batch, base=False):
        calls.append(batch)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return plain(batch, base)

    monkeypatch.setattr(policy, "logprobs", fails)
    rows = imitate("halved", *episodes)
    assert [row.get("micro_tokens") for row in rows] == [40, *[None] * 5]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], abs=1e-4)


@pytest.mark.slow
def test_a_search_becomes_a_policy_and_that_searches(tmp_path, tiny_model):
    """Although the imitation is killed once."""
    search = "--task titanic --backend local --sampling-mode none --name"
    done(tmp_path, "search.py", f"{search} tree --nodes 8 --rule-args branching=8")
    imitation = "--runs logs/tree --task titanic --updates 8 --name learned"
    run = tmp_path / "logs/learned"
    is_far = lambda: any(run.glob("checkpoints/0*"))  # noqa: E731
    out = killed_and_continued(tmp_path, is_far, "sft.py", imitation)
    assert "resumed after step" in out
    losses = [row["loss"] for row in read_rows(run / "metrics.jsonl")]
    assert len(losses) == 8 and losses[-1] < losses[0]
    done(tmp_path, "search.py", f"{search} again --nodes 1 --model logs/learned/best")
    [[before]], [[after]] = (segments_of(run.parent / name, "000000") for name in ("tree", "again"))
    assert before["tokens"][:50] == after["tokens"][:50]
    assert before["logprobs"] != after["logprobs"]  # same prompt, another policy


# ------------------------------------------------------------------ evaluate.py


@pytest.fixture
def here(tmp_path, monkeypatch, capsys, quick_provenance):
    """here(flags) runs evaluate.py in this process: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    # in this process the modules of the tests would count as code
    monkeypatch.setattr(start, "fingerprint", lambda *_: MADE_BY)
    monkeypatch.setattr(plots, "encoded", lambda *_: b"")  # pictures cost a second each

    def here(flags):
        command = f"--backend local --concurrency 1 {flags}".split()
        return run_here(evaluate.main, *command, monkeypatch=monkeypatch, capsys=capsys)

    return here


@pytest.fixture
def played(monkeypatch):
    """Tries of episodes without a model and a sandbox, each with the distance of its seed from
    FIRST_SEED. `broken` holds those of faults, once for each try, and `interrupted` the count of
    tries at which Ctrl-C arrives.
    """
    tries = SimpleNamespace(numbers=[], engines=[], broken=[], interrupted=None)

    async def run_episode(world, policy, options, score_test):
        if len(tries.numbers) == tries.interrupted:
            signal.raise_signal(signal.SIGINT)
        number = world.seed - evaluate.FIRST_SEED
        tries.numbers.append(number)
        episode = Episode(world.task.name, world.seed)
        score, test = valid(0.7 + number / 100, world.task), valid(0.6, world.task)
        if number in tries.broken:
            tries.broken.remove(number)
            episode.status, episode.fault = "fault", "the container died"
            score = test = None
        episode.judge(world.task, score, test and replace(test, position=0.25))
        return episode

    monkeypatch.setattr(evaluate, "run_episode", run_episode)
    engine = SimpleNamespace(render=lambda messages: str(messages).split(), context=2048)
    monkeypatch.setattr(evaluate, "open_engine", lambda *_: tries.engines.append(engine) or engine)
    return tries


def test_an_interrupted_evaluation_goes_on_and_a_longer_one_too(here, played):
    flags = "--task titanic --name a --episodes"
    played.interrupted = 3
    code, _, err = here(f"{flags} 5")
    assert (code, result_of()["status"]) == (130, "interrupted")
    assert "the same command continues logs/a" in err
    for episodes, more in ((5, [3, 4]), (5, []), (7, [5, 6])):
        played.numbers.clear()
        played.interrupted = None
        assert here(f"{flags} {episodes}")[0] == 0
        assert played.numbers == more
        assert 0 < result_of()["seconds"] < 60  # of the evaluation: its episodes overlap
    Path("logs/a/result.json").unlink()  # killed before it was written
    assert here(f"{flags} 7")[0] == 0
    result = result_of()
    assert (result["kind"], result["status"], result["n"]) == ("evaluation", "finished", 7)
    assert result["score_mean"] == pytest.approx(0.73)
    assert result["value"] == result["test_value_mean"] < 0 < result["value_mean"]


@pytest.mark.attack("a broken sandbox after a bad result, in half of the episodes")
def test_episodes_that_break_their_sandbox_stay_in_the_mean(here, monkeypatch, hasty):
    policy = FakePolicy(half_break)
    policy.close = lambda: None
    monkeypatch.setattr(evaluate, "open_engine", lambda *_: policy)
    code, out, _ = here("--task titanic --name a --episodes 4 --max-reply-tokens 1000")
    assert code == 0
    assert out.count("titanic value -1.0000, 3 turns, crashed") == 2
    result = result_of()
    assert (result["n"], result["faults"], result["valid_share"]) == (4, 0, 0.5)
    best = improvement(result["score_mean"], TASK)
    assert result["value_mean"] == pytest.approx((best - 1) / 2)
    assert len(policy.samples) == 12  # nothing was played again
    assert "2 x broke its sandbox" in ends([read_run(Path("logs/a"))])


SPOILED = [block(RIGHT), block("validate"), block("rm submission.csv"), block("submit")]


@pytest.mark.parametrize("flag, end", [("", "submit"), ("--ends-at-score", "validated")])
def test_a_valid_score_ends_an_episode_if_asked(here, monkeypatch, flag, end):
    policy = FakePolicy(*SPOILED)
    policy.close = lambda: None
    monkeypatch.setattr(evaluate, "open_engine", lambda *_: policy)
    here(f"--task titanic --name a --episodes 1 --max-reply-tokens 1000 {flag}")
    [row] = read_run(Path("logs/a")).episodes
    assert (row["status"], row["outcome"]) == (end, "valid" if flag else "failed")
    cfg = changed(CFG, ends_at_score=bool(flag), max_turns=4, max_reply_tokens=1000)
    job, plan = TrainingRun(play=play), Plan([TASK], 1, 1, 0)
    [group] = asyncio.run(grpo.play_groups(FakePolicy(*SPOILED), plan, cfg, job))
    assert [episode.status for episode in group.episodes] == [end]


def test_three_faults_in_a_row_stop_the_evaluation(here, played):
    played.broken = [1, 1, 2, 2, 3, 3]
    flags = "--task titanic --name a --episodes 6"
    code, out, err = here(flags)
    assert code == 2
    assert played.numbers[:7] == [0, 1, 1, 2, 2, 3, 3]  # each is replaced once
    assert "3 of 6: titanic fault" in out
    assert err.startswith("Three sandboxes in a row broke")
    assert err.endswith("the container died\n")
    result = result_of()
    assert result["status"].startswith("failed: Three sandboxes")
    assert (result["n"], result["faults"], result["score_mean"]) == (1, 3, 0.7)
    assert here(flags)[0] == 0  # with sandboxes that work, no fault is left
    assert (result_of()["n"], result_of()["faults"]) == (6, 0)


def test_several_tasks_take_turns(here, played):
    here("--task titanic battleOfSexes --name a --episodes 4")
    names = [row["task"] for row in store.read_episodes(Path("logs/a"))]
    assert names == ["titanic", "battleOfSexes"] * 2
    result = result_of()
    assert (result["titanic.valid_share"], result["battleOfSexes.valid_share"]) == (1, 1)
    assert "score_mean" not in result  # units differ


def test_seeds_are_runs_on_one_engine_and_are_compared(here, played, monkeypatch):
    """config.yaml keeps the name of a task as it was given."""
    Path("module_of_mine.py").write_text("from tasks import load_task\n")
    monkeypatch.syspath_prepend(".")
    code, out, _ = here("--task module_of_mine:titanic --name a --episodes 1 --seed 1 2")
    assert code == 0
    assert played.numbers == [evaluate.FIRST_SEED, 2 * evaluate.FIRST_SEED]
    assert len(played.engines) == 1
    for seed in (1, 2):
        config = read_mapping(Path(f"logs/a-{seed}/config.yaml"))
        assert (config["seed"], config["task"]) == (seed, ["module_of_mine:titanic"])
    assert "\ntitanic, evaluation\n" in out


def test_seeds_of_one_command_have_one_model(here, played):
    shutil.copytree(PROJECT / "configs/tiny", "other")
    assert here("--task titanic --name a-0 --episodes 1 --model other")[0] == 0
    assert here("--task titanic --name a --episodes 1 --seed 0 1")[0] == 0
    assert read_mapping(Path("logs/a-1/config.yaml"))["model"] == "other"
    assert here("--task titanic --name a-2 --episodes 1 --model tiny")[0] == 0
    code, _, err = here("--task titanic --name a --episodes 1 --seed 0 2")
    assert code == 2
    assert "logs/a-2 was made with another config (model: tiny there, other now" in err


CONTEXTS = {
    "--context 100": "more than half of --context 100",
    "--max-reply-tokens 2000": "or than the 48 beside a reply",
    "--context 5000": "--context 5000 is more than the model can: 4096.",
}


@pytest.mark.parametrize("script", [grpo, search, evaluate])
def test_a_context_is_checked_before_the_engine_starts(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Engine, "open_vllm", None)
    start = "--task titanic --model tiny --backend local --name a"
    table = {f"{start} {flags}": words for flags, words in CONTEXTS.items()}
    refuses(script.main, table, monkeypatch, capsys)


def test_a_task_whose_first_message_is_too_long_is_left_out_of_a_suite(here, played, monkeypatch):
    Path("suite.yaml").write_text("settings: {task: [titanic, digits], attempts: 2}\n")
    long = "too long " * 1000
    real = env.first_messages

    def first_messages(world, options, facts, policy):
        if world.task.name == "titanic":
            world.task = replace(world.task, prompt=long)
            facts |= {"task": world.task}
        return real(world, options, facts, policy)

    monkeypatch.setattr(env, "first_messages", first_messages)
    code, out, _ = here("--suite suite.yaml --name a")
    assert code == 0
    assert "left out titanic: The first message of task titanic has" in out
    assert result_of("a/tiny")["n"] == 2
    assert result_of("a/tiny")["left_out"].keys() == {"titanic"}
    assert played.numbers == [1, 3]  # as with both tasks
    code, out, _ = here("--suite suite.yaml --name a")
    assert (code, len(played.engines)) == (0, 1)
    assert "logs/a/tiny was finished before" in out
    assert here("--suite suite.yaml --task digits")[0] == 0
    assert result_of("evaluate-suite-digits-0/tiny")["n"] == 2


def test_two_models_of_a_suite_stand_beside_published_ones(here, played, tmp_path, monkeypatch):
    monkeypatch.setenv("MLGYM_ROOT", str(make_root(tmp_path)))
    shutil.copytree(PROJECT / "configs/tiny", "other")
    flags = "--suite suite.yaml --name a --max-turns 3 --model"
    for model in ("tiny", "other"):
        code, out, _ = here(f"{flags} {model}")
        assert code == 0
        assert "left out gone: " in out
        assert f"logs/a/{model}: without gone. " in out
    runs = [read_run(f"logs/a/{model}") for model in ("tiny", "other")]
    out = suite_report(read_suite("suite.yaml"), runs)
    lines = [line.split() for line in out.splitlines()]
    # 0.71 is below both published models; the value is that of 0.6, on the test part
    assert ["titanic", "logs/a/other", "0.7100", "0.7100", "-0.6936", "100%", "3"] in lines
    rows = {line[0]: line[1:] for line in lines if len(line) > 9}
    assert rows["logs/a/tiny"][3:5] == ["100%", "0.2500"]  # valid, position
    # log10(1 / 0.71) is reached at the tau 149 of 500, so 499 - 149 steps of 0.5 / 499 are left
    assert rows["logs/a/other"][-2:] == ["0.351", "0.351"]
    assert "logs/a/tiny is better than logs/a/other: 0.5000 [0.5000, 0.5000]" in out
    assert "over the tasks that all models have: titanic\n" in out
    monkeypatch.delenv("MLGYM_ROOT")
    with user_error("logs/a/tiny is no evaluation of the suite builtin"):
        suite_report(read_suite("builtin"), [read_run("logs/a/tiny")])


def test_what_an_endpoint_refuses_is_told_and_a_password_is_not(here, monkeypatch):
    """The first request is too long, a later one is, and replies are thoughts that were cut."""
    long = 400, {"error": {"message": "maximum context length is 512 tokens, key sk-hushhush0"}}, {}
    thought = completion(None)
    thought["choices"][0]["finish_reason"] = "length"
    first = [long, (200, completion("hm"), {}), (200, thought, {})]

    def answer(body, _):
        is_later = len(body["messages"]) > 2 and name == "b"
        return long if is_later else dict(zip("abc", first))[name]

    said = []
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hushhush0")
    with chat_server(answer) as url:
        url = url.replace("://", "://user:a@hushhush0@")
        flags = f"--task titanic --episodes 1 --max-turns 2 --model m --url {url} --name"
        for name in "abc":
            for _ in range(2):  # the same command resumes, or says that all is done
                code, _, err = here(f"{flags} {name}")
                assert code == (2 if name == "a" else 0), err
            files = [file for file in Path("logs", name).rglob("*") if file.is_file()]
            assert not [file for file in files if b"hushhush0" in file.read_bytes()]
            said.append(err)
    assert "maximum context length is 512" in said[0]
    assert "maximum context length is 512" in result_of("a")["status"]
    [row] = attempts_of("logs/b", "0")
    assert row["status"] == "refused"
    assert "maximum context length is 512" in row["refusal"]
    [row] = attempts_of("logs/c", "0")
    assert "--max-reply-tokens" in row["turns"][0]["observation"]


LIST = "Strategy: one\nProbability: 0.05\n\nStrategy: two\nProbability: 0.04"
FLAGGED = 400, {"error": {"message": "Your input was flagged", "code": "content_filter"}}, {}


def test_a_prompt_that_an_endpoint_refuses_ends_its_episode_or_node_alone(
    here, monkeypatch, capsys
):
    answers = []
    monkeypatch.setattr(plots, "encoded", lambda *_: b"<svg")
    monkeypatch.setattr(search, "DEBUG_PROB", 0)
    with chat_server(lambda *_: answers.pop(0)) as url:
        flags = f"--task titanic --backend local --max-turns 1 --model m --url {url} --name"
        answers += [(200, completion(block("submit")), {}), FLAGGED, (200, completion(None), {})]
        code, out, err = here(f"{flags} a --episodes 3 --concurrency 1")
        assert code == 0, err
        answers += [(200, completion("hm"), {}), FLAGGED]
        command = f"{flags} b --nodes 2 --workers 1".split()
        code, out, err = run_here(search.main, *command, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 0, err
        # strategies: given, refused; given, the request for more refused
        reply = (200, completion("hm"), {})
        answers += [(200, completion(LIST), {}), reply, FLAGGED]
        answers += [(200, completion(LIST.split("\n\n")[0]), {}), FLAGGED, reply]
        more = "--nodes 3 --workers 1 --select greedy --sampling-mode tail --k 2"
        command = f"{flags} c {more}".split()
        code, out, err = run_here(search.main, *command, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 0, err
    first, second, third = read_rows("logs/c/episodes.jsonl")
    assert (first["status"], first["idea"]) == ("turn_limit", "one")
    assert (second["status"], second["value"], second["idea"]) == ("refused", -1, "")
    assert second["reason"].startswith("Your input was flagged: http")
    assert (third["status"], third["idea"]) == ("turn_limit", "one")
    rows = read_rows("logs/a/episodes.jsonl")
    assert [row["status"] for row in rows] == ["submit", "refused", "turn_limit"]
    assert rows[1]["value"] == -1
    assert rows[1]["reason"].startswith("Your input was flagged: http")
    assert "The endpoint sent nothing, finish_reason stop." in rows[2]["reason"]
    first, second = read_rows("logs/b/episodes.jsonl")
    assert (first["status"], second["status"]) == ("turn_limit", "refused")
    assert "1 x Your input was flagged: http" in ends([read_run("logs/b")])


def test_an_endpoint_is_evaluated(here):
    rule = 'NR == 1 {print "id,survived"} NR > 1 {print $1 "," ($3 == "female")}'
    replies = [block(f"awk -F, '{rule}' data/test.csv > submission.csv"), block("submit")]

    def answer(body, _):
        said = sum(message["role"] == "assistant" for message in body["messages"])
        return 200, completion(replies[said]), {}

    with chat_server(answer) as url:
        flags = f"--task titanic --name a --episodes 2 --model m --url {url} --seed"
        code, _, err = here(f"{flags} 0 1")  # each seed has an event loop of its own
        assert code == 0, err
    result = result_of("a-1")
    assert (result["n"], result["valid_share"]) == (2, 1)
    assert result["value"] == result["test_value_mean"] > 0
    assert not list(Path("logs/a-1").rglob("*.tokens*"))  # its tokens are not the model's
    code, _, err = here("--task titanic --url http://localhost:1/v1")
    assert code == 2
    assert err == "--url needs --model: the name that the endpoint knows.\n"


# ------------------------------------------------------------------ examples/ppo.py


def test_gae_is_its_definition(monkeypatch):
    monkeypatch.setattr(ppo, "LAMBDA", 0.5)
    # deltas 0.3, -0.1, 0.6
    expected = [0.3 - 0.05 + 0.15, -0.1 + 0.3, 0.6]
    assert ppo.gae(1.0, [0.2, 0.5, 0.4]) == pytest.approx(expected)
    assert ppo.gae(1.0, []) == []


def test_ppo_whitens_its_advantages_and_sets_targets():
    """Also in a group with equal rewards."""
    reply = [-1, 0, 0, -1, 1]
    segments = [Segment([5, 6, 7, 8, 9], reply, [0.0] * 5, [0] * 5)]
    more = {"segments": segments, "turns": [{}, {}], "reward": 1.0}
    group = Group(0, TASK, [Episode("titanic", i, **more) for i in range(2)])
    values = torch.tensor([0.1, 0.2, 0.3])
    hidden_states = lambda pairs: (values.repeat(len(pairs)), None)  # noqa: E731
    passes = {"micro_tokens": 100, "pass_tokens": row_tokens, "hidden_states": hidden_states}
    critic = SimpleNamespace(values=lambda hidden: hidden, **passes)
    batch = ppo.make_batch(critic, [group], CFG, TrainingRun())
    one = 0.1 / (0.02 / 3) ** 0.5  # returns minus values: 0.9 0.8 0.7, mean 0.8
    for sequence in batch:
        assert sequence.target == pytest.approx([1, 1, 1])
        assert sequence.advantage == pytest.approx([one, 0, -one], abs=1e-5)
        assert {*sequence.weight} == {1 / 6}
    for episode in group.episodes:
        kept = [turn["advantage"] for turn in episode.turns]
        assert kept == pytest.approx([one / 2, -one], abs=1e-5)


@pytest.fixture
def critic(policy, monkeypatch):
    """The policy of the session with a fresh value head; ask for it before `play`."""
    head = torch.nn.Linear(policy.model.config.hidden_size, 1)
    for p in head.parameters():
        torch.nn.init.zeros_(p)
    monkeypatch.setattr(policy, "__class__", ppo.ActorCritic)
    monkeypatch.setattr(policy, "head", head, raising=False)
    monkeypatch.setattr(policy.model, "value_head", head, raising=False)
    return policy


def test_ppo_learns_its_value_head_and_resumes(critic, play, monkeypatch):
    options = {"train": ppo.train, "concurrency": 1}
    whole = play("whole", steps=4, **options)
    weights = weights_of(critic)
    assert critic.head.weight.abs().max() > 1e-3
    play("halves", steps=2, **options)
    halves = play("halves", steps=4, **options)
    for key in ("value_loss", "skipped"):
        assert [row[key] for row in halves] == [row[key] for row in whole]
    assert has_weights(critic, weights)
    head = Path("logs/whole/checkpoints/000003", ppo.HEAD_FILE)
    save_tensors(torch.nn.Linear(3, 1).state_dict(), other := head.with_name("other"))
    for content in (head.read_bytes()[:-200], b"", other.read_bytes()):
        head.write_bytes(content)
        with user_error(f"{head} (cannot be used|is not the value head)"):
            critic.load_adapter(head.parent)
    head.unlink()
    with user_error(f"{head} cannot be used: "):
        critic.load_adapter(head.parent)
    monkeypatch.setattr(critic, "path", replace(critic.path, adapter=str(head.parent)))
    critic.load_adapter(head.parent)  # the adapter of the start may have been trained without one


@pytest.mark.slow
def test_the_example_is_a_script(tmp_path, tiny_model):
    flags = "--task titanic --backend local --groups 2 --group-size 4 --eval-episodes 2 --steps"
    done(tmp_path, "examples/ppo.py", f"{flags} 2")
    logs = tmp_path / "logs/ppo-titanic-tiny-0"
    assert [row["step"] for row in read_rows(logs / "metrics.jsonl")] == [0, 1]
    assert (logs / "best" / ppo.HEAD_FILE).exists()
    assert result_of(logs)["final"]["n"] == 2
