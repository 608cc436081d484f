"""Token perplexity of a long text, cut into windows: the figure reported as `<text>/token_ppl`.

The text is one token stream. A window of W tokens predicts its tokens 1..W-1; with `stride` = W (the default) windows
do not overlap and each one's first token is not scored. A smaller stride slides the window: tokens that an earlier
window scored serve as context only, so that every token but the first is scored exactly once. A shorter last window
counts too. With `add_bos` each window is BOS plus W-1 text tokens, all of them scored. The value is exp(sum of nll /
scored tokens).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from widecli.data.packing import token_ids
from widecli.errors import UsageError, WideError
from widecli.evaluate.backoff import is_out_of_memory, release_memory
from widecli.evaluate.texts import PERPLEXITY_TOKEN_CAPS, TEXT_FIELDS, perplexity_text, split_windows
from widecli.model.finite import not_finite
from widecli.model.vocabulary import refuse_unknown
from widecli.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

FP32_LOGITS_BYTES = 256 * 2**20
"""Most memory that logits may take in fp32: they are converted a chunk of tokens at a time."""


@dataclass(frozen=True)
class PerplexityResult:
    """One text's perplexity, with what is needed to compare or merge it: totals and the way it was cut."""

    value: float
    nll_sum: float
    tokens: int
    window: int
    stride: int
    windows: int
    bos: bool
    label: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a summary; `tokens` counts scored tokens."""
        return asdict(self)


@dataclass(frozen=True)
class Window:
    """Tokens `start:end` of the text are fed; `first:end` are scored."""

    start: int
    end: int
    first: int


def cut_windows(tokens: int, width: int, stride: int, *, first_is_predicted: bool) -> Iterator[Window]:
    """Windows of `width` text tokens every `stride` tokens; one with nothing left to score ends the text.

    `first_is_predicted`: whether a window's first text token has something before it (BOS) to be predicted from.
    """
    scored = 0
    for start in range(0, tokens, stride):
        end = min(start + width, tokens)
        first = max(scored, start if first_is_predicted else start + 1)
        if first < end:
            yield Window(start, end, first)
        scored = end
        if end == tokens:
            return


def token_perplexity(
    model: nn.Module,
    input_ids: Tensor,
    *,
    window: int = 2048,
    stride: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    add_bos: bool = False,
    ranks: Ranks = ALONE,
) -> PerplexityResult:
    """Perplexity of `input_ids` [T] (int64, any device) under a causal language model.

    `window` counts the positions fed at once (BOS included); `stride` counts text tokens and defaults to a whole
    window. `batch_size` windows share a forward pass, halved when memory runs out. Several `ranks` measure a part of
    the windows each and all get the whole result. Raises `UsageError` for a text of fewer than two tokens, a stride
    outside 1..window, or `add_bos` with a model that has no BOS token.
    """
    import torch

    bos = _bos_id(model) if add_bos else None
    width = window if bos is None else window - 1
    step = width if stride is None else stride
    if width < 1 or (bos is None and width < 2):
        raise UsageError(f"A perplexity window of {window} tokens has nothing to predict; use 2 or more.")
    if not 1 <= step <= width:
        raise UsageError(f"stride={stride} must lie between 1 and the window's {width} text tokens.")
    if input_ids.dim() != 1:
        raise UsageError(
            f"token_perplexity takes one stream of tokens [T], not a tensor of shape {tuple(input_ids.shape)}."
        )
    cuts = list(cut_windows(len(input_ids), width, step, first_is_predicted=bos is not None))[:max_windows]
    if not cuts:
        raise UsageError(f"A text of {len(input_ids)} tokens is too short for a perplexity; it takes at least 2.")

    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    sums: list[Tensor] = []
    position, rows = 0, max(1, batch_size)
    mine = list(ranks.share(cuts))
    try:
        while position < len(mine):
            batch = _same_length(mine[position : position + rows])
            try:
                with torch.no_grad():
                    sums.append(_window_nll(model, input_ids, batch, bos, device))
                position += len(batch)
                continue
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            if len(batch) == 1:
                raise WideError(f"One window of {window} tokens does not fit in memory; use a shorter window.")
            rows = len(batch) // 2
            release_memory()
    finally:
        model.train(was_training)

    scored = sum(cut.end - cut.first for cut in cuts)
    # every window at its place: summed in the order of the text, whoever measured it
    by_window = torch.zeros(len(cuts), dtype=torch.float64)
    if sums:
        by_window[ranks.rank :: ranks.size] = torch.cat(sums).cpu().double()
    nll_sum = float(ranks.total(by_window).sum())
    if math.isnan(nll_sum):
        raise not_finite(model)
    # exp overflows a float beyond 709; a model that bad has an infinite perplexity, not a crash.
    value = math.exp(nll_sum / scored) if nll_sum / scored < 709 else math.inf
    return PerplexityResult(value, nll_sum, scored, window, step, len(cuts), bos is not None)


def _same_length(cuts: list[Window]) -> list[Window]:
    """The leading windows that can be stacked without padding (only the last one of a text is shorter)."""
    width = cuts[0].end - cuts[0].start
    return [cut for cut in cuts if cut.end - cut.start == width]


def _window_nll(model: nn.Module, input_ids: Tensor, batch: list[Window], bos: int | None, device: Any) -> Tensor:
    """Summed negative log-likelihood of each window, fp32 [B]."""
    import torch

    fed = torch.stack([input_ids[cut.start : cut.end] for cut in batch]).to(device)
    if bos is not None:
        fed = torch.cat([torch.full_like(fed[:, :1], bos), fed], dim=1)
    logits = model(input_ids=fed, attention_mask=torch.ones_like(fed), use_cache=False).logits
    shift = 0 if bos is None else 1
    sums = [
        _nll(logits[row, cut.first - cut.start + shift - 1 : -1], fed[row, cut.first - cut.start + shift :])
        for row, cut in enumerate(batch)
    ]
    return torch.stack(sums)


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-likelihood of `targets` [N] under `logits` [N, V], in fp32, a bounded chunk at a time."""
    import torch
    import torch.nn.functional as F

    rows = max(1, FP32_LOGITS_BYTES // (4 * logits.shape[-1]))
    pieces = [
        F.cross_entropy(part.float(), target, reduction="sum")
        for part, target in zip(torch.split(logits, rows), torch.split(targets, rows), strict=True)
    ]
    return sum(pieces[1:], start=pieces[0])


def _bos_id(model: nn.Module) -> int:
    found = getattr(getattr(model, "config", None), "bos_token_id", None)
    if not isinstance(found, int):
        raise UsageError("add_bos=True needs a model whose configuration names a bos_token_id; this one has none.")
    return found


def measure_perplexity(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    *,
    window: int = 2048,
    max_windows: int | None = None,
    batch_size: int = 1,
    data_root: str | None = None,
    offline: bool = False,
    fields: Sequence[str] = TEXT_FIELDS,
    ranks: Ranks = ALONE,
) -> PerplexityResult:
    """Perplexity of a named text or a text file, whose rows have their text in the first of `fields` that is there.

    `name@N` reads the first N windows, whatever `max_windows` says. `pydoc-topics` is capped at its first 4096 tokens
    unless windows are given; the label tells.
    """
    import torch

    text_name, own_windows = split_windows(name)
    max_windows = own_windows or max_windows
    label, pieces = perplexity_text(text_name, data_root, offline, fields)
    cap = PERPLEXITY_TOKEN_CAPS.get(text_name)
    most = cap if max_windows is None else max_windows * window
    encoded = token_ids(tokenizer, pieces, None if most is None else most + 1)
    if max_windows is None and cap is not None and len(encoded) > cap:
        encoded = encoded[:cap]
        label = f"{label}, first {cap} tokens"
    elif max_windows is not None and len(encoded) > max_windows * window:
        encoded = encoded[: max_windows * window]
        label = f"{label}, first {max_windows} windows"
    if len(encoded) < 2:
        raise UsageError(f"The perplexity text {name} has {len(encoded)} tokens; it takes at least 2.")
    refuse_unknown(f"the perplexity text {name}", encoded, model)
    ids = torch.tensor(encoded, dtype=torch.int64)
    result = token_perplexity(model, ids, window=window, max_windows=max_windows, batch_size=batch_size, ranks=ranks)
    return replace(result, label=label)
