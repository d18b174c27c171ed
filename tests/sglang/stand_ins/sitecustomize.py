"""Stand-ins for packages that SGLang imports at start-up and a text model on a CPU never calls.

torchvision's binary wheels want CUDA libraries, and vllm is asked for one kernel on a machine without a GPU.  Python
runs this file at its start where the folder is on PYTHONPATH, so in each of SGLang's processes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class _Anything(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Missing(metaclass=_Anything):
    """Any class or function of a stand-in."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("a stand-in for a package that is not installed was called")


class _Module(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        # Of vllm the kernels alone: SGLang asks whether other parts are there.
        if name.partition(".")[0] == "torchvision" or name in ("vllm", "vllm._custom_ops"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return _Module(spec.name)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        pass


sys.meta_path.append(_Finder())
