"""The floor of a training step: what this machine needs for it at least.

    floor = max(update, (waits + engine + update) / (N + 1))        with --ahead N

waits: the longest chain of waits of a rollout. engine: the fewest engine steps (a token of every
rollout each) times the time of one with all rollouts in it. update: the matrix products of the
update at the peak of the machine. With --ahead N, a step's replies come from a policy at most N
updates older, so its chain may take N + 1 steps; the updates themselves follow each other.
"""

import asyncio
import statistics
import time

SIDE = 1024  # of the matrices whose product gives the peak


def floor(waits: float, engine: float, update: float, ahead: int = 0) -> float:
    """Seconds of a step, see above."""
    return max(update, (waits + engine + update) / (ahead + 1))


def peak_flops(device: str) -> float:
    """Floating-point operations per second of a large matrix product, in fp32 or bf16 on CUDA."""
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(SIDE, SIDE, device=device, dtype=dtype)

    def product():
        float((a @ a)[0, 0])  # waits for the device

    product()
    return 2 * SIDE**3 / min(timed(product) for _ in range(20))


def timed(call) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def counting_flops(function):
    """(the same function, a list to which each call adds its floating-point operations).

    Matrix products and attention are counted, as torch.utils.flop_counter does.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counts = []

    def counted(*args):
        with FlopCounterMode(display=False) as counter:
            result = function(*args)
        counts.append(counter.get_total_flops())
        return result

    return counted, counts


async def engine_step_seconds(policy, requests: int, tokens: int) -> float:
    """Seconds of an engine step with so many requests, each of which gets a token: the median."""
    seconds = []

    def step():
        begin = time.perf_counter()
        outputs = original()
        seconds.append(time.perf_counter() - begin)
        return outputs

    original = policy.step_engine
    policy.step_engine = step
    prompt = policy.tokenizer.encode("Write. ")
    for _ in range(2):  # the first round warms up
        seconds.clear()
        await asyncio.gather(*(policy.sample(prompt, tokens) for _ in range(requests)))
    policy.step_engine = original
    return statistics.median(seconds)
