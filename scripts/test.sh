#!/usr/bin/env bash
# Everything that must pass: lint, types, tests. Arguments go to pytest: scripts/test.sh tests/test_header.py -x
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_venv.sh
ensure_venv "[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
.venv/bin/mypy
.venv/bin/python -m pytest "$@"
