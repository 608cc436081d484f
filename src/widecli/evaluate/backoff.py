"""Telling an out-of-memory error from any other, and clearing up after one."""

from __future__ import annotations

import gc

_SIGNS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch could help: torch's own type, or the messages that drivers and the CPU allocator use."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def release_memory() -> None:
    """Give cached blocks back. Call it outside the `except` block, whose traceback still holds the tensors."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
