"""The loop over an executor without a model: what each fixed bug did, and the rules that need no randomness."""

from __future__ import annotations

import numpy as np

from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.free_executor import free_core, free_request, free_tokens

VOCAB = 64


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB, length)]


def test_a_preempted_sequence_begins_its_hash_chain_anew() -> None:
    """The index was told to go on at block 0 of a sequence whose chain stood at block 5."""
    index = DictPrefixIndex(4)
    loop = free_core(num_blocks=12, max_model_len=44, index=index)
    for key in range(6):
        loop.core.add(free_request(key, prompt(10, key), 30))
    loop.run()
    assert loop.core.stats().num_preemptions > 0
    assert index.num_sequences == 0
    for key in range(6):
        assert loop.answers.tokens[key] == free_tokens(prompt(10, key), 30, vocab_size=VOCAB)
