"""A whole FFN with its decision given: layout, up projections, down projection, against the dense FFN."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import wide_kernels as wk
from wide_kernels.benchmarks import dense
from wide_kernels.benchmarks.cases import CHECKED_ROWS, Sizes, TimedCase, relative_error
from wide_kernels.dispatch import Explanation
from wide_kernels.gemm_k.configs import FEW_ROWS

COPIES = 4  # of the weights in decode: one layer after the other, as a model reads them, none of them from L2


def ffn_case(sizes: Sizes) -> TimedCase:
    """gated_mlp_up and gemm_k; for many rows route_layout counts too. Times are those of one FFN."""
    model, rows = sizes.model, sizes.rows
    hidden, channels = model.hidden_size, model.intermediate_size
    copies = COPIES if rows <= FEW_ROWS else 1
    mask = sizes.mask()
    x = sizes.normal(rows, hidden)
    weights = [
        (
            sizes.normal(channels, hidden, scale=0.02),
            sizes.normal(channels, hidden, scale=0.02),
            sizes.normal(hidden, channels, scale=0.02),
        )
        for _ in range(copies)
    ]

    def one(w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        form: dict[str, Any] = {"mask": mask} if rows <= FEW_ROWS else {"layout": wk.route_layout(mask)}
        return wk.gemm_k(wk.gated_mlp_up(x, w_gate, w_up, **form), w_down, **form)

    def compare(got: list[Tensor]) -> float:
        picked = torch.randperm(rows, device=sizes.device)[:CHECKED_ROWS]
        part = x[picked].double()
        wide_mask = mask[picked].repeat_interleave(sizes.group, 1)
        errors = []
        for y, (w_gate, w_up, w_down) in zip(got, weights, strict=True):
            h = F.silu(F.linear(part, w_gate.double())) * F.linear(part, w_up.double()) * wide_mask
            errors.append(relative_error(y, picked, F.linear(h, w_down.double())))
        return max(errors)

    up = wk.explain("gated_mlp_up", x, *weights[0][:2], mask=mask)
    down = wk.explain("gemm_k", x.new_empty(rows, channels), weights[0][2], mask=mask)
    return TimedCase(
        "ffn", *sizes.point,
        Explanation("ffn", f"{up.backend} + {down.backend}", f"{up}\n{down}", {}),
        lambda: [one(*each) for each in weights],
        {"dense ffn": lambda: [F.linear(dense.fused_gated_mlp_up(x, gate, up), down) for gate, up, down in weights]},
        lambda: compare([one(*each) for each in weights]),
        6 * float(mask.sum()) * sizes.group * hidden,
        compare=compare, checked_elements=min(rows, CHECKED_ROWS) * hidden * copies, repeats=copies,
    )  # fmt: skip
