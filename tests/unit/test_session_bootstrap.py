"""The first code of a worker: how a script that ends by itself is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.session import bootstrap
from nvrx_sre.session.environment import rank_variable_read, stop_watching_rank_variables, watch_rank_variables


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
    assert _ended(tmp_path, f"import sys\nsys.exit({argument})\n", monkeypatch) == code
    assert capsys.readouterr().err == said


def _ended(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of a worker with that script."""
    unused: Any = None
    for name in ("connect", "mask_errors_of_threads", "survive_a_full_disk", "watch_rank_variables"):
        monkeypatch.setattr(bootstrap, name, lambda *_: None)
    monkeypatch.setattr(bootstrap.sys, "argv", [])
    monkeypatch.setattr(bootstrap.sys, "path", list(bootstrap.sys.path))

    class Silent:
        def listen(self) -> None:
            pass

    script = tmp_path / "script.py"
    script.write_text(text)
    stacks: Any = Silent()
    return bootstrap.main([str(script)], unused, unused, stacks)


SECRET = "from-the-environment-1"


@pytest.mark.parametrize(
    "raised",
    [
        "SystemExit({})",
        "UserError({})",
        "ImportError({})",
        "ValueError({})",
        "KeyboardInterrupt({})",
    ],
)
def test_no_secret_is_in_what_is_said_of_a_script_that_fails(
    raised: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, and outside, the decorated function as well."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    error = raised.format('f"no data for {os.environ[name]} at s3://me:from-a-dsn-2@bucket"')
    script = f"import os\nfrom nvrx_sre.core.errors import UserError\nname = 'HF_' + 'TOKEN'\nraise {error}\n"
    assert _ended(tmp_path, script, monkeypatch) != 0
    said = capsys.readouterr().err
    assert "no data for *** at s3://***@bucket" in said
    assert SECRET not in said


def test_masking_reads_no_variable_of_a_rank_that_is_not_known_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby's script that reads its rank too early is told; what we read for ourselves is not its doing."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("RANK", "0")
    watch_rank_variables()
    try:
        assert _ended(tmp_path, "raise ValueError(1)\n", monkeypatch) == 1
        assert rank_variable_read() == ""
    finally:
        stop_watching_rank_variables()
    assert capsys.readouterr().err.endswith("ValueError: 1\n")
