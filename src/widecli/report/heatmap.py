"""A heat map before anybody draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HeatMap:
    """Values by row and column, None = nothing there; rows may differ in length. `rows` and `columns` are labels."""

    name: str
    title: str
    x_label: str
    y_label: str
    value_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: Sequence[Sequence[float | None]]
    low: float = 0.0
    high: float = 1.0
    colours: str = "Blues"  # matplotlib's name; RdBu_r for values around zero
    columns_vertical: bool = False  # the columns are words: write each, upright
    caption: str = ""
