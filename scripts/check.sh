#!/usr/bin/env bash
# Lint, format and types. All three run; the status is non-zero if any of them fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

status=0
.venv/bin/ruff check . || status=1
.venv/bin/ruff format --check . || status=1
.venv/bin/mypy core/src plugins/*/src || status=1
exit "$status"
