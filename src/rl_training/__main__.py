"""`python -m rl_training` is the command `rl-training`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # `python -m` put the working directory there; the command never imports from it
    from rl_training.cli import main

    sys.exit(main())
