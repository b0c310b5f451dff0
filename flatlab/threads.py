"""CPU threads of the engine and the trainer; `configure` must run before torch is imported.

PyTorch and vLLM share one OpenMP library, torch's libgomp. It reads its settings from the
environment when it is loaded. By default a thread that waits for work spins for several
milliseconds. If two runs share the cores, the spinning threads of one take the time of the other.
"""

import os

# Iterations of the waiting loop before a thread sleeps; libgomp's default is 300,000.
SPIN_COUNT = 10_000


def available_cores() -> int:
    """Number of CPU cores this process may use: its affinity mask and its control group's quota."""
    import joblib

    return joblib.cpu_count()


def configure() -> None:
    """Sets the environment variables of OpenMP and of torch's C++ log, unless the user has."""
    os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    # vLLM's CPU engine prints where it binds memory as a C++ warning.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
