"""Next-token cross-entropy and distillation without the full logits: the head runs over chunks of tokens.

With 32 x 1024 tokens and 49k words the fp32 logits alone take 6.4 GB. The head is frozen, so its only gradient is the
one towards the hidden states; it is computed in the forward pass, chunk by chunk, and nothing wide is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 512 * 2**20  # fp32 logits of one chunk


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, compiled: bool) -> Tensor:
        chunk = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        step = _compiled_chunk() if compiled else chunk_loss_and_gradient
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            loss, gradient[part] = step(hidden[part], weight, targets[part], counted[part])
            total += loss
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None


def chunk_loss_and_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of cross-entropies of one chunk (fp32) over the `counted` rows, and its gradient towards `hidden`."""
    logits = (hidden @ weight.T).float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    loss = ((normaliser - logits.gather(-1, targets.unsqueeze(-1))).squeeze(-1) * counted).sum()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    error = ((logits - normaliser).exp() - (columns == targets.unsqueeze(-1)).float()) * counted.unsqueeze(-1)
    return loss, error.to(hidden.dtype) @ weight


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        teacher: Tensor,
        weight: Tensor,
        targets: Tensor,
        counted: Tensor,
        share: float,
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunk = max(1, CHUNK_BYTES // (2 * 4 * weight.shape[0]))  # the teacher's logits and the student's
        step = _compiled_distillation() if compiled else chunk_distillation
        total = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            sums, gradient[part] = step(hidden[part], teacher[part], weight, targets[part], counted[part], share)
            total += sums
        ctx.save_for_backward(gradient)
        divergence, cross_entropy = total.unbind()
        ctx.mark_non_differentiable(divergence, cross_entropy)
        return share * divergence + (1 - share) * cross_entropy, divergence, cross_entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None, None


def chunk_distillation(
    hidden: Tensor, teacher: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Sums [2] over the `counted` rows of one chunk (fp32): KL(teacher, student) and the student's cross-entropy.

    Also the gradient of `share` of the first and the rest of the second towards `hidden`.
    """
    student = (hidden @ weight.T).float().log_softmax(-1)
    wanted = (teacher @ weight.T).float().log_softmax(-1)
    probabilities = wanted.exp()
    divergence = ((probabilities * (wanted - student)).sum(-1) * counted).sum()
    cross_entropy = -(student.gather(-1, targets.unsqueeze(-1)).squeeze(-1) * counted).sum()
    target = probabilities
    if share < 1:
        columns = torch.arange(student.shape[-1], device=student.device)
        target = share * probabilities + (1 - share) * (columns == targets.unsqueeze(-1)).float()
    error = (student.exp() - target) * counted.unsqueeze(-1)
    return torch.stack([divergence, cross_entropy]), error.to(hidden.dtype) @ weight


@cache
def _compiled_chunk() -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(chunk_loss_and_gradient, dynamic=False)


@cache
def _compiled_distillation() -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    return torch.compile(chunk_distillation, dynamic=False)


def next_token_loss(
    hidden: Tensor, weight: Tensor, input_ids: Tensor, valid: Tensor | None, compiled: bool = False
) -> Tensor:
    """Sum of next-token cross-entropies, fp32.

    hidden [B, T, D] after the final norm, weight [V, D] of a frozen head, input_ids [B, T], valid [B, T] bool or None.
    A prediction counts when both the token and the one it predicts are real. The mask decides, never a token id: the
    padding token is often the end-of-text token.
    """
    inputs, targets, counted = _predictions(hidden, input_ids, valid)
    loss: Tensor = _ChunkedCrossEntropy.apply(inputs, weight, targets, counted, compiled)  # type: ignore[no-untyped-call]
    return loss


def distillation_loss(
    hidden: Tensor,
    teacher: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    valid: Tensor | None,
    share: float = 1.0,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the predictions, fp32: the objective, the KL divergence from the teacher's words to the student's, and
    the LM loss. The objective is `share` of the divergence and the rest of the LM loss; it alone carries a gradient.

    `teacher` [B, T, D] are the teacher's hidden states in front of the same head. The rest as for `next_token_loss`.
    """
    inputs, targets, counted = _predictions(hidden, input_ids, valid)
    wanted = teacher[:, :-1].reshape(-1, teacher.shape[-1])
    losses: tuple[Tensor, Tensor, Tensor] = _ChunkedDistillation.apply(  # type: ignore[no-untyped-call]
        inputs, wanted, weight, targets, counted, share, compiled
    )
    return losses


def _predictions(hidden: Tensor, input_ids: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states that predict a token [N, D], that token [N], and 1 where the prediction counts [N]."""
    inputs, targets = hidden[:, :-1].reshape(-1, hidden.shape[-1]), input_ids[:, 1:].reshape(-1)
    if valid is None:
        return inputs, targets, torch.ones_like(targets, dtype=torch.float32)
    return inputs, targets, (valid[:, :-1] & valid[:, 1:]).reshape(-1).float()
