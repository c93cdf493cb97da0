#!/usr/bin/env bash
# Load checkpoints into real, released serving engines on CPU: conformance.sh [--quick] [pytest options]
#
# Installs the engines by itself, once, under $GLMQUANT_CONFORMANCE_DIR (default: .conformance; 5.1 GB, or 3.7
# with --quick, which tests two releases of sglang instead of eleven). PYTHON: the project's interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if [[ ${1:-} == --quick ]]; then
  shift
  export GLMQUANT_CONFORMANCE_QUICK=1
  # a sample of the verdict cases; the full run has them all
  export GLMQUANT_VERDICT_STRIDE=${GLMQUANT_VERDICT_STRIDE:-10} GLMQUANT_VERDICT_CASES=${GLMQUANT_VERDICT_CASES:-25}
fi
# A registry out of reach is for the tests to report: they skip, and say what was not tested.
"$python" tests/conformance/envs.py || echo "conformance: not every engine could be installed" >&2
exec "$python" -m pytest -m conformance -rsP tests/conformance "$@"
