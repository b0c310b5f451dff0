"""Containers that are started ahead of time, so that no episode waits for one."""

from __future__ import annotations

import atexit
import threading
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import suppress

from flatlab.errors import SandboxFault
from flatlab.sandbox.sandbox import Sandbox


class WarmPool:
    """Queues of starting or started sandboxes, one per set of options. Each is used once."""

    IDLE = 30.0  # seconds without a `take` after which unused sandboxes are closed
    AHEAD = 2  # sandboxes per set of options, unless `expect` asks for more

    def __init__(self, make=Sandbox):
        self.make = make
        self.lock = threading.Lock()
        self.options: dict[str, tuple[str, dict]] = {}  # key -> (backend, options)
        self.queues: dict[str, deque[Future]] = {}
        self.taken: Counter[str] = Counter()  # since the last `expect`
        self.timer: threading.Timer | None = None
        atexit.register(self.close)

    def take(self, backend: str, env: dict[str, str], **options) -> Sandbox:
        """A sandbox with these options and environment variables. Raises SandboxFault."""
        key = repr((backend, sorted(options.items())))
        with self.lock:
            self.options[key] = (backend, options)
            queue = self.queues.setdefault(key, deque())
            self.taken[key] += 1
            waiting = queue.popleft() if queue else None
            self._fill(key, self.AHEAD)
            self._restart_timer(self.IDLE)
        if waiting:
            with suppress(SandboxFault):  # it did not start, or has died since
                box = waiting.result()
                try:
                    box.call("configure", env=env)
                    return box
                except SandboxFault:
                    box.close()
        return self.make(backend, env=env, **options)

    def expect(self, count: int, seconds: float = 600.0) -> None:
        """Starts `count` sandboxes now, which are taken within that time.

        Their options are those taken since the last call, in proportion.
        """
        with self.lock:
            taken, self.taken = self.taken, Counter()
            total = taken.total()
            for key, times in taken.items():
                share = min(-(-count * times // total), count)
                self._fill(key, share)
                count -= share
                total -= times
            if taken:
                self._restart_timer(self.IDLE + seconds)

    def close(self) -> None:
        """Ends all sandboxes that nobody has taken, also those that are still starting."""
        with self.lock:
            futures = [future for queue in self.queues.values() for future in queue]
            self.queues.clear()
        for future in futures:
            future.add_done_callback(close_result)

    def _fill(self, key: str, count: int) -> None:
        queue = self.queues.setdefault(key, deque())
        while len(queue) < count:
            future = Future()
            queue.append(future)
            threading.Thread(target=self._start, args=(key, future)).start()

    def _start(self, key: str, future: Future) -> None:
        backend, options = self.options[key]
        try:
            future.set_result(self.make(backend, **options))
        except Exception as error:  # `take` sees it
            future.set_exception(error)

    def _restart_timer(self, seconds: float) -> None:
        if self.timer:
            self.timer.cancel()
        self.timer = threading.Timer(seconds, self.close)
        self.timer.daemon = True
        self.timer.start()


def close_result(future: Future) -> None:
    if not future.exception():
        future.result().close()


WARM_POOL = WarmPool()
