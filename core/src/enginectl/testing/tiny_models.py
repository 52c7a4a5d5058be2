"""Tiny random models as directories: small enough for a test of seconds, and able to fail it.

Names are those of `enginectl.testing.architectures`. Embeddings are untied and weights wide (std 0.2), so that outputs do
not repeat; windows are 8, soft caps bite and states last, so that a wrong mask, cap or state changes tokens.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from enginectl.testing.architectures import ARCHITECTURES, REFUSALS
from enginectl.testing.architectures.kinds import BOS, COMMON, EOS, PAD, VOCAB_SIZE, WINDOW

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "VOCAB_SIZE",
    "WINDOW",
    "save_byte_tokenizer",
    "save_refusal",
    "save_tiny_model",
    "tiny_config",
    "tiny_model",
]


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration object of a tiny model. changes: fields set last."""
    from transformers import CONFIG_MAPPING

    architecture = ARCHITECTURES[name]
    kind = CONFIG_MAPPING[architecture.model_type]
    known = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    common = {field: value for field, value in COMMON.items() if field in known - architecture.without}
    return kind(**{**common, **architecture.values, **changes})


def tiny_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model in fp32, in eval mode."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = tiny_config(name, **changes)
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for field, parameter in model.named_parameters():
            if field.endswith("A_log"):  # states last for some tokens, not for one
                parameter -= 3.0
            if parameter.ndim == 1:  # norms and biases start at constants, which would hide that one is left out
                parameter += torch.randn(parameter.shape, generator=random) * 0.1
    return model.eval()


def save_tiny_model(
    name: str, directory: Path, *, seed: int = 0, dtype: str = "float32", tokenizer: bool = True, **changes: Any
) -> Path:
    """Write config.json, model.safetensors, generation_config.json and a byte tokenizer. Returns the directory."""
    model = tiny_model(name, seed=seed, **changes).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    if tokenizer:
        save_byte_tokenizer(directory)
    return directory


def save_refusal(name: str, directory: Path) -> Path:
    """Write the configuration that must be refused, and one tensor, since weights are not to be read. Returns the directory."""
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING

    refusal = REFUSALS[name]
    CONFIG_MAPPING[refusal.model_type](**refusal.values).save_pretrained(directory)
    save_file({"unread": torch.zeros(1)}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer with one token a byte, the specials `<s> </s> <pad>` and a plain chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(str(directory))
    assert wrapped.convert_tokens_to_ids("</s>") == EOS, json.dumps(wrapped.get_added_vocab())
