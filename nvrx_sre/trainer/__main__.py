"""`python -m nvrx_sre.trainer ARGS`: what a launcher starts as a rank.

Without a launcher (plain Python, or torchrun) it trains all the same and each process prints its results as
one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from nvrx_sre.core.errors import NvrxError
from nvrx_sre.trainer.config import TrainerConfig


def main(argv: Sequence[str]) -> int:
    """Exit code. Errors that a person can act on are one line on standard error."""
    try:
        config = TrainerConfig.from_argv(argv)
        from nvrx_sre.trainer.loop import run  # after the arguments are known to be good: this loads torch

        results = run(config)
    except NvrxError as error:
        sys.stderr.write(f"nvrx-sre: {error}\n")
        return int(error.exit_code)
    if results is not None:
        sys.stdout.write(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
