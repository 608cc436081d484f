"""Plain torch: dense attention with the skipped heads zeroed. Also the backend that runs anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_SCORES = 1 << 24  # elements of the boolean visibility [B, chunk, T_k] made at a time


def zero_skipped_heads(o: Tensor, mask: Tensor) -> Tensor:
    """o [B, T, H_q, d] with exact zeros in the heads of the groups that `mask` [B*T, N_G] skips."""
    batch, tokens, heads, size = o.shape
    groups = mask.shape[1]
    grouped = o.reshape(batch, tokens, groups, heads // groups, size)
    return grouped.masked_fill(~mask.view(batch, tokens, groups, 1, 1), 0).view(o.shape)


def attention_prefill_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    causal: bool,
    q_start: Tensor | None,
    kv_start: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attention of q [B, T, H_q, d] over k, v [B, T_k, H_k, d]; a row that sees no key gives zeros."""
    batch, tokens, heads, _ = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    kh, vh = (tensor.transpose(1, 2) for tensor in (k, v))
    if kv_heads != heads:
        kh, vh = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (kh, vh))
    key = torch.arange(keys, device=q.device)
    first_position = q.new_full((batch,), keys - tokens, dtype=torch.int64) if q_start is None else q_start
    first_key = q.new_zeros(batch, dtype=torch.int64) if kv_start is None else kv_start
    parts = []
    step = max(1, CHUNK_SCORES // max(1, batch * keys))
    for start in range(0, tokens, step):
        position = first_position[:, None] + torch.arange(start, min(start + step, tokens), device=q.device)
        visible = key >= first_key[:, None, None]
        if causal:
            visible = visible & (key <= position[:, :, None])
        visible = visible.expand(batch, position.shape[1], keys)
        blind = ~visible.any(-1)
        # A row without keys would be 0 / 0: let it see all of them and clear it afterwards.
        seen = (visible | blind[:, :, None])[:, None]
        part = F.scaled_dot_product_attention(q[:, start : start + step].transpose(1, 2), kh, vh, seen, scale=scale)
        parts.append(part.transpose(1, 2).masked_fill(blind[:, :, None, None], 0))
    o = torch.cat(parts, 1) if parts else torch.zeros_like(q)
    return zero_skipped_heads(o, mask).contiguous()
