"""A writer without a fork server: python -m tests.integration.lone_writer RUN_DIR RUN [options], on a given channel."""

from __future__ import annotations

import os
import sys

from nvrx_sre.checkpoint import writer
from nvrx_sre.events.settings import ChildSettings
from nvrx_sre.session.environment import take_channel

if __name__ == "__main__":
    settings = ChildSettings.from_environment(os.environ)
    assert settings is not None
    code = writer.main(sys.argv[1:], settings, take_channel())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
