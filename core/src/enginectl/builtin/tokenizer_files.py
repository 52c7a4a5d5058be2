"""Reads a model's tokenizer directory: tokenizer.json, configuration, special tokens and chat templates."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginectl.errors import ModelError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
SOURCE_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the directory says. special_tokens: `bos_token` … to text. extra_special_tokens: more of them, unnamed.
    added_tokens: (id, fields of an AddedToken) by id. templates: name to Jinja text, the usual one is `default`.
    """

    tokenizer_json: Path
    special_tokens: dict[str, str]
    extra_special_tokens: tuple[str, ...]
    added_tokens: tuple[tuple[int, dict[str, Any]], ...]
    templates: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read everything; a directory without tokenizer.json is converted once into the user's cache.

    Raises ModelError if there is no tokenizer or a file is damaged.
    """
    if not directory.is_dir():
        raise ModelError(f"no tokenizer directory at {directory}")
    source = directory if (directory / "tokenizer.json").is_file() else converted(directory)
    config = _json(source / "tokenizer_config.json")
    marks = {**_json(source / "special_tokens_map.json"), **config}
    extra = [_text(token) for key in EXTRA_TOKENS for token in _values(marks.get(key))]
    return TokenizerFiles(
        tokenizer_json=source / "tokenizer.json",
        special_tokens={name: _text(marks[name]) for name in NAMED_TOKENS if marks.get(name)},
        extra_special_tokens=tuple(extra),
        added_tokens=_added_tokens(config, _json(source / "added_tokens.json")),
        templates=_templates(directory, config) or _templates(source, config),
        config=config,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _values(tokens: Any) -> list[Any]:
    return list(tokens.values()) if isinstance(tokens, dict) else list(tokens or ())


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _added_tokens(config: dict[str, Any], legacy: dict[str, Any]) -> tuple[tuple[int, dict[str, Any]], ...]:
    """`added_tokens_decoder` of the configuration, or the older added_tokens.json (text to id)."""
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = {int(i): {key: token[key] for key in fields if key in token} for i, token in
              (config.get("added_tokens_decoder") or {}).items()}  # fmt: skip
    for text, token_id in legacy.items():
        tokens.setdefault(int(token_id), {"content": text})
    return tuple(sorted(tokens.items()))


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates in files win over those in the configuration, which may be one text or a list of named ones."""
    found: dict[str, str] = {}
    for given in (_json(directory / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(given, str):
            found["default"] = given
        elif isinstance(given, dict):
            found |= given
        elif given:
            found |= {entry["name"]: entry["template"] for entry in given}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text("utf-8")
    if (directory / "chat_template.jinja").is_file():
        found["default"] = (directory / "chat_template.jinja").read_text("utf-8")
    return found


def converted(directory: Path) -> Path:
    """A directory with tokenizer.json made from an older format by transformers, kept in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginectl" / "tokenizers"
    target = cache / _fingerprint(directory)
    if (target / "tokenizer.json").is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=cache, prefix=".converting-"))
    try:
        _convert(directory, scratch)
        try:
            scratch.rename(target)  # atomic: another process sees the whole directory or none
        except OSError:
            if not (target / "tokenizer.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fingerprint(directory: Path) -> str:
    """Changes when a file the tokenizer is made from does."""
    digest = hashlib.sha256(str(directory.resolve()).encode())
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in SOURCE_SUFFIXES:
            stat = path.stat()
            digest.update(f"\0{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def _convert(directory: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        tokenizer.save_pretrained(str(target))
    except Exception as error:  # the formats and their libraries raise what they like
        raise ModelError(
            f"{directory} has no tokenizer.json, and transformers cannot make one from what is there: {error}"
        ) from error
    if not (target / "tokenizer.json").is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json, and its {type(tokenizer).__name__} cannot be converted to one; "
            "serve with --tokenizer DIRECTORY that has a tokenizer.json"
        )
