"""Slot files: binary format, sealing, who may overwrite what."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_sre.checkpoint import memory
from nvrx_sre.checkpoint.slots import NUM_SLOTS, PAGE_BYTES, SlotFile, SlotHeader
from nvrx_sre.core.errors import UserError


@pytest.fixture
def slots() -> Iterator[SlotFile]:
    """A small slot file."""
    file = SlotFile.create(10_000, 5_000, name="nvrx-test")
    yield file
    file.close()


def seal(slots: SlotFile, slot: int, step: int, generation: int = 1) -> SlotHeader:
    """Fill and seal `slot` with recognisable bytes."""
    slots.begin(slot, generation, step, False)
    slots.data(slot)[:4] = struct.pack("<I", step)
    header = SlotHeader(
        generation=generation,
        step=step,
        durable=step % 2 == 0,
        sealed_mono_ns=step * 10,
        data_bytes=4,
        blob_bytes=0,
        layout_hash="ab" * 32,
        digest=slots.digest(slot, 4, 0),
    )
    slots.seal(slot, header)
    return header


def test_format_is_the_contract(slots: SlotFile) -> None:
    """Every field lies where docs/reference/contracts.md says, little-endian."""
    header = seal(slots, 1, 6, generation=3)
    slots.sealed_step = 5
    slots.held_slot = 2
    raw = os.pread(slots.fd, 1 << 20, 0)
    assert raw[:8] == b"NVRXHOT1"
    assert struct.unpack_from("<IIQQqq", raw, 8) == (1, 3, 12_288, 8_192, 5, 2)
    assert len(raw) == 4096 + 3 * (4096 + 12_288 + 8_192)
    start = 4096 + 1 * (4096 + 12_288 + 8_192)
    assert struct.unpack_from("<IIQQQQQ", raw, start) == (2, 1, 3, 6, 60, 4, 0)
    assert raw[start + 48 : start + 80] == bytes.fromhex("ab" * 32)
    assert raw[start + 80 : start + 96] == header.digest
    assert struct.unpack_from("<I", raw, start + 96)[0] == zlib.crc32(raw[start : start + 96])
    assert raw[start + 4096 : start + 4100] == struct.pack("<I", 6)


def test_header_round_trip_through_another_mapping(slots: SlotFile) -> None:
    """What one process seals another reads from its own mapping of the descriptor."""
    header = seal(slots, 0, 7)
    other = SlotFile.map(os.dup(slots.fd), 10_000, 5_000)
    assert other.header(0) == header
    assert bytes(other.data(0)[:4]) == struct.pack("<I", 7)
    assert other.digest(0, 4, 0) == header.digest
    other.close()


def test_nothing_is_sealed_at_first(slots: SlotFile) -> None:
    """A new file holds nothing and both control words say so."""
    assert slots.headers() == [None] * NUM_SLOTS
    assert (slots.sealed_step, slots.held_slot) == (-1, -1)


def test_begin_takes_the_old_state_away(slots: SlotFile) -> None:
    """A capture cut short leaves no header, however far the copy came."""
    seal(slots, 0, 7)
    slots.begin(0, 1, 8, False)
    assert slots.header(0) is None


@pytest.mark.parametrize("offset", [0, 4, 8, 16, 24, 32, 40, 48, 80, 96])
def test_header_with_a_flipped_bit_does_not_count(slots: SlotFile, offset: int) -> None:
    """The crc covers every field."""
    seal(slots, 0, 7)
    position = 4096 + offset
    byte = os.pread(slots.fd, 1, position)[0]
    os.pwrite(slots.fd, bytes([byte ^ 1]), position)
    assert slots.header(0) is None


def test_free_slot_prefers_unsealed_then_oldest(slots: SlotFile) -> None:
    """Unsealed first; of the sealed ones below `sealed_step` the oldest."""
    assert slots.free_slot(1) == 0
    seal(slots, 0, 1)
    assert slots.free_slot(2) == 1
    seal(slots, 1, 2)
    seal(slots, 2, 3)
    slots.sealed_step = 3
    assert slots.free_slot(4) == 0


def test_free_slot_never_takes_the_newest_common_or_newer(slots: SlotFile) -> None:
    """While step 5 is the newest sealed everywhere, only what is older may go."""
    for slot, step in enumerate((5, 6, 7)):
        seal(slots, slot, step)
    slots.sealed_step = 5
    assert slots.free_slot(8) is None
    slots.sealed_step = 6
    assert slots.free_slot(8) == 0


def test_free_slot_never_takes_the_held_one(slots: SlotFile) -> None:
    """What the writer reads stays, although it is old."""
    for slot, step in enumerate((5, 6, 7)):
        seal(slots, slot, step)
    slots.sealed_step = 7
    slots.held_slot = 0
    assert slots.free_slot(8) == 1
    slots.begin(0, 1, 8, False)
    assert slots.free_slot(8) == 1


def test_free_slot_takes_an_abandoned_line_after_a_rollback(slots: SlotFile) -> None:
    """Slots of an older generation above the restored step are free; the restored one is not."""
    for slot, step in enumerate((5, 6, 7)):
        seal(slots, slot, step, generation=1)
    slots.sealed_step = 5
    assert slots.free_slot(6, generation=2, restored_step=5) == 1
    seal(slots, 1, 6, generation=2)
    assert slots.free_slot(7, generation=2, restored_step=5) == 2


def test_ranks_with_different_stranded_steps_capture_together_again() -> None:
    """One slot held, one sealed everywhere, in the third another step each: both are free once they are stranded."""
    ranks = [SlotFile.create(PAGE_BYTES, PAGE_BYTES) for _ in range(2)]
    for slots, own_step in zip(ranks, (10, 11), strict=True):
        for slot, step in enumerate((8, 9, own_step)):
            seal(slots, slot, step, generation=1)
        slots.held_slot, slots.sealed_step = 0, 9
        assert slots.free_slot(12, generation=1, restored_step=0) is None
        slots.strand(1, 11)
        assert slots.stranded == (1, 11)
        assert slots.free_slot(12, generation=1, restored_step=0) == 2
        assert slots.free_slot(12, generation=2, restored_step=11) is None, "a stale word frees nothing"
        slots.close()


def test_stale_sealed_step_frees_nothing_below_the_step_taken(slots: SlotFile) -> None:
    """A word from before a rollback does not give away the step that was restored."""
    seal(slots, 0, 98)
    seal(slots, 1, 97)
    seal(slots, 2, 96)
    slots.sealed_step = 100
    assert slots.free_slot(99, generation=2, restored_step=98) == 2
    slots.held_slot = 2
    slots.begin(1, 2, 99, False)
    assert slots.free_slot(99, generation=2, restored_step=98) == 1


@pytest.mark.parametrize("word, free", [(30, 0), (10, None)])
def test_c16_a_due_save_outlives_a_fast_rank_after_a_rollback(slots: SlotFile, word: int, free: int | None) -> None:
    """Back at 10, two steps ahead of the launcher: with the word of before, 30, the due save of 11 would be lost."""
    slots.sealed_step = word
    for slot, step in enumerate((11, 12, 13)):
        seal(slots, slot, step, generation=2)
    assert slots.free_slot(14, generation=2, restored_step=10) == free


def test_map_refuses_other_sizes(slots: SlotFile) -> None:
    """A descriptor that is not what was announced is refused before anything is read."""
    with pytest.raises(UserError, match="announced"):
        SlotFile.map(slots.fd, 100_000, 5_000)
    wrong = os.memfd_create("nvrx-test")
    os.ftruncate(wrong, os.fstat(slots.fd).st_size)
    with pytest.raises(UserError, match="not a slot file"):
        SlotFile.map(wrong, 10_000, 5_000)
    os.close(wrong)


def test_close_while_a_view_is_alive(slots: SlotFile) -> None:
    """Closing twice and under a live view is harmless; the view keeps its bytes."""
    mapped = SlotFile.map(os.dup(slots.fd), 10_000, 5_000)
    view = mapped.data(0)
    view[:1] = b"x"
    mapped.close()
    mapped.close()
    assert bytes(view[:1]) == b"x"


def _machine(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_room_is_refused_above_80_percent_of_a_v2_limit(tmp_path: Path) -> None:
    """cgroup v2: use without page cache plus the wish must stay below 80 % of the limit, of a parent as well."""
    _machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/run\n",
            "proc/meminfo": "MemAvailable: 99999999 kB\n",
            "cg/pod/run/memory.max": "max\n",
            "cg/pod/run/memory.current": "500\n",
            "cg/pod/memory.max": "1000\n",
            "cg/pod/memory.current": "500\n",
            "cg/pod/memory.stat": "inactive_file 100\nactive_file 0\n",
        },
    )
    memory.check_room(400, proc=tmp_path / "proc", cgroups=tmp_path / "cg")
    with pytest.raises(UserError, match="80 %"):
        memory.check_room(401, proc=tmp_path / "proc", cgroups=tmp_path / "cg")


def test_room_is_refused_above_80_percent_of_a_v1_limit(tmp_path: Path) -> None:
    """cgroup v1: the same from the memory controller's files; its 'no limit' number is none."""
    _machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/pod\n",
            "cg/memory/pod/memory.limit_in_bytes": "1000\n",
            "cg/memory/pod/memory.usage_in_bytes": "700\n",
            "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    memory.check_room(100, proc=tmp_path / "proc", cgroups=tmp_path / "cg")
    with pytest.raises(UserError, match="--hot-every 0"):
        memory.check_room(101, proc=tmp_path / "proc", cgroups=tmp_path / "cg")


def test_room_is_refused_beyond_the_hosts_free_memory(tmp_path: Path) -> None:
    """Without cgroup limits the host's available memory is the bound; no information refuses nothing."""
    _machine(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1 kB\n"})
    memory.check_room(1024, proc=tmp_path / "proc", cgroups=tmp_path / "cg")
    with pytest.raises(UserError, match="available"):
        memory.check_room(1025, proc=tmp_path / "proc", cgroups=tmp_path / "cg")
    memory.check_room(1 << 50, proc=tmp_path / "nothing", cgroups=tmp_path / "cg")


def test_room_is_asked_for_all_ranks_before_the_first_has_its_slots() -> None:
    """One rank's slots would fit, those of all do not: refused before any memory is touched."""
    with pytest.raises(UserError, match="hot checkpoint slots need"):
        SlotFile.create(4096, 4096, num_alike=1 << 40)
    SlotFile.create(4096, 4096, num_alike=2, name="nvrx-test").close()


def test_two_slots_take_less_memory_and_say_so() -> None:
    """The number is in the control page, where every process that maps the file reads it."""
    two, three = (SlotFile.create(1 << 20, 4096, num_slots=number, name="nvrx-test") for number in (2, 3))
    assert SlotFile.map(os.dup(two.fd), 1 << 20, 4096).headers() == [None, None]
    assert three.size_bytes - two.size_bytes == 4096 + (1 << 20) + 4096
    assert three.size_bytes <= 3 * (1 << 20) * 1.05
    two.close()
    three.close()


def test_create_refuses_what_cannot_fit() -> None:
    """An absurd size is one clear line, and no memory is touched."""
    with pytest.raises(UserError, match="hot checkpoint slots need"):
        SlotFile.create(1 << 45, 4096)
