"""Gluon's copies under one name each: Triton 3.6 calls them by longer names than its successors."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
