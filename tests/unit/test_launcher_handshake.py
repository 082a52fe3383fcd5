"""Two launchers find out that they belong together, without either learning what it did not know."""

from __future__ import annotations

import json

import pytest

from nvrx_sre.launcher import handshake
from nvrx_sre.launcher.handshake import Answer, Claims, HandshakeError

TOKEN = b"0123456789abcdef"
OTHER = b"fedcba9876543210"
LEADERS, FOLLOWERS = b"l" * 32, b"f" * 32
CLAIMS = Claims(
    run="r",
    node_rank=1,
    node="host1",
    pid=7,
    start_ticks=8,
    version="1.0",
    mono_ns=9,
    settings={"--save-every": "50"},
)


def test_both_sides_learn_what_the_other_says() -> None:
    """Challenge, claim, answer, and one key for both."""
    assert handshake.read_challenge(handshake.challenge(LEADERS)) == LEADERS
    frame = handshake.claim(TOKEN, LEADERS, FOLLOWERS, CLAIMS)
    assert handshake.read_claim(TOKEN, LEADERS, frame) == (FOLLOWERS, CLAIMS)
    said = Answer(epoch=3, traceparent="00-1-2-01")
    frame = handshake.answer(TOKEN, LEADERS, FOLLOWERS, said)
    assert handshake.read_answer(TOKEN, LEADERS, FOLLOWERS, frame) == said


def test_another_token_is_noticed_on_both_sides() -> None:
    """The leader refuses the claim; the follower does not believe the answer."""
    frame = handshake.claim(OTHER, LEADERS, FOLLOWERS, CLAIMS)
    with pytest.raises(HandshakeError, match="token is another"):
        handshake.read_claim(TOKEN, LEADERS, frame)
    frame = handshake.answer(OTHER, LEADERS, FOLLOWERS, Answer())
    with pytest.raises(HandshakeError, match="token is another"):
        handshake.read_answer(TOKEN, LEADERS, FOLLOWERS, frame)


def test_a_claim_is_worth_nothing_in_another_connection() -> None:
    """The leader's nonce is new each time: what was overheard cannot be said again."""
    frame = handshake.claim(TOKEN, LEADERS, FOLLOWERS, CLAIMS)
    with pytest.raises(HandshakeError, match="token is another"):
        handshake.read_claim(TOKEN, b"x" * 32, frame)


def test_a_claim_that_was_changed_on_the_way_is_refused() -> None:
    """Its text is under the mac."""
    frame = handshake.claim(TOKEN, LEADERS, FOLLOWERS, CLAIMS).replace(b"host1", b"host2")
    with pytest.raises(HandshakeError, match="token is another"):
        handshake.read_claim(TOKEN, LEADERS, frame)


def test_a_leaders_answer_cannot_be_turned_into_a_claim() -> None:
    """Each side has a label of its own, so nothing can be reflected."""
    text = json.loads(handshake.claim(TOKEN, LEADERS, FOLLOWERS, CLAIMS))
    reflected = json.dumps({"answer": text["claims"], "mac": text["mac"]}).encode()
    with pytest.raises(HandshakeError, match="token is another"):
        handshake.read_answer(TOKEN, LEADERS, FOLLOWERS, reflected)


def test_neither_token_nor_key_travels() -> None:
    """What goes over the wire holds neither."""
    frames = handshake.challenge(LEADERS) + handshake.claim(TOKEN, LEADERS, FOLLOWERS, CLAIMS)
    frames += handshake.answer(TOKEN, LEADERS, FOLLOWERS, Answer())
    key = handshake.session_key(TOKEN, LEADERS, FOLLOWERS)
    for secret in (TOKEN, TOKEN.hex().encode(), key, key.hex().encode()):
        assert secret not in frames


@pytest.mark.parametrize(
    "payload", [b"GET / HTTP/1.1", b"[]", b"{}", b'{"protocol": 1}', b'{"protocol": 1, "nonce": "00"}']
)
def test_whatever_else_answers_there_is_no_launcher(payload: bytes) -> None:
    """A web server on the port, a nonce that is too short."""
    with pytest.raises(HandshakeError):
        handshake.read_challenge(payload)


def test_another_protocol_is_named() -> None:
    """Launchers of two releases say what each speaks."""
    frame = json.dumps({"protocol": 2, "nonce": LEADERS.hex()}).encode()
    with pytest.raises(HandshakeError, match="speaks link protocol 2, this launcher 1"):
        handshake.read_challenge(frame)


def test_what_differs_is_named_with_both_values() -> None:
    """One line for a person; an option that one of the two does not have, or has without a value, was not given."""
    assert handshake.difference({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, here="here", there="there") == ""
    ours, theirs = {"--fault": "sigkill@1:60", "--save-every": "50"}, {"--fault": "", "--save-every": "20", "c": "3"}
    assert handshake.difference(ours, theirs, here="here", there="there") == (
        "--fault is sigkill@1:60 here and not given there, --save-every is 50 here and 20 there, "
        "c is not given here and 3 there"
    )
