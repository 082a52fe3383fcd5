"""The first code of a worker: how a script that ends by itself is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.session import bootstrap


@pytest.mark.parametrize(
    ("argument", "code", "said"),
    [("", 0, ""), ("3", 3, ""), ("'error: no data at /data'", 1, "error: no data at /data\n")],
    ids=["nothing", "code", "text"],
)
def test_what_a_script_says_at_its_exit_is_in_its_log(
    argument: str,
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter prints the text of `sys.exit(text)` at its own end, which a worker does not come to."""
    unused: Any = None
    for name in ("connect", "survive_a_full_disk", "watch_rank_variables"):
        monkeypatch.setattr(bootstrap, name, lambda *_: None)
    monkeypatch.setattr(bootstrap.sys, "argv", [])
    monkeypatch.setattr(bootstrap.sys, "path", list(bootstrap.sys.path))

    class Silent:
        def listen(self) -> None:
            pass

    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.exit({argument})\n")
    stacks: Any = Silent()
    assert bootstrap.main([str(script)], unused, unused, stacks) == code
    assert capsys.readouterr().err == said
