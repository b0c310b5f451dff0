"""A sign of life from what takes long."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress

EVERY = 10.0  # seconds
_running = []  # heartbeats, in the order in which they began


@contextmanager
def heartbeat(text: str | Callable):
    """Inside, a line each 10 seconds ends with the seconds so far. A terminal gets one line, which
    is rewritten. Of several at the same time only the last one speaks. text: or a function without
    arguments that returns it.
    """
    began = time.monotonic()
    has_ended = threading.Event()
    _running.append(has_ended)

    def beat():
        end, last = ("\r", "\n") if sys.stdout.isatty() else ("\n", "")
        with suppress(BrokenPipeError):
            while not has_ended.wait(EVERY):
                if _running[-1] is not has_ended:
                    continue
                said = text if isinstance(text, str) else text()
                print(f"{said} ({time.monotonic() - began:.0f} s)", end=end, flush=True)
            if time.monotonic() - began >= EVERY:
                print(end=last)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        _running.remove(has_ended)
        has_ended.set()
        thread.join()


async def stoppable(work):
    """Awaits a coroutine. Ctrl-C says at once that it stops, and how long its sandboxes and threads
    take to end.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        print("\nstopping: sandboxes and replies in flight are being ended", file=sys.stderr)
        task.cancel()
        with heartbeat("stopping"):
            await asyncio.wait([task])
    task.result()
