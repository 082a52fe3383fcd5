"""What launchers say to each other: every item comes back as it was, nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.checkpoint.slots import SlotHeader
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.launcher import link_codec
from nvrx_sre.launcher.link_codec import Beat, Headers, Item, Packet

HEADER = SlotHeader(
    generation=3,
    step=7,
    durable=True,
    sealed_mono_ns=11,
    data_bytes=4096,
    blob_bytes=10,
    layout_hash="ab" * 32,
    digest=bytes(range(16)),
)
GO = wire.Go(
    generation=2,
    world_size=4,
    store_host="",
    store_port=4000,
    candidates=[{"tier": "hot", "step": 5, "slot": 1, "layout_hash": "00"}],
    require_restore=True,
    passes={"exception@1:5": 1},
    hot_every=1,
    epoch=3,
)
ITEMS: list[Item] = [
    Beat(sent_ns=2**63, echo_ns=1),
    Packet(child=7, packet=b"\x00\xffanything"),
    Headers(rank=3, headers=(HEADER, None, HEADER)),
    Headers(rank=0, headers=()),
    c.Spawn(child=1, role=Role.WORKER, rank=2, attempt=3, local_rank=0, world_size=4, node=1),
    c.Spawn(child=2, role=Role.WRITER, rank=None, attempt=0, node=1),
    c.AssignRank(child=1, rank=2, local_rank=0, world_size=4, generation=1),
    c.Tell(child=1, message=GO),
    c.Tell(child=1, message=wire.Leave()),
    c.TellWriter(message=wire.Retain(keep=3, epoch=1)),
    c.HoldSlots(first_rank=2, slots=(0, 2)),
    c.ReleaseSlots(step=4),
    c.KeepStacks(incident=3),
    c.DeviceUnfit(node=1, index=0, reason="device GPU-1 is unfit: Xid 79"),
    c.NoteLateness(ranks=(2, 3), seconds=(0.0, 0.25)),
    c.PublishSealed(step=9),
    c.StrandSlots(generation=1, step=9),
    c.GrantSlots(child=1, rank=2, data_bytes=1, blob_bytes=2),
    c.DropSlots(num_ranks=2, node=1),
    c.SetHotInterval(every=2, from_step=9),
    c.ReleaseBoundary(generation=1, step=2),
    c.RequestStacks(child=1, generation=1),
    c.Kill(child=1, reason="x"),
    c.Stop(exit_code=93, reason="halted", result={"loss": 1.5}),
    c.Spawned(child=1, pid=2, start_ticks=3),
    c.Exited(child=1, exit_code=None, signal=9, exited_ns=5, oom=True, last_line="é"),
    c.SignalReceived(signal=15, by_person=False),
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_every_item_comes_back_as_it_was(item: Item) -> None:
    """Types included: an enum is an enum again, a tuple a tuple, a message a message."""
    back = link_codec.decode(link_codec.encode(item))
    assert back == item
    assert type(back) is type(item)


def test_what_is_the_leaders_own_does_not_travel() -> None:
    """No node is ever asked to write a fence, or told of an event."""
    with pytest.raises(TypeError, match="Fence does not travel"):
        link_codec.encode(c.Fence(generation=1, step=2))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"M",
        b"B123",
        b"{",
        b"[]",
        b'{"type": "Fence", "generation": 1, "step": 1}',
        b'{"type": "Kill"}',
        b"\xff\xfe",
    ],
)
def test_anything_else_is_refused(payload: bytes) -> None:
    """Unknown types, missing fields, torn frames."""
    with pytest.raises(ValueError, match="not an item"):
        link_codec.decode(payload)


def test_a_type_with_a_field_too_many_is_refused() -> None:
    """Another version's item is not half understood."""
    with pytest.raises(ValueError, match="not an item"):
        link_codec.decode(b'{"type": "Kill", "child": 1, "reason": "", "softly": true}')


@given(st.binary(max_size=200))
def test_noise_never_raises_anything_else(payload: bytes) -> None:
    """Whatever arrives is an item or a `ValueError`."""
    try:
        item = link_codec.decode(payload)
    except ValueError:
        return
    assert link_codec.decode(link_codec.encode(item)) == item
