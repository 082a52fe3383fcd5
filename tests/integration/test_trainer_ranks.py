"""The reference trainer under torchrun, without our launcher: what must hold before anything can recover it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
EVALUATED = ("--steps", "8", "--evaluate-every", "8")
DIGESTS = ("loss_digest", "samples_digest", "state_digest")


@functools.cache
def train(nproc: int, *arguments: str) -> dict[str, Any]:
    """Results of a run on `nproc` ranks; all ranks must agree on them. The same question is answered once."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    done = subprocess.run(
        [*launcher, "-m", "nvrx_sre.trainer", "--batch-size", "4", "--seq-len", "32", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == nproc
    assert all(result == results[0] for result in results)
    return dict(results[0])


def test_two_runs_are_equal_bit_for_bit_evaluated_or_not() -> None:
    """Losses, samples and state of two ranks repeat; an evaluation behind the last step changes none of them."""
    first = train(2, "--steps", "8", "--grad-accum", "2")
    second = train(2, "--steps", "8", "--grad-accum", "2", "--evaluate-every", "4")
    assert {name: second[name] for name in DIGESTS} == {name: first[name] for name in DIGESTS}
    assert first["evaluation_loss"] is None
    assert second["evaluation_loss"] < 6


def test_the_world_size_changes_rounding_only() -> None:
    """1, 2 and 3 ranks (parts of 4, 2 + 2 and 1 + 1 + 2 samples) see the same samples and the same loss."""
    results = [train(nproc, *EVALUATED) for nproc in (1, 2, 3)]
    assert len({result["samples_digest"] for result in results}) == 1
    for name in ("final_loss", "evaluation_loss"):
        assert results[1][name] == pytest.approx(results[0][name], abs=1e-4)
        assert results[2][name] == pytest.approx(results[0][name], abs=1e-4)


def test_the_seed_changes_weights_and_order() -> None:
    """Another seed is another run."""
    zero, one = train(1, *EVALUATED), train(1, *EVALUATED, "--seed", "1")
    assert all(zero[name] != one[name] for name in DIGESTS)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--data", "/no/such/text"], 78, "there is no such file or folder"),
        (["--data", os.devnull], 78, "holds no text"),
        (["--model", "tinny"], 78, "did you mean 'tiny'?"),
        (["--steps", "-1"], 78, "use 0 or more"),
        (["--steps", "few"], 2, "invalid int value"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(arguments: list[str], exit_code: int, words: str) -> None:
    """No traceback, nothing trained."""
    done = subprocess.run(
        [sys.executable, "-m", "nvrx_sre.trainer", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == exit_code
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
