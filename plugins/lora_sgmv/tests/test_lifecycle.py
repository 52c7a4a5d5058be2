"""Adapters come, change and go while requests run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from enginectl import Engine, SamplingParams
from enginectl.engine.router import Ticket
from enginectl.errors import NotFoundError, RequestError
from enginectl.testing.tiny_adapters import greedy, save_adapter
from enginectl.testing.tiny_models import save_tiny_model, tiny_model

NUM_ADAPTERS, NUM_SLOTS = 40, 4
NUM_TOKENS = 8
SIGN = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def versions(root: Path) -> list[Path]:
    """Twice as many as names, each name has a first and a second version; of four kinds, with numbers of their own."""
    kinds = ((4, ["q_proj", "v_proj"]), (8, "all-linear"), (12, ["down_proj"]), (16, ["gate_proj", "o_proj"]))
    made = [
        save_adapter("llama", root / f"kind{i}", r=rank, lora_alpha=32, target_modules=modules)
        for i, (rank, modules) in enumerate(kinds)
    ]
    found = []
    for i in range(2 * NUM_ADAPTERS):
        kind, random = made[i % len(made)], torch.Generator().manual_seed(i)
        path = shutil.copytree(kind, root / str(i))
        tensors = load_file(kind / "adapter_model.safetensors")
        for name, tensor in tensors.items():
            tensors[name] = torch.randn(tensor.shape, generator=random) / tensor.shape[1] ** 0.5
        save_file(tensors, path / "adapter_model.safetensors")
        found.append(path)
    return found


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(4).integers(3, 250, 20).tolist()


@pytest.fixture(scope="module")
def signatures(versions: list[Path], prompt: list[int]) -> list[list[int]]:
    """What each version makes of the prompt: no two make the same."""
    from peft import PeftModel, set_peft_model_state_dict

    found: list[list[int]] = [[]] * len(versions)
    for kind in range(4):
        module = PeftModel.from_pretrained(tiny_model("llama"), versions[kind]).eval()
        for i in range(kind, len(versions), 4):
            set_peft_model_state_dict(module, load_file(versions[i] / "adapter_model.safetensors"))
            found[i] = greedy(module, [prompt], NUM_TOKENS)[0]
    found += greedy(tiny_model("llama"), [prompt], NUM_TOKENS)
    assert len({tuple(tokens) for tokens in found}) == len(found)
    return found


@pytest.fixture
def engine(tiny: Callable[[str], Path], root: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "block_size": 4,
        "enable_lora": True,
        "max_loras": NUM_SLOTS,
        "plugins": ["prefix-cache", "sgmv"],
        "plugin_options": {"sgmv": {"roots": [str(root)], "max_wait_s": 0.05}},
    }
    with Engine(str(tiny("llama")), **{**options, **getattr(request, "param", {})}) as engine:
        yield engine
        backend = engine._assembled.parts["adapter"]
        assert backend.table.references == [0] * len(backend.table.slots)
        assert all(slot.reserved_for is None for slot in backend.table.slots)
        assert not backend.table._waiting_since
        assert not backend.library._users
        assert not backend.library._again
        assert engine.stats().num_blocks_in_use == 0
        engine.core.pool.check()


def ask(engine: Engine, prompt: list[int], name: str | None, params: SamplingParams = SIGN) -> Ticket:
    return engine._submit(engine._requests([prompt], params, {"adapter": name}))[0]


def finish(engine: Engine, *tickets: Ticket, max_steps: int = 3000) -> list[dict[int, list[int]]]:
    """Tokens by choice of each."""
    for _ in range(max_steps):
        if all(ticket.is_done for ticket in tickets):
            break
        engine._step()
    else:
        pytest.fail("some never end")
    found = []
    for ticket in tickets:
        assert ticket.failure is None, ticket.failure
        choices: dict[int, list[int]] = {}
        for chunk in ticket.take():
            choices.setdefault(chunk.index, []).extend(chunk.token_ids)
        found.append(choices)
    return found


@pytest.mark.parametrize("engine", [{"overlap_depth": 0}, {"overlap_depth": 1, "max_cpu_loras": 6}], indirect=True)
def test_forty_adapters_through_four_slots_under_traffic(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """Loads, replacements and unloads at random: every answer is signed by the version that was current when it began,
    or, where it waited meanwhile, when it was admitted. Laws 20 and 21.
    """
    random = np.random.default_rng(8)
    current: dict[int, int] = {}
    history: dict[int, list[int]] = {}
    open_requests: list[tuple[Ticket, int | None, int]] = []
    counts = {"load": 0, "replace": 0, "unload": 0, "answers": 0}
    backend = engine._assembled.parts["adapter"]
    for _ in range(900):
        chance = random.random()
        name = int(random.integers(NUM_ADAPTERS))
        if chance < 0.12 and name not in current:
            current[name] = name
            engine.load_adapter(f"a{name}", str(versions[name]))
            history.setdefault(name, []).append(name)
            counts["load"] += 1
        elif chance < 0.18 and name in current:
            current[name] = (current[name] + NUM_ADAPTERS) % (2 * NUM_ADAPTERS)
            engine.load_adapter(f"a{name}", str(versions[current[name]]), replace=True)
            history[name].append(current[name])
            counts["replace"] += 1
        elif chance < 0.2 and name in current:
            del current[name]
            engine.unload_adapter(f"a{name}")
            counts["unload"] += 1
        elif chance < 0.6 and len(open_requests) < 24:
            choice = int(random.choice(list(current))) if current and chance < 0.55 else None
            ticket = ask(engine, prompt, None if choice is None else f"a{choice}")
            open_requests.append((ticket, choice, 0 if choice is None else len(history[choice]) - 1))
        engine._step()
        assert sum(slot.references > 0 for slot in backend.table.slots) <= NUM_SLOTS
        for entry in [entry for entry in open_requests if entry[0].is_done]:
            open_requests.remove(entry)
            check(engine, entry, history, signatures)
            counts["answers"] += 1
    for entry in open_requests:
        finish_one(engine, entry[0])
        check(engine, entry, history, signatures)
    assert min(counts.values()) > 8, counts
    assert len(engine.adapters) == len(current) > NUM_SLOTS


def finish_one(engine: Engine, ticket: Ticket) -> None:
    for _ in range(3000):
        if ticket.is_done:
            return
        engine._step()
    pytest.fail("it never ends")


def check(
    engine: Engine,
    entry: tuple[Ticket, int | None, int],
    history: dict[int, list[int]],
    signatures: list[list[int]],
) -> None:
    (tokens,) = finish(engine, entry[0])
    allowed = [signatures[-1]] if entry[1] is None else [signatures[v] for v in history[entry[1]][entry[2] :]]
    assert tokens[0] in allowed


def test_unload_takes_effect_after_the_last_use(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """Law 21: with more choices than rows, some still wait; all of them end as they would have."""
    engine.load_adapter("mine", str(versions[0]))
    ticket = ask(engine, prompt, "mine", SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=12))
    engine._step()
    engine.unload_adapter("mine")
    assert engine.adapters == ()
    with pytest.raises(NotFoundError, match="mine"):
        ask(engine, prompt, "mine")
    (choices,) = finish(engine, ticket)
    assert choices == dict.fromkeys(range(12), signatures[0])
    backend = engine._assembled.parts["adapter"]
    assert [slot.content for slot in backend.table.slots] == [None] * NUM_SLOTS
    assert backend.library.num_weights == 0
    engine.load_adapter("mine", str(versions[1]))
    assert finish(engine, ask(engine, prompt, "mine"))[0][0] == signatures[1]


def test_an_abort_is_a_last_use_too(engine: Engine, versions: list[Path], prompt: list[int]) -> None:
    """Law 13: running and waiting choices give everything back."""
    engine.load_adapter("mine", str(versions[0]))
    ticket = ask(engine, prompt, "mine", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, n=12))
    engine._step()
    engine.unload_adapter("mine")
    engine._abort([ticket])
    for _ in range(5):
        engine._step()
    backend = engine._assembled.parts["adapter"]
    assert backend.library.info("mine") is None
    assert backend.library.num_weights == 0


def test_reloading_in_place_invalidates_its_prefix(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """Law 20; and a row that runs meanwhile ends with the weights it began with."""
    engine.load_adapter("mine", str(versions[0]))
    engine.load_adapter("other", str(versions[1]))
    first = [finish(engine, ask(engine, prompt, name))[0][0] for name in ("mine", "mine", "other")]
    assert first == [signatures[0], signatures[0], signatures[1]]
    hits = engine.stats().prefix_hits
    assert hits == 16, "the second time four blocks of mine were found, and none for the other"
    running = ask(engine, prompt, "mine")
    for _ in range(3):
        engine._step()
    engine.load_adapter("mine", str(versions[2]), replace=True)
    hits = engine.stats().prefix_hits
    after = ask(engine, prompt, "mine")
    old, new = finish(engine, running, after)
    assert (old[0], new[0]) == (signatures[0], signatures[2])
    assert engine.stats().prefix_hits == hits
    assert finish(engine, ask(engine, prompt, "mine"))[0][0] == signatures[2]
    assert engine.stats().prefix_hits == hits + 16


def test_the_version_is_that_of_the_contents(engine: Engine, versions: list[Path], root: Path) -> None:
    """Equal bytes have one version wherever they lie; a byte of the configuration makes another."""
    copy = shutil.copytree(versions[0], root / "copy")
    first, second = engine.load_adapter("a", str(versions[0])), engine.load_adapter("b", str(copy))
    assert first.version == second.version
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 33}))
    third = engine.load_adapter("b", str(copy), replace=True)
    assert third.version != first.version
    assert third.rank == first.rank == 4


@pytest.mark.parametrize("engine", [{"max_loras": 1, "max_cpu_loras": 1, "max_num_seqs": 2}], indirect=True)
def test_one_that_waits_gets_its_turn(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """One slot and an adapter that never stops asking: the other waits max_wait_s, then the slot's rows end."""
    engine.load_adapter("busy", str(versions[0]))
    engine.load_adapter("rare", str(versions[1]))
    busy = [ask(engine, prompt, "busy") for _ in range(3)]
    engine._step()
    rare = ask(engine, prompt, "rare")
    for _ in range(1500):
        busy = [ticket for ticket in busy if not ticket.is_done]
        while len(busy) < 3:
            busy.append(ask(engine, prompt, "busy"))
        engine._step()
        if rare.is_done:
            break
    else:
        pytest.fail("it starves")
    assert finish(engine, rare)[0][0] == signatures[1]
    assert all(tokens[0] == signatures[0] for tokens in finish(engine, *busy))


def test_files_that_changed_are_not_read_again_in_silence(
    tiny: Callable[[str], Path], versions: list[Path], root: Path, prompt: list[int]
) -> None:
    """Weights dropped from host memory are those that were loaded, or the request ends with the reason."""
    copy = shutil.copytree(versions[0], root / "changing")
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "num_threads": 1}
    options |= {"max_loras": 1, "max_cpu_loras": 1, "plugin_options": {"sgmv": {"roots": [str(root)]}}}
    with Engine(str(tiny("llama")), enable_lora=True, **options) as engine:
        engine.load_adapter("mine", str(copy))
        engine.load_adapter("other", str(versions[1]))
        shutil.copy(versions[5] / "adapter_model.safetensors", copy)
        shutil.copy(versions[5] / "adapter_config.json", copy)
        (output,) = engine.generate([prompt], SIGN, adapter="mine")
        assert output.error is not None
        assert "have changed since it was loaded" in output.error
        assert engine.generate([prompt], SIGN, adapter="other")[0].error is None
        engine.load_adapter("mine", str(copy), replace=True)
        assert engine.generate([prompt], SIGN, adapter="mine")[0].error is None


def test_what_was_read_for_a_refused_load_is_not_used_later(
    tiny: Callable[[str], Path], versions: list[Path], signatures: list[list[int]], root: Path, prompt: list[int]
) -> None:
    """Weights read ahead for a name that was taken stayed in memory, and a later load in place served them as new."""
    copy = shutil.copytree(versions[0], root / "refused")
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "num_threads": 1}
    options |= {"plugin_options": {"sgmv": {"roots": [str(root)]}}}
    with Engine(str(tiny("llama")), enable_lora=True, **options) as engine:
        engine.load_adapter("mine", str(copy))
        with pytest.raises(RequestError, match="is loaded"):
            engine.load_adapter("mine", str(copy))
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            shutil.copy(versions[5] / name, copy)
        engine.load_adapter("mine", str(copy), replace=True)
        assert list(engine.generate([prompt], SIGN, adapter="mine")[0].outputs[0].token_ids) == signatures[5]


def test_pinned_adapters_stay_in_host_memory(tiny: Callable[[str], Path], versions: list[Path], root: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "num_threads": 1}
    options |= {"max_loras": 1, "max_cpu_loras": 2}
    options |= {"plugin_options": {"sgmv": {"roots": [str(root)], "pinned": ["a0"]}}}
    with Engine(str(tiny("llama")), enable_lora=True, **options) as engine:
        for i in range(5):
            engine.load_adapter(f"a{i}", str(versions[i]))
        library = engine._assembled.parts["adapter"].library
        assert list(library._weights) == ["a0", "a4"]


def test_16_bit_rows_differ_from_the_base(tmp_path: Path, versions: list[Path], prompt: list[int]) -> None:
    """bfloat16 serves too; exactness is a matter of fp32."""
    model = save_tiny_model("llama", tmp_path / "llama", dtype="bfloat16")
    with Engine(
        str(model),
        max_num_seqs=4,
        max_model_len=64,
        op_set="torch",
        enable_lora=True,
        lora_modules={"mine": str(versions[0])},
    ) as engine:
        assert engine.info.dtype == "bfloat16"
        answers = [engine.generate([prompt], SIGN, adapter=name)[0].outputs[0] for name in (None, "mine")]
        assert answers[0].token_ids != answers[1].token_ids
        assert engine._assembled.parts["adapter"]._stores[0].down.dtype == torch.bfloat16
