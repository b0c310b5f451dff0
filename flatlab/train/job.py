"""A process of a training run: its two threads, and the other processes of the same job.

The main thread runs the event loop, which steps the engine and plays episodes. The trainer's thread
computes updates, exchanges numbers with other ranks and writes checkpoints, see in_trainer: so
episodes of later steps go on meanwhile.

`torchrun --nproc-per-node 4 grpo.py ...` starts several ranks, also on several machines. Every rank
has its own engine, trainer and sandboxes and plays its part of the groups. The ranks exchange the
LoRA gradients, summed in one flat buffer per update, and the transcripts of a step, which all of
them judge alike. Rank 0 writes the run directory; all ranks have to see it (a shared file system),
since they resume from its checkpoints. Replacement groups are assigned to ranks up front, so a run
on N ranks may sample different groups than a run on one.

The exchange is gloo over TCP in a process group of our own: the default group of torch.distributed
belongs to each rank's vLLM engine. A rank that dies closes its connections. The others then raise
in their next exchange, torchrun ends the job, and the same command resumes it.
"""

import asyncio
import atexit
import bisect
import contextlib
import functools
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

from flatlab import threads
from flatlab.errors import UserError
from flatlab.runs.store import Run
from flatlab.world.episode import invoke

# Always the same thread: a second one would start OpenMP threads of its own.
TRAINER = ThreadPoolExecutor(1, "trainer", threads.use_all)
INTERRUPTED = threading.Event()  # the trainer's thread has to end

# ------------------------------------------------------------------------------ two threads


class Interrupted(Exception):
    """The run ends because of Ctrl-C."""


def stop_if_interrupted() -> None:
    """Raises Interrupted after Ctrl-C, so that an update ends after the current micro-batch."""
    if INTERRUPTED.is_set():
        raise Interrupted


async def in_trainer(function, *args):
    """Awaits function(*args) in the trainer's thread. One call at a time.

    A hop between the threads waits for a step of the engine, so heavy work is one call.
    """
    call = asyncio.get_running_loop().run_in_executor(TRAINER, invoke, function, *args)
    try:
        while not call.done():
            # A signal that arrives in another thread is handled when the loop wakes up.
            await asyncio.wait([call], timeout=1)
    finally:
        if not call.done():  # cancelled, as by Ctrl-C
            INTERRUPTED.set()
            await asyncio.wait([call])
            INTERRUPTED.clear()
            call.exception()  # asyncio prints the ones that nobody looked at
    return call.result()


class Slots:
    """At most `count` holders at a time. A free slot goes to the lowest order that waits, and among
    equal ones to the first.
    """

    def __init__(self, count: int):
        self.free = count
        self.waiting = []  # (order, future), sorted

    @contextlib.asynccontextmanager
    async def slot(self, order: int):
        """Holds a slot inside of the block."""
        turn = asyncio.get_running_loop().create_future()
        bisect.insort(self.waiting, (order, turn), key=lambda pair: pair[0])
        self.assign()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.free += 1
                self.assign()

    def assign(self) -> None:
        while self.free and self.waiting:
            _, turn = self.waiting.pop(0)
            if not turn.done():  # a future that is done was cancelled
                turn.set_result(None)
                self.free -= 1


# ------------------------------------------------------------------------------ several ranks


@dataclass
class Ranks:
    """The processes of a job. Without a process group there is one, and nothing is exchanged."""

    rank: int = 0
    world_size: int = 1  # number of ranks
    group: object = None

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over the ranks."""
        if self.group is None:
            return list(numbers)
        import torch

        total = torch.tensor(numbers, dtype=torch.float64)
        self.group.allreduce([total]).wait()
        return total.tolist()

    def sum_gradients(self, parameters, agrees: bool) -> bool:
        """Sums the gradients in place, a missing one as 0. Returns whether all ranks agree."""
        if self.group is None:
            return agrees
        import torch
        from torch.nn.utils import parameters_to_vector, vector_to_parameters

        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in parameters]
        flat = parameters_to_vector(grads).cpu()
        self.group.allreduce([flat]).wait()
        vector_to_parameters(flat.to(grads[0].device), grads)
        return not self.sum(not agrees)[0]

    def broadcast(self, tensors) -> None:
        """Overwrites the tensors with those of rank 0."""
        for tensor in tensors:
            tensor.data.copy_(self.first(tensor.detach().cpu()))

    def gather(self, thing) -> list:
        """[rank 0's thing, rank 1's thing, ...] on every rank; anything that pickle can write."""
        if self.group is None:
            return [thing]
        import torch

        mine = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        sizes = [0] * self.world_size
        sizes[self.rank] = len(mine)
        sizes = [int(size) for size in self.sum(*sizes)]
        # Every rank adds its part to zeros.
        everything = torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = everything.split(sizes)
        parts[self.rank].copy_(mine)
        self.group.allreduce([everything]).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def first(self, thing):
        """The thing of rank 0, on every rank."""
        return self.gather(thing)[0]


def mismatch(name: str, other: str) -> UserError:
    """The error that two variables of torchrun do not fit together."""
    said = os.environ.get(other) or "not set"
    return UserError(
        f"{name} is {os.environ[name]} but {other} is {said}: start it with torchrun, or unset "
        f"{name}."
    )


@functools.cache
def join_ranks(timeout: float = 24 * 3600) -> Ranks:
    """The ranks of this job, which the first call joins. Call it before anything touches CUDA: a
    rank of torchrun sees only its own GPU.

    timeout: seconds to wait for the slowest rank; one that died is noticed at once. Raises
    UserError if the variables of torchrun do not fit together, or if there are GPUs, but fewer than
    ranks.
    """
    world_size = threads.whole_number("WORLD_SIZE", 1)
    if threads.whole_number("RANK", 0, low=0) >= world_size:
        raise mismatch("RANK", "WORLD_SIZE")
    if world_size == 1:
        return Ranks()
    for name in ("LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise mismatch("WORLD_SIZE", name)
    threads.whole_number("MASTER_PORT", 0)
    import torch
    from torch import distributed

    local = threads.whole_number("LOCAL_RANK", 0, low=0)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else range(torch.cuda.device_count())
    if visible:  # without a GPU every rank computes on the CPU
        count = len(visible)
        if local >= count:
            raise UserError(f"torchrun starts more processes here than there are GPUs ({count}).")
        os.environ["CUDA_VISIBLE_DEVICES"] = str(visible[local])
    meeting = distributed.rendezvous("env://", timeout=timedelta(seconds=120))
    store, rank, world_size = next(meeting)
    store = distributed.PrefixStore("flatlab", store)
    group = distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))
    if rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # rank 0 says what happens
    ranks = Ranks(rank, world_size, group)
    # The group's threads must be joined before the interpreter ends, so it is dropped at exit.
    atexit.register(setattr, ranks, "group", None)
    return ranks


@dataclass
class TrainingRun:
    """State of a process of a training run, and how far the run has come."""

    tasks: list = field(default_factory=list)  # to train on
    play: Callable | None = None  # the loop of an episode, see run_episode
    run: Run | None = None  # the open run directory; None on all ranks but rank 0
    finished: bool = False  # before this start: nothing is left to do
    slots: Slots | None = None  # of the sandboxes of this process
    step: int = 0  # the next one; as many steps of training are in the weights
    best: dict | None = None  # evaluation of the adapter in best/
    began: float = 0.0  # see start_clock()
    evaluation_seconds: float = 0.0  # of the latest evaluation
    stopped: str = ""  # why metrics.collapse ended the run
    ranks: Ranks = field(default_factory=join_ranks)

    def start_clock(self) -> None:
        """Begins to count the seconds of the run, after those of earlier starts."""
        earlier = self.run.result.get("seconds", 0.0) if self.run else 0.0
        self.began = time.monotonic() - earlier

    def update_result(self, **fields) -> None:
        """Merges the fields and the seconds of the run into result.json."""
        if self.run:
            self.run.update_result(**fields, seconds=time.monotonic() - self.began)
