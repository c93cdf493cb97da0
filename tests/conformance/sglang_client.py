"""Plays a Python interpreter in which sglang can be imported on CPU, for its benchmark client: -c CODE or -m MODULE.

The client itself needs no GPU, but it imports sglang's utilities, which need packages that are not installed here.
"""

from __future__ import annotations

import runpy
import sys

import gpustubs

STUBS = ["triton", "torchvision", "IPython", "tvm_ffi", "sentencepiece", "sgl_kernel", "partial_json_parser"]
STUBS += ["xgrammar", "aiter", "datasets"]

if __name__ == "__main__":
    option, what, *rest = sys.argv[1:]
    if option == "-c":
        exec(what, {"__name__": "__main__"})
    else:
        gpustubs.pretend_mi355x()
        gpustubs.install(STUBS)
        import sglang  # noqa: F401  first: it patches transformers
        import transformers

        for name in ("AutoImageProcessor", "AutoVideoProcessor"):  # need torchvision in some releases
            if getattr(getattr(transformers, name, None), "is_dummy", False):
                setattr(transformers, name, gpustubs.stub_class(name))
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
