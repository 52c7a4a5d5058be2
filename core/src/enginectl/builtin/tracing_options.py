"""The section `[plugins.otel]`, and whether what it needs is installed. Imports none of it."""

from __future__ import annotations

import msgspec

from enginectl.context import Machine

DISTRIBUTIONS = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


class TracingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """endpoint: URL of an OTLP collector over HTTP; `/v1/traces` is added when it has no path.

    Everything else is OpenTelemetry's own to say: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS …
    """

    endpoint: str

    def __post_init__(self) -> None:
        """Refuse what the exporter would fail with much later."""
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"endpoint is {self.endpoint!r}; allowed: a URL such as http://127.0.0.1:4318 (OTLP over HTTP)"
            )


def without_opentelemetry(machine: Machine) -> str | None:
    """Why traces cannot be sent here."""
    missing = [name for name in DISTRIBUTIONS if name not in machine.versions]
    return f"{' and '.join(missing)} not installed; pip install 'enginectl[otel]'" if missing else None
