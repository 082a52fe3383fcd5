"""The launcher's ends of a child: what it can say of the child's output."""

from __future__ import annotations

import os
from pathlib import Path

from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import process


def test_the_last_line_is_not_that_of_an_earlier_launchers_child(tmp_path: Path) -> None:
    """A second launcher of a run appends to a log of the same name: a child that printed nothing said nothing."""
    log = tmp_path / "rank-00000-attempt-0000-1.log"
    log.write_text("ValueError: since fixed\n")
    child, theirs, output = process.prepare(1, Role.WORKER, log)
    before = child.last_line()
    os.write(output, b"Killed\n")
    after = child.last_line()
    for end in (child, theirs):
        end.close()
    os.close(output)
    assert (before, after) == ("", "Killed")
