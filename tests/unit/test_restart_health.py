"""The probe after a teardown: which process may go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nvrx_sre.restart.health import DeviceMemory, process_fitness

STICKY = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in https://...\n"


class Cuda:
    """A device whose calls are recorded, and fail from the named one on as after a sticky error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails_at: str = "", computes: float = 1024.0) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at
        self._computes = computes
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
        monkeypatch.setattr("torch.cuda.synchronize", self._called("synchronize"))
        monkeypatch.setattr("torch.cuda.empty_cache", self._called("empty_cache"))
        monkeypatch.setattr("torch.ones", self._ones(torch.full))

    def _called(self, name: str) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            if name == self._fails_at:
                raise RuntimeError(STICKY)

        return call

    def _ones(self, full: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def ones(size: int, device: str) -> torch.Tensor:
            assert device == "cuda"
            self._called("probe")()
            return full((size,), self._computes / size)

        return ones


def test_a_process_without_cuda_is_fit() -> None:
    """Nothing to probe."""
    assert process_fitness() == process_fitness(empties_cache=True) == ""


@pytest.mark.parametrize(
    ("reserved", "grown"),
    [
        ((100, 109, 110, 111, 100, 109), (False, False, False, True, False, False)),
        ((0, 100, 100, 100), (False, True, False, False)),
    ],
    ids=["slowly", "after a generation that had nothing"],
)
def test_memory_that_torch_keeps_is_given_back_once_it_has_grown(
    reserved: tuple[int, ...], grown: tuple[bool, ...]
) -> None:
    """By more than a tenth of a generation that began with an empty cache, and not at each restart from then on."""
    memory = DeviceMemory()
    assert tuple(memory.is_above(num_bytes) for num_bytes in reserved) == grown


@pytest.mark.parametrize("fails_at", ["synchronize", "probe"])
def test_a_lost_context_makes_the_process_unfit(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call finds it; the reason is one line."""
    Cuda(monkeypatch, fails_at=fails_at)
    assert process_fitness() == "device probe failed: CUDA error: an illegal memory access was encountered"


def test_a_device_that_computes_wrongly_makes_the_process_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is not enough: it must be the right one."""
    Cuda(monkeypatch, computes=512.0)
    assert process_fitness() == "device probe computed 512.0 instead of 1024"


def test_the_cache_is_emptied_after_an_out_of_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of the old work and the probe; after any other fault the memory is kept for what comes."""
    cuda = Cuda(monkeypatch)
    assert process_fitness() == ""
    assert cuda.calls == ["synchronize", "probe"]
    cuda.calls.clear()
    assert process_fitness(empties_cache=True) == ""
    assert cuda.calls == ["synchronize", "empty_cache", "probe"]
