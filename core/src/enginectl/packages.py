"""The packages that bring our plugins, by the plugins' names."""

from __future__ import annotations

PACKAGES = {
    "cpu": "enginectl-attention-cpu",
    "triton": "enginectl-attention-triton",
    "flashinfer": "enginectl-attention-flashinfer",
    "ngram": "enginectl-spec-ngram",
    "draft": "enginectl-spec-draft",
    "sgmv": "enginectl-lora-sgmv",
    "prefix-cache": "enginectl-prefix-cache",
}
"""Plugin to the distribution that brings it, for those we publish."""

BRING = {"prefix_index": ("prefix-cache",), "adapter": ("sgmv",), "speculator": ("ngram", "draft")}
"""Role that core itself does not fill to those plugins of ours that do."""


def canonical(name: str) -> str:
    """A plugin's name without the differences that flags, variables and files impose."""
    return name.lower().replace("-", "_").replace(".", "_")


def install_hint(plugin: str) -> str:
    """How to get a plugin, or the provider of its name: the command, if we publish it."""
    package = next((dist for name, dist in PACKAGES.items() if canonical(name) == canonical(plugin)), None)
    return f"pip install {package}" if package else "Install the package that brings it, or see `enginectl plugins`"


def role_hint(role: str) -> str:
    """How to get a provider of a role that core itself does not fill."""
    return f"pip install {' or '.join(PACKAGES[plugin] for plugin in BRING[role])}"
