"""Every hook, and nothing else.

Hooks run at start-up, and at the admission and finish of a request; never in a step. The registration hooks return
plain data: no download, no device query, no import of torch, triton or flashinfer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from enginectl.provider import Provider
    from enginectl.types import FinishedRequest, GenerateRequest

hookspec = pluggy.HookspecMarker("enginectl")
hookimpl = pluggy.HookimplMarker("enginectl")


class HookSpecs:
    """One registration hook a role; each returns the providers the plugin offers for it."""

    @hookspec
    def enginectl_scheduler(self) -> Iterable[Provider]:
        """Offer schedulers (`interfaces.scheduler.Scheduler`): order, token counts, preemption victims.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_kv_allocator(self) -> Iterable[Provider]:
        """Offer KV allocators (`interfaces.kv.KVAllocator`): which block is handed out or evicted next.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_prefix_index(self) -> Iterable[Provider]:
        """Offer prefix indexes (`interfaces.kv.PrefixIndex`): what full blocks contain.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_attention(self) -> Iterable[Provider]:
        """Offer attention backends (`interfaces.attention.AttentionBackend`) over the shared paged layout.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_logits_processor(self) -> Iterable[Provider]:
        """Offer logits processors (`interfaces.sampler.LogitsProcessor`); all of them run, by rank, highest first.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_sampler(self) -> Iterable[Provider]:
        """Offer samplers (`interfaces.sampler.Sampler`): logits and position-keyed noise to token ids.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_speculator(self) -> Iterable[Provider]:
        """Offer speculators (`interfaces.speculator.Speculator`): propose drafts that core verifies.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_adapter(self) -> Iterable[Provider]:
        """Offer adapter backends (`interfaces.adapter.AdapterBackend`): a slot per token, LoRA and its kin.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_grammar(self) -> Iterable[Provider]:
        """Offer grammar backends (`interfaces.grammar.GrammarBackend`); chosen per request.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_model_family(self) -> Iterable[Provider]:
        """Offer model families (`interfaces.model.ModelFamily`): a checkpoint to something that runs a step.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_op_set(self) -> Iterable[Provider]:
        """Offer op sets (`interfaces.ops.OpSet`): norms, RoPE, activations and linears for native models.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_weights(self) -> Iterable[Provider]:
        """Offer weights sources (`interfaces.weights.WeightsSource`): a path to config, tensors and tokenizer.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_detokenizer(self) -> Iterable[Provider]:
        """Offer detokenizers (`interfaces.detokenizer.Detokenizer`): token ids to text, incrementally.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_executor(self) -> Iterable[Provider]:
        """Offer executors (`interfaces.executor.Executor`): run step plans on one or more devices.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_frontend(self) -> Iterable[Provider]:
        """Offer API frontends (`interfaces.frontend.Frontend`): routes of the HTTP server. All of them are mounted.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_parser(self) -> Iterable[Provider]:
        """Offer tool-call and reasoning parsers (`interfaces.parser.OutputParser`); chosen by flag or request.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_observer(self) -> Iterable[Provider]:
        """Offer observers (`interfaces.observer.Observer`): see finished requests and step statistics.

        Called: once per PluginHost, at start-up.
        """

    @hookspec
    def enginectl_commands(self, app: typer.Typer) -> None:
        """Add commands to the `enginectl` command line.

        Called: once per invocation, before arguments are read; keep imports inside the commands.
        """

    @hookspec
    def enginectl_request_admitted(self, request: GenerateRequest) -> None:
        """See a request before it is queued; raise RequestError to refuse it.

        Called: once per request, on the API side, outside the engine loop.
        """

    @hookspec
    def enginectl_request_finished(self, request: GenerateRequest, finished: FinishedRequest) -> None:
        """See how a request ended: reason, counts and timings.

        Called: once per request, on the API side, outside the engine loop.
        """
