"""The paper's published figures, as a labelled set of their own: never mixed with what was measured here.

Source: "WIDE: Boosting Adaptive LLM Inference via Token-level Dynamic Width Pruning", arXiv 2607.28418.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "arXiv 2607.28418"
END_TO_END = "end to end"  # the stage of a figure that is of a whole model, not of a kernel


@dataclass(frozen=True)
class Published:
    """One published result. Fractions in [0, 1]; None = not stated."""

    model: str
    method: str
    stage: str
    sparsity: float
    group_size: int | None = None
    average: float | None = None
    retention: float | None = None
    perplexity: float | None = None
    prefill_speedup: float | None = None
    decode_speedup: float | None = None
    remark: str = ""

    def speedup(self, phase: str) -> float | None:
        """Of a whole model, to the first token (`ttft`) or for each further one (`tpot`)."""
        if self.stage != END_TO_END:
            return None
        return self.prefill_speedup if phase == "ttft" else self.decode_speedup

    @property
    def label(self) -> str:
        """Method, group size and model."""
        return f"{self.method}{f', G {self.group_size}' if self.group_size else ''}, {self.model}"

    @property
    def description(self) -> str:
        """The label and what must be known of it."""
        return ", ".join(filter(None, (self.label, self.remark)))


_8B, _3B = "Llama-3.1-8B", "Llama-3.2-3B"

PUBLISHED: tuple[Published, ...] = (
    Published(_8B, "WIDE", "calibrate", 0.25, 32, retention=0.9792),
    Published(_8B, "WIDE", "calibrate", 0.25, 64, retention=0.9068),
    Published(_8B, "DDP", "calibrate", 0.25, retention=0.8993),
    Published(_8B, "SkipGPT", "calibrate", 0.25, retention=0.7222),
    Published(_8B, "WIDE", "calibrate", 0.5, average=0.6184, perplexity=14.15),
    Published(_8B, "DDP", "calibrate", 0.5, average=0.5304),
    Published(_8B, "SkipGPT", "calibrate", 0.5, average=0.4251),
    Published(_8B, "WIDE", "calibrate + LoRA", 0.5, average=0.6482),
    Published(_3B, "WIDE", "calibrate", 0.5, average=0.5700),
    Published(_3B, "best baseline", "calibrate", 0.5, average=0.4803),
    Published(_3B, "WIDE", "calibrate + LoRA", 0.5, average=0.5877),
    Published(_8B, "WIDE", END_TO_END, 0.5, prefill_speedup=1.68, decode_speedup=1.55, remark="RTX 5090, whole model"),
    Published(_8B, "WIDE", "kernels", 0.5, prefill_speedup=1.98, decode_speedup=4.95, remark="single operators, up to"),
    Published(_8B, "WIDE", END_TO_END, 0.0, remark="98.60 % of the dense throughput"),
)

GROUP_SIZES = (
    "From G = 16 to 256 the average falls by 2.62 points (calibration only), from 16 to 512 by 1.13 points after LoRA."
)
