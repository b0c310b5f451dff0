"""Containers that are started ahead of time."""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress

from flatlab.errors import SandboxFault
from flatlab.sandbox.sandbox import Sandbox


class Spares:
    """Sandboxes that are started ahead, so that nobody waits for a container. Each is used once, or closed when idle."""

    IDLE, MOST = (
        30.0,
        4,
    )  # seconds; so many of a kind, and only as many as takers came at once (but see expect)

    def __init__(self):
        self.lock = threading.Lock()
        self.ready: dict[str, list[Sandbox]] = {}
        self.coming: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.takes: dict[str, tuple] = {}  # since the last `expect`: (how many, make, options)
        self.taken, self.timer, self.round = (
            0.0,
            None,
            0,
        )  # round: of those that a `close` ends together
        atexit.register(self.close)

    def take(self, make, env: dict[str, str], **options) -> Sandbox:
        """make("docker", **options), with this added to its environment. Raises SandboxFault."""
        key = repr((make, sorted(options.items())))
        with self.lock:
            self.taken, boxes = time.monotonic(), self.ready.setdefault(key, [])
            self.takes[key] = self.takes.get(key, (0,))[0] + 1, make, options
            box = boxes.pop(0) if boxes else None
            if not box:
                self.wanted[key] = min(self.MOST, self.wanted.get(key, 0) + 1)
            self._start_more(key, make, options)
        while box:
            with suppress(SandboxFault):  # it may have died meanwhile
                box.call("configure", env=env)
                return box
            box.close()
            with self.lock:
                box = self.ready[key].pop(0) if self.ready[key] else None
        return make("docker", env=env, **options)

    def expect(self, most: int, seconds: float = 600.0) -> None:
        """Starts `most` now, of the kinds that were taken since the last call, in proportion. Within that time somebody
        takes them."""
        with self.lock:
            taken, self.takes = self.takes, {}
            total = sum(count for count, _, _ in taken.values())
            self.taken = time.monotonic() + seconds * bool(taken)
            for key, (count, make, options) in taken.items():
                share = min(-(-most * count // total), most)
                self._start_more(key, make, options, share)
                most, total = most - share, total - count

    def _start_more(self, key: str, make, options: dict, most: int = 0) -> None:
        for _ in range(
            max(most, self.wanted.get(key, 0)) - len(self.ready[key]) - self.coming.get(key, 0)
        ):
            self.coming[key] = self.coming.get(key, 0) + 1
            threading.Thread(target=self._start, args=(key, make, options, self.round)).start()
        if self.timer is None:
            self._arm()

    def _arm(self) -> None:
        self.timer = threading.Timer(self.IDLE, self._look)
        self.timer.daemon = True
        self.timer.start()

    def _start(self, key: str, make, options: dict, number: int) -> None:
        try:
            box = make("docker", **options)
        except SandboxFault:  # whoever needs one will see the reason
            box = None
        with self.lock:
            self.coming[key] -= 1
            late = number != self.round  # the others have been closed meanwhile
            if box and not late:
                self.ready[key].append(box)
        if box and late:
            box.close()

    def _look(self) -> None:
        with self.lock:
            self.timer, idle = None, self.taken < time.monotonic() - self.IDLE
            if not idle:
                self._arm()
        if idle:
            self.close()

    def close(self) -> None:
        """Ends all that nobody has taken."""
        with self.lock:
            boxes = [box for some in self.ready.values() for box in some]
            self.ready, self.wanted, self.round = (
                {key: [] for key in self.ready},
                {},
                self.round + 1,
            )
        for box in boxes:
            box.close()


SPARES = Spares()
