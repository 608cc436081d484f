"""Which backend runs an operator: by argument, by the environment variable WIDE_KERNELS_BACKEND, or `auto`.

`auto` takes the first backend that supports the problem, in the order of `PREFERENCE`; it falls back to torch, says so
once where that is slow, and `explain` tells why. A backend named by hand refuses by name instead.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor

from wide_kernels.errors import UnsupportedError
from wide_kernels.tuning.tiles import TILE

ENVIRONMENT = "WIDE_KERNELS_BACKEND"
PREFERENCE = ("gluon", "triton", "torch")
CHOICES = ("auto", *reversed(PREFERENCE))
HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile does not follow such a question

PROCESSORS_WITHOUT_GPU = 3

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GLUON_DTYPES = (torch.float16, torch.bfloat16)
GLUON_SINCE = (3, 6)  # the Triton release whose Gluon the kernels are written for; it is experimental


def _triton_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return ()


TRITON_VERSION = _triton_version()  # read once: a traced call must not open files

# Operator -> the module with `<operator>_problem`, and the backends that exist for it.
OPERATORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "route_layout": ("wide_kernels.layout", ("triton", "torch")),
    "gemm_mn": ("wide_kernels.gemm_mn.launch", ("gluon", "triton", "torch")),
    "gated_mlp_up": ("wide_kernels.gemm_mn.launch", ("gluon", "triton", "torch")),
    "gemm_k": ("wide_kernels.gemm_k.launch", ("gluon", "triton", "torch")),
    "compensate": ("wide_kernels.compensate.launch", ("triton", "torch")),
    "attention_prefill": ("wide_kernels.attention_prefill.launch", ("gluon", "triton", "torch")),
    "attention_decode": ("wide_kernels.attention_decode.launch", ("gluon", "triton", "torch")),
    "norm_route": ("wide_kernels.norm_route.launch", ("triton", "torch")),
}


@dataclass(frozen=True)
class Problem:
    """What a backend must know to accept or refuse: no tensor, only facts about them.

    `tile_sizes` names the sizes that must be multiples of 16 on tensor cores; `strided` names the weights that are not
    contiguous, which would have to be copied at every call. `refused` says, by backend, what the operator's own kernel
    there does not take beyond the rules that all operators share; `passed_over` why auto leaves one out that could run.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    tile_sizes: Mapping[str, int] = field(default_factory=dict)
    strided: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`: the backend that runs, why it does, and what the preferred ones refused."""

    op: str
    backend: str
    reason: str
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op} runs on {self.backend}: {self.reason}"]
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.refused.items())])


@cache
def interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU (for tests; slow)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; for the interpreter few, so that its tests cross every border."""
    if device.type != "cuda":
        return PROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9.0."""
    return device.type == "cuda" and _capability(device.index or 0) == (9, 0)


def _triton_refusal(problem: Problem) -> str | None:
    if not HAS_TRITON:
        return "the package triton is not installed"
    if problem.device.type == "cuda":
        capability = _capability(problem.device.index or 0)
        if capability < (8, 0):
            return f"it needs compute capability 8.0 or newer, this GPU has {capability[0]}.{capability[1]}"
    elif not interpreted():
        return f"it needs a CUDA device, the tensors are on {problem.device.type}"
    elif problem.dtype is torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly; use float16 or float32 there"
    if problem.dtype not in TRITON_DTYPES:
        return f"it takes {', '.join(map(_short, TRITON_DTYPES))}, not {_short(problem.dtype)}"
    for name, size in problem.tile_sizes.items():
        if size % TILE:
            return f"{name} must be a multiple of {TILE}, got {size}"
    if problem.strided:
        return f"{problem.strided[0]} must be contiguous; call .contiguous() once, outside of the loop"
    return problem.refused.get("triton")


def _gluon_refusal(problem: Problem) -> str | None:
    """Gluon's kernels use what only Hopper has, on top of what Triton's need."""
    if not HAS_TRITON:
        return "the package triton is not installed"
    if problem.device.type != "cuda":
        return f"it needs a Hopper GPU, the tensors are on {problem.device.type}"
    capability = _capability(problem.device.index or 0)
    if capability != (9, 0):
        return f"it needs compute capability 9.0 (Hopper), this GPU has {capability[0]}.{capability[1]}"
    if TRITON_VERSION < GLUON_SINCE:
        return f"it needs Triton {_dotted(GLUON_SINCE)} or newer, this is {_dotted(TRITON_VERSION) or 'unknown'}"
    if problem.dtype not in GLUON_DTYPES:
        return f"it takes {', '.join(map(_short, GLUON_DTYPES))}, not {_short(problem.dtype)}"
    return _triton_refusal(problem) or problem.refused.get("gluon")


_REFUSALS: Mapping[str, Callable[[Problem], str | None]] = {
    "gluon": _gluon_refusal,
    "triton": _triton_refusal,
    "torch": lambda problem: None,
}


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wanted(op: str, backend: str) -> tuple[str, str]:
    """The backend asked for and who asked."""
    source = "asked for by backend="
    if backend == "auto":
        backend, source = os.environ.get(ENVIRONMENT, "auto") or "auto", f"asked for by {ENVIRONMENT}"
    if backend not in CHOICES:
        raise UnsupportedError(f"{op}: there is no backend {backend!r}; choose one of {', '.join(CHOICES)}")
    return backend, source


def _decide(problem: Problem, backend: str) -> Explanation:
    available = OPERATORS[problem.op][1]
    wanted, source = _wanted(problem.op, backend)
    refused: dict[str, str] = {}
    for name in PREFERENCE if wanted == "auto" else (wanted,):
        why = _REFUSALS[name](problem) if name in available else f"there is no {name} kernel for {problem.op} yet"
        if why is None and wanted == "auto":
            why = problem.passed_over.get(name)
        if why is None:
            reason = source if wanted != "auto" else "the first in order of preference that takes this"
            return Explanation(problem.op, name, reason, refused)
        refused[name] = why
    raise UnsupportedError(f"{problem.op}: the {wanted} backend cannot run this: {refused[wanted]}")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def choose(problem: Problem, backend: str) -> str:
    """Pick the backend for `problem`, or raise UnsupportedError naming what the backend asked for cannot take."""
    decision = _decide(problem, backend)
    why = decision.refused.get("triton")
    if decision.backend == "torch" and why and problem.device.type == "cuda" and not torch.compiler.is_compiling():
        _warn_once(f"{problem.op} runs on the torch backend, which skips nothing: {why}")
    return decision.backend


def available_backends() -> dict[str, tuple[str, ...]]:
    """For every operator, the backends that exist and can run in this process, preferred first."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return {
        op: tuple(name for name in backends if _REFUSALS[name](Problem(op, device, torch.float16)) is None)
        for op, (_, backends) in OPERATORS.items()
    }


def explain(op: str, *args: object, backend: str = "auto", **kwargs: object) -> Explanation:
    """Which backend `op` would use for these arguments (those of the operator itself), and why; runs nothing."""
    if op not in OPERATORS:
        raise UnsupportedError(f"there is no operator {op!r}; choose one of {', '.join(OPERATORS)}")
    problem_of = getattr(import_module(OPERATORS[op][0]), f"{op}_problem")
    return _decide(cast(Problem, problem_of(*args, **kwargs)), backend)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
