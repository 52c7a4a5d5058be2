"""The frontend with the tokenizer that core ships."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from enginectl.builtin.tokenizer import Tokenizer
from enginectl.testing import tokenizers as samples
from enginectl.testing.fake_client import FakeClient, fake_info, say
from enginectl.types import OutputChunk

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
)
TEMPLATE += "<|user|>{{ m.content }}{% endfor %}"


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Byte-level, with a chat template that writes BOS."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(samples.byte_level(), special_tokens=special, templates={"default": TEMPLATE})


async def test_chats_have_one_bos_and_template_errors_are_400(
    client: FakeClient, connect: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """Laws 11 and 14b."""
    client.info = fake_info(vocab_size=tokenizer.vocab_size)
    async with connect(client, tokenizer) as http:
        url = "/v1/chat/completions"
        parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
        fine = await http.post(url, json={"messages": [{"role": "user", "content": parts}], "bad_words": ["stop"]})
        refused = await http.post(url, json={"messages": [{"role": "user", "content": "no"}]})
        image = {"type": "image_url", "image_url": {"url": "x"}}
        picture = await http.post(url, json={"messages": [{"role": "user", "content": [image]}]})
        endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}"
        costly = await http.post(url, json={"messages": [{"role": "user", "content": "a"}], "chat_template": endless})
    assert fine.status_code == 200, fine.text
    ids = client.requests[0].prompt_token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|user|>hello\nworld"
    assert client.requests[0].params.bad_word_ids
    assert refused.status_code == 400
    assert "not that" in refused.json()["error"]["message"]
    assert (picture.status_code, picture.json()["error"]["param"]) == (400, "messages[0].content")
    assert costly.status_code == 400


async def test_offsets_follow_tokens_of_several_characters_and_bytes(
    client: FakeClient, connect: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    """Law 10."""
    prompt = "hello naïve 日本 👍🏽 <s>x"
    client.info = fake_info(vocab_size=tokenizer.vocab_size)
    client.script = say("x")
    async with connect(client, tokenizer) as http:
        response = await http.post(
            "/v1/completions", json={"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0}
        )
    choice = response.json()["choices"][0]
    assert choice["text"] == prompt
    ids = tokenizer.encode(prompt)
    offsets = choice["logprobs"]["text_offset"]
    for place in range(len(ids)):
        before = b"".join(tokenizer.token_bytes(token_id) for token_id in ids[1:place])
        assert offsets[place] == len(before.decode(errors="ignore"))


async def test_a_long_prompt_leaves_streams_alone(connect: Callable[..., Any], tokenizer: Tokenizer) -> None:
    """Tokenising runs beside the event loop."""

    def endless(request: Any) -> Any:
        yield [OutputChunk(index=0, text="x", token_ids=(5,))]

    client = FakeClient(endless, fake_info(vocab_size=tokenizer.vocab_size))
    longest = 0.0
    async with connect(client, tokenizer) as http:
        call = asyncio.create_task(http.post("/tokenize", json={"prompt": "hello world stops here " * 40_000}))
        start = before = time.monotonic()
        while not call.done():
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, before = max(longest, now - before), now
        assert (await call).status_code == 200
    took = time.monotonic() - start
    assert longest < max(0.5 * took, 0.1)
