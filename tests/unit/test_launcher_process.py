"""The launcher's ends of a child: what it can say of the child's output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import process

TRACEBACK = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 88, in _run_code
  File "/srv/train.py", line 3, in <module>
    build()
    ^^^^^^^
  File "/srv/model.py", line 12, in build
    raise RuntimeError("no weights")
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("hello\nerror: no data\n\n", "error: no data"),
        (TRACEBACK + "RuntimeError: no weights\n", "RuntimeError: no weights, model.py:12 build"),
        (TRACEBACK + "RuntimeError: missing:\n\tkey a\n\tkey b\n", "RuntimeError: missing:, model.py:12 build"),
        (TRACEBACK + "RuntimeError: caught\ngave up\n", "gave up"),
        ('  File "bad.py", line 3\n    def f(:\n         ^\nSyntaxError: invalid\n', "SyntaxError: invalid, bad.py:3"),
        ("Loading:\n  layer 1\n  layer 2\n", "layer 2"),
        ("  cut off\n  in the middle\n", "in the middle"),
    ],
    ids=["nothing", "print", "error", "lines", "more-said", "syntax", "list", "indented"],
)
def test_a_traceback_at_the_end_is_its_error_and_its_place(text: str, said: str) -> None:
    """Where whoever reads one line would look for it; what was said after an error is not taken for a part of it."""
    assert process.last_said(text) == said


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
