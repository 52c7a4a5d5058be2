"""Laws 11 and 21: what cannot be served is refused with the reason, and nothing has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from enginectl import Engine, SamplingParams
from enginectl.errors import ConfigError, EnginectlError, NotFoundError, RequestError
from enginectl.testing.tiny_adapters import ATTENTION, save_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory adapters may be loaded from."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def good(root: Path) -> Path:
    return save_adapter("llama", root / "good", target_modules=ATTENTION)


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], Path], root: Path, good: Path) -> Iterator[Engine]:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "num_threads": 1}
    options |= {"plugin_options": {"sgmv": {"roots": [str(root)]}}, "lora_modules": {"good": str(good)}}
    with Engine(str(tiny("llama")), enable_lora=True, **options) as engine:
        yield engine


def edited(good: Path, directory: Path, edit: Edit) -> Path:
    """A copy of the good adapter with its configuration and tensors changed."""
    directory.mkdir()
    config, tensors = json.loads((good / CONFIG).read_text()), load_file(good / WEIGHTS)
    edit(config, tensors)
    (directory / CONFIG).write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS)
    return directory


def refused(engine: Engine, path: Path | str, match: str, *, name: str = "bad", replace: bool = False) -> None:
    before, answers = engine.adapters, answer(engine)
    with pytest.raises(RequestError, match=match):
        engine.load_adapter(name, str(path), replace=replace)
    assert engine.adapters == before
    assert answer(engine) == answers


def answer(engine: Engine) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return engine.generate([[5, 6, 7, 8]], params, adapter="good")[0].outputs[0].token_ids


def resized(key: str, rows: int, columns: int) -> Edit:
    return lambda _, tensors: tensors.update({key: torch.ones(rows, columns)})


def without(part: str) -> Edit:
    return lambda _, tensors: [tensors.pop(name) for name in list(tensors) if part in name]


CASES: dict[str, tuple[Edit, str]] = {
    "another method": (lambda c, _: c.update(peft_type="LOHA"), "peft_type is 'LOHA'; only LORA"),
    "DoRA": (lambda c, _: c.update(use_dora=True), "use_dora is set: DoRA"),
    "whole modules": (lambda c, _: c.update(modules_to_save=["lm_head"]), "modules_to_save is set"),
    "trained tokens": (lambda c, _: c.update(trainable_token_indices=[1]), "trainable_token_indices is set"),
    "bias": (lambda c, _: c.update(bias="lora_only"), "bias is 'lora_only'"),
    "bias of B": (lambda c, _: c.update(lora_bias=True), "lora_bias is set"),
    "parameters": (lambda c, _: c.update(target_parameters=["experts"]), "target_parameters is set"),
    "PiSSA": (lambda c, _: c.update(init_lora_weights="pissa_niter_4"), "changes the base's weights"),
    "activated": (lambda c, _: c.update(alora_invocation_tokens=[1]), "alora_invocation_tokens is set"),
    "an unknown field": (lambda c, _: c.update(use_magic=True), "use_magic is set, and its meaning is not known"),
    "a wrong type": (lambda c, _: c.update(lora_alpha="much"), r"Expected `float`.*lora_alpha"),
    "no rank": (lambda c, _: c.update(r=0), "ranks must be 1 or more"),
    "a broken pattern": (lambda c, _: c.update(target_modules="(q_proj"), "is no regular expression"),
    "another rank": (lambda c, _: c.update(r=4), "says rank 4, its tensors have 8 and 8"),
    "a wide base": (resized(f"{Q}.lora_A.weight", 8, 64), r"lora_A is \(8, 64\) where this model needs \(rank, 48\)"),
    "a tall base": (resized(f"{Q}.lora_B.weight", 64, 8), r"lora_B is \(64, 8\) where .* \(96, rank\).*another base"),
    "no B": (without("layers.0.self_attn.q_proj.lora_B"), r"module 'model.layers.0.self_attn.q_proj' has no lora_B"),
    "no layer": (without("layers.1.self_attn"), "is incomplete: target_modules names model.layers.1.self_attn.q_proj"),
    "infinite": (lambda _, t: t[f"{Q}.lora_A.weight"].fill_(torch.inf), "damaged: tensor .* not finite"),
    "integers": (
        lambda _, t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 48, dtype=torch.int8)}),
        "is torch.int8; float32, float16 or bfloat16",
    ),
    "a magnitude": (resized(f"{Q}.lora_magnitude_vector", 96, 1), "it is DoRA's"),
    "an embedding": (
        resized("base_model.model.model.embed_tokens.lora_embedding_A", 8, 320),
        "adapters on embeddings are not supported",
    ),
    "a bias": (resized(f"{Q}.base_layer.bias", 96, 1), "biases are not supported"),
    "unnamed": (lambda c, _: c.update(target_modules=["k_proj", "v_proj", "o_proj"]), "which target_modules does not"),
    "excluded": (lambda c, _: c.update(exclude_modules=["q_proj"]), "which target_modules does not name"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_served_is_named(case: str, engine: Engine, root: Path, good: Path) -> None:
    edit, match = CASES[case]
    path = edited(good, root / case.replace(" ", "_"), edit)
    refused(engine, path, match)
    refused(engine, path, match, name="good", replace=True)


def renamed(old: str, new: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["target_modules"] = [new if name == old else name for name in config["target_modules"]]
        for name in [name for name in tensors if f".{old}." in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def test_unknown_modules(engine: Engine, root: Path, good: Path) -> None:
    path = edited(good, root / "unknown", renamed("o_proj", "out_proj"))
    refused(engine, path, r"holds model.layers.\d.self_attn.out_proj.* cannot use in this model.*did you mean .*o_proj")


def test_the_head(engine: Engine, root: Path) -> None:
    path = save_adapter("llama", root / "head", target_modules=["q_proj", "lm_head"])
    refused(engine, path, "lm_head, which adapters cannot use .*on the head are not supported")


def test_no_matching_module(engine: Engine, root: Path) -> None:
    path = save_adapter("gpt2", root / "gpt2", target_modules=["c_attn"], fan_in_fan_out=True)
    refused(engine, path, r"target_modules \(c_attn\) matches no linear .* the model has down_proj, gate_proj, k_proj")


def test_a_rank_over_the_limit(engine: Engine, root: Path) -> None:
    """Law 21."""
    path = save_adapter("llama", root / "high", target_modules=ATTENTION, rank_pattern={"v_proj": 17})
    refused(engine, path, "v_proj' has rank 17, and at most 16 is served; start with --max-lora-rank 17")


def test_damaged_and_missing_files(engine: Engine, root: Path, good: Path) -> None:
    path = root / "damaged"
    refused(engine, path, "no directory")
    path.mkdir()
    refused(engine, path, f"has no {CONFIG}")
    (path / CONFIG).write_text("{")
    (path / "adapter_model.bin").write_bytes(b"")
    refused(engine, path, "adapter_model.bin is a pickle, which is not read")
    data = (good / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data)
    refused(engine, path, "adapter_config.json is damaged")
    shutil.copy(good / CONFIG, path / CONFIG)
    for cut in (0, 4, 100, len(data) - 1):
        (path / WEIGHTS).write_bytes(data[:cut])
        refused(engine, path, f"{WEIGHTS} is damaged")
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).mkdir()
    refused(engine, path, "cannot be read")


def test_paths_outside_the_roots(engine: Engine, root: Path, tmp_path: Path, good: Path) -> None:
    """Neither directly, nor upwards, nor through a link, nor through a file that is a link."""
    outside = shutil.copytree(good, tmp_path / "outside")
    match = "outside the directories that adapters are loaded from"
    refused(engine, outside, match)
    refused(engine, f"{root}/../{outside.relative_to(root.parent.parent)}/..", match)
    (root / "link").symlink_to(outside)
    refused(engine, root / "link", match)
    (root / "inner").mkdir()
    shutil.copy(good / CONFIG, root / "inner")
    (root / "inner" / WEIGHTS).symlink_to(outside / WEIGHTS)
    refused(engine, root / "inner", match)
    refused(engine, outside, match, name="good", replace=True)


def test_names(engine: Engine, good: Path) -> None:
    """Exact names only, and each name once."""
    refused(engine, good, "adapter 'good' is loaded, from .*load it in place", name="good")
    refused(engine, good, "may not be empty", name="")
    for wrong in ("Good", "good ", "goo", "goods"):
        with pytest.raises(NotFoundError, match="did you mean 'good'"):
            engine.generate([[5]], adapter=wrong)
        with pytest.raises(NotFoundError, match="did you mean 'good'"):
            engine.unload_adapter(wrong)


def test_without_roots_nothing_is_loaded_at_run_time(tiny: Callable[[str], Path], good: Path) -> None:
    with Engine(str(tiny("llama")), enable_lora=True, max_num_seqs=2, max_model_len=64) as engine:
        refused_path = pytest.raises(RequestError, match=r"no directory is open for that; start with --sgmv\.roots")
        with refused_path:
            engine.load_adapter("good", str(good))


def test_an_adapter_of_the_start_that_does_not_load_is_an_error(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lora-modules mine=.*nothing at"):
        Engine(str(tiny("llama")), enable_lora=True, lora_modules={"mine": str(tmp_path / "none")})


def test_options_are_checked(tiny: Callable[[str], Path]) -> None:
    for options, match in (
        ({"max_wait_s": -1}, "max_wait_s"),
        ({"kernels": "cuda"}, "kernels is 'cuda'"),
        ({"kernels": "triton"}, "needs a GPU"),
    ):
        with pytest.raises(EnginectlError, match=match):
            Engine(str(tiny("llama")), enable_lora=True, plugin_options={"sgmv": options})
