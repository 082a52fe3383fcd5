"""The redactor: secrets by form and by value, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.core.masking import MASK
from nvrx_sre.events.schema import Record, RunFinished, SaveFailed, SaveFailure, Tier
from nvrx_sre.telemetry.redact import Redactor, blanked
from tests.stories import exception_story


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("DB_PASSWORD=hunter22 python train.py", "hunter22"),
        ("api_key: 'abc def'", "abc def"),
        ("train.py --hf-token hf123456 --steps 5", "hf123456"),
        ("--wandb-api-key=local-0123", "local-0123"),
        ("Authorization: Bearer eyJhbGciOi.abc-def", "eyJhbGciOi.abc-def"),
        ("https://user:pa55word@host/path", "pa55word"),
        ("key AKIAIOSFODNN7EXAMPLE found", "AKIAIOSFODNN7EXAMPLE"),
        ("token ghp_0123456789abcdefghij0123", "ghp_0123456789abcdefghij0123"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----", "MIIE"),
        ('{"secret": "s3cr3t-value"}', "s3cr3t-value"),
    ],
)
def test_secrets_are_masked_by_their_form(text: str, secret: str) -> None:
    """Whatever stands where a secret stands is masked."""
    masked = Redactor().text(text)
    assert secret not in masked
    assert MASK in masked


@pytest.mark.parametrize(
    "text",
    [
        "step 7: loss 1.25, 4096 tokens/s",
        "RuntimeError: tensor size mismatch at non-singleton dimension 0",
        'File "train.py", line 7, in train',
        "--steps 300 --model tiny",
        "http://127.0.0.1:9100/metrics",
    ],
)
def test_harmless_text_is_left_alone(text: str) -> None:
    """A log that masks everything is no log."""
    assert Redactor().text(text) == text


def test_values_of_secret_variables_are_masked_wherever_they_stand() -> None:
    """Also in a stack that does not name the variable; short values are left alone."""
    redactor = Redactor.from_environment({"WANDB_API_KEY": "verysecret1", "HOME": "/home/me", "MY_TOKEN": "1"})
    assert redactor.text("connect(verysecret1) from /home/me step 1") == f"connect({MASK}) from /home/me step 1"


def test_environment_and_argv_are_masked() -> None:
    """Names decide in an environment, the flag before a value in a command line."""
    redactor = Redactor()
    assert redactor.environment({"HF_TOKEN": "x", "LANG": "C"}) == {"HF_TOKEN": MASK, "LANG": "C"}
    masked = redactor.argv(["train.py", "--password", "x y", "--steps", "5", "--api-key=zzz"])
    assert masked == ["train.py", "--password", MASK, "--steps", "5", f"--api-key={MASK}"]


def test_records_are_masked_in_their_free_texts() -> None:
    """Messages and results; a record without secrets is the same object."""
    records = exception_story().records
    assert all(Redactor().record(record) is record for record in records)
    finished = next(record for record in records if isinstance(record.event, RunFinished))
    redactor = Redactor(["aa-digest-like-secret"])
    secret = RunFinished(exit_code=0, reason="pass aa-digest-like-secret", step=1, result={"api_token": "x", "n": 5})
    masked = redactor.record(type(finished)(**{**vars(finished), "event": secret})).event
    assert isinstance(masked, RunFinished)
    assert masked.reason == f"pass {MASK}"
    assert masked.result == {"api_token": MASK, "n": 5}


@given(st.text(max_size=300))
def test_any_text_can_be_redacted_twice_with_one_result(text: str) -> None:
    """Never fails, and masking the masked changes nothing more."""
    once = Redactor().text(text)
    assert Redactor().text(once) == once


def test_what_cannot_be_redacted_loses_its_text() -> None:
    """A failing redactor must not let a secret through: free text goes, closed sets and numbers stay."""
    event = SaveFailed(step=3, tier=Tier.DURABLE, reason=SaveFailure.STORAGE, message="token=hunter2")
    record = Record(run="r", epoch=1, generation=2, rank=None, seq=3, time_ns=4, event=event)
    assert blanked(record) == dataclasses.replace(record, event=dataclasses.replace(event, message=""))


@pytest.mark.parametrize("part", ["a-", "-", "a.", "a://b:", "-token ", "password "])
def test_a_long_word_is_no_problem(part: str) -> None:
    """It costs no square of its length: 100 kB of it would take a quarter of an hour."""
    text = part * (100_000 // len(part))
    assert len(Redactor().text(text)) <= len(text)
