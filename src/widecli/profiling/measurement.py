"""Measures a subject over its grid: one cell a batch and prompt, in which dense and all routed variants take turns.

Variants that differ in the share of random masks alone run on one session: the masks change in its memory.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from widecli.engine.model import InferenceModel
from widecli.engine.session import Session, prefill_chunks
from widecli.model.plan import RoutingPlan
from widecli.model.trace import RoutingTrace
from widecli.profiling.bound import Pass, Peaks, Phase, Skipped, bound, peaks_of
from widecli.profiling.cells import MeasuredCells
from widecli.profiling.energy import EnergyMeter
from widecli.profiling.grid import capacity_of, cells, fits_beside, pass_of
from widecli.profiling.hugging_face import HuggingFace
from widecli.profiling.latency import Call, Times, first_token, further_tokens, interleaved
from widecli.profiling.memory import memory_model
from widecli.profiling.subject import Outline, Settings, Subject, Variant
from widecli.profiling.trace import breakdown, fixed_share, range_times

Point = dict[str, Any]
POINTS_SCHEMA = "wide.points/4"
"""Form of a summary's points. 1 had no `hugging_face` (their figures, or null) and `mode`; 2 had `patterns`; 3 had no
`compensation` (null, or its `mean` and `rank`)."""

_PROFILED_STEPS = 3
_COARSE = 0.01  # of all groups: a share skipped that misses the one asked for by more is told
_MOST_RECORDED_CHUNKS = 16


@dataclass(frozen=True)
class Side:
    """One of those that take turns: the dense model (no variant) or a routed one."""

    session: Session
    model: InferenceModel
    variant: Variant | None

    def turn(self, call: Call) -> Call:
        """`call` after the side's own masks were set."""

        def run() -> list[float]:
            if self.variant is not None:
                self.variant.prepare()
            return call()

        return run


def measure(
    subject: Subject,
    settings: Settings,
    note: Callable[[str], None],
    remark: Callable[[str], None],
    done: Callable[[list[Point], list[str]], None],
    known: MeasuredCells,
) -> list[Point]:
    """All points, those of a cell handed to `done` as soon as they are there, with what there was no time for.

    Of the `known` cells only those are measured again that lack something for which there is time now. `note` takes
    progress, `remark` what to remember.
    """
    meter = None
    if settings.energy:
        meter, why_not = EnergyMeter.open(subject.outline.device)
        if why_not:
            remark(why_not)
    if settings.memory and subject.outline.device.type != "cuda":
        remark("peak memory is counted on a GPU alone; here only the memory model is given")
    if settings.dense == "library" and (subject.outline.device.type != "cuda" or 1 not in settings.batches):
        remark("--dense library changes nothing here: only for one row on a GPU are there products of our own")
    elif settings.dense == "library":
        remark("dense products of one row are the library's, not the kernels' that read them faster (--dense own)")
    theirs = HuggingFace(subject.hugging_face) if settings.compare_hf else None
    points: list[Point] = []
    for batch, prompt in cells(settings):
        found = known.of(batch, prompt)
        has_time = theirs is not None and theirs.may_set_up
        if found and ((batch, prompt) in known.kept or not has_time):
            note(f"batch {batch}, prompt {prompt}: measured before")
        else:
            again = ", again for transformers" if found else ""
            note(f"batch {batch}, prompt {prompt}: {len(subject.variants)} routed beside dense{again}")
            cell = Cell(subject, settings, batch, prompt, meter, theirs, remark)
            found = cell.measure()
            for words in cell.lacks:
                note(words)
            done(found, cell.lacks)
            _release(subject.outline.device)
        points += found
    return points


def _release(device: torch.device) -> None:
    """Give back the memory of what is no longer referred to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Cell:
    """One batch and prompt."""

    def __init__(
        self,
        subject: Subject,
        settings: Settings,
        batch: int,
        prompt: int,
        meter: EnergyMeter | None,
        theirs: HuggingFace | None,
        remark: Callable[[str], None],
    ) -> None:
        self._subject = subject
        self._settings = settings
        self._batch = batch
        self._prompt = prompt
        self._meter = meter
        self._theirs = theirs
        self._remark = remark
        self.lacks: list[str] = []
        """What there was no time for, in words."""
        self._outline = subject.outline
        self._capacity = capacity_of(settings, prompt)
        self._ids = subject.prompts(batch, prompt)
        self._peaks: Peaks = peaks_of(self._outline.device, self._outline.dtype)

    def measure(self) -> list[Point]:
        """The cell's points, phase by phase."""
        peaks = self._peak_memory() if self._settings.memory else {}
        in_turn = self._theirs is not None and fits_beside(self._outline, self._settings, self._batch, self._prompt)
        sides = self._open()
        points = [
            point for phase in self._settings.phases for point in self._measure_phase(phase, sides, peaks, in_turn)
        ]
        sides.clear()
        for variant in self._subject.variants:
            if variant.masks is not None:
                variant.masks.forget()
        if self._theirs is not None and not in_turn:
            _release(self._outline.device)
            for phase in self._settings.phases:
                figures = self._hugging_face_alone(phase)
                for point in points:
                    if point["phase"] == phase:
                        point["hugging_face"] = figures
        return points

    def _measure_phase(self, phase: Phase, sides: Sequence[Side], peaks: dict[int, int], in_turn: bool) -> list[Point]:
        """Points of one phase; `in_turn`: with Hugging Face's model among the sides."""
        calls = self._prefills(sides) if phase == "ttft" else self._decodes(sides)
        calls = [side.turn(call) for side, call in zip(sides, calls, strict=True)]
        theirs = self._hugging_face(phase) if in_turn else None
        times = interleaved([*calls, *([theirs[0]] if theirs else [])], self._settings.seconds)
        beside = self._their_figures(phase, times[-1], theirs[1], in_turn=True) if theirs else None
        found = []
        for side, call, timed in zip(sides, calls, times[: len(sides)], strict=True):
            figures, trace = self._figures(phase, side, call, timed)
            if self._settings.memory:
                figures["memory"] = self._memory(side, peaks.get(id(side.model)))
            found.append((figures, trace))
        dense = found[0][0]
        points = []
        for side, (figures, trace) in zip(sides[1:], found[1:], strict=True):
            assert side.variant is not None
            point = self._point(phase, side.variant, dense, figures, trace) | {"hugging_face": beside}
            self._remark_coarse(point)
            points.append(point)
        return points

    def _remark_coarse(self, point: Point) -> None:
        """Say where random masks could not skip the share asked for: few rows of few groups, layers of few parts."""
        asked, skipped = point["sparsity"], point["skip_rate"]["mean"]
        if point["masks"] == "random" and abs(skipped - asked) > _COARSE:
            where = f"{point['phase'].upper()} at batch {self._batch}, prompt {self._prompt}, G {point['group_size']}"
            self._remark(f"{where}: so few groups skip {100 * skipped:.1f} % where {100 * asked:.4g} % was asked for")

    def _open(self) -> list[Side]:
        """Sessions of all models, on one cache where decisions do not depend on what it holds."""
        dense = self._subject.dense.session(self._batch, self._capacity)
        cache = None if self._settings.masks == "learned" else dense.cache
        sides = [Side(dense, self._subject.dense, None)]
        sessions: dict[int, Session] = {}
        for variant in self._subject.variants:
            model = variant.model
            if id(model) not in sessions:
                sessions[id(model)] = model.session(self._batch, self._capacity, cache=cache)
            sides.append(Side(sessions[id(model)], model, variant))
        return sides

    def _hugging_face(self, phase: Phase) -> tuple[Call, dict[str, Any]] | None:
        """Their call, warm, and how it was set up; None where time or memory does not allow it."""
        where = f"{phase.upper()} at batch {self._batch}, prompt {self._prompt}"
        assert self._theirs is not None
        if not self._theirs.may_set_up:
            self.lacks.append(f"transformers, {where}: no time to compile it; --resume measures this cell again")
            return None
        try:
            if phase == "ttft":
                return self._theirs.first_token(self._ids)
            return self._theirs.further_tokens(self._ids, self._settings.gen - 1)
        except torch.OutOfMemoryError:
            self._remark(f"transformers, {where}: out of memory")
            return None

    def _hugging_face_alone(self, phase: Phase) -> dict[str, Any] | None:
        """Their figures where ours must leave the memory first."""
        found = self._hugging_face(phase)
        if found is None:
            return None
        (times,) = interleaved([found[0]], 0.0)
        return self._their_figures(phase, times, found[1], in_turn=False)

    def _their_figures(self, phase: Phase, times: Times, facts: dict[str, Any], *, in_turn: bool) -> dict[str, Any]:
        tokens = self._batch * (self._prompt if phase == "ttft" else 1)
        return {**times.as_dict(), "tokens_per_second": 1e3 * tokens / times.p50_ms, **facts, "in_turn": in_turn}

    def _prefills(self, sides: Sequence[Side]) -> list[Callable[[], list[float]]]:
        for side in sides:
            if self._is_recorded("ttft"):
                for begin, tokens in prefill_chunks(self._batch, self._prompt):
                    side.session.record_prefill(tokens, begin)
        return [partial(first_token, side.session, self._ids) for side in sides]

    def _decodes(self, sides: Sequence[Side]) -> list[Callable[[], list[float]]]:
        steps = self._settings.gen - 1
        first: list[Tensor]
        if self._settings.masks == "learned":
            for side in sides:
                side.session.prefill(self._ids)
            first = [side.session.token.clone() for side in sides]
        else:
            _fill(sides[0].session)
            first = [self._ids[:, 0].to(self._outline.device)] * len(sides)
        for side, token in zip(sides, first, strict=True):
            side.session.rewind(self._prompt, token)
            side.session.record_decode()
        return [
            partial(further_tokens, side.session, self._prompt, token, steps)
            for side, token in zip(sides, first, strict=True)
        ]

    def _figures(
        self, phase: Phase, side: Side, call: Callable[[], list[float]], times: Times
    ) -> tuple[dict[str, Any], RoutingTrace | None]:
        """One side's figures, and what it skipped."""
        tokens = self._batch * (self._prompt if phase == "ttft" else 1)
        trace = None
        if side.variant is not None:
            side.session.reset_skipped()
            call()
            trace = side.session.skipped()
        ideal = bound(self._pass(phase), self._peaks, _skipped(side.variant, trace, self._outline))
        figures: dict[str, Any] = {
            **times.as_dict(),
            "tokens_per_second": 1e3 * tokens / times.p50_ms,
            "bound_ms": 1e3 * ideal.seconds,
            "bound_reached": 1e3 * ideal.seconds / times.p50_ms,
        }
        if self._meter is not None:
            per_call = tokens * (1 if phase == "ttft" else self._settings.gen - 1)
            figures["joules_per_token"] = self._meter.joules(call) / per_call
        if self._settings.breakdown:
            parts = breakdown(self._parts(phase, side), times.p50_ms)
            figures["breakdown_ms"] = parts
            figures["bound_parts_ms"] = {part: 1e3 * seconds for part, seconds in ideal.parts.items()}
            if side.variant is None:
                figures["fixed_share"] = fixed_share(parts, self._outline.shape)
        return figures, trace

    def _parts(self, phase: Phase, side: Side) -> dict[str, float]:
        """Milliseconds by part of a plain pass, on the side's own cache."""
        plain = side.model.session(self._batch, self._capacity, graphs=False, cache=side.session.cache)
        if side.variant is not None:
            side.variant.prepare()
        if phase == "ttft":
            return range_times(lambda: plain.prefill(self._ids), self._outline.device, 1)
        token = side.session.token.clone()
        steps = min(_PROFILED_STEPS, self._settings.gen - 1)

        def run() -> None:
            plain.rewind(self._prompt, token)
            for _ in range(steps):
                plain.decode()

        return {part: value / steps for part, value in range_times(run, self._outline.device, 1).items()}

    def _peak_memory(self) -> dict[int, int]:
        """Peak bytes of each model (by its id) alone, prefill and a step as they are asked for, without graphs."""
        device = self._outline.device
        if device.type != "cuda":
            return {}
        found = {}
        models = {id(model): model for model in (self._subject.dense, *(v.model for v in self._subject.variants))}
        for key, model in models.items():
            session = model.session(self._batch, self._capacity, graphs=False)
            torch.cuda.reset_peak_memory_stats(device)
            if "ttft" in self._settings.phases:
                session.prefill(self._ids)
            if "tpot" in self._settings.phases:
                session.rewind(self._prompt, session.token.clone())
                session.decode()
            found[key] = torch.cuda.max_memory_allocated(device)
            del session
        return found

    def _memory(self, side: Side, peak: int | None) -> dict[str, Any]:
        model = memory_model(
            self._outline.shape,
            side.variant.plan if side.variant else None,
            self._batch,
            self._prompt,
            self._capacity,
            self._outline.dtype,
            tied=self._outline.tied,
            prefills="ttft" in self._settings.phases,
        )
        return {"peak_bytes": peak, "model": model.as_dict()}

    def _point(
        self,
        phase: Phase,
        variant: Variant,
        dense: dict[str, Any],
        routed: dict[str, Any],
        trace: RoutingTrace | None,
    ) -> Point:
        seen = trace.skip_rate() if trace is not None else None
        sparsity = variant.sparsity if variant.sparsity is not None else (seen.mean if seen else None)
        return {
            "phase": phase,
            "batch": self._batch,
            "prompt": self._prompt,
            "gen": self._settings.gen,
            "sparsity": sparsity,
            "group_size": variant.plan.ffn_group_size,
            "masks": self._settings.masks,
            "mode": variant.plan.mode,
            "compensation": asdict(variant.plan.compensation) if variant.plan.compensation else None,
            "skip_rate": {"attention": seen.attention, "ffn": seen.ffn, "mean": seen.mean} if seen else None,
            "recorded": self._is_recorded(phase),
            "dense": dense,
            "routed": routed,
            "speedup": dense["p50_ms"] / routed["p50_ms"],
            "run": None,
        }

    def _is_recorded(self, phase: Phase) -> bool:
        """Whether a phase replays CUDA graphs: of a prompt in very many chunks each would cost a recording."""
        if self._outline.device.type != "cuda":
            return False
        return phase == "tpot" or len(prefill_chunks(self._batch, self._prompt)) <= _MOST_RECORDED_CHUNKS

    def _pass(self, phase: Phase) -> Pass:
        return pass_of(self._outline, self._settings, phase, self._batch, self._prompt)


def _skipped(variant: Variant | None, trace: RoutingTrace | None, outline: Outline) -> Skipped | None:
    if variant is None:
        return None
    plan: RoutingPlan = variant.plan
    if variant.sparsity is not None:
        return Skipped.evenly(plan, outline.shape, variant.sparsity)
    assert trace is not None
    return Skipped(plan, trace.group_rates("attention"), trace.group_rates("ffn"))


@torch.inference_mode()
def _fill(session: Session) -> None:
    """Random keys and values: without learned decisions nothing but their number matters, and zeros cost less power."""
    for tensor in (*session.cache.k, *session.cache.v):
        tensor.normal_()


def saturation(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The most tokens a second over all batch sizes, and at which batch, for each phase, prompt and variant."""
    keys = ("phase", "prompt", "group_size", "masks", "mode", "compensation")
    groups: dict[str, list[Point]] = {}
    for point in points:
        # a learned rate differs a little with the batch: one variant all the same
        rate = point["sparsity"] if point["masks"] == "random" else None
        setting = {key: point[key] for key in keys} | {"sparsity": rate}
        groups.setdefault(json.dumps(setting), []).append(point)
    found = []
    for group, members in groups.items():
        best = {}
        for side in ("dense", "routed"):
            top = max(members, key=lambda point: float(point[side]["tokens_per_second"]))
            best[side] = {"tokens_per_second": top[side]["tokens_per_second"], "batch": top["batch"]}
        ratio = best["routed"]["tokens_per_second"] / best["dense"]["tokens_per_second"]
        found.append({**json.loads(group), **best, "speedup": ratio})
    return found
