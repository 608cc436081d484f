"""What `python -m widecli.train.speed` measured: training speed by layout and number of cards, memory, hours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from widecli.recipe import paper
from widecli.report.documents import Document
from widecli.report.load import number

TENTH = 0.1  # of the paper's steps: what the closed-form start needs
_WHOLE_ON_ONE = ("dealt", "whole")  # dealing weights to one card alone is holding them whole


@dataclass(frozen=True)
class ScalingPoint:
    """One layout on so many cards. Sizes in bytes, on the fullest card; `batch` in sequences a step of all cards.

    `kind` is what must agree before two points are compared: the routing, the precision, compiled or not.
    """

    model: str
    shape: str
    device: str
    kind: tuple[str, ...]
    layout: str
    cards: int
    batch: float | None
    micro_batch: float | None
    sequence: float | None
    tokens_per_second: float
    peak_bytes: float | None
    estimated_bytes: float | None
    document: str
    command: str

    @property
    def estimate_error(self) -> float | None:
        """How far the dry run's estimate lies above what was measured, as a share of that."""
        if self.peak_bytes is None or self.estimated_bytes is None:
            return None
        return self.estimated_bytes / self.peak_bytes - 1

    def hours(self, steps_share: float = 1.0) -> float:
        """Time of a share of the paper's steps, with the paper's tokens a step."""
        return steps_share * paper.TOKENS / self.tokens_per_second / 3600

    @property
    def layout_on_one(self) -> str:
        """What the layout is called on one card."""
        return self.layout.replace(*_WHOLE_ON_ONE, 1) if self.layout.startswith(_WHOLE_ON_ONE[0]) else self.layout


def scaling_points(documents: Iterable[Document]) -> list[ScalingPoint]:
    """All results of the documents on training speed, by model, sequence length, layout and cards."""
    found = [
        _point(document, result, float(speed))
        for document in documents
        for result in document.results
        if (speed := number(result.get("tokens_per_second")))
    ]
    order = {layout: i for i, layout in enumerate(dict.fromkeys(point.layout for point in found))}
    return sorted(
        found, key=lambda p: (p.model, p.device, p.kind, p.sequence or 0, order[p.layout], p.cards, p.batch or 0)
    )


def _point(document: Document, result: Mapping[str, Any], speed: float) -> ScalingPoint:
    recipe = document.values.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}

    def setting(section: str, key: str) -> Any:
        values = recipe.get(section)
        return values.get(key) if isinstance(values, dict) else None

    shape = document.values.get("shape")
    cards = number(result.get("ranks")) or number(document.values.get("ranks")) or 1.0
    kind = [("routing", "mode"), ("routing", "ffn_group_size"), ("model", "dtype"), ("train", "compile")]
    return ScalingPoint(
        model=str(setting("model", "name") or "unknown model").rstrip("/").rsplit("/", 1)[-1],
        shape=shape_text(shape) if isinstance(shape, dict) else "",
        device=document.device,
        kind=tuple(f"{key} {setting(section, key)}" for section, key in kind),
        layout=str(result.get("layout") or result.get("variant") or ""),
        cards=int(cards),
        batch=number(result.get("batch_size")) or number(setting("train", "batch_size")),
        micro_batch=number(result.get("micro_batch_size")),
        sequence=number(setting("data", "sequence_length")),
        tokens_per_second=speed,
        peak_bytes=number(result.get("peak_memory_bytes")),
        estimated_bytes=number(result.get("estimated_memory_bytes")),
        document=document.label,
        command=document.command,
    )


def shape_text(shape: Mapping[str, Any]) -> str:
    """Sizes of a model in one cell."""
    return (
        f"{shape.get('num_hidden_layers')} layers, D {shape.get('hidden_size')}, D' {shape.get('intermediate_size')}, "
        f"{shape.get('num_attention_heads')}/{shape.get('num_key_value_heads')} heads"
    )


def on_one_card(point: ScalingPoint, measured: Sequence[ScalingPoint]) -> ScalingPoint | None:
    """What a point on several cards is compared with: the same layout, model, device and length on one card.

    With the same global batch where that was measured, else with the same batch a card. Of repeats the fastest.
    """
    if point.cards == 1:
        return None
    alike = [
        other
        for other in measured
        if other.cards == 1
        and (other.model, other.device, other.kind) == (point.model, point.device, point.kind)
        and (other.sequence, other.layout) == (point.sequence, point.layout_on_one)
    ]
    for batch in (point.batch, point.batch / point.cards if point.batch else None):
        same = [other for other in alike if other.batch == batch]
        if same:
            return max(same, key=lambda other: other.tokens_per_second)
    return None
