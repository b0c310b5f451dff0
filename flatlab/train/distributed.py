"""One process among several of the same job: `torchrun --nproc-per-node 4 grpo.py ...`, also on several machines.

Every rank has its own engine, trainer and sandboxes and plays its share of the groups. What travels: the LoRA
gradients, summed in one flat buffer per update, and the transcripts of a step, to all (each judges them alike; rank 0
writes the run directory). The directory has to be visible to all ranks (a shared file system): they resume from its
checkpoints. The groups that replace those of equal rewards are shared out beforehand: with them, N ranks may play other
groups than one does.

gloo over TCP, with a process group of our own: the default one of torch.distributed belongs to each rank's vLLM engine.
A rank that dies closes its connections: the others raise in the next exchange, torchrun ends the job, and the same
command resumes it.
"""

import atexit
import os
import pickle
from datetime import timedelta


class Alone:
    """A single process: nothing to exchange."""

    rank, world = 0, 1

    def sum(self, *numbers: float) -> list[float]:
        return list(numbers)

    def sum_gradients(self, parameters) -> None:
        pass

    def share(self, tensors) -> None:
        pass

    def gather(self, thing) -> list:
        return [thing]

    def sent(self) -> int:
        """Bytes that this rank has sent in since the last call: gradients and what was gathered."""
        return 0


class Ranks(Alone):
    """One of several processes that torchrun started. timeout: seconds to wait for the slowest rank."""

    def __init__(self, timeout: float):
        from torch import distributed

        store, self.rank, self.world = next(
            distributed.rendezvous("env://", timeout=timedelta(seconds=120))
        )
        store = distributed.PrefixStore("flatlab", store)
        self.bytes = 0
        self.group = distributed.ProcessGroupGloo(
            store, self.rank, self.world, timedelta(seconds=timeout)
        )
        atexit.register(
            self.__dict__.clear
        )  # before the interpreter is gone: its threads must be joined

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over the ranks."""
        import torch

        total = torch.tensor(numbers, dtype=torch.float64)
        self.group.allreduce([total]).wait()
        return total.tolist()

    def sum_gradients(self, parameters) -> None:
        """Sums the gradients in place; absent ones count as 0."""
        import torch

        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.flatten() for p in parameters]).cpu()
        self.group.allreduce([flat]).wait()
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))
        self.bytes += flat.numel() * flat.element_size()

    def share(self, tensors) -> None:
        """Overwrites the tensors with rank 0's: all ranks start from the same numbers."""
        import torch

        for tensor in tensors:
            copy = (
                tensor.detach().cpu() if self.rank == 0 else torch.empty_like(tensor, device="cpu")
            )
            self.group.broadcast([copy]).wait()
            tensor.data.copy_(copy)

    def gather(self, thing) -> list:
        """[rank 0's thing, rank 1's thing, ...] on every rank. thing: anything that can be pickled."""
        import torch

        mine = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.world)]
        self.group.allgather([sizes], [torch.tensor([mine.numel()])]).wait()
        self.bytes += mine.numel()
        longest = max(int(size) for size in sizes)
        buffers = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
        self.group.allgather(
            [buffers], [torch.nn.functional.pad(mine, (0, longest - mine.numel()))]
        ).wait()
        return [
            pickle.loads(buffer[: int(size)].numpy().tobytes())
            for buffer, size in zip(buffers, sizes)
        ]

    def sent(self) -> int:
        sent, self.bytes = self.bytes, 0
        return sent


def join(timeout: float) -> Alone:
    """Alone, or one of torchrun's ranks. Call it before anything touches CUDA: a rank sees one GPU only, its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    local = int(os.environ["LOCAL_RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = devices.split(",")[local] if devices else str(local)
    return Ranks(timeout)
