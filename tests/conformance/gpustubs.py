"""Import stubs for packages that only matter on a GPU machine, and a pretended MI355X (gfx950).

`install(names)` answers `import NAME[.x.y]` for top-level packages that are not really installed. A stub's
attribute is a fresh class (CamelCase) or another stub; a stub works as a decorator or a default value, but
calling one with a tensor raises, so that no result of a load can come from a stub without a word.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable
from typing import Any

# Attributes that need a real answer, by full name.
ANSWERS: dict[str, Any] = {}


class StubMeta(type):
    def __getattr__(cls, name: str) -> Any:  # members of an enum and the like
        if name.startswith("_"):
            raise AttributeError(name)
        return StubModule(f"{cls.__name__}.{name}")


class StubClass(metaclass=StubMeta):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_tensors(type(self).__name__, args, kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class StubModule(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__file__ = f"<stub {name}>"
        self.__spec__ = importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0.0.0+stub"
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in ANSWERS:
            return ANSWERS[full]
        if full in sys.modules:
            return sys.modules[full]
        value = stub_class(name, self.__name__) if name[:1].isupper() else StubModule(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_tensors(self.__name__, args, kwargs)
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return StubModule(f"{self.__name__}()")

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __getitem__(self, item: Any) -> StubModule:
        return self

    def __hash__(self) -> int:
        return hash(self.__name__)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __or__(self, other: Any) -> StubModule:  # in annotations: `triton.Thing | None`
        return self

    __ror__ = __or__


def stub_class(name: str, module: str = __name__) -> type:
    return StubMeta(name, (StubClass,), {"__module__": module})


def _refuse_tensors(name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if tensor is not None and any(isinstance(a, tensor) for a in (*args, *kwargs.values())):
        raise RuntimeError(f"the stub {name} of a GPU package was called with a tensor")


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        parent, _, child = module.__name__.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)
        return None


def install(names: Iterable[str], pretend_installed: Iterable[str] = ()) -> None:
    """Stub the packages `names`; those in `pretend_installed` also answer yes to find_spec probes."""
    real = importlib.util.find_spec
    absent = {n for n in names if real(n) is None}
    sys.meta_path.append(_Finder(absent))  # last, so that a real package wins
    hidden = absent - set(pretend_installed)

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.split(".")[0] in hidden else real(name, package)

    importlib.util.find_spec = find_spec


def pretend_mi355x() -> None:
    """Make torch describe a ROCm machine with one gfx950; engines take that path, tensors stay on CPU."""
    import torch

    properties = types.SimpleNamespace(
        gcnArchName="gfx950:sramecc+:xnack-",
        name="AMD Instinct MI355X",
        major=9,
        minor=5,
        total_memory=288 << 30,
        multi_processor_count=256,
        warp_size=64,
    )
    torch.version.hip = "7.2.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *args: None
    torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 5)
    torch.cuda.get_device_properties = lambda *args, **kwargs: properties
    target = types.SimpleNamespace(backend="hip", arch="gfx950", warp_size=64)
    ANSWERS["triton.runtime.driver.active"] = types.SimpleNamespace(get_current_target=lambda: target)
