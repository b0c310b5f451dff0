"""CPU threads of the engine and the trainer; `configure` must run before torch is imported.

PyTorch and vLLM share one OpenMP library, torch's libgomp, which reads the environment when it is
loaded. By default its threads spin while they wait for work. If the cores are shared with another
process, spinning threads keep others from the work they wait for, and a run becomes many times
slower. With the passive policy a waiting thread sleeps.
"""

import os

from flatlab.errors import UserError
from flatlab.files import user_home


def whole_number(name: str, default: int, low: int = 1) -> int:
    """The value of an environment variable, the first one of a list; `default` without one.

    Raises UserError if it is no whole number from `low` to 65535.
    """
    text = os.environ.get(name, "").partition(",")[0].strip()
    if not text:
        return default
    if not text.isdecimal() or not low <= int(text[:9]) <= 65535:
        raise UserError(f"{name} must be a whole number from {low} to 65535, not {text[:20]!r}.")
    return int(text)


def configure() -> None:
    """Sets the environment variables of OpenMP, of torch's C++ log, of its memory on a GPU and of
    the home directory, unless the user has. Raises UserError for a wrong number of threads.
    """
    import joblib

    # It counts the cores that the affinity mask and the quota of the control group leave.
    os.environ["OMP_NUM_THREADS"] = str(whole_number("OMP_NUM_THREADS", joblib.cpu_count()))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    whole_number("LOCAL_RANK", 0, low=0)  # vLLM reads it, too, and stops at an empty one
    if os.environ.get("LOCAL_RANK") == "":
        del os.environ["LOCAL_RANK"]
    # Without a home directory vLLM would make a folder called ~.
    os.environ.setdefault("HOME", str(user_home()))
    # Micro-batches differ in length; without this, memory of a GPU is lost between them.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # vLLM's CPU engine prints where it binds memory as a C++ warning.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def use_all(reserve: int = 0) -> None:
    """Uses OMP_NUM_THREADS - reserve threads, at least one.

    PyTorch gives a thread, at its first use, the number that any thread has set last.
    """
    import torch

    torch.get_num_threads()
    torch._C.set_num_threads(max(1, int(os.environ["OMP_NUM_THREADS"]) - reserve))
