"""AMD Quark as the quantization backend: its own observer, scaling, rounding and packing, a few rows at a time.

The only file that imports quark. Blocks lie along in_features, so rows are independent and chunks change no bit.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

from glmquant.errors import BackendError
from glmquant.mxfp4.backend import Buffer

if TYPE_CHECKING:
    import torch

# 13 MB of bf16: with the float32 and int32 temporaries of Quark (35 bytes an element) some 220 MB.
CHUNK_ELEMENTS = 6 * 1024 * 1024
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def missing_compiler() -> str | None:
    """The C++ compiler that importing Quark needs and this machine lacks, or None.

    Quark's wheel ships no binary: at import it compiles a small extension through torch.utils.cpp_extension, which
    runs $CXX (c++ by default) and ninja. ninja comes as a wheel with glmquant, but perhaps not on the PATH.
    """
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which("ninja"):
        import ninja

        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
    return None if shutil.which(compiler) else compiler


class QuarkBackend:
    """Quantizes weights to MXFP4 with Quark's code on one torch device.

    Raises:
        BackendError: Quark or what it needs is missing, or the device is not usable. Says what to install.
    """

    name = "quark"
    chunk_elements = CHUNK_ELEMENTS
    threads = 1  # torch brings its own

    def __init__(self, device: str = "cpu") -> None:
        if missing := missing_compiler():
            raise BackendError(
                f"AMD Quark cannot be imported: it compiles a C++ extension at import and {missing!r} is not there",
                "Install a C++ compiler (Debian, Ubuntu: apt-get install g++) or name one in CXX.",
            )
        os.environ.setdefault("QUARK_LOG_LEVEL", "warning")
        try:
            import torch

            self._torch: Any = torch
            self.device = self._check_device(device)  # first: importing Quark takes 15 s
            from quark import __version__
            from quark.torch import kernel
            from quark.torch.quantization.config.config import OCP_MXFP4Spec
            from quark.torch.quantization.tensor_quantize import FakeQuantizeBase
            from quark.torch.utils.numerics import to_e8m0_uint8
            from quark.torch.utils.pack import create_pack_method
        except ImportError as err:
            raise BackendError(f"AMD Quark cannot be imported: {err}", "pip install 'amd-quark>=0.13'") from err
        except RuntimeError as err:
            raise BackendError(
                f"AMD Quark cannot be imported: {err}",
                "Quark's own messages above say why; it compiles with $CXX (c++ by default) and Python's headers.",
            ) from err
        self.version = str(__version__)
        self._kernel: Any = kernel
        self._to_e8m0: Any = to_e8m0_uint8
        self._fake_quantize: Any = FakeQuantizeBase.get_fake_quantize
        self._pack: Any = create_pack_method
        self._spec: Any = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()

    def _check_device(self, device: str) -> torch.device:
        try:
            found = self._torch.device(device)
            self._torch.empty(1, device=found)
        except (RuntimeError, AssertionError) as err:
            raise BackendError(f"device {device!r} cannot be used: {str(err).splitlines()[0]}") from err
        return found

    def quantize_into(self, source: memoryview, dtype: str, columns: int, packed: Buffer, scale: Buffer) -> int:
        """Quantize whole rows into the caller's buffers.

        Args:
            source: writable rows of `columns` elements (torch takes no read-only buffer).
            dtype: BF16, F16 or F32.
            packed: gets half a byte per element, scale one E8M0 byte per 32.

        Returns:
            -1, or the flat index of the first NaN or Inf; packed and scale are then unchanged.
        """
        torch = self._torch
        weight = torch.frombuffer(source, dtype=getattr(torch, _DTYPES[dtype])).view(-1, columns).to(self.device)
        finite = torch.isfinite(weight)
        if not finite.all():
            return int((~finite).view(-1).nonzero()[0])
        for buffer, result in zip((packed, scale), self._quantize(weight), strict=True):
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(result.reshape(-1))
        return -1

    def _quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The calls and their order are those of Quark's file-to-file path (file2file_quantization.py:1315).
        spec = self._spec
        quantizer = self._fake_quantize(spec)
        quantizer.enable_observer()
        quantizer.disable_fake_quant()
        quantizer(weight)
        codes = self._kernel.scaled_real_quantize(
            spec.dtype.value,
            weight,
            quantizer.scale,
            quantizer.zero_point,
            spec.ch_axis,
            spec.group_size,
            quantizer.quant_min,
            quantizer.quant_max,
            spec.round_method.value,
            spec.qscheme.value,
        )
        packed = self._pack(qscheme=spec.qscheme.value, dtype=spec.dtype.value).pack(codes, False)
        return packed.contiguous(), self._to_e8m0(quantizer.scale).contiguous()
