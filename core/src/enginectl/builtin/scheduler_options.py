"""Options of core's scheduling policies. Plain data: read at registration."""

from __future__ import annotations

import msgspec


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the policies `fcfs` and `priority`.

    skip_ahead: how many others may be admitted before a waiting request whose blocks do not fit; 0 keeps strict order.
    skip_ahead_s: for how long, from when it was first refused. It also bounds the wait for an adapter slot.
    """

    skip_ahead: int = 16
    skip_ahead_s: float = 5.0


class FairOptions(QueueOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the policy `fair`: those of the other policies, and two more.

    output_weight: what an output token costs, where a prompt token costs 1. burst: how much of that a tenant that had
    nothing waiting may get before those that waited; unused time counts for no more.
    """

    output_weight: float = 2.0
    burst: float = 4096.0
