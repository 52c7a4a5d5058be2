"""What is taken out of the command line before typer sees it."""

from __future__ import annotations

import json

import pytest

from enginectl.cli.arguments import split_arguments
from enginectl.errors import UsageError

COMMANDS = {"serve"}


@pytest.mark.parametrize(
    ("line", "rest", "plugin_flags"),
    [
        ("serve M --port 1", "serve M --port 1", {}),
        ("serve M --ngram.num-speculative-tokens 4", "serve M", {"ngram": {"num-speculative-tokens": "4"}}),
        ("serve --ngram.k=4 M", "serve M", {"ngram": {"k": "4"}}),
        ("serve M --a.x --a.y --port 1", "serve M --port 1", {"a": {"x": "true", "y": "true"}}),
        ("serve M --a.x -1", "serve M", {"a": {"x": "-1"}}),
        ("serve M --prefix-cache.policy lru", "serve M", {"prefix-cache": {"policy": "lru"}}),
        ("serve M --structured-outputs-config.backend x", "serve M --structured-outputs-config.backend x", {}),
        ("serve M --structured-outputs-config.backend=x", "serve M --structured-outputs-config.backend=x", {}),
        ("serve M --lora-modules a=b c=d --port 1", "serve M --lora-modules a=b --lora-modules c=d --port 1", {}),
        ("serve --lora-modules a=b c=d M", "serve --lora-modules a=b --lora-modules c=d M", {}),
        ("serve M --served-model-name a b", "serve M --served-model-name a --served-model-name b", {}),
        ("serve --served-model-name a M", "serve --served-model-name a M", {}),
        ("serve M --lora-modules", "serve M --lora-modules", {}),
        ("plugins --a.x 1", "plugins --a.x 1", {}),
        ("serve M -- --a.x 1", "serve M -- --a.x 1", {}),
        ("serve M --max_model_len 5 --only_plugins", "serve M --max-model-len 5 --only-plugins", {}),
        ("serve M --max_model_len=a_b", "serve M --max-model-len=a_b", {}),
        ("serve M --prefix_cache.policy a_b", "serve M", {"prefix-cache": {"policy": "a_b"}}),
        ("serve M -tp 2 -pp=3", "serve M --tensor-parallel-size 2 --pipeline-parallel-size=3", {}),
    ],
)
def test_plugin_options_and_repeated_values(line: str, rest: str, plugin_flags: dict[str, dict[str, str]]) -> None:
    result = split_arguments(line.split(), COMMANDS)
    assert " ".join(result.rest) == rest
    assert result.plugin_flags == plugin_flags


@pytest.mark.parametrize("line", ["--debug serve M", "serve --debug M", "serve M --debug", "plugins --debug"])
def test_debug_may_stand_anywhere(line: str) -> None:
    result = split_arguments(line.split(), COMMANDS)
    assert result.debug
    assert "--debug" not in result.rest
    assert not split_arguments(["serve", "--", "--debug"], COMMANDS).debug


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="given twice: '1' and '2'"):
        split_arguments(["serve", "M", "--a.x", "1", "--a.x", "2"], COMMANDS)


def test_speculative_config_key_by_key() -> None:
    line = (
        "serve M --speculative-config.method ngram --speculative_config.num_speculative_tokens=4 --speculative-config.x"
    )
    *rest, value = split_arguments(line.split(), COMMANDS).rest
    assert rest == ["serve", "M", "--speculative-config"]
    assert json.loads(value) == {"method": "ngram", "num_speculative_tokens": 4, "x": True}


def test_speculative_config_in_two_forms_is_refused() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        split_arguments(["serve", "M", "--speculative-config", "{}", "--speculative-config.method", "ngram"], COMMANDS)
