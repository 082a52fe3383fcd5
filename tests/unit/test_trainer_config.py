"""Trainer configuration: validation, command line, identity, learning rate."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.core.errors import ExitCode, UsageError, UserError
from nvrx_sre.trainer.config import MODELS, TrainerConfig

configs = st.builds(
    TrainerConfig,
    steps=st.integers(0, 10**6),
    data=st.sampled_from([None, Path("/")]),
    model=st.sampled_from(list(MODELS)),
    seed=st.integers(0, 2**63),
    grad_accum=st.integers(1, 64),
    batch_size=st.integers(1, 4096),
    seq_len=st.integers(2, 8192),
    learning_rate=st.none() | st.floats(1e-9, 10),
    warmup_steps=st.integers(0, 10**4),
    decay_steps=st.integers(1, 10**6),
    evaluate_every=st.integers(0, 1000),
)


@given(configs)
def test_command_line_and_configuration_are_inverse(config: TrainerConfig) -> None:
    """What the launcher passes on is what the rank gets, every field of it."""
    assert TrainerConfig.from_argv(config.to_argv()) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": -1}, ["--steps is -1", "use 0 or more"]),
        ({"grad_accum": 0}, ["--grad-accum is 0", "use 1 or more"]),
        ({"batch_size": 0}, ["--batch-size is 0"]),
        ({"seq_len": 1}, ["--seq-len is 1", "use 2 or more"]),
        ({"seed": -1}, ["--seed is -1"]),
        ({"steps": 2.5}, ["--steps is 2.5", "whole number"]),
        ({"steps": True}, ["--steps is True", "whole number"]),
        ({"model": "tyny"}, ["'tyny'", "did you mean 'tiny'?", "small"]),
        ({"model": "vast"}, ["'vast'", "known are tiny"]),
        ({"learning_rate": 0.0}, ["--learning-rate is 0.0"]),
        ({"learning_rate": float("nan")}, ["--learning-rate is nan"]),
        ({"data": Path("/no/such/text")}, ["/no/such/text", "no such file or folder"]),
    ],
)
def test_bad_values_are_one_clear_line(values: dict[str, Any], words: list[str]) -> None:
    """A configuration that cannot work never comes into being; the message names the flag and what would work."""
    with pytest.raises(UserError) as raised:
        TrainerConfig(**values)
    assert raised.value.exit_code == ExitCode.CONFIG
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("argv", [["--bogus"], ["--steps", "many"], ["--steps"], ["--step", "3"], ["stray"]])
def test_an_unreadable_command_line_exits_2(argv: list[str]) -> None:
    """Unknown and abbreviated flags and values of the wrong type are usage errors."""
    with pytest.raises(UsageError) as raised:
        TrainerConfig.from_argv(argv)
    assert raised.value.exit_code == ExitCode.USAGE


def test_unknown_names_of_a_file_are_errors() -> None:
    """A typing error in a configuration file is not ignored; None keeps the default."""
    assert TrainerConfig.from_mapping({"steps": 7, "data": None}) == TrainerConfig(steps=7)
    with pytest.raises(UserError, match="unknown trainer option 'step'"):
        TrainerConfig.from_mapping({"step": 7})


def test_ranks_must_share_a_micro_batch() -> None:
    """Every rank needs at least one sample."""
    TrainerConfig(batch_size=4).check_world(4)
    with pytest.raises(UserError, match="at least the number of ranks, 5"):
        TrainerConfig(batch_size=4).check_world(5)


def test_identity_holds_what_changes_a_step_and_not_the_length(tmp_path: Path) -> None:
    """A run may be extended or evaluated more often; another model, seed or text is another run."""
    text = tmp_path / "text"
    text.write_bytes(b"some text " * 100)
    base = TrainerConfig(data=text)
    for same in ({"steps": 900}, {"evaluate_every": 5}, {"learning_rate": base.peak_learning_rate}):
        assert dataclasses.replace(base, **same).config_items() == base.config_items()
    different: list[dict[str, Any]] = [
        {"model": "small"},
        {"seed": 1},
        {"grad_accum": 2},
        {"batch_size": 16},
        {"seq_len": 32},
        {"learning_rate": 1.0},
        {"warmup_steps": 1},
        {"decay_steps": 9},
    ]
    for values in different:
        assert dataclasses.replace(base, **values).config_items() != base.config_items(), values
    other = tmp_path / "other"
    other.write_bytes(b"more text " * 100)
    assert dataclasses.replace(base, data=other).config_items() != base.config_items()
    copy = tmp_path / "copy"
    copy.write_bytes(text.read_bytes())
    assert dataclasses.replace(base, data=copy).config_items() == base.config_items()


def test_identity_of_unusable_data_is_refused(tmp_path: Path) -> None:
    """Empty or too short data is found before anything starts."""
    text = tmp_path / "text"
    text.write_bytes(b"")
    with pytest.raises(UserError, match="holds no text"):
        TrainerConfig(data=text).config_items()
    short = tmp_path / "short"
    short.write_bytes(b"x" * 64)
    with pytest.raises(UserError, match="has 64 bytes: --seq-len 64 needs at least 65"):
        TrainerConfig(data=short).config_items()


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    """Linear from zero, peak at the end of the warm-up, a tenth from `decay_steps` on, never rising after the peak."""
    config = TrainerConfig(learning_rate=1.0, warmup_steps=10, decay_steps=100)
    rates = [config.learning_rate_at(step) for step in range(1, 201)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[99:] == pytest.approx([0.1] * 101)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[9:]))
    assert TrainerConfig(learning_rate=1.0, warmup_steps=0).learning_rate_at(1) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", list(MODELS))
def test_shapes_fit_rotary_heads(name: str) -> None:
    """Heads divide the width, and rotary positions need an even head."""
    shape = MODELS[name]
    assert shape.dim % (2 * shape.num_heads) == 0
