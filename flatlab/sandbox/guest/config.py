"""What the host tells the program in a sandbox. Both sides use it: Python 3.8, no slow imports."""

from collections import namedtuple

GRACE = 2  # seconds between SIGTERM and SIGKILL
Config = namedtuple(
    "Config",
    [
        "isolation",  # "docker", "namespaces" or "landlock", see isolate.py
        "workspace",  # where commands start; its parent is the home of the agent
        "tools",  # folder of `programs`, first in PATH
        "programs",  # name -> shell script
        "env",  # environment variables of commands
        "limits",  # name of an RLIMIT without the prefix -> number
        "path",  # PATH behind `tools`; empty: the one that this program was started with
        "uid",  # user of the commands; docker: found in the image
        "gid",
        "disk",  # bytes of each tmpfs (namespaces)
        "network",  # whether this machine's network is left open (local sandboxes)
        "view",  # [path, real path] pairs to show read-only; an empty real path hides (local)
        "hidden_data",  # folders of Python packages to empty at the start (docker)
        "copies",  # [source, target] folders: targets get links to the files of the source
    ],
    defaults=["", 1000, 1000, 0, False, (), (), ()],
)
