"""enginectl: an LLM serving engine that a deployment assembles from the packages it installs.

Importing this package imports no torch; the heavy parts load when an engine is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from enginectl.api import Engine
    from enginectl.hookspecs import hookimpl
    from enginectl.provider import API_VERSION, Capabilities, Provider, Role
    from enginectl.types import RequestOutput, SamplingParams, StructuredOutputs

__all__ = [
    "API_VERSION",
    "Capabilities",
    "Engine",
    "Provider",
    "RequestOutput",
    "Role",
    "SamplingParams",
    "StructuredOutputs",
    "hookimpl",
]

_HOME = {
    "Engine": "enginectl.api",
    "hookimpl": "enginectl.hookspecs",
    "API_VERSION": "enginectl.provider",
    "Capabilities": "enginectl.provider",
    "Provider": "enginectl.provider",
    "Role": "enginectl.provider",
    "RequestOutput": "enginectl.types",
    "SamplingParams": "enginectl.types",
    "StructuredOutputs": "enginectl.types",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import enginectl` stays cheap."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'enginectl' has no attribute {name!r}")
