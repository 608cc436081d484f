"""CUDA graphs: a step recorded once and replayed without the host's part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_WARM_UPS = 2  # compile, tune and allocate before recording


class Recorded:
    """`run`, which reads and writes static tensors only, as a graph; calling it replays and returns `run`'s output.

    `state` names the tensors that a run changes and the next one reads: warming up must leave them as they were.
    Recording itself runs nothing.
    """

    def __init__(self, run: Callable[[], Tensor], state: Sequence[Tensor], pool: Any) -> None:
        device = state[0].device
        kept = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
                for tensor, value in zip(state, kept, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.output = run()

    def __call__(self) -> Tensor:
        """Replay; the output is overwritten by the next call."""
        self.graph.replay()
        return self.output
