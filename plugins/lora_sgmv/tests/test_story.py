"""Three products on one instance, over HTTP: base, `support` and `billing` behind the same system prompt of 1,200 tokens,
with a constrained answer, copied SQL under speculation, chunked prompts and preemption. Law 3: every answer is PEFT's
with that adapter alone.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from enginectl import Engine
from enginectl.api_side import ApiSide
from enginectl.builtin.openai import OpenAIFrontend
from enginectl.builtin.weights import build_gguf
from enginectl.compose import Assembled, compose
from enginectl.config import EngineConfig, ServerConfig
from enginectl.context import BuildContext
from enginectl.engine.inprocess import InProcessClient
from enginectl.machine import detect_machine
from enginectl.plugins import PluginHost
from enginectl.server import build_app
from enginectl.testing.tiny_adapters import save_adapter
from enginectl.testing.tiny_models import EOS, save_tiny_model, tiny_model
from enginectl.testing.toys import CycleGrammar, CycleMatcher

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

PRODUCTS = (None, "support", "billing")
BLOCK_SIZE, NUM_BLOCKS = 16, 75
SYSTEM_LEN = BLOCK_SIZE * NUM_BLOCKS
BUDGET = 64

RULE = "Rule {0}: an order of more than {1} euros that arrives damaged is refunded within {2} days. "
SQL = (
    "\nCopy:\n"
    "INSERT INTO invoices (id, total) VALUES (1017, 120.50);\n"
    "INSERT INTO invoices (id, total) VALUES (1018, 99.90);\n"
    "INSERT INTO invoices (id, total) VALUES (1017, 120.50);\n"
    "INSERT INTO invoices"
)
QUESTIONS = (
    "where is my parcel, which I ordered last week?",
    "who pays for the way back?",
    "may I have the bill once more, for March?",
    "why was I charged twice?",
)


@dataclass(frozen=True)
class Asked:
    """One request. is_triage: its answer is constrained."""

    product: str | None
    tail: tuple[int, ...]
    num_tokens: int
    is_triage: bool = False


@dataclass
class Story:
    """A model, its adapters, what is asked, and what PEFT answers.

    cold: the first request of each product. warm: one of each kind, for each product; with those before, they fill the
    pool. burst: more than it holds, together.
    """

    model: Path
    module: Any
    eos: int
    system: list[int]
    adapters: dict[str, Path]
    cold: list[Asked]
    warm: list[Asked]
    burst: list[Asked]
    expected: dict[Asked, list[int]] = field(default_factory=dict)

    @property
    def grammar(self) -> CycleGrammar:
        return CycleGrammar(self.module.config.vocab_size, [self.eos])

    @property
    def asked(self) -> list[Asked]:
        return list(dict.fromkeys((*self.cold, *self.warm, *self.burst)))

    @property
    def num_blocks(self) -> int:
        """The pool's: three system prompts, and all that comes behind them before the burst."""
        return NUM_BLOCKS * len(PRODUCTS) + num_own_blocks([*self.cold, *self.warm])

    def answer_alone(self) -> None:
        """Each product on its own, the system prompt computed once, then a forward a token."""
        from peft import PeftModel

        for product in PRODUCTS:
            module = self.module
            if product is not None:
                module = PeftModel.from_pretrained(self.module, self.adapters[product]).eval()
            with torch.inference_mode():
                prefix = module(input_ids=torch.tensor([self.system])).past_key_values
                for asked in self.asked:
                    if asked.product == product:
                        self.expected[asked] = self._decode(module, copy.deepcopy(prefix), asked)
            if product is not None:
                module.unload()

    def _decode(self, module: Any, cache: Any, asked: Asked) -> list[int]:
        found: list[int] = []
        matcher = CycleMatcher(self.grammar) if asked.is_triage else None
        tokens = list(asked.tail)
        while len(found) < asked.num_tokens:
            logits = module(input_ids=torch.tensor([tokens]), past_key_values=cache).logits[0, -1]
            if matcher is not None:
                mask = np.zeros(logits.shape[0], np.bool_)
                matcher.fill_mask(mask)
                logits = logits.masked_fill(~torch.from_numpy(mask), -torch.inf)
            tokens = [int(logits.argmax())]
            found += tokens
            if tokens[0] == self.eos:
                break
            assert matcher is None or matcher.accept(tokens[0])
        return found


def num_own_blocks(asked: Sequence[Asked]) -> int:
    """Blocks behind the system prompt, each request with its own."""
    return sum(-(-(len(one.tail) + one.num_tokens) // BLOCK_SIZE) for one in asked)


def story_of(
    model: Path, module: Any, eos: int, directory: Path, encode: Callable[[str], Sequence[int]], *, std: float
) -> Story:
    """The same questions for every product; those of the burst have long answers, so that rows outgrow the pool."""
    system: list[int] = []
    number = 0
    while len(system) < SYSTEM_LEN:
        number += 1
        system += encode(RULE.format(number, 10 * number, number % 30))
    adapters = {
        name: save_adapter(module, directory / str(name), seed=i, std=std, r=8 * (i + 1))
        for i, name in enumerate(PRODUCTS[1:])
    }

    def ask(text: str, num_tokens: int = 28, *, is_triage: bool = False) -> list[Asked]:
        return [Asked(product, tuple(encode(text)), num_tokens, is_triage) for product in PRODUCTS]

    warm = [*ask("\nClass of this message:", is_triage=True), *ask(SQL)]
    long = [one for text in QUESTIONS for one in ask(f"\nQuestion: {text}\nAnswer:", 64)]
    cold = ask("May I return shoes?")
    story = Story(model, module, eos, system[:SYSTEM_LEN], adapters, cold, warm, burst=[*long, *warm])
    story.answer_alone()
    check_story(story)
    return story


def check_story(story: Story) -> None:
    """The adapters are not idle: no product answers a question as another does; they may agree on a copy. Some prompts
    are read in chunks, hits or not.
    """
    questions = [one for one in story.burst if one not in story.warm]
    for tail in {one.tail for one in questions}:
        assert len({tuple(story.expected[one]) for one in questions if one.tail == tail}) == len(PRODUCTS), tail
    assert max(len(asked.tail) for asked in story.warm) > BUDGET


@pytest.fixture(scope="module")
def tiny_story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    directory = tmp_path_factory.mktemp("story")
    model = save_tiny_model("llama", directory / "llama", max_position_embeddings=2048)
    module = tiny_model("llama", max_position_embeddings=2048)
    return story_of(model, module, EOS, directory, lambda text: [3 + byte % 240 for byte in text.encode()], std=0.4)


@pytest.fixture(scope="module")
def real_story(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    from transformers import LlamaConfig, LlamaForCausalLM

    ctx = BuildContext(EngineConfig(model=str(demo_model), dtype="float32"), detect_machine())
    checkpoint = build_gguf(ctx).open(demo_model)
    module = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).eval()
    module.load_state_dict({name: tensor.float() for name, tensor in checkpoint.tensors()}, strict=False)
    module.tie_weights()
    with Engine(str(demo_model), max_model_len=256, max_num_seqs=1) as engine:
        encode, (eos, *_) = engine.tokenizer.encode, engine.info.eos_token_ids
    directory = tmp_path_factory.mktemp("story")
    return story_of(demo_model, module, eos, directory, encode, std=0.8)


@asynccontextmanager
async def served(story: Story, family: str) -> AsyncIterator[tuple[httpx.AsyncClient, Assembled]]:
    """One instance, whose pool holds all that comes before the burst."""
    config = EngineConfig(
        model=str(story.model),
        dtype="float32",
        num_threads=1,
        block_size=BLOCK_SIZE,
        max_model_len=SYSTEM_LEN + 512,
        max_num_seqs=24,
        max_num_batched_tokens=BUDGET,
        num_gpu_blocks_override=story.num_blocks,
        enable_lora=True,
        max_loras=2,
        lora_modules={name: str(path) for name, path in story.adapters.items()},
        plugins=("prefix-cache", "ngram", "sgmv"),
        plugin_options={"ngram": {"prompt_lookup_min": 1}},
        roles={"model_family": family},
    )
    host, machine = PluginHost(config.plugins), detect_machine()
    engine = compose(config, machine=machine, host=host, overrides={"grammar": story.grammar})
    api = ApiSide(engine.config, host, machine)
    client = InProcessClient(engine, api.detokenizer(engine.info))
    server = ServerConfig(served_model_name=("base",))
    app = build_app(client, api.load_tokenizer(engine.info), engine.config, server, [OpenAIFrontend()], [])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=600) as http:
        try:
            yield http, engine
        finally:
            await client.close()


async def answer(http: httpx.AsyncClient, story: Story, asked: Asked) -> int:
    """Check one answer, and return how many tokens of its prompt were cached."""
    body: dict[str, Any] = {
        "model": asked.product or "base",
        "prompt": [*story.system, *asked.tail],
        "max_tokens": asked.num_tokens,
        "temperature": 0,
        "speculation": 4,
        "return_token_ids": True,
    }
    if asked.is_triage:
        body["structured_outputs"] = {"regex": "cycle"}
    found = await http.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    (choice,), usage = found.json()["choices"], found.json()["usage"]
    assert choice["token_ids"] == story.expected[asked], asked
    assert usage["prompt_tokens"] == SYSTEM_LEN + len(asked.tail)
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


async def answers(http: httpx.AsyncClient, story: Story, asked: Sequence[Asked]) -> list[int]:
    """All of them together."""
    return list(await asyncio.gather(*(answer(http, story, one) for one in asked)))


async def check_served(story: Story, family: str) -> None:
    """Three phases: one request a product in turn; all kinds together, while the pool holds all; more than it holds."""
    async with served(story, family) as (http, engine):
        core, backend = engine.core, engine.parts["adapter"]
        assert [await answer(http, story, asked) for asked in story.cold] == [0] * len(PRODUCTS), "nothing is shared"
        assert await answers(http, story, story.warm) == [SYSTEM_LEN] * len(story.warm), (
            "75 blocks of each product's own"
        )
        assert core.stats().num_preemptions == 0
        await answers(http, story, story.burst)
        stats = core.stats()
        assert stats.num_preemptions > 0
        assert 0 < stats.num_accepted < stats.num_drafted
        assert stats.num_blocks_in_use == 0
        assert backend.table.references == [0, 0]
        core.pool.check()


@pytest.mark.parametrize("family", ["native", "transformers"])
async def test_three_products_on_one_instance(family: str, tiny_story: Story) -> None:
    await check_served(tiny_story, family)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", ["native", "transformers"])
async def test_three_products_on_the_demo_model(family: str, real_story: Story) -> None:
    await check_served(real_story, family)
