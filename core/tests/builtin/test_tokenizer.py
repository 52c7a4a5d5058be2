"""Loading tokenizers, encoding, token bytes and chat templates."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from enginectl.builtin.tokenizer import Tokenizer
from enginectl.errors import ConfigError, ModelError, RequestError
from enginectl.testing import tokenizers as small

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}"
    "{% endfor %}"
)
BLOCKS = """
{% for m in messages %}
    {% if m.role == 'user' %}
  {{ m.content }}
    {% endif %}
{% endfor %}
"""
TOOLS = """
{%- for m in messages %}
    {%- if m.tool_calls is defined %}
        {%- for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
    {%- else %}
        {%- generation %}{{ m.role }}: {{ m.content | trim }};{% endgeneration %}
    {%- endif %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %} tools={{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %} n={{ ns.n }} é={{ {'é': '<'} | tojson }} {{ flag }}
"""
USER = [{"role": "user", "content": "hi"}]


def write(directory: Path, backend: tokenizers.Tokenizer | None = None, **files: Any) -> Path:
    """A tokenizer directory; keyword `a_json` writes a.json."""
    directory.mkdir(exist_ok=True)
    (backend or small.byte_level()).save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= files.pop("config", {})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def in_memory(template: str | None = CHATML, **named: str) -> Tokenizer:
    templates = named if template is None else {"default": template, **named}
    return Tokenizer(small.byte_level(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, templates=templates)


# Loading


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Start-up must be fast."""
    write(tmp_path / "m", config={"chat_template": CHATML})
    script = (
        "import sys; from pathlib import Path; from enginectl.builtin.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(Path(sys.argv[1])); t.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "m")], check=True, timeout=60)


def test_special_tokens_come_from_every_file(tmp_path: Path) -> None:
    """Configuration wins over special_tokens_map.json; objects and texts are both read."""
    path = write(
        tmp_path,
        config={"eos_token": {"content": "<tool>"}, "additional_special_tokens": ["<|user|>"]},
        special_tokens_map__json={"eos_token": "</s>", "pad_token": {"content": "</s>"}},
    )
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<tool>")
    assert tokenizer.eos_token_id == small.token_id(tokenizer.backend, "<tool>")
    assert tokenizer.eos_token_id in tokenizer.special_ids  # tokenizer.json says it is not special
    assert tokenizer.decode([tokenizer.eos_token_id or 0]) == ""
    assert tokenizer.special_tokens["pad_token"] == "</s>"


def test_added_tokens_keep_the_declared_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens only the configuration knows get exactly the id it states, or none."""
    size = small.byte_level().get_vocab_size()
    declared = {str(size): {"content": "<new>", "special": True}, str(size + 9): {"content": "<far>", "special": True}}
    tokenizer = Tokenizer.load(write(tmp_path, config={"added_tokens_decoder": declared, "pad_token": "<nowhere>"}))
    assert tokenizer.encode("<new>", False) == [size]
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.token_to_id("<nowhere>") is None
    assert "<far>" in caplog.text


def test_truncation_and_padding_saved_in_the_file_are_cleared(tmp_path: Path) -> None:
    """A tokenizer.json saved with truncation must not cut prompts in silence."""
    backend = small.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert len(tokenizer.encode("xyzxyzxyz", False)) == 9


@pytest.mark.parametrize(
    ("flags", "around"), [((True, True), (1, 1)), ((False, True), (0, 1)), ((False, False), (0, 0))]
)
def test_add_bos_and_add_eos_in_the_configuration(tmp_path: Path, flags: tuple[bool, bool], around: Any) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, config={"add_bos_token": flags[0], "add_eos_token": flags[1]}))
    ids = tokenizer.encode("x")
    assert tokenizer.decode(ids, False) == "<s>" * around[0] + "x" + "</s>" * around[1]


def test_missing_or_damaged_files_are_model_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="no tokenizer directory"):
        Tokenizer.load(tmp_path / "none")
    path = write(tmp_path / "m")
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        Tokenizer.load(path)
    (path / "tokenizer_config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.load(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="transformers cannot make one"):
        Tokenizer.load(tmp_path / "empty")
    assert not list((tmp_path / "cache" / "enginectl" / "tokenizers").iterdir())


def test_an_older_format_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vocab.json and merges.txt, no tokenizer.json: the second load finds the cached result."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "old"
    path.mkdir()
    small.byte_level().model.save(str(path))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}))
    (path / "chat_template.jinja").write_text(CHATML)
    first = Tokenizer.load(path)
    assert first.decode(first.encode("hello 日本")) == "hello 日本"
    (made,) = (tmp_path / "cache" / "enginectl" / "tokenizers").iterdir()
    before = (made / "tokenizer.json").stat().st_mtime_ns
    second = Tokenizer.load(path)
    assert second.encode("hello") == first.encode("hello")
    assert (made / "tokenizer.json").stat().st_mtime_ns == before
    assert second.has_chat_template


# Encoding and bytes


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<▁"), max_size=30))
def test_token_bytes_join_to_the_text(text: str) -> None:
    """Law 10: `bytes` are the token's raw bytes."""
    for backend in (small.byte_level(), small.byte_fallback(strip=False)):
        tokenizer = Tokenizer(backend)
        data = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, False))
        assert data == text.encode()


def test_token_bytes_of_every_kind() -> None:
    llama, piece = Tokenizer(small.byte_fallback()), Tokenizer(small.word_piece())
    expected = {"<0x0A>": b"\n", "<0xE6>": b"\xe6", "▁hello": b" hello", "</s>": b"</s>", "日本": "日本".encode()}
    for token, data in expected.items():
        assert llama.token_bytes(small.token_id(llama.backend, token)) == data
    assert piece.token_bytes(small.token_id(piece.backend, "hello")) == b"hello"
    assert llama.token_bytes(10**6) == b""
    assert llama.token_bytes(-1) == b""


def test_wrong_input_is_the_requests_fault() -> None:
    """Law 11: a 400, not a crash."""
    tokenizer = in_memory()
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("\ud800")
    for ids in ([-1], [2**40]):
        with pytest.raises(RequestError, match="token ids must be"):
            tokenizer.decode(ids)
    with pytest.raises(RequestError, match="bad_words"):
        tokenizer.bad_word_ids(["ok", " "])


def test_encoding_is_the_same_from_many_threads() -> None:
    tokenizer = in_memory()
    texts = [f"hello {i} " * (i % 7 + 1) for i in range(60)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer.encode, texts))
    assert found == tokenizer.encode_batch(texts)
    assert found == [tokenizer.backend.encode(text).ids for text in texts]


def test_bad_words_are_found_at_the_start_and_after_a_space() -> None:
    tokenizer = in_memory()
    found = tokenizer.bad_word_ids(["hello", " hello"])
    assert {tokenizer.decode(ids) for ids in found} == {"hello", " hello"}
    assert len(found) == 2
    llama = Tokenizer(small.byte_fallback())
    assert llama.bad_word_ids(["hello"])[0] == (small.token_id(llama.backend, "▁hello"),)


def test_bos_is_never_doubled() -> None:
    """Law 14b: added where the template did not write it, never twice; nothing is put behind the text."""
    tokenizer = in_memory()
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.encode_chat("<s>hello").count(bos) == 1
    assert tokenizer.encode_chat("hello")[0] == bos
    assert tokenizer.encode_chat("hello").count(bos) == 1
    assert bos not in tokenizer.encode_chat("hello", add_special_tokens=False)
    assert tokenizer.encode_chat("") == [bos]
    backend = small.byte_level()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> <|user|> $A </s>", special_tokens=[(t, backend.token_to_id(t)) for t in small.SPECIAL]
    )
    both = Tokenizer(backend, special_tokens={"bos_token": "<s>"})
    assert both.decode(both.encode_chat("hello"), False) == "<s><|user|>hello"
    assert both.decode(both.encode_chat("<s><|user|>hello"), False) == "<s><|user|>hello"
    assert both.decode(both.encode_chat("<s>hello"), False) == "<s>hello"
    unnamed = Tokenizer(backend)  # puts tokens in front, and none of them is called BOS
    assert unnamed.decode(unnamed.encode_chat("<s><|user|>hello"), False) == "<s><|user|>hello"


# Chat templates


@pytest.mark.parametrize("template", [CHATML, PARTS_ONLY, TOOLS, BLOCKS])
@pytest.mark.parametrize("generation", [True, False])
def test_rendering_equals_transformers(tmp_path: Path, template: str, generation: bool) -> None:
    """The prompt is the one the model was trained on, character for character."""
    from transformers import PreTrainedTokenizerFast

    path = write(tmp_path, chat_template__jinja=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(path))
    text = [{"type": "text", "text": " hé <b> "}] if template == PARTS_ONLY else " hé <b> "
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é<"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text},
        {"role": "user", "content": text},
        {"role": "assistant", "content": None if template == TOOLS else text, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "é < >", "parameters": {}}}]
    if template != TOOLS:
        del messages[2]["tool_calls"]
    options: dict[str, Any] = {"add_generation_prompt": generation, "tools": tools, "flag": True}
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert Tokenizer.load(path).apply_chat_template(messages, **options) == expected


@pytest.mark.parametrize("trimmed", [True, False])
def test_continuing_the_final_message_equals_transformers(tmp_path: Path, trimmed: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    template = CHATML.replace("m['content']", "m['content'] | trim") if trimmed else CHATML
    path = write(tmp_path, chat_template__jinja=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(path))
    messages = [*USER, {"role": "assistant", "content": "hi hi "}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    got = Tokenizer.load(path).apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert got == expected
    assert got.endswith("hi hi" if trimmed else "hi hi ")
    assert messages[1]["content"] == "hi hi "


def test_templates_are_found_wherever_they_are_kept(tmp_path: Path) -> None:
    """Named lists in the configuration, files, the flag as a file or as text; files win."""
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools|length }}"}]
    path = write(tmp_path / "a", config={"chat_template": named})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.apply_chat_template(USER) == "D"
    assert tokenizer.apply_chat_template(USER, tools=[{}]) == "T1"
    assert tokenizer.apply_chat_template(USER, chat_template="tool_use", tools=[]) == "T0"
    (path / "chat_template.jinja").write_text("FILE")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert Tokenizer.load(path).apply_chat_template(USER) == "FILE"
    assert Tokenizer.load(path).apply_chat_template(USER, chat_template="rag") == "R"
    (tmp_path / "mine").write_text("MINE")
    assert Tokenizer.load(path, str(tmp_path / "mine")).apply_chat_template(USER) == "MINE"
    assert Tokenizer.load(path, "{{ 'TEXT' }}").apply_chat_template(USER, tools=[{}]) == "TEXT"
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(path, "nothing-there")
    with pytest.raises(ConfigError, match="cannot be used"):
        Tokenizer.load(path, "{% for %}")


def test_content_takes_the_form_the_template_reads() -> None:
    """Lists of text parts are joined for templates that want texts, texts are wrapped for those that want parts."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert in_memory("{{ messages[0]['content'] }}").apply_chat_template(parts) == "a\nb"
    assert in_memory("{{ messages[0].content + '!' }}").apply_chat_template(parts) == "a\nb!"
    assert in_memory("{{ messages[0].content | upper }}").apply_chat_template(USER) == "HI"
    assert in_memory(PARTS_ONLY).apply_chat_template(parts) == "[a][b]"
    assert in_memory(PARTS_ONLY).apply_chat_template(USER) == "[hi]"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(RequestError, match="reads text only"):
        in_memory().apply_chat_template(image)


def test_tool_call_arguments_become_objects() -> None:
    template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.x }}{% endfor %}"
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 5}'}}],
    }
    assert in_memory(template).apply_chat_template([message]) == "5"
    message["tool_calls"] = [{"function": {"name": "f", "arguments": "{"}}]
    with pytest.raises(RequestError, match="arguments are not JSON"):
        in_memory(template).apply_chat_template([message])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "division"),
        ("{% for %}", r"cannot be used.*line 1"),
        ("{% include 'x' %}", "loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "underscore"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion|steps"),
    ],
)
@pytest.mark.parametrize("of_request", [True, False])
def test_template_errors_are_the_requests_fault(template: str, reason: str, of_request: bool) -> None:
    """Law 11: 400 with the template's own reason, whoever the template is from; the sandbox holds."""
    tokenizer = in_memory(CHATML if of_request else template)
    with pytest.raises(RequestError, match=f"(?is){reason}") as caught:
        tokenizer.apply_chat_template(USER, chat_template=template if of_request else None)
    assert caught.value.status == 400


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 'x' * 9999999999 }}",
        "{{ [1] * 9999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{% set x = 'a' * 4000000 %}{{ x.replace('', x) }}",
        "{% set x = 'a' * 4000000 %}{{ x | replace('a', x) }}",
        "{% set x = 'a' * 4000000 %}{{ x.join([x, x]) }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ [1] | tojson(indent=9999999999) }}",
        "{# " + "x" * 200_000 + " #}",
    ],
)
def test_templates_from_requests_run_under_a_budget(template: str) -> None:
    """Law 11: a hostile template is refused in about a second, and does not take the memory with it."""
    with pytest.raises(RequestError, match=r"steps|characters|at most|wide|may not use|No filter"):
        in_memory().apply_chat_template(USER, chat_template=template)


def test_a_requests_own_template_renders_as_the_models_would() -> None:
    for template in (CHATML, TOOLS, PARTS_ONLY, BLOCKS):
        messages = [*USER, {"role": "assistant", "content": "x" * 5000}]
        options: dict[str, Any] = {"tools": [{"a": 1}], "flag": "f"}
        expected = in_memory(template).apply_chat_template(messages, **options)
        assert in_memory().apply_chat_template(messages, chat_template=template, **options) == expected


def test_wrong_messages_and_options_are_refused() -> None:
    tokenizer = in_memory()
    with pytest.raises(RequestError, match="must be an object with a role"):
        tokenizer.apply_chat_template(["hi"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="a text or a list of parts"):
        tokenizer.apply_chat_template([{"role": "user", "content": 5}])
    with pytest.raises(RequestError, match="cannot both be true"):
        tokenizer.apply_chat_template(USER, continue_final_message=True)
    with pytest.raises(RequestError, match="needs a final message"):
        tokenizer.apply_chat_template([], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="drops or changes"):
        in_memory("x").apply_chat_template(USER, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(RequestError, match="may not set messages"):
        tokenizer.templates.render(
            USER,
            add_generation_prompt=True,
            continue_final_message=False,
            tools=None,
            documents=None,
            chat_template=None,
            kwargs={"messages": []},
        )
    with pytest.raises(RequestError, match=r"no default chat template.*by name: rag") as caught:
        in_memory(None, rag="x").apply_chat_template(USER)
    assert caught.value.code == "no_chat_template"
