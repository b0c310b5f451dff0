"""flatlab's tasks as an environment of verifiers 0.4: `vf-eval flatlab-env`, prime-rl.

The agent's loop runs in this process, with flatlab's own prompt, sandboxes and grading. Every
request to the model goes to the address that verifiers provides, which records it in the trace. The
machine that verifiers starts for an episode (its runtime) stays empty.
"""

import asyncio
import math
import zlib
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import verifiers.v1 as vf

from env import Env, in_thread
from flatlab.errors import SandboxFault
from flatlab.model.endpoint import Endpoint
from flatlab.model.path import ModelPath
from flatlab.options import EpisodeOptions, ModelOptions, SandboxOptions, filled
from flatlab.task.grading import Score
from flatlab.task.machine import resolve_backend
from flatlab.task.value import judged
from flatlab.world.episode import Episode, begin_episode, play
from tasks import load_task

__all__ = ["FlatlabEnv", "FlatlabHarness", "FlatlabTaskset"]

load = cache(load_task)


async def crash_score(world: Env, fault: SandboxFault) -> Score:
    """See Env.crash_score. Raises SandboxError for a fault."""
    score = await in_thread(world.crash_score, fault)
    if not score:
        raise vf.SandboxError(str(fault)) from fault
    return score


# ------------------------------------------------------------------ what is asked, and the reward


class FlatlabData(vf.TaskData):
    task: str


class FlatlabState(vf.State):
    """State of an episode while it runs; it is not saved."""

    world: Any = None  # an Env of env.py, from the start of the agent until `cleanup`


class FlatlabTask(vf.Task[FlatlabData, FlatlabState]):
    @property
    def key(self) -> str:
        return self.data.task

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Grades what the agent left, also after a limit of verifiers has ended its episode."""
        world = trace.state.world
        if world is None or world.sandbox is None:
            raise vf.SandboxError("the episode ended before its sandbox was ready")
        try:
            score = await in_thread(world.score)
        except SandboxFault as fault:
            score = await crash_score(world, fault)
        trace.info["score"] = asdict(score)
        trace.info["value"] = judged(score, world.task)["value"]

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        """As in grpo.py: the value, at most 1."""
        return min(1.0, trace.info["value"])

    @vf.metric
    async def value(self, trace: vf.Trace) -> float:
        """0 at the task's baseline, 1 at its reference, -1 without a valid submission. On the part
        that `validate` shows."""
        return trace.info["value"]

    @vf.metric
    async def valid(self, trace: vf.Trace) -> float:
        return float(trace.info["score"]["valid"])

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class FlatlabTasksetConfig(vf.TasksetConfig):
    names: list[str] = ["titanic"]
    """Names of tasks, see `python tasks.py`; $MLGYM_ROOT and $MLEDOJO_ROOT add theirs."""


class FlatlabTaskset(vf.Taskset[FlatlabTask, FlatlabTasksetConfig]):
    def load(self):
        for name in self.config.names:
            data = FlatlabData(name=name, task=name, prompt=load(name).prompt)
            yield FlatlabTask(data, self.config.task)


# ------------------------------------------------------------------ the agent


class FlatlabHarnessConfig(vf.HarnessConfig):
    id: str = "flatlab-env"
    context: int = 16384
    """Tokens of prompt and reply together, estimated as 3 characters each."""
    episode: EpisodeOptions = EpisodeOptions()
    """Limits and texts, as in grpo.py; the run's sampling.max_tokens replaces max_reply_tokens."""
    sandbox: SandboxOptions = SandboxOptions()
    """Kind of sandbox and what it offers, as in grpo.py."""


@dataclass(frozen=True)
class Lengths:
    model: ModelOptions
    episode: EpisodeOptions


class FlatlabHarness(vf.Harness[FlatlabHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False  # none in the runtime of verifiers
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: FlatlabData,
    ) -> vf.ProgramResult:
        """Plays one episode. Raises SandboxError if its sandbox breaks.

        A system prompt follows the task's prompt in the first message.
        """
        options = self.config
        seed = zlib.crc32(trace.id.encode())  # the episodes of a group must differ
        policy = Endpoint(endpoint, ctx.model, options.context, key=secret)
        limit = trace.agent.config.timeout.rollout or math.inf  # a command must not outlast it
        limits = replace(
            options.episode,
            max_reply_tokens=ctx.sampling.max_tokens or options.episode.max_reply_tokens,
            episode_minutes=min(limit / 60, options.episode.episode_minutes),
        )
        lengths = Lengths(ModelOptions(context=options.context), limits)
        limits = filled(lengths, ModelPath("", None, stand_in=False)).episode
        try:
            task = load(data.task)
            sandbox = await in_thread(resolve_backend, task, options.sandbox)
            trace.state.world = world = Env(task, sandbox, seed, data.system_prompt or "")
            episode = Episode(data.task, seed)
            history = await begin_episode(world, policy, episode, limits)
            trace.info["status"] = await play(world, policy, episode, limits, history)
        except SandboxFault as fault:
            await crash_score(world, fault)
            trace.info["status"] = "crashed"
        finally:
            await policy.client.close()
        return vf.ProgramResult(0, "", "")

    async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Ends the sandbox, also of an episode that was cancelled."""
        if trace.state.world is not None:
            await asyncio.shield(in_thread(trace.state.world.close))


# ------------------------------------------------------------------ defaults that cost nothing


class FlatlabEnvConfig(vf.SingleAgentEnvConfig):
    # The default of verifiers is a virtual machine that is paid for, and no second attempt.
    agent: vf.AgentConfig = vf.AgentConfig(
        harness=FlatlabHarnessConfig(),
        runtime=vf.SubprocessConfig(),
        retries=vf.RetryConfig(rules=[vf.RetryRule(type="SandboxError", max_retries=1)]),
    )


class FlatlabEnv(vf.SingleAgentEnv, vf.Env[FlatlabEnvConfig]):
    async def finalize(self, task: FlatlabTask, episode: vf.Episode) -> None:
        """Counts the sandboxes that broke, also in repeated attempts."""
        for trace in episode.traces:
            faults = sum(error.type == "SandboxError" for error in trace.errors)
            trace.record_metric("faults", faults)
