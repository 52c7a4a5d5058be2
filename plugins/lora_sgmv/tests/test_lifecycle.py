"""Adapters come, change and go while requests run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from enginectl import Engine, SamplingParams
from enginectl.errors import NotFoundError
from enginectl.testing.stepping import ask, finish
from enginectl.testing.tiny_models import save_tiny_model
from enginectl_lora_sgmv.checkpoint import CONFIG

NUM_SLOTS, NUM_TOKENS = 4, 6
SIGN = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def test_unload_takes_effect_after_the_last_use(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """Law 21: with more choices than rows, some still wait; all of them end as they would have."""
    engine.load_adapter("mine", str(versions[0]))
    ticket = ask(
        engine, prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=12), adapter="mine"
    )
    engine._step()
    engine.unload_adapter("mine")
    assert engine.adapters == ()
    with pytest.raises(NotFoundError, match="mine"):
        ask(engine, prompt, SIGN, adapter="mine")
    (choices,) = finish(engine, ticket)
    assert choices == dict.fromkeys(range(12), signatures[0])
    backend = engine._assembled.parts["adapter"]
    assert [slot.content for slot in backend.table.slots] == [None] * NUM_SLOTS
    assert backend.library.num_weights == 0
    engine.load_adapter("mine", str(versions[1]))
    assert finish(engine, ask(engine, prompt, SIGN, adapter="mine"))[0][0] == signatures[1]


def test_an_abort_is_a_last_use_too(engine: Engine, versions: list[Path], prompt: list[int]) -> None:
    """Law 13: running and waiting choices give everything back."""
    engine.load_adapter("mine", str(versions[0]))
    ticket = ask(engine, prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, n=12), adapter="mine")
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
    first = [finish(engine, ask(engine, prompt, SIGN, adapter=name))[0][0] for name in ("mine", "mine", "other")]
    assert first == [signatures[0], signatures[0], signatures[1]]
    hits = engine.stats().prefix_hits
    assert hits == 16, "the second time four blocks of mine were found, and none for the other"
    running = ask(engine, prompt, SIGN, adapter="mine")
    for _ in range(3):
        engine._step()
    engine.load_adapter("mine", str(versions[2]), replace=True)
    hits = engine.stats().prefix_hits
    after = ask(engine, prompt, SIGN, adapter="mine")
    old, new = finish(engine, running, after)
    assert (old[0], new[0]) == (signatures[0], signatures[2])
    assert engine.stats().prefix_hits == hits
    assert finish(engine, ask(engine, prompt, SIGN, adapter="mine"))[0][0] == signatures[2]
    assert engine.stats().prefix_hits == hits + 16


def test_the_version_is_that_of_the_contents(engine: Engine, versions: list[Path], root: Path) -> None:
    """Equal bytes have one version wherever they lie; a byte of the configuration makes another."""
    copy = shutil.copytree(versions[0], root / "copy")
    first, second = engine.load_adapter("a", str(versions[0])), engine.load_adapter("b", str(copy))
    assert first.version == second.version
    config = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps(config | {"lora_alpha": 33}))
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
    busy = [ask(engine, prompt, SIGN, adapter="busy") for _ in range(3)]
    engine._step()
    rare = ask(engine, prompt, SIGN, adapter="rare")
    for _ in range(1500):
        busy = [ticket for ticket in busy if not ticket.is_done]
        while len(busy) < 3:
            busy.append(ask(engine, prompt, SIGN, adapter="busy"))
        engine._step()
        if rare.is_done:
            break
    else:
        pytest.fail("it starves")
    assert finish(engine, rare)[0][0] == signatures[1]
    assert all(tokens[0] == signatures[0] for tokens in finish(engine, *busy))


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
