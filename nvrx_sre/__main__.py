"""`python -m nvrx_sre`: the same command line as `nvrx-sre`."""

from __future__ import annotations

import sys

from nvrx_sre.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
