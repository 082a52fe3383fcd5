"""The launcher's ends of a child: what it can say of the child's output."""

from __future__ import annotations

import os
from pathlib import Path

from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import process


def test_the_last_line_is_the_childs_own(tmp_path: Path) -> None:
    """A child that printed nothing said nothing; then it is the last line that is not empty."""
    log = tmp_path / "rank-00000-epoch-0001-attempt-0000-1.log"
    child, theirs, output = process.prepare(1, Role.WORKER, log)
    before = child.last_line()
    os.write(output, b"one\nKilled\n\n")
    after = child.last_line()
    for end in (child, theirs):
        end.close()
    os.close(output)
    assert (before, after) == ("", "Killed")
