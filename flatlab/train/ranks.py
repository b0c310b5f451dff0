"""One process among several of the same job: `torchrun --nproc-per-node 4 grpo.py ...`, also on
several machines.

Every rank has its own engine, trainer and sandboxes and plays its part of the groups. The ranks
exchange the LoRA gradients, summed in one flat buffer per update, and the transcripts of a step,
which all of them judge alike. Rank 0 writes the run directory; all ranks have to see it (a shared
file system), since they resume from its checkpoints. Replacement groups are assigned to ranks up
front, so a run on N ranks may sample different groups than a run on one.

The exchange is gloo over TCP in a process group of our own: the default group of torch.distributed
belongs to each rank's vLLM engine. A rank that dies closes its connections. The others then raise
in their next exchange, torchrun ends the job, and the same command resumes it.
"""

import atexit
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from flatlab.errors import UserError
from flatlab.runs.store import Run
from flatlab.train.overlap import EventLoop, Slots


class Ranks:
    """The processes of a job. Without a group there is one, which has nothing to exchange."""

    def __init__(self, rank: int = 0, world: int = 1, group=None):
        self.rank = rank
        self.world = world  # number of ranks
        self.group = group
        # The group's threads must be joined before the interpreter ends, so it is dropped at exit.
        atexit.register(self.close)

    def close(self) -> None:
        self.group = None

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over the ranks."""
        if self.group is None:
            return list(numbers)
        import torch

        total = torch.tensor(numbers, dtype=torch.float64)
        self.group.allreduce([total]).wait()
        return total.tolist()

    def sum_gradients(self, parameters) -> None:
        """Sums the gradients in place; a missing one counts as 0."""
        if self.group is None:
            return
        import torch

        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([p.grad.flatten() for p in parameters]).cpu()
        self.group.allreduce([flat]).wait()
        parts = flat.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts):
            p.grad.copy_(part.view_as(p))

    def broadcast(self, tensors) -> None:
        """Overwrites the tensors with those of rank 0."""
        if self.group is None:
            return
        for tensor in tensors:
            copy = tensor.detach().cpu().clone()
            self.group.broadcast([copy]).wait()
            tensor.data.copy_(copy)

    def gather(self, thing) -> list:
        """[rank 0's thing, rank 1's thing, ...] on every rank; anything that pickle can write."""
        if self.group is None:
            return [thing]
        import torch

        mine = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        sizes = [0] * self.world
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


@dataclass
class Job:
    """What a process of a training run works with."""

    ranks: Ranks = field(default_factory=Ranks)
    loop: EventLoop = field(default_factory=EventLoop)
    run: Run | None = None  # the open run directory; None on all ranks but rank 0
    slots: Slots | None = None  # of the sandboxes of this process
    play: Callable | None = None  # play_groups of the script

    def say(self, text: str) -> None:
        """Prints on rank 0 only."""
        if self.ranks.rank == 0:
            print(text, flush=True)

    def result(self, **fields) -> None:
        """Merges the fields into result.json."""
        if self.run:
            self.run.result(**fields)


def join(timeout: float) -> Ranks:
    """The ranks of this job. Call it before anything touches CUDA: a rank of torchrun sees only its
    own GPU.

    timeout: seconds to wait for the slowest rank. Raises UserError if there are GPUs, but fewer
    than ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    import torch
    from torch import distributed

    local = int(os.environ["LOCAL_RANK"])
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else range(torch.cuda.device_count())
    if visible:  # without a GPU every rank computes on the CPU
        count = len(visible)
        if local >= count:
            raise UserError(f"torchrun starts more processes here than there are GPUs ({count}).")
        os.environ["CUDA_VISIBLE_DEVICES"] = str(visible[local])
    meeting = distributed.rendezvous("env://", timeout=timedelta(seconds=120))
    store, rank, world = next(meeting)
    store = distributed.PrefixStore("flatlab", store)
    group = distributed.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout))
    return Ranks(rank, world, group)
