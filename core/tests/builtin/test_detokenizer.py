"""The detokenizer against decoding everything at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginectl.builtin.detokenizer import PieceStream, TokenizerDetokenizer, WindowStream, build
from enginectl.builtin.token_pieces import BYTE_TOKEN
from enginectl.builtin.tokenizer import Tokenizer
from enginectl.testing import tokenizers as small
from enginectl.types import SamplingParams

TOKENIZERS = {
    "byte_level": Tokenizer(small.byte_level()),
    "llama": Tokenizer(small.byte_fallback()),
    "gemma": Tokenizer(small.byte_fallback(strip=False)),
    "metaspace": Tokenizer(small.metaspace()),
    "word_piece": Tokenizer(small.word_piece()),
}
DETOKENIZERS = {name: TokenizerDetokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
WITH_BYTES = ["byte_level", "llama", "gemma"]
TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from("helo stop日本語é😀👍🏽\n "), st.characters(codec="utf-8", exclude_characters="<▁")
    ),
    max_size=30,
)
BYTES = st.lists(
    st.one_of(st.binary(max_size=2), st.sampled_from("aé日😀👍🏽").map(str.encode), st.just("😀".encode()[:3])),
    max_size=6,
).map(b"".join)
"""Random bytes, whole characters and truncated ones, in a row."""


def streamed(
    name: str, ids: Sequence[int], prompt: Sequence[int] = (), chunks: Sequence[int] = (), **params: Any
) -> str:
    """The text of `ids` pushed in chunks of these sizes, then one by one."""
    stream = DETOKENIZERS[name].start(prompt, SamplingParams(**params))
    parts, at = [], 0
    for size in (*chunks, *[1] * len(ids)):
        parts.append(stream.push(ids[at : at + size]))
        at += size
    return "".join(parts) + stream.flush()


def spell(name: str, data: bytes) -> list[int]:
    """One token a byte."""
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        return [by_bytes[bytes([byte])] for byte in data]
    return [small.token_id(tokenizer.backend, f"<0x{byte:02X}>") for byte in data]


def has_mixed_run(name: str, ids: Sequence[int]) -> bool:
    """Whether a run of byte tokens holds both characters and errors: where we keep the characters."""
    if name == "byte_level":
        return False
    tokens = [token for token_id in ids if (token := TOKENIZERS[name].id_to_token(token_id)) is not None]
    for run in re.findall(r"(?:<0x[0-9A-F]{2}>)+", "".join(t if BYTE_TOKEN.fullmatch(t) else "|" for t in tokens)):
        text = bytes.fromhex(re.sub(r"<0x|>", "", run)).decode(errors="replace")
        if "\ufffd" in text and text.strip("\ufffd"):
            return True
    return False


def visible(name: str, ids: Sequence[int], skip: bool) -> list[int]:
    return [i for i in ids if not (skip and i in TOKENIZERS[name].special_ids)]


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(list(TOKENIZERS)), data=st.data(), skip=st.booleans())
def test_stream_equals_decoding_at_once_for_any_tokens(name: str, data: st.DataObject, skip: bool) -> None:
    """Law 7: for any ids, broken characters and unknown ids included, and any chunking."""
    ids = data.draw(st.lists(st.integers(0, TOKENIZERS[name].vocab_size + 3), max_size=40))
    if has_mixed_run(name, visible(name, ids, skip)):
        return
    chunks = data.draw(st.lists(st.integers(1, 5), max_size=8))
    assert streamed(name, ids, chunks=chunks, skip_special_tokens=skip) == TOKENIZERS[name].decode(ids, skip)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(WITH_BYTES), text=TEXT, chunks=st.lists(st.integers(1, 5), max_size=8))
def test_stream_equals_the_text_that_was_encoded(name: str, text: str, chunks: list[int]) -> None:
    """Law 7: emoji, CJK and anything else come out as they went in."""
    assert streamed(name, TOKENIZERS[name].encode(text), chunks=chunks) == text


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(WITH_BYTES), prompt=TEXT, text=TEXT, data=st.data())
def test_prompt_and_output_read_as_one_text(name: str, prompt: str, text: str, data: st.DataObject) -> None:
    """Law 7: cut one text's tokens anywhere, in a character too; the output is what follows the prompt's characters."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(prompt + text)
    cut = data.draw(st.integers(0, len(ids)))
    data_before = b"".join([tokenizer.token_bytes(token_id) for token_id in visible(name, ids[:cut], True)])
    before = data_before.decode(errors="ignore")  # an unfinished character belongs to the output
    if name == "llama":
        before = before.removeprefix(" ")
    assert streamed(name, ids[cut:], ids[:cut]) == (prompt + text).removeprefix(before)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(WITH_BYTES), data=st.binary(max_size=24), chunks=st.lists(st.integers(1, 4), max_size=6))
def test_bytes_that_are_no_text_lose_no_character(name: str, data: bytes, chunks: list[int]) -> None:
    """Law 7: valid characters survive errors around them; each byte is accounted for once."""
    expected = ""
    rest = data
    while rest:
        try:
            expected, rest = expected + rest.decode(), b""
        except UnicodeDecodeError as error:
            num_bad = error.end - error.start if name != "byte_level" else 1
            expected += rest[: error.start].decode() + "\ufffd" * num_bad
            rest = rest[error.end :]
    if name == "llama":
        expected = expected.removeprefix(" ")
    assert streamed(name, spell(name, data), chunks=chunks) == expected


def emitted(name: str, prompt: bytes, output: bytes) -> str:
    """What comes of output bytes behind a prompt: each character that ends in the output, and U+FFFD for each error in
    it. A byte-level decoder counts a truncated character as one error, byte tokens are one each.
    """
    data, at, found = prompt + output, 0, ""
    while at < len(data):
        try:
            valid, end, errors = data[at:].decode(), len(data), 0
        except UnicodeDecodeError as error:
            valid, end, errors = data[at : at + error.start].decode(), at + error.end, error.end - error.start
        for char in valid:
            at += len(char.encode())
            found += char if at > len(prompt) else ""
        if name == "byte_level":
            found += "\ufffd" if errors and end > len(prompt) else ""
        else:
            found += "\ufffd" * min(errors, max(0, end - len(prompt)))
        at = end
    return found


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(WITH_BYTES),
    prompt=BYTES,
    output=BYTES,
    chunks=st.lists(st.integers(1, 4), max_size=6),
)
def test_bytes_behind_a_prompt_of_bytes(name: str, prompt: bytes, output: bytes, chunks: list[int]) -> None:
    """Law 7: wherever the cut falls, nothing of the prompt comes out, and nothing of the output is lost or doubled."""
    got = streamed(name, spell(name, output), spell(name, prompt), chunks)
    expected = emitted(name, prompt, output)
    assert got == (expected.removeprefix(" ") if name == "llama" and not prompt else expected)


@pytest.mark.parametrize("name", WITH_BYTES)
def test_a_character_begun_by_the_prompt_appears_once_and_whole(name: str) -> None:
    """Law 7: a prompt may end inside a character."""
    prompt, rest = spell(name, "ab日".encode()[:-1]), spell(name, "日".encode()[-1:] + b"x")
    assert streamed(name, rest, prompt) == "日x"
    assert streamed(name, [*rest, *spell(name, b"\xff")], prompt) == "日x\ufffd"
    assert streamed(name, spell(name, b"\xa5\xff"), prompt, [2]) == "日\ufffd"


@pytest.mark.parametrize("name", WITH_BYTES)
def test_an_error_that_is_all_the_prompts_is_not_emitted(name: str) -> None:
    """Law 7: prompt text is never emitted, its U+FFFD included."""
    assert streamed(name, spell(name, b"x"), spell(name, b"a\xe6\x97")) == "x"
    assert streamed(name, [], spell(name, b"a\xe6\x97")) == ""


@pytest.mark.parametrize("name", WITH_BYTES)
def test_an_unfinished_character_at_the_end_is_flushed(name: str) -> None:
    """Law 7: output bytes that never become a character are not lost."""
    ids = spell(name, b"a\xe6\x97")
    assert streamed(name, ids) == TOKENIZERS[name].decode(ids) or has_mixed_run(name, ids)
    assert streamed(name, ids).startswith("a\ufffd")


def test_characters_are_emitted_as_soon_as_they_are_complete() -> None:
    """Invalid bytes do not hold up what follows, and a valid character never waits."""
    for name in WITH_BYTES:
        stream = DETOKENIZERS[name].start([], SamplingParams())
        got = [stream.push([token_id]) for token_id in spell(name, b"a\xff\xe6\x97\xa5\xe6b")]
        assert got[:5] == ["a", "\ufffd", "", "", "日"]
        assert got[6].endswith("b")


def test_half_a_surrogate_is_two_errors() -> None:
    """ED A0 begins no character, though Python's incremental decoder waits for a third byte."""
    for name in WITH_BYTES:
        assert streamed(name, spell(name, b"\xed\xa0")) == "\ufffd\ufffd"
        assert streamed(name, spell(name, b"\xed\xa0b"), [], [2]) == "\ufffd\ufffdb"
        assert streamed(name, spell(name, b"\x80"), spell(name, b"a\xed\xa0")) == "\ufffd"
        assert streamed(name, spell(name, b"\xa0"), spell(name, b"a\xed")) == "\ufffd"


def test_leading_space_depends_on_whether_text_comes_before() -> None:
    """A decoder that strips a text's first space does so only where no prompt text comes before."""
    tokenizer = TOKENIZERS["llama"]
    word = small.token_id(tokenizer.backend, "▁hello")
    assert streamed("llama", [word]) == "hello"
    assert streamed("llama", [word], [small.token_id(tokenizer.backend, "<s>")]) == "hello"
    assert streamed("llama", [word], tokenizer.encode("hello")) == " hello"
    assert streamed("llama", [word], [small.token_id(tokenizer.backend, "▁")]) == " hello"
    assert streamed("gemma", [word]) == " hello"
    assert streamed("metaspace", [small.token_id(TOKENIZERS["metaspace"].backend, "▁hello")]) == "hello"


def test_special_tokens_are_emitted_when_not_skipped() -> None:
    """`skip_special_tokens=False` shows them, and they end an unfinished character."""
    for name in WITH_BYTES:
        eos = small.token_id(TOKENIZERS[name].backend, "</s>")
        ids = [*spell(name, b"\xe6\x97"), eos, *spell(name, b"\xa5")]
        assert streamed(name, ids) == "日"
        assert "</s>" in streamed(name, ids, skip_special_tokens=False)


def test_spaces_between_special_tokens() -> None:
    """False joins adjacent added tokens that a decoder would set apart by a space."""
    tokenizer = TOKENIZERS["word_piece"]
    ids = [small.token_id(tokenizer.backend, token) for token in ("<s>", "</s>", "hello", "##s", "<s>", "</s>")]
    assert streamed("word_piece", ids, skip_special_tokens=False) == "<s> </s> hellos <s> </s>"
    joined = streamed("word_piece", ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined == "<s></s> hellos <s></s>"


def test_windowed_stream_continues_the_prompt() -> None:
    """Law 7 for decoders that look at neighbours: a suffix piece joins the prompt's word, and nothing is repeated."""
    tokenizer = TOKENIZERS["word_piece"]
    prompt = tokenizer.encode("hello world") * 5
    assert streamed("word_piece", tokenizer.encode("##", False) or [6], prompt) != ""
    assert streamed("word_piece", [small.token_id(tokenizer.backend, "##s")], prompt) == "s"
    assert streamed("word_piece", [small.token_id(tokenizer.backend, "hello")], prompt) == " hello"


def test_the_kind_of_stream_follows_the_decoder() -> None:
    for name, detokenizer in DETOKENIZERS.items():
        kind = WindowStream if name == "word_piece" else PieceStream
        assert type(detokenizer.start([], SamplingParams())) is kind


def test_cost_does_not_depend_on_prompt_or_output() -> None:
    """Law 7: only a bounded tail of the prompt is read, and pending bytes never pile up."""

    class Counting(list[int]):
        num_read = 0

        def __getitem__(self, at: Any) -> Any:
            got = super().__getitem__(at)
            Counting.num_read += len(got) if isinstance(at, slice) else 1
            return got

    for name in WITH_BYTES:
        Counting.num_read = 0
        stream = DETOKENIZERS[name].start(Counting(spell(name, b"\xff" * 5000)), SamplingParams())
        assert Counting.num_read <= 10
        for token_id in spell(name, b"\xff" * 5000):
            assert stream.push([token_id]) == "\ufffd"


def test_factory_takes_the_tokenizer_from_the_context() -> None:
    ctx: Any = SimpleNamespace(parts={"tokenizer": TOKENIZERS["gemma"]})
    stream = build(ctx).start([], SamplingParams())
    assert stream.push(TOKENIZERS["gemma"].encode("hello", False)) == "hello"
