"""Memory of optimizer state goes from one generation to the next, unless somebody still holds it."""

from __future__ import annotations

import gc
import mmap
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nvrx_sre.checkpoint.capture import Capturer
from nvrx_sre.checkpoint.restore import HotCandidate
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.spare import KEPT_BYTES_MIN, Spare

WIDTH = 256
SIZE_BYTES = WIDTH * WIDTH * 4
assert SIZE_BYTES >= KEPT_BYTES_MIN


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """As in a restore."""
    with torch.no_grad():
        yield


def generation() -> tuple[nn.Linear, torch.optim.AdamW]:
    """A model and its optimizer after one step; state of two big moments, and of small ones."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def moments(model: nn.Linear, optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    """The big ones."""
    return [optimizer.state[model.weight][key] for key in ("exp_avg", "exp_avg_sq")]


def test_a_restore_fills_the_memory_of_the_generation_before() -> None:
    """Twice in a row: the second generation's moments were made by a restore, and are kept as well."""
    spare = Spare()
    model, optimizer = generation()
    tracked = {"model": model, "optimizer": optimizer}
    capturer = Capturer(tracked)
    capturer.refresh()
    slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
    capturer.capture(slots, 0, generation=1, step=1, durable=False, now_mono_ns=1)
    expected = [moment.clone() for moment in moments(model, optimizer)]
    before = {moment.data_ptr() for moment in moments(model, optimizer)}
    layout_hash = capturer.layout_hash
    del capturer
    for _ in range(2):
        spare.keep(tracked)
        del model, optimizer, tracked
        gc.collect()
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters())
        tracked = {"model": model, "optimizer": optimizer}
        candidate = HotCandidate(slots, 0, 1, layout_hash, tracked, spare)
        candidate.check()
        candidate.load()
        spare.release()
        del candidate
        restored = moments(model, optimizer)
        assert {moment.data_ptr() for moment in restored} == before
        assert all(torch.equal(*pair) for pair in zip(restored, expected, strict=True))
        del restored
    slots.close()


def test_a_new_process_has_the_memory_before_it_restores() -> None:
    """Fetched from what the newest slot says of optimizer state; the restore fills it without one page to wait for."""
    torch.manual_seed(0)
    model = nn.Linear(2048, 2048)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    capturer = Capturer({"model": model, "optimizer": optimizer})
    capturer.refresh()
    slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
    capturer.capture(slots, 0, generation=1, step=1, durable=False, now_mono_ns=1)
    expected = [moment.clone() for moment in moments(model, optimizer)]
    other, spare = nn.Linear(2048, 2048), Spare()
    restored = torch.optim.AdamW(other.parameters())
    tracked = {"model": other, "optimizer": restored}
    spare.fetch_ahead(slots)
    spare.settle()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    candidate = HotCandidate(slots, 0, 1, capturer.layout_hash, tracked, spare)
    candidate.check()
    candidate.load()
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    spare.release()
    assert all(torch.equal(*pair) for pair in zip(moments(other, restored), expected, strict=True))
    assert num_faults < sum(moment.nbytes for moment in expected) / mmap.PAGESIZE / 10
    slots.close()


@pytest.mark.parametrize("what", ["nothing sealed", "no slots", "another text"])
def test_memory_is_only_fetched_for_what_a_slot_says(what: str) -> None:
    """Without a state, or with one that cannot be read, the restore gets its memory itself."""
    model, optimizer = generation()
    capturer = Capturer({"model": model, "optimizer": optimizer})
    capturer.refresh()
    slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
    if what == "another text":
        capturer.capture(slots, 0, generation=1, step=1, durable=False, now_mono_ns=1)
        slots.blob(0)[:9] = b'{"layout{'
    spare = Spare()
    spare.fetch_ahead(None if what == "no slots" else slots)
    tensor = torch.empty(WIDTH, WIDTH)
    own = tensor.data_ptr()
    spare.provide(tensor)
    assert tensor.data_ptr() == own
    slots.close()


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[3:4],
    "array": lambda tensor: tensor.numpy()[3:4],
    "storage": lambda tensor: tensor.untyped_storage(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_still_holds_is_not_handed_out(holder: str) -> None:
    """Whatever the old generation leaked: writing to it later changes nothing of the new one."""
    spare = Spare()
    model, optimizer = generation()
    leaked = optimizer.state[model.weight]["exp_avg"]
    address = leaked.data_ptr()
    spare.keep({"model": model, "optimizer": optimizer})
    held = HOLDERS[holder](leaked)
    del leaked, model, optimizer
    gc.collect()
    made = [torch.empty(WIDTH, WIDTH) for _ in range(2)]
    for tensor in made:
        spare.provide(tensor)
    assert address not in [tensor.data_ptr() for tensor in made]
    del held


def test_only_memory_of_the_same_size_fits() -> None:
    """Another model's moments get memory of their own, and what is left over is given up."""
    spare = Spare()
    model, optimizer = generation()
    address = {moment.data_ptr() for moment in moments(model, optimizer)}
    spare.keep({"model": model, "optimizer": optimizer})
    del model, optimizer
    gc.collect()
    other = torch.empty(WIDTH * WIDTH + 1)
    own = other.data_ptr()
    spare.provide(other)
    assert other.data_ptr() == own and own not in address
    spare.release()
    again = torch.empty(WIDTH, WIDTH)
    own = again.data_ptr()
    spare.provide(again)
    assert again.data_ptr() == own


def test_state_over_memory_of_others_is_left_alone(tmp_path: Path) -> None:
    """An array that the user made may be written by whoever has it; so may a shared file by another process."""
    spare = Spare()
    model, optimizer = generation()
    state = optimizer.state[model.weight]
    array, path = np.full((WIDTH, WIDTH), 7, np.float32), tmp_path / "shared"
    path.write_bytes(array.tobytes())
    state["exp_avg"] = torch.from_numpy(array)
    state["exp_avg_sq"] = torch.from_file(str(path), shared=True, size=WIDTH * WIDTH).view(WIDTH, WIDTH)
    spare.keep({"model": model, "optimizer": optimizer})
    del state, model, optimizer
    gc.collect()
    for tensor in [torch.empty(WIDTH, WIDTH) for _ in range(2)]:
        spare.provide(tensor)
        tensor.fill_(1.0)
    assert (array == 7).all() and path.read_bytes() == array.tobytes()


def test_new_memory_is_fetched_before_it_is_filled() -> None:
    """64 MiB that the process never had: all pages are there when the restore comes to fill them."""

    def faults_of(tensor: torch.Tensor) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensor.fill_(1.0)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def new_memory() -> torch.Tensor:  # of the kernel's: malloc may have as much left of somebody else
        private = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(private, dtype=torch.float32)

    untouched, provided = new_memory(), new_memory()
    Spare().provide(provided)
    few, many = faults_of(provided), faults_of(untouched)
    assert many > 1000 and few < many / 10, (few, many)
