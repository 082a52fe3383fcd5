"""Where the traceback of a training function goes."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from nvrx_sre.restart import torch_errors
from nvrx_sre.restart.wrapper import write_to_log


def _caught(error: Exception) -> torch_errors.Description:
    try:
        raise error
    except Exception as caught:
        return torch_errors.describe(caught)


def test_an_error_of_the_script_leaves_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """As Python would have printed it."""
    write_to_log(_caught(KeyError("weights")))
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.endswith("KeyError: 'weights'\n")


def test_a_lost_peer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The frames of a victim would only lead astray."""
    write_to_log(_caught(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("RuntimeError in communication with other ranks: [gloo/")


@pytest.mark.parametrize("why", [OSError(errno.ENOSPC, "full"), ValueError("I/O operation on closed file")])
def test_a_log_that_cannot_be_written_costs_nothing(why: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full, or the script have closed its stderr."""
    refused: list[str] = []

    class Refusing(io.StringIO):
        def write(self, text: str) -> int:
            refused.append(text)
            raise why

    monkeypatch.setattr(sys, "stderr", Refusing())
    write_to_log(_caught(KeyError("weights")))
    assert len(refused) == 1


@pytest.mark.parametrize("said", ["{}", "[gloo/transport/tcp/pair.cc:547] {}"], ids=["own", "of a lost peer"])
def test_no_secret_is_in_what_a_rank_says_of_its_end(
    said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's log, the terminal and an archive of evidence hold it."""
    monkeypatch.setenv("S3_SECRET", "from-the-environment-1")
    text = said.format("from-the-environment-1 refused for mysql://me:from-a-dsn-2@db")
    write_to_log(_caught(RuntimeError(text)))
    printed = capsys.readouterr().err
    assert printed.endswith(said.format("*** refused for mysql://***@db") + "\n")
    assert "from-" not in printed
