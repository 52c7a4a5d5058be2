"""Choice assembly and stop strings against a slow reference that looks at the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginectl.builtin.detokenizer import TokenizerDetokenizer
from enginectl.builtin.tokenizer import Tokenizer
from enginectl.engine.text import ChoiceText, StopMatcher
from enginectl.testing import tokenizers as small
from enginectl.types import Finished, FinishReason, OutputChunk, SamplingParams, Timings, TokenLogprobs

TOKENIZER = Tokenizer(small.byte_level())
DETOKENIZER = TokenizerDetokenizer(TOKENIZER)
EOS = small.token_id(TOKENIZER.backend, "</s>")
TIMINGS = Timings(0.0, 1.0, 2.0, 3.0, 0)
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}


def spell(text: str) -> list[int]:
    """One token a byte."""
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def choice(prompt: Sequence[int] = (), **fields: Any) -> ChoiceText:
    params = SamplingParams(**fields)
    return ChoiceText(0, DETOKENIZER.start(prompt, params), params, eos_token_ids=(EOS,))


def ended(reason: FinishReason = FinishReason.LENGTH, stop_token_id: int | None = None) -> Finished:
    return Finished(1, reason, stop_token_id, None, 7, TIMINGS)


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, (), ())


def run(
    ids: Sequence[int], sizes: Sequence[int] = (), finished: Finished | None = None, **fields: Any
) -> tuple[list[OutputChunk], ChoiceText]:
    """Push ids in chunks of these sizes, then one by one; `finished` comes with the last."""
    text, chunks, at = choice(**fields), [], 0
    steps = [*sizes, *[1] * len(ids)]
    for size in steps:
        part = list(ids[at : at + size])
        at += size
        if not part:
            break
        last = finished if at >= len(ids) else None
        chunk = text.push(part, [logprob(token_id) for token_id in part], last)
        if chunk is not None:
            chunks.append(chunk)
    if not ids and finished is not None:
        chunk = text.push([], None, finished)
        assert chunk is not None
        chunks.append(chunk)
    return chunks, text


def whole(chunks: Sequence[OutputChunk]) -> tuple[str, list[int]]:
    """All text and ids; checks that log-probabilities are cut where ids are."""
    ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert [entry.token_id for chunk in chunks for entry in chunk.logprobs or ()] == ids
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    return "".join(chunk.text for chunk in chunks), ids


def reference(ids: Sequence[int], stops: Sequence[str], min_tokens: int, include: bool) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop, by looking at every end of the whole text after each token."""
    num_seen = 0
    for num_tokens in range(1, len(ids) + 1):
        at_end = num_tokens == len(ids)
        text = TOKENIZER.decode(ids[:num_tokens])
        certain = len(text) if at_end else len(text.rstrip("\ufffd"))
        for end in range(num_seen + 1, certain + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found and num_tokens > min_tokens:
                stop = max(found, key=len)
                return text[: end if include else end - len(stop)], num_tokens, stop
        num_seen = max(num_seen, certain)
    return TOKENIZER.decode(ids), len(ids), None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="ab日😀", max_size=16),
    stops=st.lists(st.text(alphabet="ab日😀", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), max_size=6),
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
    by_byte=st.booleans(),
)
def test_stops_equal_the_reference_for_any_chunking(
    text: str, stops: list[str], sizes: list[int], min_tokens: int, include: bool, by_byte: bool
) -> None:
    """Laws 6 and 8: text, ids and log-probabilities cut at the same token, whatever arrives in one push."""
    ids = spell(text) if by_byte else TOKENIZER.encode(text, False)
    chunks, got = run(ids, sizes, ended(), stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include)
    expected_text, num_tokens, stop = reference(ids, stops, min_tokens, include)
    assert whole(chunks) == (expected_text, list(ids[:num_tokens]))
    assert got.num_output_tokens == num_tokens
    assert got.stopped == (stop is not None)
    assert chunks[-1].stop_reason == stop
    assert chunks[-1].finish_reason is (FinishReason.LENGTH if stop is None else FinishReason.STOP)


KINDS = {"byte_level": small.byte_level(), "llama": small.byte_fallback(), "gemma": small.byte_fallback(strip=False)}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in KINDS.items()}
DETOKENIZERS = {name: TokenizerDetokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def certain_text(name: str, ids: Sequence[int], at_end: bool) -> str:
    """What these tokens say for certain, from their bytes: an unfinished character only at the end."""
    tokenizer = TOKENIZERS[name]
    rest, found = b"".join(map(tokenizer.token_bytes, ids)), ""
    while rest:
        try:
            found, rest = found + rest.decode(), b""
        except UnicodeDecodeError as error:
            found += rest[: error.start].decode()
            if not at_end and error.reason == "unexpected end of data":
                break
            found += "\ufffd" * (1 if name == "byte_level" else error.end - error.start)
            rest = rest[error.end :]
    return found.removeprefix(" ") if name == "llama" else found


def spelled(name: str, data: bytes) -> list[int]:
    """One token a byte."""
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        return [BYTE_IDS[bytes([byte])] for byte in data]
    return [small.token_id(tokenizer.backend, f"<0x{byte:02X}>") for byte in data]


STOPS = st.lists(st.text(alphabet="ab日😀👍🏽\ufffd", min_size=1, max_size=3), min_size=1, max_size=3)
PIECES = st.lists(
    st.one_of(st.text(alphabet="ab日😀👍🏽", max_size=4).map(str.encode), st.binary(max_size=2)), max_size=6
)


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(list(KINDS)),
    pieces=PIECES,
    by_byte=st.booleans(),
    stops=STOPS,
    sizes=st.lists(st.integers(1, 5), max_size=6),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_stops_in_any_bytes_of_any_tokenizer(
    name: str, pieces: list[bytes], by_byte: bool, stops: list[str], sizes: list[int], min_tokens: int, include: bool
) -> None:
    """Laws 6, 7 and 8: byte-level and byte tokens, emoji, CJK and bytes that are no text, against reading all at once."""
    data = b"".join(pieces)
    ids = spelled(name, data) if by_byte else TOKENIZERS[name].encode(data.decode(errors="ignore"), False)
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include)
    got = ChoiceText(0, DETOKENIZERS[name].start([], params), params, eos_token_ids=(EOS,))
    chunks, at = [], 0
    for size in [*sizes, *[1] * (len(ids) + 1)]:
        part, at = ids[at : at + size], at + size
        chunk = got.push(part, [logprob(token_id) for token_id in part], ended() if at >= len(ids) else None)
        chunks += [] if chunk is None else [chunk]
        if at >= len(ids):
            break
    expected, count, stop = whole_text(name, ids, stops, min_tokens, include)
    assert whole(chunks) == (expected, list(ids[:count]))
    assert (got.num_output_tokens, chunks[-1].stop_reason) == (count, stop)


def whole_text(
    name: str, ids: Sequence[int], stops: Sequence[str], min_tokens: int, include: bool
) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop: every end of the text after each token, and what only the end makes certain."""
    num_seen = 0
    for count in (*range(1, len(ids) + 1), len(ids) + 1):
        text = certain_text(name, ids[:count], at_end=count > len(ids))
        for end in range(num_seen + 1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found and min(count, len(ids)) > min_tokens:
                stop = max(found, key=len)
                return text[: end if include else end - len(stop)], min(count, len(ids)), stop
        num_seen = max(num_seen, len(text))
    return certain_text(name, ids, at_end=True), len(ids), None


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 6), max_size=8),
    stops=st.sampled_from([(), ("never in any of it",), ("a", "\ufffd")]),
)
def test_concatenated_stream_equals_one_push(ids: list[int], sizes: list[int], stops: tuple[str, ...]) -> None:
    """Law 6: concat(stream) == the non-streamed answer, for any tokens and any chunking."""
    streamed, one = run(ids, sizes, ended(), stop=stops), run(ids, [len(ids)], ended(), stop=stops)
    assert whole(streamed[0]) == whole(one[0])
    assert streamed[1].num_output_tokens == one[1].num_output_tokens


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="abc", max_size=20), stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1))
def test_held_back_text_is_the_longest_that_could_begin_a_stop(text: str, stops: list[str]) -> None:
    """Law 8: exactly that much waits, no more."""
    chunks, got = run(spell(text), stop=tuple(stops))
    emitted = "".join(chunk.text for chunk in chunks)
    if got.stopped:
        return
    longest = max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)
    assert emitted == text[: len(text) - longest]
    assert sum(len(chunk.token_ids) for chunk in chunks) == len(emitted)


def test_stop_in_an_accepted_draft_drops_what_follows() -> None:
    """Law 8: several tokens in one push, the stop among them; later ones are neither emitted nor counted."""
    ids = spell("one STOP two")
    chunks, got = run(ids, [len(ids)], stop=("STOP",))
    assert whole(chunks) == ("one ", spell("one STOP"))
    assert (got.num_output_tokens, got.stopped) == (8, True)
    assert got.push(spell("x"), [logprob(1)], ended()) is None
    assert got.num_output_tokens == 8


def test_stop_that_ends_inside_a_token() -> None:
    """Law 8: the text is cut inside the token, the token counts."""
    ids = TOKENIZER.encode("hello", False)
    assert len(ids) == 1
    chunks, _ = run(ids, stop=("ell",))
    assert whole(chunks) == ("h", ids)


def test_the_stop_complete_first_wins_and_the_longest_of_those() -> None:
    """The order of stop strings does not matter."""
    for stops in (("abcd", "bc"), ("bc", "abcd")):
        chunks, _ = run(spell("xabcd"), stop=stops)
        assert (whole(chunks)[0], chunks[-1].stop_reason) == ("xa", "bc")
    for stops in (("ab", "b"), ("b", "ab")):
        chunks, _ = run(spell("xab"), stop=stops)
        assert (whole(chunks)[0], chunks[-1].stop_reason) == ("x", "ab")


@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("skip", [True, False])
def test_eos_counts_but_its_text_does_not(stop: tuple[str, ...], skip: bool) -> None:
    """EOS is in the ids, as in the engine's count; its text appears only if asked for."""
    ids = [*spell("hi"), EOS]
    finished = ended(FinishReason.STOP)
    chunks, got = run(ids, [3], finished, stop=stop, skip_special_tokens=skip)
    assert whole(chunks) == ("hi", ids)
    assert (got.num_output_tokens, chunks[-1].finish_reason, chunks[-1].stop_reason) == (3, FinishReason.STOP, None)
    assert chunks[-1].timings == TIMINGS
    assert chunks[-1].num_cached_tokens == 7
    chunks, _ = run(ids, [], finished, stop=stop, skip_special_tokens=skip, include_stop_str_in_output=True)
    assert whole(chunks)[0] == ("hi" if skip else "hi</s>")


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_stop_token_id_is_reported_and_silent(stop: tuple[str, ...]) -> None:
    """Law 8: `stop_reason` says which."""
    bang = spell("!")[0]
    ids = [*spell("hi"), bang]
    finished = ended(FinishReason.STOP, bang)
    chunks, _ = run(ids, [], finished, stop=stop, stop_token_ids=(bang,))
    assert whole(chunks) == ("hi", ids)
    assert chunks[-1].stop_reason == bang


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_an_engine_stop_without_a_stop_token_keeps_the_last_text(stop: tuple[str, ...]) -> None:
    """A grammar may end a choice with a token that is text; and a length end keeps an EOS-like token's text."""
    chunks, _ = run(spell("{}"), [], ended(FinishReason.STOP), stop=stop)
    assert whole(chunks)[0] == "{}"


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH])
def test_held_back_text_is_flushed_at_any_end(reason: FinishReason) -> None:
    """Law 8: flushed at the end, with its tokens, when the end comes alone."""
    text = choice(stop=("STOP",))
    assert text.push(spell("ST"), None, None) is None
    assert text.num_output_tokens == 2
    last = text.push([], None, Finished(1, reason, None, "why", 0, TIMINGS))
    assert last is not None
    assert (last.text, last.token_ids, last.finish_reason, last.error) == ("ST", tuple(spell("ST")), reason, "why")
    assert not text.stopped
    assert text.push([], None, ended()) is None


def test_stop_found_in_the_engines_last_step_wins() -> None:
    """A stop string before EOS in the same push ends the choice; the rest is dropped, timings are kept."""
    ids = [*spell("aXb"), EOS]
    chunks, got = run(ids, [4], ended(FinishReason.STOP), stop=("X",))
    assert whole(chunks) == ("a", spell("aX"))
    assert (chunks[-1].stop_reason, chunks[-1].timings, got.num_output_tokens) == ("X", TIMINGS, 2)


def test_min_tokens_ignores_earlier_stops_for_good() -> None:
    """Law 8: a stop complete within the first min_tokens tokens is text; one that ends later counts."""
    chunks, _ = run(spell("aXbXc"), [], ended(), stop=("X",), min_tokens=2)
    assert whole(chunks)[0] == "aXb"
    assert [chunk.text for chunk in chunks[:2]] == ["a", "X"]  # nothing waits for a stop that did not count
    chunks, _ = run(spell("aXY"), [], ended(), stop=("XY",), min_tokens=2)
    assert whole(chunks)[0] == "a"


def test_one_matcher_serves_all_choices() -> None:
    params = SamplingParams(stop=("END",))
    matcher = StopMatcher(params.stop)
    texts = [ChoiceText(i, DETOKENIZER.start([], params), params, matcher=matcher) for i in range(2)]
    assert texts[0].push(spell("EN"), None, None) is None
    other = texts[1].push(spell("D"), None, None)
    assert other is not None
    assert (other.index, other.text) == (1, "D")
    last = texts[0].push(spell("D"), None, None)
    assert last is not None
    assert (last.text, last.finish_reason, texts[0].stopped, texts[1].stopped) == ("", FinishReason.STOP, True, False)


def test_without_stop_strings_tokens_are_emitted_at_once() -> None:
    """An unfinished character's token is emitted with no text; log-probabilities stay None when not asked."""
    text = choice()
    first = text.push(spell("日")[:1], None, None)
    assert first is not None
    assert (first.text, len(first.token_ids), first.logprobs) == ("", 1, None)
    rest = text.push(spell("日")[1:], None, ended())
    assert rest is not None
    assert rest.text == "日"
    assert text.num_output_tokens == 3
