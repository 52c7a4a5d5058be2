"""Text to token ids and back, and chat messages to a prompt. Imports neither transformers nor torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from enginectl.builtin.chat_template import ChatTemplates, given_template
from enginectl.builtin.token_pieces import DecoderShape, byte_level_bytes, decoder_shape, piece_bytes
from enginectl.builtin.tokenizer_files import TokenizerFiles, read_tokenizer_files
from enginectl.errors import ModelError, RequestError

logger = logging.getLogger(__name__)


class Tokenizer:
    """A Hugging Face fast tokenizer with its special tokens and chat templates.

    Safe to use from several threads: nothing changes after loading, and encoding lets other threads run.
    Texts are never truncated or padded here; whoever wants fewer tokens cuts the list.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        templates: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.templates = ChatTemplates(templates or {}, self.special_tokens)
        self.decoder_shape: DecoderShape = decoder_shape(backend)
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)

    @classmethod
    def load(cls, directory: Path, chat_template: str | None = None) -> Tokenizer:
        """Load from a model's directory. chat_template: a file, or the template's text, instead of the model's.

        Raises ModelError if there is no usable tokenizer, ConfigError if the template is missing or has a mistake.
        """
        files = read_tokenizer_files(directory)
        try:
            backend = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise ModelError(f"{files.tokenizer_json} cannot be read: {error}") from error
        _add_declared_tokens(backend, files)
        _set_post_processor(backend, files)
        templates = files.templates
        if chat_template is not None:
            templates = {"default": given_template(chat_template)}
        return cls(backend, special_tokens=files.special_tokens, templates=templates)

    # Special tokens

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token. The model's whole set is in EngineInfo.eos_token_ids."""
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of bos_token, None if the vocabulary lacks it."""
        return self.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of eos_token, None if the vocabulary lacks it."""
        return self.token_to_id(self.eos_token)

    @property
    def has_chat_template(self) -> bool:
        """Whether apply_chat_template works without a template of the request's own."""
        return bool(self.templates.named)

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around it (BOS …) unless told not to.

        Raises RequestError for text that is not Unicode (lone surrogates).
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, encoded in parallel where there are cores."""
        # The batch call releases the GIL and computes no offsets; the single one does neither.
        try:
            found = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the text cannot be tokenised, it is not valid Unicode: {error}") from error
        return [encoding.ids for encoding in found]

    def encode_chat(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a rendered chat.

        Tokens that the tokenizer puts in front of a text (BOS) are added unless the template wrote them; nothing is
        put behind it. add_special_tokens: False adds none.
        """
        ids = self.encode(text, add_special_tokens=False)
        prefix = self._prefix_ids
        if add_special_tokens is False or ids[: len(prefix)] == prefix:
            return ids
        if ids and ids[0] == self.bos_token_id:
            return ids
        return prefix + ids

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Id sequences that spell these words, each at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise RequestError(
                    f"bad_words holds {word!r}, expected words with a visible character", param="bad_words"
                )
            for text in (word.lstrip(), f" {word.lstrip()}"):
                if ids := self.encode(text, add_special_tokens=False):
                    found[tuple(ids)] = None
        return tuple(found)

    # Ids to text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids, decoded at once. Ids without a token add nothing."""
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"token ids must be numbers from 0 to {self.vocab_size - 1}: {error}") from error

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text; b"" for an id without a token. Special tokens give their own text."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self.decoder_shape.kind == "byte_level":
            return byte_level_bytes(token)
        if self.decoder_shape.kind == "pieces":
            return piece_bytes(token, self.decoder_shape)
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str | None) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return None if token is None else self.backend.token_to_id(token)

    # Chat

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for these messages. See `ChatTemplates.render`."""
        return self.templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            kwargs=kwargs,
        )

    @cached_property
    def _prefix_ids(self) -> list[int]:
        """What the tokenizer puts in front of every text."""
        bare = self.encode("a", add_special_tokens=False)
        full = self.encode("a")
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return []


def _add_declared_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Tokens that only the configuration knows, and marks that it sets on known ones.

    No token gets an id that the files do not state: the model would have no row for it.
    """
    for token_id, fields in files.added_tokens:
        known = backend.token_to_id(fields["content"])
        if known is None and token_id == backend.get_vocab_size(with_added_tokens=True):
            backend.add_tokens([tokenizers.AddedToken(**fields)])
        elif known != token_id:
            logger.warning("token %r: declared id %d, found %s; keeping that", fields["content"], token_id, known)
        elif fields.get("special"):
            backend.add_special_tokens([tokenizers.AddedToken(**fields)])
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in (*files.special_tokens.values(), *files.extra_special_tokens):
        if text not in marked and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _set_post_processor(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """`add_bos_token` and `add_eos_token`, when the configuration has them, say what is put around a text."""
    if "add_bos_token" not in files.config and "add_eos_token" not in files.config:
        return
    around: dict[str, tuple[str, int]] = {}
    for name in ("bos_token", "eos_token"):
        text = files.special_tokens.get(name)
        token_id = backend.token_to_id(text) if text is not None else None
        if files.config.get(f"add_{name}") and text is not None and token_id is not None:
            around[name] = (text, token_id)
    single = [around["bos_token"][0]] if "bos_token" in around else []
    single += ["$A"] + ([around["eos_token"][0]] if "eos_token" in around else [])
    backend.post_processor = TemplateProcessing(single=single, pair=None, special_tokens=list({*around.values()}))
