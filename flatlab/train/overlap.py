"""The two threads of a training run.

The event loop, in the main thread, steps the engine and plays episodes. The trainer's thread does
everything else: it runs the loop over the steps, with the updates, the exchanges with other ranks,
rows, checkpoints and plots. So episodes of later steps go on while an update is computed.
"""

import asyncio
import contextlib
import heapq
import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from flatlab import threads

# Always the same thread: a second one would start OpenMP threads of its own.
TRAINER = ThreadPoolExecutor(1, "trainer", threads.use_all)
INTERRUPTED = threading.Event()  # the trainer's thread has to end


class Interrupted(Exception):
    """The run ends because of Ctrl-C."""


def stop_if_interrupted() -> None:
    """Raises Interrupted after Ctrl-C, so that an update ends after the current micro-batch."""
    if INTERRUPTED.is_set():
        raise Interrupted


class EventLoop:
    """The event loop as the trainer's thread uses it. Outside of run_beside() there is none."""

    def __init__(self):
        self.loop = None
        self.tasks = set()  # started and not ended

    def start(self, function, *args) -> Future:
        """Runs an async function in the event loop. Its result is that of the returned future."""
        stop_if_interrupted()

        async def tracked():
            task = asyncio.current_task()
            self.tasks.add(task)
            try:
                return await function(*args)
            finally:
                self.tasks.remove(task)

        return asyncio.run_coroutine_threadsafe(tracked(), self.loop)

    def wait(self, function, *args):
        """Runs an async function in the event loop and returns its result."""
        return self.start(function, *args).result()

    def call(self, function):
        """Calls a function between two steps of the engine and returns its result."""

        async def called():
            return function()

        return self.wait(called)

    def cancel(self) -> None:
        """Cancels everything that was started, and returns when it has ended."""
        asyncio.run_coroutine_threadsafe(self.end_tasks(), self.loop).result()

    async def end_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)


async def run_beside(loop: EventLoop, train, *args) -> None:
    """Runs train(*args) in the trainer's thread. Meanwhile `loop` is the event loop of this one.

    After Ctrl-C train ends where it waits for the event loop, or after a micro-batch; episodes in
    flight are cancelled, and their sandboxes closed.
    """
    loop.loop = asyncio.get_running_loop()
    training = loop.loop.run_in_executor(TRAINER, train, *args)
    try:
        while not training.done():
            # A signal that arrives in another thread is handled when the loop wakes up.
            await asyncio.wait([training], timeout=1)
        training.result()
    finally:
        INTERRUPTED.set()
        while not training.done():
            await loop.end_tasks()
            await asyncio.wait([training], timeout=0.1)
        await loop.end_tasks()
        training.exception()  # asyncio prints those that nobody looked at
        INTERRUPTED.clear()
        loop.loop = None


class Slots:
    """At most `count` holders at a time. A free slot goes to the lowest order that waits, and among
    equal ones to the first.
    """

    def __init__(self, count: int):
        self.free = count
        self.waiting = []  # heap of (order, number, future)
        self.numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def slot(self, order: int):
        """Holds a slot inside of the block."""
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, (order, next(self.numbers), turn))
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
            turn = heapq.heappop(self.waiting)[2]
            if not turn.done():  # a future that is done was cancelled
                turn.set_result(None)
                self.free -= 1
