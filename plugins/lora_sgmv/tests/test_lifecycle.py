"""Adapters come, change and go while requests run."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from enginectl import Engine, SamplingParams
from enginectl.engine.control import ControlDesk, NotYet
from enginectl.engine.router import Ticket
from enginectl.errors import NotFoundError, RequestError
from enginectl.testing.tiny_adapters import save_adapter
from enginectl.testing.tiny_models import save_tiny_model, tiny_model
from enginectl_lora_sgmv.library import Library, PreparedAdapter

NUM_VERSIONS, NUM_SLOTS = 48, 4
NUM_TOKENS = 6
SIGN = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


KINDS = ((4, ["q_proj", "v_proj"]), (8, "all-linear"), (12, ["down_proj"]), (16, ["gate_proj", "o_proj"]))
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_versions(directory: Path, count: int) -> list[Path]:
    """Checkpoints of four kinds in turn. PEFT saves one of each kind; each version has numbers of its own."""
    kinds = [
        save_adapter("llama", directory / f"kind{i}", r=rank, lora_alpha=32, target_modules=modules)
        for i, (rank, modules) in enumerate(KINDS)
    ]
    tensors = [load_file(kind / WEIGHTS) for kind in kinds]
    found = []
    for i in range(count):
        random = torch.Generator().manual_seed(i)
        path = directory / str(i)
        path.mkdir()
        shutil.copy(kinds[i % len(KINDS)] / CONFIG, path)
        own = {
            name: torch.randn(tensor.shape, generator=random) / tensor.shape[1] ** 0.5
            for name, tensor in tensors[i % len(KINDS)].items()
        }
        save_file(own, path / WEIGHTS)
        found.append(path)
    return found


@pytest.fixture(scope="module")
def versions(root: Path) -> list[Path]:
    return write_versions(root, NUM_VERSIONS)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return [int(token) for token in np.random.default_rng(4).integers(3, 250, 20)]


def sign(module: Any, prompt: list[int]) -> list[int]:
    """A whole forward a token: less than `generate` costs, for so few."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            tokens.append(int(module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def sign_all(versions: list[Path], prompt: list[int]) -> list[list[int]]:
    """What PEFT makes of the prompt with each version, and last the base: no two make the same."""
    from peft import PeftModel, set_peft_model_state_dict

    found: list[list[int]] = [[]] * len(versions)
    for kind in range(len(KINDS)):
        module = PeftModel.from_pretrained(tiny_model("llama"), versions[kind]).eval()
        for i in range(kind, len(versions), len(KINDS)):
            set_peft_model_state_dict(module, load_file(versions[i] / WEIGHTS))
            found[i] = sign(module, prompt)
    found.append(sign(tiny_model("llama"), prompt))
    assert len({tuple(tokens) for tokens in found}) == len(found)
    return found


@pytest.fixture(scope="module")
def signatures(versions: list[Path], prompt: list[int]) -> list[list[int]]:
    return sign_all(versions, prompt)


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


def schedule(num_adapters: int, random: np.random.Generator) -> list[str]:
    """What is done, in turn: so many of each kind, however long answers take. Names are loaded before others go, and go
    before they are restored.
    """
    counts = Counter(load=num_adapters - 8, replace=num_adapters // 2, ask=num_adapters, ask_base=num_adapters // 8)
    counts["turn"] = num_adapters * 3 // 4
    turns = cycle(["unload", "restore", "unload"])
    later = random.permutation(sorted(counts.elements())).tolist()
    return ["load"] * 8 + [next(turns) if kind == "turn" else kind for kind in later]


@dataclass
class Traffic:
    """Who has which version now, and all it had; what is open, with the name, and how many versions that had then.

    recent: names something was done with lately. They are chosen half of the time, so that what changes is in use.
    """

    engine: Engine
    versions: list[Path]
    signatures: list[list[int]]
    prompt: list[int]
    random: np.random.Generator
    current: dict[int, int] = field(default_factory=dict)
    history: dict[int, list[int]] = field(default_factory=dict)
    opened: list[tuple[Ticket, int | None, int]] = field(default_factory=list)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_SLOTS))
    num_answered: int = 0

    def act(self, kind: str) -> None:
        """On a name of those for which it can be done."""
        if kind == "load":
            self._load(len(self.history))
        elif kind == "restore":
            self._load(self._choose(self.history.keys() - self.current.keys()))
        elif kind == "replace":
            self._load(self._choose(self.current))
        elif kind == "unload":
            self.unload(self._choose(self.current))
        else:
            self._ask(self._choose(self.current) if kind == "ask" else None)

    def _choose(self, names: Iterable[int]) -> int:
        known = sorted(names)
        recent = [name for name in self.recent if name in known]
        name = int(self.random.choice(recent if recent and self.random.random() < 0.5 else known))
        self.recent.append(name)
        return name

    def _load(self, name: int) -> None:
        """A version that no other name has, in place if the name has one."""
        free = sorted(set(range(len(self.versions))) - set(self.current.values()))
        version = int(self.random.choice(free))
        self.engine.load_adapter(f"a{name}", str(self.versions[version]), replace=name in self.current)
        self.current[name] = version
        self.history.setdefault(name, []).append(version)

    def unload(self, name: int) -> None:
        del self.current[name]
        self.engine.unload_adapter(f"a{name}")

    def _ask(self, name: int | None) -> None:
        ticket = ask(self.engine, self.prompt, None if name is None else f"a{name}")
        self.opened.append((ticket, name, 0 if name is None else len(self.history[name]) - 1))

    def check_done(self) -> None:
        """Signed by the version that was current when it was asked, or, where it waited, one after that."""
        for entry in [entry for entry in self.opened if entry[0].is_done]:
            self.opened.remove(entry)
            ticket, name, seen = entry
            (tokens,) = finish(self.engine, ticket)
            known = [-1] if name is None else self.history[name][seen:]
            assert tokens[0] in [self.signatures[version] for version in known]
            self.num_answered += 1


def check_traffic(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int], num_adapters: int
) -> None:
    """Loads, replacements, unloads and evictions, a step after each: every answer is signed by its own adapter."""
    random = np.random.default_rng(8)
    traffic = Traffic(engine, versions, signatures, prompt, random)
    backend, num_alive = engine._assembled.parts["adapter"], num_prepared()
    contents: set[Any] = set()

    def step() -> None:
        engine._step()
        contents.update(slot.content for slot in backend.table.slots)
        assert backend.library.num_weights <= max(NUM_SLOTS, engine.config.max_cpu_loras or 0)
        traffic.check_done()

    for kind in schedule(num_adapters, random):
        traffic.act(kind)
        step()
        while len(traffic.opened) >= 16:
            step()
    while traffic.opened:
        step()
    assert traffic.num_answered == num_adapters + num_adapters // 8
    assert len(contents) > num_adapters / 4, "slots changed hands"
    assert len(engine.adapters) == len(traffic.current) == num_adapters * 3 // 4
    check_nothing_stays(engine, traffic)
    assert num_prepared() <= num_alive, "weights of adapters that were outlive them"


DEPTHS = pytest.mark.parametrize(
    "engine", [{"overlap_depth": 0}, {"overlap_depth": 1, "max_cpu_loras": 6}], indirect=True, ids=["depth0", "depth1"]
)


@DEPTHS
def test_forty_adapters_through_four_slots_under_traffic(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """Laws 20, 21."""
    check_traffic(engine, versions, signatures, prompt, 40)


@pytest.mark.slow
@DEPTHS
def test_two_hundred_adapters_through_four_slots_under_traffic(
    engine: Engine, root: Path, prompt: list[int], tmp_path: Path
) -> None:
    """Laws 20, 21."""
    versions = write_versions(root / tmp_path.name, 208)
    check_traffic(engine, versions, sign_all(versions, prompt), prompt, 200)


def num_prepared() -> int:
    """Adapters whose weights are anywhere in this process."""
    gc.collect()
    return sum(type(found) is PreparedAdapter for found in gc.get_objects())


def check_nothing_stays(engine: Engine, traffic: Traffic) -> None:
    """Once all are unloaded: no names, no weights, nothing that is being read."""
    library = engine._assembled.parts["adapter"].library
    for name in list(traffic.current):
        traffic.unload(name)
    assert (library.num_weights, library._known, library._ahead, library._again) == (0, {}, {}, {})


class Gate:
    """Stands in front of the library's reader: says which thread read, and holds it back while it is closed."""

    def __init__(self, library: Library) -> None:
        self._read, library._read = library._read, self
        self._open = threading.Event()
        self.threads: set[str] = set()
        self.set(is_open=True)

    def set(self, *, is_open: bool) -> None:
        (self._open.set if is_open else self._open.clear)()

    def __call__(self, path: Path) -> PreparedAdapter:
        self.threads.add(threading.current_thread().name)
        assert self._open.wait(60)
        return self._read(path)


@pytest.mark.parametrize(
    "engine", [{"max_loras": 1, "max_cpu_loras": 1, "overlap_depth": depth} for depth in (0, 1)], indirect=True
)
def test_no_step_waits_for_files(
    engine: Engine, versions: list[Path], signatures: list[list[int]], prompt: list[int]
) -> None:
    """A load that is asked for, and weights that left host memory, are read beside the steps: as long as the files give
    nothing, each step gives other rows a token; then only the copy to the slot is left.
    """
    desk, gate = ControlDesk(engine._assembled), Gate(engine._assembled.parts["adapter"].library)
    for i in range(2):
        engine.load_adapter(f"a{i}", str(versions[i]))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    base = ask(engine, prompt, None, params)
    engine._step()
    gate.set(is_open=False)
    evicted = ask(engine, prompt, "a0")
    load = {"name": "a2", "path": str(versions[2])}
    for _ in range(20):
        before = engine.stats().num_generation_tokens
        with pytest.raises(NotYet):
            desk.handle("load_adapter", load)
        engine._step()
        assert engine.stats().num_generation_tokens == before + 1
        assert not evicted.take()
    gate.set(is_open=True)
    assert finish(engine, evicted)[0][0] == signatures[0]
    engine.load_adapter("a2", str(versions[2]))
    assert finish(engine, ask(engine, prompt, "a2"))[0][0] == signatures[2]
    finish(engine, base)
    assert all(name.startswith("adapters") for name in gate.threads), "no step, and no control message, reads"


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
        shutil.copy(versions[5] / WEIGHTS, copy)
        shutil.copy(versions[5] / CONFIG, copy)
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
        for name in (WEIGHTS, CONFIG):
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
