"""Wire form of messages: what goes in comes out, and nothing else is a message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.events import messages as wire
from nvrx_sre.events import packets
from nvrx_sre.events.step_ring import StepRing, unmark

_NUMBER = st.integers(0, 2**64 - 1)
_SMALL = st.integers(0, 2**32 - 1)
_TIME = st.floats(allow_nan=False)
_SLOT = st.integers(-1, 2)

HOT: st.SearchStrategy[wire.Message] = st.one_of(
    st.builds(
        wire.Step,
        generation=_SMALL,
        step=_NUMBER,
        mono_ns=_NUMBER,
        step_s=_TIME,
        data_s=_TIME,
        checkpoint_block_s=_TIME,
        evaluate_s=_TIME,
        tokens=_NUMBER,
        loss=_TIME,
        has_loss=st.booleans(),
        slot=_SLOT,
        durable=st.booleans(),
        captured=_NUMBER,
        skipped=_NUMBER,
        arrived_ns=_NUMBER,
        gpu_ns=_NUMBER,
    ),
    st.builds(wire.Alive, generation=_SMALL, step=_NUMBER, progress=_NUMBER, mono_ns=_NUMBER, num_dropped=_NUMBER),
    st.builds(wire.Sealed, generation=_SMALL, step=_NUMBER, slot=_SLOT, mono_ns=_NUMBER),
)


@given(HOT)
def test_a_message_of_the_hot_path_comes_out_as_it_went_in(message: wire.Message) -> None:
    """Every field, in a packet that no JSON begins like; equal also as an object that was built the usual way."""
    packet = packets.encode(message)
    assert packets.decode(packet) == message
    assert packet[:1] in (b"S", b"A", b"L") and len(packet) < 128


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3))
def test_other_messages_travel_as_json(result: dict[str, Any]) -> None:
    """Also what only a person's script makes up."""
    message = wire.Finished(generation=3, step=7, result=result, mono_ns=9)
    assert packets.decode(packets.encode(message)) == message


@pytest.mark.parametrize(
    "packet", [b"", b"S", b"A" * 200, b"{}", b"[1]", b"\xff\xfe", b'{"type": "Nothing"}', b'{"type": "Leave", "x": 1}']
)
def test_anything_else_is_no_message(packet: bytes) -> None:
    """A cut packet, a foreign one, an unknown type or field: one error that the intake counts."""
    with pytest.raises(ValueError, match="not a message"):
        packets.decode(packet)


def test_a_message_that_fits_no_packet_is_refused() -> None:
    """Before it is sent: the other end would see half of it."""
    with pytest.raises(ValueError, match="Leave is"):
        packets.encode(wire.Leave(reason="x" * packets.MAX_PACKET_BYTES))


def test_a_packet_says_how_many_steps_were_before_it() -> None:
    """One without that follows none; a cut one is no message."""
    packet = packets.encode(wire.Leave())
    ring = StepRing.create()
    assert unmark(packet) == (packet, 0) and unmark(ring.mark(packet)) == (packet, 0)
    ring.put((*(0,) * 14, 0.0))
    assert unmark(ring.mark(packet)) == (packet, 1)
    ring.close()
    with pytest.raises(ValueError, match="not a message"):
        packets.decode(unmark(b"@cut")[0])
