"""Parts are wired, or refused with both names and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from enginectl import Engine, SamplingParams
from enginectl.builtin.transformers_family.family import TransformersFamily
from enginectl.builtin.weights import build_safetensors
from enginectl.compose import compose
from enginectl.config import EngineConfig
from enginectl.context import BuildContext, Gpu, Machine
from enginectl.engine.deferred import DeferredExecutor
from enginectl.errors import ConfigError, EnginectlError, ModelError, OutOfMemoryError, PluginError, UnsupportedError
from enginectl.hookspecs import hookimpl
from enginectl.interfaces.model import LayerSpec, ModelSpec
from enginectl.interfaces.sampler import LogitsProcessor, SampleBatch
from enginectl.negotiate import check_capabilities
from enginectl.plugins import Entry, Plugin, PluginHost
from enginectl.provider import Capabilities, Provider, Role
from enginectl.resolve import size_pool
from enginectl.testing.tiny_models import save_tiny_model
from enginectl.testing.toys import ConstantSpeculator, HiddenSpeculator

MACHINE = Machine(num_cores=1, memory_bytes=1 << 30, cpu_flags=frozenset())
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("compose") / "llama")


def small(model: Path | str, **options: Any) -> Engine:
    """Core's own parts only, whatever else is installed."""
    options = {"max_num_seqs": 2, "dtype": "float32", "num_threads": 1, "only_plugins": True, **options}
    return Engine(str(model), **options)


class OnlyToken(LogitsProcessor):
    """Forces one token on every row."""

    def __init__(self, token: int) -> None:
        self.token = token

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None: ...

    def remove_row(self, row: int) -> None: ...

    def is_active(self, rows: NDArray[np.int32]) -> bool:
        return True

    def needs_logits(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.ones(rows.size, np.bool_)

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        kept = logits[:, self.token].clone()
        logits[:] = -float("inf")
        logits[:, self.token] = kept


@pytest.mark.parametrize("several", [False, True])
def test_a_logits_processor_given_as_an_object_runs(several: bool, tiny_llama: Path) -> None:
    """It was accepted and ignored."""
    mine = [OnlyToken(5), OnlyToken(5)] if several else OnlyToken(5)
    with small(tiny_llama, logits_processor=mine) as engine:
        (output,) = engine.generate([[1, 2]], GREEDY)
        assert output.outputs[0].token_ids == (5,) * 4
        assert [row[1] for row in engine.info.table].count("OnlyToken") == (2 if several else 1)


def test_weights_and_model_family_given_as_objects_are_used(tiny_llama: Path) -> None:
    """They were accepted and ignored."""

    class Family(TransformersFamily):
        num_loads = 0

        def load(self, checkpoint: Any, ctx: BuildContext) -> Any:
            self.num_loads += 1
            return super().load(checkpoint, ctx)

    family, weights = Family(), build_safetensors(BuildContext(EngineConfig(model=""), MACHINE))
    with small(tiny_llama, model_family=family, weights=weights) as engine:
        assert len(engine.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == 4
    assert family.num_loads == 1


def test_weights_that_cannot_read_the_path_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("no weights")
    weights = build_safetensors(BuildContext(EngineConfig(model=""), MACHINE))
    with pytest.raises(ModelError, match=r"model\.txt.*not in the format that \w+ reads"):
        small(tmp_path / "model.txt", weights=weights)


def test_a_speculator_that_reads_hidden_states_needs_a_model_that_keeps_them(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step failed for every row instead."""
    import torch

    monkeypatch.setattr("enginectl.builtin.transformers_family.model.TransformersModel.keeps_hidden", False)
    with pytest.raises(UnsupportedError, match=r"HiddenSpeculator.*LlamaForCausalLM"):
        small(tiny_llama, model_family="transformers", speculator=HiddenSpeculator(torch.zeros(1, 1)))
    small(tiny_llama, model_family="transformers", speculator=ConstantSpeculator()).close()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_executor_that_answers_at_once_is_deferred_when_steps_overlap(depth: int, tiny_llama: Path) -> None:
    with small(tiny_llama, overlap_depth=depth) as engine:
        assert isinstance(engine.core.executor, DeferredExecutor) == bool(depth)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": "/nowhere/at/all"}, ModelError, "no model at '/nowhere/at/all'; give a directory"),
        ({"tensor_parallel_size": 2}, UnsupportedError, "tensor_parallel_size"),
        ({"enable_prefix_caching": True}, PluginError, "enginectl-prefix-cache"),
        ({"enable_lora": True}, PluginError, "enginectl-lora-sgmv"),
        ({"speculator": "ngarm"}, PluginError, "no speculator named 'ngarm'"),
        ({"attention": "torhc"}, PluginError, "did you mean 'torch'"),
        ({"attention": "decode=torch,prefill=torhc"}, PluginError, "no attention named 'torhc'"),
        ({"attention": "decode=torch"}, ConfigError, "decode=NAME,prefill=NAME"),
        ({"scheduling_policy": "fcsf"}, PluginError, "did you mean 'fcfs'"),
        ({"plugins": ["fcsf"]}, PluginError, "did you mean 'fcfs'"),
        ({"roles": {"sheduler": "fcfs"}}, EnginectlError, "sheduler"),
        ({"max_model_len": 100_000}, ConfigError, "256"),
        ({"max_model_len": 200, "num_gpu_blocks_override": 4}, ConfigError, "hold fewer than max_model_len, 200"),
        ({"num_gpu_blocks_override": 4}, ConfigError, "hold fewer than max_model_len, 256; give at least 16"),
        (
            {"kv_cache_memory_bytes": 1 << 50},
            ConfigError,
            "kv-cache-memory-bytes is 1024 TiB, and this process may use",
        ),
        (
            {"enable_lora": True, "lora_modules": {"a": "/none"}},
            ConfigError,
            "--lora-modules a=/none: nothing at '/none'",
        ),
        ({"speculative_config": {"method": "fcfs"}}, PluginError, "no speculative method named 'fcfs'"),
        ({"num_gpu_blocks_override": 1 << 40}, OutOfMemoryError, "takes .* TiB, and this process may use"),
        ({"max_num_seqs": 1 << 40}, ConfigError, "allowed: 1 to 65536"),
        ({"num_threads": 100_000}, ConfigError, "allowed: 1 to 1024"),
        ({"kv_cache_memory_bytes": 100}, OutOfMemoryError, "at least 2 are needed"),
        ({"device": "cuda"}, UnsupportedError, "no NVIDIA GPU"),
        ({"kv_cache_dtype": "bfloat16"}, ConfigError, "kv-cache-dtype bfloat16"),
        ({"plugin_options": {"fcsf": {"x": 1}}}, PluginError, "no plugin named 'fcsf'; did you mean 'fcfs'"),
        ({"plugin_options": {"paged": {"x": 1}}}, ConfigError, "takes no options"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16}, ConfigError, "chunked"),
        ({"max_num_seq": 3}, ConfigError, "did you mean 'max_num_seqs'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_composed_is_refused(
    options: dict[str, Any], error: type[EnginectlError], words: str, tiny_llama: Path
) -> None:
    """Law 23: what was asked, what is allowed, what to do; before a request can meet it."""
    options = {"model": tiny_llama, **options}
    with pytest.raises(error, match=words):
        small(**options).close()


def test_a_budget_smaller_than_the_batch_is_told(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was accepted without a word, and most of the sequences that run did not advance."""
    small(tiny_llama, max_num_seqs=8, max_num_batched_tokens=4).close()
    assert "max_num_batched_tokens is 4, less than max_num_seqs, 8" in caplog.text
    caplog.clear()
    small(tiny_llama, max_num_seqs=8, max_num_batched_tokens=8).close()
    assert "max_num_seqs" not in caplog.text


def test_a_length_nobody_asked_for_shrinks_to_the_pool(tiny_llama: Path) -> None:
    with small(tiny_llama) as engine:
        bytes_per_block = engine.info.kv_bytes_per_token * engine.info.block_size
    with small(tiny_llama, kv_cache_memory_bytes=4 * bytes_per_block) as engine:
        assert engine.info.max_model_len == 64
        assert engine.info.num_kv_tokens == 64
        (output,) = engine.generate([[1]], SamplingParams(temperature=0.0, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 63


@pytest.mark.parametrize("options", [{"max_model_len": 200}, {}], ids=["a length", "no length"])
def test_a_pool_that_is_too_small_says_how_many_bytes_are_needed(options: dict[str, Any], tiny_llama: Path) -> None:
    """It told a CPU to raise --gpu-memory-utilization, and nobody how much was wanting."""
    with pytest.raises(OutOfMemoryError, match="raise --kv-cache-memory-bytes to") as caught:
        small(tiny_llama, kv_cache_memory_bytes=30_000 if options else 100, **options)
    message = str(caught.value)
    assert "gpu" not in message
    needed = int(message.rpartition("--kv-cache-memory-bytes to ")[2].split()[0])
    with pytest.raises(OutOfMemoryError):
        small(tiny_llama, kv_cache_memory_bytes=needed - 1, **options)
    small(tiny_llama, kv_cache_memory_bytes=needed, **options).close()


def test_a_gpu_is_told_of_its_share() -> None:
    spec = model_spec()
    config = EngineConfig(model="m", device="cuda:0", kv_cache_dtype="float32", max_num_seqs=1)
    with pytest.raises(
        OutOfMemoryError, match=r"hold 1 block of 16 tokens \(8 KiB each\).* to 16384 \(16 KiB\).*gpu-mem"
    ):
        size_pool(config, spec, MACHINE, measure=lambda: 10_000)


def test_one_sequence_shorter_than_a_block_is_served(tiny_llama: Path) -> None:
    """No more blocks than are of use were taken, which was one, and two are needed: refused for want of memory."""
    with small(tiny_llama, max_model_len=8, max_num_seqs=1) as engine:
        assert engine.info.num_kv_tokens == 32
        assert len(engine.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == 4


# -- capabilities ------------------------------------------------------------------------------------------------

CONTEXT = BuildContext(EngineConfig(model="m", block_size=16), MACHINE)


def entry(role: Role, name: str, **capabilities: Any) -> Entry:
    provider = Provider(role, name, "module:factory", capabilities=Capabilities(**capabilities))
    return Entry(provider, Plugin(name, "dist", "1", "module:object"))


def model_spec(**layer: Any) -> ModelSpec:
    fields = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "v_head_dim": 64, "scale": 1.0, **layer}
    return ModelSpec(architecture="Toy", layers=(LayerSpec(**fields),), vocab_size=8, hidden_size=128, max_model_len=64)


@pytest.mark.parametrize(
    ("capabilities", "layer", "words"),
    [
        ({"head_dims": frozenset({128})}, {}, ("attention 'toy'", "model Toy", "head size 64")),
        ({"sliding_window": False}, {"window": 8}, ("attention 'toy'", "model Toy", "sliding window")),
        ({"sliding_window": False}, {"chunk": 8}, ("attention 'toy'", "model Toy", "chunk")),
        ({"soft_cap": False}, {"soft_cap": 2.0}, ("attention 'toy'", "model Toy", "soft cap")),
        ({"sinks": False}, {"sinks": True}, ("attention 'toy'", "model Toy", "sinks")),
        ({"block_sizes": frozenset({32})}, {}, ("attention 'toy'", "block size 16")),
        ({"dtypes": frozenset({"bfloat16"})}, {}, ("attention 'toy'", "dtype float32")),
        ({"devices": frozenset({"cuda"})}, {}, ("attention 'toy'", "device cpu")),
        ({"head_dims": frozenset({64})}, {"v_head_dim": 32}, ("attention 'toy'", "model Toy", "head size 32")),
        ({"queries_per_seq": 1}, {}, ("attention 'toy'", "speculator 'drafts'")),
    ],
)
def test_parts_that_cannot_work_together_are_both_named(
    capabilities: dict[str, Any], layer: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Negotiation happens before a weight is loaded."""
    chosen = {
        Role.ATTENTION: entry(Role.ATTENTION, "toy", **capabilities),
        Role.SPECULATOR: entry(Role.SPECULATOR, "drafts"),
    }
    with pytest.raises(UnsupportedError) as caught:
        check_capabilities(chosen, model_spec(**layer), CONTEXT)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_parts_without_limits_work_together() -> None:
    chosen = {Role.ATTENTION: entry(Role.ATTENTION, "toy"), Role.SPECULATOR: entry(Role.SPECULATOR, "drafts")}
    check_capabilities(chosen, model_spec(window=8, soft_cap=1.0, sinks=True), CONTEXT)


def test_a_failed_start_names_the_model_that_cannot_run(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path / "m", tokenizer=False)
    config = (path / "config.json").read_text().replace('"llama"', '"rwkv"')
    (path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="rwkv"):
        small(path)


def test_the_budget_of_a_cpu_is_small_though_the_device_was_auto(tiny_llama: Path) -> None:
    """A step of 8,192 tokens takes seconds on a CPU and stalls every stream: the budget was chosen before the device."""
    with small(tiny_llama, max_num_batched_tokens=None) as engine:
        assert engine.config.device == "cpu"
        assert engine.config.max_num_batched_tokens == engine.info.max_num_batched_tokens == 256


ON_GPU = Machine(
    num_cores=1,
    memory_bytes=1 << 33,
    cpu_flags=frozenset(),
    gpus=(Gpu("Test GPU", (9, 0), 80 << 30),),
    has_compiler=True,
)


@pytest.mark.parametrize("attention", [None, "torch", "only_cpu"])
def test_on_a_machine_with_a_gpu_the_cpu_can_be_asked_for(attention: str | None, tiny_llama: Path) -> None:
    """Parts were chosen for the GPU, and those that serve a CPU refused, whatever --device said."""
    host = PluginHost()
    plain = next(e.provider for e in host.catalogue[Role.ATTENTION].values() if e.provider.name == "torch")

    class OnlyCpu:
        @hookimpl
        def enginectl_attention(self) -> Provider:
            reason = "this machine computes on its GPU"
            return dataclasses.replace(
                plain,
                name="only_cpu",
                rank=5,
                unsupported=lambda m: reason if m.gpus else None,
                capabilities=msgspec.structs.replace(plain.capabilities, devices=frozenset({"cpu"})),
            )

    host.register(OnlyCpu(), Plugin("only_cpu", "test", "1", "test"))
    roles = {} if attention is None else {"attention": attention}
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", roles=roles, max_num_seqs=2)
    assembled = compose(config, machine=ON_GPU, host=host)
    try:
        assert assembled.info.device == "cpu"
        chosen = {role: name for role, name, *_ in assembled.info.table}
        assert attention is None or chosen["attention"] == attention
        assert not {chosen[role] for role in ("attention", "op_set", "sampler")} & {"triton", "flashinfer"}
    finally:
        assembled.close()


def test_who_was_not_asked_for_is_told_with_the_reason(tiny_llama: Path) -> None:
    """/server_info did not say why an installed speculator does nothing."""
    host = PluginHost(only_named=True)

    class Drafts:
        @hookimpl
        def enginectl_speculator(self) -> Provider:
            return Provider(Role.SPECULATOR, "drafts", "nowhere:build")

    host.register(Drafts(), Plugin("drafts", "test", "1", "test"))
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", max_num_seqs=2, only_plugins=True)
    assembled = compose(config, machine=MACHINE, host=host)
    assembled.close()
    reason = "not asked for: --speculative-config or its plugin by name turns it on"
    assert ("speculator", "drafts", reason) in assembled.info.skipped


def test_a_gpu_that_torch_cannot_use_is_an_error_before_a_weight_is_loaded(tiny_llama: Path) -> None:
    """Here torch's CPU build meets a machine with a GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    config = EngineConfig(model=str(tiny_llama), dtype="float32", roles={"attention": "torch"})
    with pytest.raises(UnsupportedError, match=r"--device cuda:0: torch .*use --device cpu"):
        compose(config, machine=ON_GPU)


def test_enforce_eager_records_no_graph(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--enforce-eager reaches the runner."""
    from enginectl.engine import graphs

    asked: list[str] = []
    monkeypatch.setattr(graphs, "recorder_for", lambda device: asked.append(device.type))
    for eager in (True, False):
        small(tiny_llama, enforce_eager=eager).close()
    assert asked == ["cpu"]
