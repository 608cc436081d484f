"""Plain torch: dense attention of one token against the cache, skipped heads zeroed. Also runs anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from wide_kernels.attention_prefill.reference import zero_skipped_heads


def attention_decode_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    kv_len: Tensor | None,
    kv_start: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention of q [B, 1, H_q, d] over keys kv_start[b] <= j < kv_len[b]; a sequence without keys gives zeros."""
    batch, _, heads, size = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    key = torch.arange(keys, device=q.device)
    end = q.new_full((batch,), keys, dtype=torch.int64) if kv_len is None else kv_len
    start = q.new_zeros(batch, dtype=torch.int64) if kv_start is None else kv_start
    visible = (key >= start[:, None]) & (key < end[:, None])
    blind = ~visible.any(-1)
    # The query heads that share a KV head become rows of one product: no copies of the cache.
    shared = heads // kv_heads
    rows = q.reshape(batch, kv_heads, shared, size)
    seen = (visible | blind[:, None])[:, None, None, :].expand(batch, 1, shared, keys)
    o = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), seen, scale=scale)
    o = o.reshape(batch, 1, heads, size).masked_fill(blind[:, None, None, None], 0)
    return zero_skipped_heads(o, mask)
