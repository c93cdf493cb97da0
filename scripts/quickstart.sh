#!/usr/bin/env bash
# The main job on a small GLM-5.2-shaped checkpoint: install, write it, quantize it with AMD Quark, validate, sum up.
# Run it again any time; it only redoes its own folder, quickstart-out/.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/_venv.sh
ensure_venv ""

out=quickstart-out
rm -rf "$out"
mkdir "$out"
echo "1/3 a small checkpoint in the published layout: $out/tiny-glm"
.venv/bin/python scripts/make_tiny_glm.py "$out/tiny-glm" >/dev/null
echo "2/3 quantizing it to MXFP4 with AMD Quark (importing Quark takes a while): $out/tiny-glm-mxfp4"
.venv/bin/glmquant quantize "$out/tiny-glm" "$out/tiny-glm-mxfp4" --backend quark --quiet
echo "3/3 validating the result from disk"
.venv/bin/glmquant validate "$out/tiny-glm-mxfp4"
echo
.venv/bin/glmquant plan "$out/tiny-glm"
cat <<EOF

Done. $out/tiny-glm-mxfp4 is a checkpoint as sglang loads it; its README.md says how it was made.
For the real model: .venv/bin/glmquant plan /path/to/GLM-5.2, then scripts/quantize_glm52.py or glmquant quantize.
EOF
