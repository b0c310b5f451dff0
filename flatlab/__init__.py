"""Package of the scripts: sandboxes, episodes, training, search trees and run directories."""

import sys
from importlib.util import find_spec

# as a script alone: sandboxes of an ordinary user need no packages
if sys.argv[0].endswith(".py") and not (find_spec("tyro") and find_spec("yaml")):
    print(
        f"{sys.executable} lacks packages: run `source .venv/bin/activate`, or `make setup` first.",
        file=sys.stderr,
    )
    sys.exit(2)
