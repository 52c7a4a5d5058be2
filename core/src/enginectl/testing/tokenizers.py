"""Small tokenizers of the two common kinds, made in memory in milliseconds, that can spell every text."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "hello world",
    "the stop string stops here",
    "naïve café",
    "日本語のテキスト",
    "a\n\nb",
    "😀👍🏽",
    "1 + 1 = 2",
)
SPECIAL = ("<s>", "</s>", "<|user|>")


def byte_level(*, vocab_size: int = 340) -> tokenizers.Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen: tokens may split characters; `<tool>` is added, not special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS] * 3, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return _with_bos(backend)


def byte_fallback(*, strip: bool = True) -> tokenizers.Tokenizer:
    """SentencePiece-style BPE with byte tokens: as Llama 2 (strip) or Gemma saves it."""
    words = ["▁", "he", "hel", "hell", "hello", "▁hello", "st", "sto", "stop", "▁stop", "日本", "é", "▁▁"]
    chars = sorted({char for char in "".join((*CORPUS, *words)) if char not in " \n😀👍🏽"} - {"語", "ï"})
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in (*chars, *words) if token not in tokens]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [(word[:-1], word[-1]) for word in words if len(word) > 1 and word[:-1] in vocab]
    merges += [("▁", "hello"), ("▁", "stop")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*stages, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", *SPECIAL)])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return _with_bos(backend)


def metaspace() -> tokenizers.Tokenizer:
    """Unigram with a Metaspace decoder, as XLM-R and T5 are saved; it has no bytes."""
    pieces = [("<unk>", 0.0), *((token, 0.0) for token in SPECIAL), ("▁hello", -1.0), ("▁world", -1.0), ("▁", -2.0)]
    pieces += [(char, -3.0) for char in "abcdefghijklmnopqrstuvwxyz日本é"]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(list(SPECIAL))
    return _with_bos(backend)


def word_piece() -> tokenizers.Tokenizer:
    """WordPiece: a decoder that looks at neighbouring tokens."""
    tokens = ["[UNK]", *SPECIAL, "hello", "world", "##s", "##ing", ".", "日", "a"]
    backend = tokenizers.Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(list(SPECIAL))
    return _with_bos(backend)


def token_id(backend: tokenizers.Tokenizer, token: str) -> int:
    """The id of a token that is there."""
    found = backend.token_to_id(token)
    assert found is not None, f"no token {token!r}"
    return found


def _with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", token_id(backend, "<s>"))]
    )
    return backend
