"""`python -m rl_training` is the command `rl-training`."""

from __future__ import annotations

import sys

from rl_training.cli import main

if __name__ == "__main__":
    sys.exit(main())
