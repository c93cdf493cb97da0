"""Give command lines to the argument parser of the sglang that is importable, as if on MI355X.

stdin: a JSON list of words a line. stdout: a JSON line for each: {"ok": true, "args": {...}} with the server's
arguments as sglang understood them, or {"ok": false, "error": "..."}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

import gpustubs
import sglang_boot

ASKED = (
    "tp_size",
    "dp_size",
    "ep_size",
    "kv_cache_dtype",
    "enable_aiter_allreduce_fusion",
    "disable_shared_experts_fusion",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "chunked_prefill_size",
    "mem_fraction_static",
    "watchdog_timeout",
    "reasoning_parser",
    "tool_call_parser",
    "host",
    "port",
)


def main() -> int:
    os.environ["SGLANG_USE_AITER"] = "1"
    gpustubs.pretend_mi355x()
    gpustubs.install(sglang_boot.STUBS)
    import sglang  # noqa: F401  first: it changes what transformers offers
    import transformers

    for name in ("AutoImageProcessor", "AutoVideoProcessor"):  # need torchvision in some releases
        if getattr(getattr(transformers, name, None), "is_dummy", False):
            setattr(transformers, name, gpustubs.stub_class(name))
    from sglang.srt.utils import common

    common.get_amdgpu_memory_capacity = lambda: 288 * 1024.0
    from sglang.srt.server_args import prepare_server_args

    for line in sys.stdin:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                args = prepare_server_args(json.loads(line))
        except (Exception, SystemExit) as err:
            text = said.getvalue().strip().splitlines()
            answer = {"ok": False, "error": f"{type(err).__name__}: {err}; {text[-1] if text else ''}"}
        else:
            answer = {"ok": True, "args": {name: getattr(args, name) for name in ASKED}}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
