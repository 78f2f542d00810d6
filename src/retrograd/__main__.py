"""`python -m retrograd`."""

import os
import sys

from retrograd.cli import main

if __name__ == "__main__":
    # `python -m` puts the current folder first on the path: a file there that is called
    # matplotlib.py would run in place of matplotlib.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
