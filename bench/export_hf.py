"""Write a GGUF model as a Hugging Face directory, dequantised, so that peers load the same weights.

python bench/export_hf.py MODEL.gguf DIRECTORY [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from enginectl.builtin.weights import build_gguf
from enginectl.config import EngineConfig
from enginectl.context import BuildContext
from enginectl.machine import detect_machine


def main() -> None:
    """Read, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    ctx = BuildContext(EngineConfig(model=str(args.model), dtype=args.dtype), detect_machine())
    checkpoint = build_gguf(ctx).open(args.model)
    args.directory.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, args.dtype)
    tensors = {name: tensor.to(dtype).contiguous().clone() for name, tensor in checkpoint.tensors()}
    save_file(tensors, args.directory / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "dtype": args.dtype, "torch_dtype": args.dtype}
    (args.directory / "config.json").write_text(json.dumps(config, indent=2))
    (args.directory / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2))
    tokenizer = checkpoint.tokenizer_dir()
    for file in tokenizer.iterdir() if tokenizer is not None else ():
        if file.name not in ("config.json", "generation_config.json"):
            shutil.copy(file, args.directory / file.name)


if __name__ == "__main__":
    main()
