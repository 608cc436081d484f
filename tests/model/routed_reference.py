"""The routed model once more, slowly: fp64, one sequence, loops over layers, tokens, heads and groups.

It shares no code with the product. Only the two facts of the method are taken for granted: which residual a router
reads, and that a skipped group adds nothing to the projection that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass
class Slow:
    """What the slow forward found: logits [T, V], executed groups by (layer, part), and the smallest margin."""

    logits: Tensor
    executed: dict[tuple[int, str], list[list[bool]]] = field(default_factory=dict)
    margin: float = math.inf


def slow_forward(
    config: Any, weights: Weights, routers: Weights, ids: list[int], *, heads_a_group: int, channels_a_group: int
) -> Slow:
    """Independent bits (mode wide), both parts, residual tap."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    r = {name: tensor.double() for name, tensor in routers.items()}
    found = Slow(torch.empty(0))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    x = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(config.num_hidden_layers):
        base = f"model.layers.{layer}."
        gates = [_decide(r, f"{layer}.attention.", v, found) for v in x]
        found.executed[layer, "attention"] = gates
        normed = [_rms(v, w[base + "input_layernorm.weight"], config.rms_norm_eps) for v in x]
        heads = _attention(config, w, base + "self_attn.", layer, normed, head_dim)
        wo = w[base + "self_attn.o_proj.weight"]
        width = heads_a_group * head_dim
        x = [v + _sum_of_groups(wo, torch.cat(heads[t]), gates[t], width) for t, v in enumerate(x)]
        gates = [_decide(r, f"{layer}.ffn.", v, found) for v in x]
        found.executed[layer, "ffn"] = gates
        for t, v in enumerate(x):
            n = _rms(v, w[base + "post_attention_layernorm.weight"], config.rms_norm_eps)
            up = w[base + "mlp.up_proj.weight"] @ n
            gate = w[base + "mlp.gate_proj.weight"] @ n
            hidden = gate / (1 + torch.exp(-gate)) * up
            x[t] = v + _sum_of_groups(w[base + "mlp.down_proj.weight"], hidden, gates[t], channels_a_group)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    found.logits = torch.stack([head @ _rms(v, w["model.norm.weight"], config.rms_norm_eps) for v in x])
    return found


def _decide(r: Weights, base: str, x: Tensor, found: Slow) -> list[bool]:
    inner = r[base + "down.weight"] @ x + r[base + "down.bias"]
    logits = r[base + "up.weight"] @ inner + r[base + "up.bias"]
    bits = []
    for group in range(len(logits) // 2):
        execute, skip = float(logits[2 * group]), float(logits[2 * group + 1])
        found.margin = min(found.margin, abs(execute - skip))
        bits.append(execute >= skip)
    return bits


def _sum_of_groups(weight: Tensor, h: Tensor, gates: list[bool], width: int) -> Tensor:
    total = torch.zeros(weight.shape[0], dtype=weight.dtype)
    for group, executed in enumerate(gates):
        if executed:
            columns = slice(group * width, (group + 1) * width)
            total = total + weight[:, columns] @ h[columns]
    return total


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _rotate(config: Any, v: Tensor, position: int) -> Tensor:
    theta = float(config.rope_parameters["rope_theta"])
    half = len(v) // 2
    out = v.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(v))
        a, b = v[i], v[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def _attention(
    config: Any, w: Weights, base: str, layer: int, normed: list[Tensor], head_dim: int
) -> list[list[Tensor]]:
    """Head outputs [T][H_q] before o_proj."""
    ratio = config.num_attention_heads // config.num_key_value_heads
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    rotary = config.model_type != "smollm3" or bool(config.no_rope_layers[layer])

    def project(name: str, heads: int, x: Tensor) -> list[Tensor]:
        flat = w[f"{base}{name}_proj.weight"] @ x
        if f"{base}{name}_proj.bias" in w:
            flat = flat + w[f"{base}{name}_proj.bias"]
        rows = [flat[h * head_dim : (h + 1) * head_dim] for h in range(heads)]
        if f"{base}{name}_norm.weight" in w:
            rows = [_rms(v, w[f"{base}{name}_norm.weight"], config.rms_norm_eps) for v in rows]
        return rows

    def placed(rows: list[Tensor], t: int) -> list[Tensor]:
        return [_rotate(config, v, t) for v in rows] if rotary else rows

    q = [placed(project("q", config.num_attention_heads, x), t) for t, x in enumerate(normed)]
    k = [placed(project("k", config.num_key_value_heads, x), t) for t, x in enumerate(normed)]
    v = [project("v", config.num_key_value_heads, x) for x in normed]
    out = []
    for t in range(len(normed)):
        first = 0 if window is None else max(0, t - window + 1)
        row = []
        for h in range(config.num_attention_heads):
            scores = torch.stack([q[t][h] @ k[s][h // ratio] / math.sqrt(head_dim) for s in range(first, t + 1)])
            share = torch.softmax(scores, 0)
            row.append(sum(share[s - first] * v[s][h // ratio] for s in range(first, t + 1)))
        out.append(row)
    return out
