"""Reading streams: events are counted whatever the pieces they come in, and only output counts."""

from __future__ import annotations

import pytest

from enginectl.loadtest.answers import Answer

TEXT = rb'data: {"choices":[{"index":0,"text":"say \"error\" or [DONE]","finish_reason":null}],"usage":null}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}'


def read(data: bytes, size: int, *, is_chat: bool = False, end: bytes = b"\n\n") -> Answer:
    """Read a stream in pieces of `size` bytes; the place of a piece stands for the time."""
    answer = Answer(is_chat=is_chat, keep_events=True)
    answer.on_status(200)
    data = data.replace(b"\n", end)
    for place in range(0, len(data), size):
        answer.on_data(data[place : place + size], place)
    return answer


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_counts_do_not_depend_on_the_pieces(size: int, end: bytes) -> None:
    stream = b"\n".join([b": a comment", TEXT, TEXT, b"event: x", TEXT, USAGE, b"data: [DONE]", b""])
    answer = read(stream, size, end=end)
    assert len(answer.times_s) == 3
    assert answer.times_s == sorted(answer.times_s)
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 3)
    assert answer.is_done
    assert answer.error is None
    assert not answer.is_unreadable
    assert answer.events is not None
    assert len(answer.events) == 5


def test_the_role_of_a_chat_is_no_token() -> None:
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
    token = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}'
    answer = read(b"\n".join([role, token, token, b"data: [DONE]", b""]), 9, is_chat=True)
    assert len(answer.times_s) == 2


@pytest.mark.parametrize("space", [b"", b" "])
def test_an_event_without_text_says_nothing(space: bytes) -> None:
    """Some servers send one for a token that ends within a character: a reader sees nothing of it."""
    some = b'data: {"choices":[{"index":0,"text":%s"%s","logprobs":null}],"usage":null}'
    some, none = some % (space, b"a:"), some % (space, b"")
    assert len(read(b"\n".join([none, some, none, none, some, none, b""]), 5).times_s) == 2
    said, unsaid = (b'data: {"choices":[{"delta":{"content":%s"%s"}}]}' % (space, text) for text in (b"a", b""))
    thought = b'data: {"choices":[{"delta":{"content":%s"","reasoning":"so"}}]}' % space
    assert len(read(b"\n".join([unsaid, said, unsaid, thought, unsaid, b""]), 7, is_chat=True).times_s) == 2
    ends = [
        b'data: {"choices":[{"delta":%s{},"finish_reason":"stop"}]}' % space,
        b'data: {"choices":[{"delta":{"content":%snull},"finish_reason":"stop"}]}' % space,
    ]
    assert len(read(b"\n".join([said, said, *ends, b""]), 7, is_chat=True).times_s) == 2


def test_an_error_event_is_found_among_tokens() -> None:
    error = b'data: {"error":{"message":"the engine process died","type":"server_error"}}'
    answer = read(b"\n".join([TEXT, TEXT, error, b""]), 11)
    assert answer.error == "the engine process died"
    assert not answer.is_done
    assert len(answer.times_s) == 2


def test_what_is_no_json_is_noted() -> None:
    assert read(b"data: what\n", 100).is_unreadable
    assert read(b"data: [1]\n", 100).is_unreadable
