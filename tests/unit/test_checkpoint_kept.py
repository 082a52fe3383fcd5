"""A state that no slot takes: what is kept of it is what a capture at the boundary would have taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvrx_sre.checkpoint.capture import Capturer, parse_blob, slot_views
from nvrx_sre.checkpoint.kept import COPIED_BYTES_MAX, Kept, _words
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.tracked import fixed_sources
from nvrx_sre.session.loading import follow_loaders


class Training:
    """A model with running statistics, and a shuffled loader in the midst of a pass."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.model.register_buffer("mask", torch.ones(COPIED_BYTES_MAX // 4 + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(32.0).view(8, 4)), batch_size=2, shuffle=True)
        follow_loaders({"loader": loader})
        self.batches = iter(loader)
        self.capturer = Capturer({"model": self.model, "optimizer": self.optimizer, "loader": loader})
        self.slots: SlotFile | None = None
        self.forward().sum().backward()
        self.optimizer.step()

    def forward(self) -> torch.Tensor:
        """Fetch a batch and compute: changes positions, random states and running statistics."""
        (batch,) = next(self.batches)
        output: torch.Tensor = self.model(batch)
        return output

    def captured(self, kept: Kept | None = None) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Tensors and small state that a capture takes now."""
        self.capturer.refresh(kept)
        if self.slots is None:
            self.slots = SlotFile.create(*self.capturer.required_bytes(), num_slots=3, name="nvrx-test")
        self.capturer.capture(self.slots, 0, 1, 1, False, 0)
        header = self.slots.header(0)
        assert header is not None
        layout, state = parse_blob(self.slots, 0, header)
        return {name: view.numpy().tobytes() for name, view in slot_views(self.slots, 0, layout).items()}, state


@pytest.fixture
def training() -> Iterator[Training]:
    """After one step."""
    made = Training()
    yield made
    assert made.slots is not None
    made.slots.close()


def test_a_step_that_was_only_begun_is_no_part_of_what_was_kept(training: Training) -> None:
    """A batch was fetched and went through the model: a capture then is that of the boundary, byte for byte."""
    at_boundary = training.captured()
    training.capturer.keep()
    kept = training.capturer.kept
    training.forward()
    assert not kept.has_changed()
    assert training.captured() != at_boundary
    assert training.captured(kept) == at_boundary


def zero(training: Training) -> None:
    """The parameters, by hand."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()


def fill_mask(training: Training) -> None:
    """A buffer that is too large to be copied."""
    training.model.get_buffer("mask").fill_(2.0)


@pytest.mark.parametrize("change", [zero, fill_mask])
def test_a_change_of_what_was_not_copied_shows(training: Training, change: Callable[[Training], None]) -> None:
    """Whether values were known or not."""
    training.captured()
    training.capturer.keep()
    kept = training.capturer.kept
    change(training)
    assert kept.has_changed()
    kept.keep()
    assert not kept.has_changed()


def test_values_that_were_exchanged_and_put_back_have_not_changed(training: Training) -> None:
    """Known to be so only where they were looked at before."""
    training.captured()
    training.capturer.keep()
    kept, own = training.capturer.kept, {k: v.clone() for k, v in training.model.state_dict().items()}
    for is_known in (False, True):
        kept.keep()
        if is_known:
            kept.know_values()
        zero(training)
        assert kept.has_changed()
        training.model.load_state_dict(own)
        assert kept.has_changed() is not is_known


def test_a_copy_has_the_layout_of_what_it_was_made_of() -> None:
    """Another would have new slots made for the last step: of a tensor that asks for a gradient, the copy does too."""
    capturer = Capturer({"model": nn.Linear(2, 2), "prompt": torch.zeros(4, requires_grad=True)})
    capturer.refresh()
    layout = capturer.layout
    capturer.keep()
    capturer.refresh(capturer.kept)
    assert capturer.layout is layout


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_values_of_each_type_are_known(dtype: torch.dtype) -> None:
    """Also of a part of a larger memory that begins and ends at odd places, and on a device, which adds up words."""
    whole = torch.arange(99).remainder(2).to(dtype)
    model = nn.Module()
    model.register_parameter("odd", nn.Parameter(whole[3:98], requires_grad=False))
    kept = Kept({"model": model}, fixed_sources({"model": model}))
    own = model.odd.detach().clone()
    words = _words(model.odd)
    assert (words.numel(), words.sum(dtype=torch.int64) != 0) == (95 * (2 if dtype.is_complex else 1), True)
    kept.keep()
    kept.know_values()
    with torch.no_grad():
        model.odd.copy_(own.roll(1))
        assert kept.has_changed()
        model.odd.copy_(own)
    assert not kept.has_changed()
