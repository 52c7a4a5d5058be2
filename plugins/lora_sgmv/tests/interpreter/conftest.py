"""Collected only where kernels run in Triton's interpreter: `test_in_interpreter.py` starts such a process."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
