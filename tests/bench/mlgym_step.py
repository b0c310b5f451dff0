"""Prints the median seconds of MLGymEnv.communicate("true"): MLGym's own class and container.

    python -m bench.mlgym_step CHECKOUT IMAGE      the section `env` runs this in its own process

Packages that MLGym imports and this measurement does not need are replaced by empty ones.
"""

import importlib
import logging
import statistics
import sys
import time
import types

UNUSED = (
    "gymnasium",
    "gymnasium.spaces",
    "simple_parsing",
    "simple_parsing.helpers",
    "simple_parsing.helpers.fields",
    "simple_parsing.helpers.flatten",
    "simple_parsing.helpers.serialization",
    "simple_parsing.helpers.serialization.serializable",
    "dotenv",
    "rich",
    "rich.logging",
)


class Empty(types.ModuleType):
    """A module in which every name is a class."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__new__": lambda cls, *a, **k: object.__new__(cls)})
        setattr(self, name, made)
        return made


def main(checkout, image):
    sys.path.insert(0, checkout)
    for name in UNUSED:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = Empty(name)
    from mlgym.environment import env, utils

    world = env.MLGymEnv.__new__(env.MLGymEnv)
    world.logger = logging.getLogger("mlgym")
    world.returncode = None
    world.bash_path = "/bin/bash"
    name = f"flatlab-bench-{int(time.time())}"
    world.container, _ = utils._get_non_persistent_container(name, image, "docker", [], ["cpu_0"])
    took = []
    try:
        for _ in range(21):
            begin = time.perf_counter()
            world.communicate("true", set_last_action=True)
            took.append(time.perf_counter() - begin)
    finally:
        world.container.stdin.close()
        world.container.wait(20)
    print(statistics.median(took[1:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
