"""Whatever bytes come: a message, or an error that says what is wrong; never more memory than was allowed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import struct
import threading

import numpy as np
import pytest
from batches import first_allocation, group, records
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.control.codec import CodecError
from rex_ray.hosting.wire import checked, decode, encode
from rex_ray.standalone.frames import (
    MOST_FRAME_BYTES,
    FrameError,
    frame,
    parsed,
    read_frame,
    receive_frame,
    send_bytes,
)
from rex_ray.standalone.handshake import challenge, greeting, is_proof, new_token, nonce_of, reply, welcome
from rex_ray.standalone.messages import (
    Answer,
    AskNews,
    AskRowLimits,
    Join,
    Lost,
    Put,
    Refusal,
    answer_in,
    framed,
    request_in,
)
from rex_ray.worker.link import IncidentRecord, KindLimit, MetricRecord, SaveRequest

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
names = st.sampled_from(
    ["Put", "Join", "AskNews", "Lost", "Batch", "GroupInfo", "WorkerSpec", "Answer", "array", "float"]
)
tagged = st.builds(lambda name, fields: {**fields, "$": name}, names, st.dictionaries(st.text(max_size=8), anything))


async def _read(data: bytes, most_bytes: int = MOST_FRAME_BYTES) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await read_frame(reader, 5.0, most_bytes=most_bytes)


def body_of(data: bytes) -> bytes:
    return asyncio.run(_read(data))


@given(anything.filter(lambda value: not isinstance(value, float) or math.isfinite(value)))
def test_a_document_comes_out_as_it_went_in(document: object) -> None:
    assert json.dumps(parsed(body_of(frame(document)))) == json.dumps(document)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_a_clear_error(data: bytes) -> None:
    with contextlib.suppress(FrameError, EOFError):
        assert data[4:].startswith(asyncio.run(_read(data, 64)))


@given(st.binary(max_size=200) | st.one_of(anything, tagged).map(lambda value: json.dumps(value).encode()))
def test_any_body_is_a_message_of_ours_or_a_clear_error(body: bytes) -> None:
    for read in (request_in, answer_in):
        with contextlib.suppress(CodecError):
            assert type(read(body)).__module__ == Put.__module__


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 50_000, b"1" * 100_000, b"\xff\xfe", b""])
def test_texts_that_trouble_a_parser_are_errors(body: bytes) -> None:
    with pytest.raises(CodecError):
        request_in(body)


def test_a_frame_too_large_is_refused_by_its_first_four_bytes() -> None:
    announced = struct.pack(">I", MOST_FRAME_BYTES + 1)
    with pytest.raises(FrameError, match="16777217 bytes was announced, and 16777216 are"):
        asyncio.run(_read(announced))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(announced)
        with pytest.raises(FrameError):
            receive_frame(ours, 5.0)
    with pytest.raises(FrameError, match="above the limit"):
        frame("x" * MOST_FRAME_BYTES)


def test_a_peer_that_stops_half_way_costs_no_more_than_the_limit() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(">I", 1000) + b"half")
        with pytest.raises(TimeoutError):
            receive_frame(ours, 0.2)


def test_frames_that_come_in_pieces_are_whole() -> None:
    ours, theirs = socket.socketpair()
    data = frame({"rows": list(range(50_000))})
    with ours, theirs:
        sending = threading.Thread(target=send_bytes, args=(theirs, data, 30.0))
        sending.start()
        assert parsed(receive_frame(ours, 30.0))["rows"][-1] == 49_999
        sending.join()


def test_every_message_comes_out_as_it_went_in() -> None:
    incident = IncidentRecord(
        generation="g", rank=1, step=3, kind="out_of_memory", message="m", limits=KindLimit(device="T4", num_rows=8)
    )
    metric = MetricRecord(generation="g", epoch=0, step=3, elapsed_s=1.0, metrics={"loss": math.nan, "accuracy": 0.5})
    sent = [*records(1, range(5), first_allocation()), metric, incident]
    came = request_in(body_of(framed(Put(batch=encode(1, sent, num_dropped=2)))))
    assert isinstance(came, Put)
    batch = checked(came.batch)
    assert decode(batch) == sent[:5]
    assert (batch.num_dropped, batch.incidents) == (2, (incident,))
    assert math.isnan(batch.metrics[0].metrics["loss"])
    for request in (
        Join(group=group()),
        AskNews(generation="g", version=-1, save_number=0),
        AskRowLimits(),
        Lost(generation="g", rank=1, reason="it burnt"),
    ):
        assert request_in(body_of(framed(request))) == request
    for answer in (
        Answer(),
        Answer(value=first_allocation()),
        Answer(value=SaveRequest(number=1, reason="r")),
        Answer(value={"T4": 8}),
        Refusal(reason="no", infeasible=True),
    ):
        assert answer_in(body_of(framed(answer))) == answer


def test_an_array_of_objects_is_not_unpickled() -> None:
    body = json.dumps({"$": "Put", "batch": {"$": "array", "dtype": "|O", "shape": [1], "data": "AAAA"}})
    with pytest.raises(CodecError, match="has no place"):
        request_in(body.encode())
    assert np.dtype("|O").kind == "O"


def test_a_group_of_odd_kinds_is_no_group() -> None:
    for field, odd in (("step", "3"), ("workers", [1]), ("global_batch_size", -1), ("allocation", 3)):
        document = parsed(body_of(framed(Join(group=group()))))
        document["group"][field] = odd
        with pytest.raises(CodecError):
            request_in(json.dumps(document).encode())


def test_both_ends_prove_that_they_know_the_token_and_never_send_it() -> None:
    token = new_token()
    challenged = challenge()
    greeted = greeting(token, challenged["nonce"], rank=1)
    assert welcome(token, challenged["nonce"], greeted) == greeted["nonce"]
    assert is_proof(token, "server", greeted["nonce"], reply(token, greeted["nonce"]))
    assert token not in json.dumps([challenged, greeted, reply(token, greeted["nonce"])])
    assert not is_proof(token, "server", challenged["nonce"], greeted), "a proof cannot be sent back"
    assert welcome(token, challenge()["nonce"], greeted) is None, "nor be used twice"
    assert welcome(new_token(), challenged["nonce"], greeted) is None
    assert welcome(token, challenged["nonce"], {**greeted, "rex_ray": 99}) is None, "another version"


@given(anything)
def test_no_other_greeting_is_welcome(greeted: object) -> None:
    assert welcome("token", "0" * 32, greeted) is None
    assert not is_proof("token", "server", "0" * 32, greeted)
    assert nonce_of(greeted) is None
