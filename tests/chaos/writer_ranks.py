"""Two ranks' slots for a writer under test: a small replicated model whose buffer differs by rank."""

from __future__ import annotations

import torch
from torch import nn

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.slots import SlotFile


class Ranks:
    """Slots of two ranks; `capture` seals a step in them."""

    def __init__(self) -> None:
        self.models = [nn.BatchNorm1d(64) for _ in range(2)]
        for rank, model in enumerate(self.models):
            assert model.running_mean is not None
            model.running_mean += rank
        self.capturers = [Capturer({"model": model}) for model in self.models]
        self.slots = [SlotFile.create(1 << 14, 1 << 16, name="nvrx-test") for _ in range(2)]

    def capture(self, step: int, slot: int, generation: int = 1) -> None:
        """Seal `step` on both ranks."""
        for capturer, slots in zip(self.capturers, self.slots, strict=True):
            capturer.capture(slots, slot, generation=generation, step=step, durable=True, now_mono_ns=1)

    def poison(self) -> None:
        """Not-a-number in a trained parameter of rank 1."""
        with torch.no_grad():
            self.models[1].weight[5] = float("nan")

    def close(self) -> None:
        """Unmap and close."""
        for slots in self.slots:
            slots.close()
