"""Bodies that are wrong in every way: 400 with OpenAI's error body, never 5xx and never 422."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginectl.builtin.openai.protocol import NO_EFFECT, REFUSED, ChatRequest, CompletionRequest
from enginectl.errors import RequestError
from enginectl.http.body import JsonBody

URL = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "priority": 99999999999999999999}',
        b'{"prompt": [' + b"9" * 30 + b"]}",
        b'{"prompt": "a", "metadata": {"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}}",
        b'{"prompt": "a"} trailing',
        b'{"prompt": "a", "logit_bias": {"x": 1}}',
        b'{"prompt": "a", "logit_bias": {"-1": 1}}',
        b'{"prompt": "a", "stop": "' + b"\\u0000" * 3 + b'", "n": "1"}',
        b'{"prompt": "a", "' + b"k" * 100_000 + b'": 1}',
        b"{}",
    ],
    ids=lambda body: repr(body[:40]),
)
async def test_a_malformed_body_is_a_400(http: httpx.AsyncClient, body: bytes) -> None:
    """Law 11."""
    response = await http.post(URL, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 5000


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_the_content_type_must_be_json(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    response = await http.post(URL, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 400


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=UTF-8"])
async def test_json_content_types(http: httpx.AsyncClient, content_type: str) -> None:
    response = await http.post(URL, content=b'{"prompt": "a"}', headers={"content-type": content_type})
    assert response.status_code == 200


def _refusal(kind: type[msgspec.Struct], body: bytes) -> RequestError | None:
    try:
        JsonBody(kind).decode(body)
    except RequestError as error:
        return error
    return None


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_decode_or_raise_a_request_error(body: bytes) -> None:
    error = _refusal(CompletionRequest, body)
    assert error is None or error.status == 400


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.__struct_fields__)), _values, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_value_of_any_field_decodes_or_names_a_field(fields: dict[str, object]) -> None:
    error = _refusal(ChatRequest, json.dumps(fields).encode("utf-8", "surrogatepass"))
    assert error is None or (error.status == 400 and (error.param is not None or error.code == "invalid_json"))


def test_the_tables_name_fields_that_exist() -> None:
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert known >= {*REFUSED, *NO_EFFECT}


def test_every_documented_extension_is_a_field() -> None:
    """The list in the compatibility document."""
    documented = """top_k min_p repetition_penalty min_tokens stop_token_ids ignore_eos include_stop_str_in_output
        skip_special_tokens spaces_between_special_tokens logit_bias allowed_token_ids bad_words prompt_logprobs
        truncate_prompt_tokens echo add_generation_prompt continue_final_message add_special_tokens chat_template
        chat_template_kwargs documents structured_outputs priority request_id cache_salt return_token_ids"""
    assert set(documented.split()) <= set(ChatRequest.__struct_fields__)
    chat_only = {
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
    }
    assert set(documented.split()) - chat_only <= set(CompletionRequest.__struct_fields__)
