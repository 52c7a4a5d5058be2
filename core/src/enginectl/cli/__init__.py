"""The `enginectl` command line."""

from __future__ import annotations

from enginectl.cli.app import main

__all__ = ["main"]
