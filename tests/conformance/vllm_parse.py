"""Give command lines to the argument parser of the vLLM that is importable, as if on MI355X.

stdin: a JSON list of the words after `vllm serve` a line. stdout: a JSON line for each, as in sglang_parse.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

import vllm_boot

ASKED = (
    "model_tag",
    "tensor_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "kv_cache_dtype",
    "speculative_config",
    "moe_backend",
    "linear_backend",
    "gpu_memory_utilization",
    "reasoning_parser",
    "tool_call_parser",
    "host",
    "port",
)


def main() -> int:
    vllm_boot.import_vllm()
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for line in sys.stdin:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                args = parser.parse_args(json.loads(line))
        except (Exception, SystemExit) as err:
            text = said.getvalue().strip().splitlines()
            answer = {"ok": False, "error": f"{type(err).__name__}: {err}; {text[-1] if text else ''}"}
        else:
            answer = {"ok": True, "args": {name: getattr(args, name) for name in ASKED}}
        print(json.dumps(answer, default=str), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
