"""The report's tables, from points, fronts, sweeps and profiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from widecli.report.charts import flops_kind, gain_label, is_share, quality_label, slug
from widecli.report.documents import Document
from widecli.report.find import StoredRun
from widecli.report.load import DENSE
from widecli.report.pareto import Front, qualities
from widecli.report.points import Figure, Point, best_protocol, fullness_order, items_of, names_of
from widecli.report.reference import GROUP_SIZES, PUBLISHED, SOURCE
from widecli.report.sweeps import Sweep, ThroughputPoint, share_curves
from widecli.report.tables import Column, Table, Value

# The paper's tasks in its order, with heads that leave room on a terminal.
_TASKS = {
    "arc_easy": "arc\neasy",
    "arc_challenge": "arc\nchall.",
    "boolq": "boolq",
    "winogrande": "wino-\ngrande",
    "piqa": "piqa",
    "openbookqa": "open-\nbook",
    "hellaswag": "hella-\nswag",
}


def summary_table(made: Sequence[Point]) -> Table:
    """One model's configurations: what each skips, keeps and gains."""
    texts = [name for name in qualities(made) if name.startswith("perplexity ")]
    validations = names_of(made, "validation ")
    speeds = [name for phase in ("ttft ", "tpot ") for name in names_of(made, phase)[:1]]
    columns = [
        Column("mode", "mode"),
        Column("sparsity", "S, %", "percent"),
        Column("group_size", "G", "count", _weight(p.group_size for p in made)),
        Column("patterns", "C", "count", _weight(p.patterns for p in made)),
        Column("steps", "steps", "count", _weight(p.steps for p in made)),
        *_kind_columns(made, 1),
        Column("settings", "settings", importance=1),
        Column("runs", "runs", importance=4),
        Column("seeds", "seeds", "count", 7),
        Column("skip attention", "attention\nskipped, %", "percent", 6),
        Column("skip ffn", "FFN\nskipped, %", "percent", 6),
        *_flops_columns(made, 1),
        Column("flops total", "of all\nFLOPs, %", "percent", 8),
        *_perplexities(texts, 9),
        *(Column(v, f"held-out\n{_brief(v.removeprefix('validation '))}", "figure", 9) for v in validations),
        Column("average", "average\naccuracy, %", "percent", 5),
        Column("items", "items\na task", "count", 7),
        Column("retention", "kept, %", "percent"),
        *(Column(s, s.replace(" ", "\n", 1), "times", 1) for s in speeds),
    ]
    each = [row for point in made for row in point.rows()]
    rows = [_summary_row(point) for point in each]
    several = " What was evaluated apart has rows of its own." if len(each) > len(made) else ""
    table = Table(
        name=slug(f"summary {made[0].model}"),
        title=made[0].model,
        columns=tuple(columns),
        rows=tuple(rows),
        caption=f"FLOPs skipped: of what routing may skip, over everything evaluated, {_flops_words(made)}. Of all: "
        "net. Kept: average accuracy as a share of the dense model's on the same items. ± is the sample standard "
        f"deviation over trainings.{several}",
        row_runs=tuple(point.runs for point in each),
    )
    return table.filled()


def _flops_columns(made: Sequence[Point], importance: int) -> list[Column]:
    """Net and gross never share a column. Where all records are from before there was a net figure, one will do."""
    if not _have_net(made):
        return [Column("flops gross", "FLOPs\nskipped, %", "percent", importance)]
    return [
        Column("flops net", "FLOPs\nnet, %", "percent", importance),
        Column("flops gross", "FLOPs\ngross, %", "percent", importance + 2),
    ]


def _have_net(made: Sequence[Point]) -> bool:
    return any("flops net" in point.figures for point in made)


def _flops_words(made: Sequence[Point]) -> str:
    if not _have_net(made):
        return "gross, without subtracting what routers cost"
    return "net, less what routers and compensation cost (older records have no such figure), and gross"


def _kind_columns(made: Sequence[Point], importance: int) -> list[Column]:
    """How channels are grouped and what skipped groups leave, each where it tells rows apart."""
    columns = []
    if len({point.grouping for point in made if point.grouping}) > 1:
        columns.append(Column("grouping", "groups", importance=importance))
    if len({point.compensation for point in made if point.mode == "wide"}) > 1 or any(
        point.compensation not in (None, "none") for point in made if point.mode != "wide"
    ):
        columns.append(Column("compensation", "skipped\nleave", importance=importance))
    return columns


def _weight(values: Iterable[float | None]) -> int:
    """Importance of a setting's column: it stays where it tells rows apart, and goes early where all say the same."""
    return 1 if len({value for value in values if value is not None}) > 1 else 3


def _perplexities(names: Sequence[str], further: int) -> list[Column]:
    """The first text always, others with the importance `further`."""
    return [Column(name, name.replace(" ", "\n", 1), "figure", further if name != names[0] else 0) for name in names]


def _summary_row(point: Point) -> dict[str, Value]:
    average, kept = best_protocol(point, "average"), best_protocol(point, "retention")
    row: dict[str, Value] = dict(point.figures)
    trainings = max((len(figure.runs) for figure in point.figures.values()), default=1)
    row |= {
        "mode": point.trained_as,
        "grouping": point.grouping,
        "compensation": point.compensation,
        "sparsity": point.sparsity,
        "group_size": point.group_size,
        "patterns": point.patterns,
        "steps": point.steps,
        "settings": point.extra,
        "seeds": float(trainings) if trainings > 1 else None,
        "average": point.figures.get(average) if average else None,
        "items": items_of(average) if average else None,
        "retention": point.figures.get(kept) if kept else None,
    }
    others = (figure for name, figure in point.figures.items() if name.startswith(("perplexity ", "skip ")))
    best = [row["retention"], *others]
    measured = next((figure.runs for figure in best if isinstance(figure, Figure)), point.runs)
    row["runs"] = few((*measured, *(run for run in point.runs if run not in measured)))
    return row


def _brief(text: str, longest: int = 20) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def few(runs: Sequence[str], at_most: int = 1) -> str:
    """The first runs by name and how many more; the page and the CSV have all."""
    names = ", ".join(runs[:at_most])
    return names if len(runs) <= at_most else f"{names} +{len(runs) - at_most}"


def tasks_table(made: Sequence[Point]) -> Table:
    """Accuracy by task, a row for each configuration and number of items."""
    names = {name.removeprefix("task ").partition(" [")[0] for name in names_of(made, "task ")}
    ordered = [*(task for task in _TASKS if task in names), *sorted(names - set(_TASKS))]
    rows: list[dict[str, Value]] = []
    runs = []
    for items in [items_of(name) for name in sorted(names_of(made, "average ["), key=fullness_order)]:
        for point in made:
            figures = {task: f for task in ordered if (f := point.figures.get(f"task {task} [{items}]"))}
            if figures:
                measured = next(iter(figures.values())).runs
                row: dict[str, Value] = {"configuration": point.label, "items": items, **figures, "runs": few(measured)}
                rows.append(row | {"average": point.figures.get(f"average [{items}]")})
                runs.append(measured)
    columns = (
        Column("configuration", "configuration"),
        Column("items", "items", "count", 2),
        *(Column(task, _TASKS.get(task, task.replace("_", "\n")), "percent") for task in ordered),
        Column("average", "average", "percent", 1),
        Column("runs", "runs", importance=3),
    )
    caption = "acc_norm where the task has it, acc otherwise."
    title = f"{made[0].model}: accuracy by task, %"
    return Table(slug(f"tasks {made[0].model}"), title, columns, tuple(rows), caption, tuple(runs))


_HEADS = {"average": "average\naccuracy, %", "retention": "accuracy\nkept, %", "perplexity": "token\nperplexity"}


def front_table(front: Front) -> Table:
    """One comparison: every candidate, and what dominates it."""
    rows: list[dict[str, Value]] = []
    ordered = sorted(front.candidates, key=lambda c: c.gain.value)
    for candidate in ordered:
        winner = candidate.dominated_by
        rows.append(
            {
                "configuration": candidate.point.label,
                "gain": candidate.gain,
                "quality": candidate.quality,
                "state": "on the front" if winner is None else f"dominated by {winner.label}",
                "runs": few(candidate.quality.runs),
            }
        )
    label, percent = quality_label(front.quality)
    columns = (
        Column("configuration", "configuration"),
        Column("gain", f"FLOPs\n{flops_kind(front.gain)}, %", "percent")
        if is_share(front.gain)
        else Column("gain", "speed-up", "times"),
        Column("quality", _HEADS[front.quality.split(" ")[0]], "percent" if percent else "figure"),
        Column("state", "state", importance=1),
        Column("runs", "runs", importance=2),
    )
    name = slug(f"pareto {front.model} {front.quality} {front.gain}")
    runs = tuple(tuple(dict.fromkeys((*c.quality.runs, *c.gain.runs))) for c in ordered)
    title = f"{front.model}: {label} against {gain_label(front.gain)}"
    return Table(name, title, columns, tuple(rows), row_runs=runs)


def sweep_table(sweep: Sweep) -> Table:
    """One axis: the lines one after the other."""
    rows: list[dict[str, Value]] = []
    runs = []
    texts = [n for n in qualities([p for _, ps in sweep.lines for p in ps]) if n.startswith("perplexity ")]
    for name, made in sweep.lines:
        for point in (row for found in made for row in found.rows()):
            row = _summary_row(point)
            rows.append({**row, "line": name, "value": sweep.value(point)})
            runs.append(point.runs)
    columns = (
        Column("line", "configuration"),
        Column("value", "S, %", "percent") if sweep.axis == "sparsity" else Column("value", "G", "count"),
        Column("skip mean", "skipped, %", "percent", 3),
        *_flops_columns([point for _, made in sweep.lines for point in made], 2),
        *_perplexities(texts, 4),
        Column("average", "average\naccuracy, %", "percent", 2),
        Column("items", "items", "count", 5),
        Column("retention", "kept, %", "percent"),
        Column("runs", "runs", importance=6),
    )
    title = f"{sweep.model}: by {sweep.title}"
    caption = f"FLOPs skipped are {_flops_words([point for _, made in sweep.lines for point in made])}."
    name = slug(f"{sweep.axis} {sweep.model}")
    return Table(name, title, columns, tuple(rows), caption, row_runs=tuple(runs)).filled()


def throughput_table(model: str, measured: Sequence[ThroughputPoint]) -> Table:
    """Everything that profiles of one model measured, dense beside routed; on what, where that differs."""
    several = len({point.machine for point in measured}) > 1
    rows: list[dict[str, Value]] = [
        {
            "phase": point.phase.upper(),
            "batch": point.batch,
            "prompt": point.prompt,
            "gen": point.gen,
            "sparsity": point.sparsity,
            "group_size": point.group_size,
            "masks": point.masks,
            "mode": point.mode,
            "patterns": point.patterns,
            "compensation": point.compensation,
            "baseline": "library" if point.library else None,
            "machine": point.machine if several else None,
            "dense": point.dense_ms,
            "routed": point.routed_ms,
            "transformers": point.transformers_ms,
            "speedup": point.speedup,
            "runs": point.run,
        }
        for point in measured
    ]
    columns = (
        Column("phase", "phase"),
        Column("batch", "batch", "count"),
        Column("prompt", "prompt", "count"),
        Column("gen", "generated", "count", 4),
        Column("sparsity", "S, %", "percent"),
        Column("group_size", "G", "count", 1),
        Column("mode", "mode", importance=4),
        Column("patterns", "patterns", "count", 1),
        Column("compensation", "compensation", importance=2),
        Column("masks", "masks", importance=3),
        Column("baseline", "dense by", importance=1),
        Column("dense", "dense,\nms", "ms", 1),
        Column("routed", "routed,\nms", "ms", 1),
        Column("transformers", "transformers,\nms", "ms", 1),
        Column("speedup", "speed-up", "times"),
        Column("machine", "on", importance=1),
        Column("runs", "runs", importance=2),
    )
    caption = "Medians. TTFT: prompt in, first token out. TPOT: time a further token."
    runs = tuple((point.run,) for point in measured)
    return Table(slug(f"throughput {model}"), f"{model}: measured speed", columns, tuple(rows), caption, runs).filled()


def share_table(model: str, measured: Sequence[ThroughputPoint]) -> Table:
    """Speed-up by the share skipped: a row for each setting with a curve, the paper's figures beside."""
    curves = share_curves(measured)
    rows: list[dict[str, Value]] = []
    runs: list[tuple[str, ...]] = []
    for curve in curves:
        first = curve[0]
        rows.append(
            {
                "phase": first.phase.upper(),
                "batch": first.batch,
                "prompt": first.prompt,
                "group_size": first.group_size,
                "patterns": first.patterns,
                "compensation": first.compensation,
                "masks": first.masks,
                **{f"share {point.sparsity:g}": point.speedup for point in curve},
                "runs": first.run,
            }
        )
        runs.append((first.run,))
    shares = {float(point.sparsity) for curve in curves for point in curve if point.sparsity is not None}
    for phase in dict.fromkeys(curve[0].phase for curve in curves):
        for entry in PUBLISHED:
            if (speedup := entry.speedup(phase)) is not None:
                name = f"{phase.upper()}, published"  # where every terminal shows it
                rows.append({"phase": name, "masks": entry.description, f"share {entry.sparsity:g}": speedup})
                runs.append(())
                shares.add(entry.sparsity)
    columns = (
        Column("phase", "phase"),
        Column("batch", "batch", "count", 2),
        Column("prompt", "prompt", "count", 2),
        Column("group_size", "G", "count"),
        Column("patterns", "patterns", "count", 1),
        Column("compensation", "compensation", importance=2),
        Column("masks", "masks", importance=3),
        *(Column(f"share {share:g}", f"{100 * share:.4g} %", "times") for share in sorted(shares)),
        Column("runs", "runs", importance=4),
    )
    title = f"{model}: speed-up by the share skipped"
    caption = "Dense time / routed time, medians of one run each. Published: by the paper, on another device."
    return Table(slug(f"shares {model}"), title, columns, tuple(rows), caption, tuple(runs)).filled()


def published_table() -> Table:
    """The paper's own figures, said to be that."""
    rows: list[dict[str, Value]] = [
        {
            "model": entry.model,
            "method": entry.method,
            "stage": entry.stage,
            "sparsity": entry.sparsity,
            "group_size": entry.group_size,
            "average": entry.average,
            "retention": entry.retention,
            "perplexity": entry.perplexity,
            "prefill": entry.prefill_speedup,
            "decode": entry.decode_speedup,
            "remark": entry.remark,
        }
        for entry in PUBLISHED
    ]
    columns = (
        Column("model", "model"),
        Column("method", "method"),
        Column("stage", "stage"),
        Column("sparsity", "S, %", "percent"),
        Column("group_size", "G", "count"),
        Column("average", "average of\nseven, %", "percent", 1),
        Column("retention", "kept, %", "percent"),
        Column("perplexity", "perplexity", "figure", 2),
        Column("prefill", "prefill", "times", 1),
        Column("decode", "decode", "times", 1),
        Column("remark", "remark", importance=3),
    )
    title = f"published by the paper ({SOURCE}), not measured here"
    return Table("published", title, columns, tuple(rows), GROUP_SIZES)


def runs_table(runs: Iterable[StoredRun], documents: Iterable[Document] = ()) -> Table:
    """Where every figure comes from: runs, then files with measurements."""
    rows: list[dict[str, Value]] = []
    names = []
    for run in runs:
        words = run.environment.get("command_line")
        line = " ".join(map(str, words)) if isinstance(words, list) else ""
        model = str(run.summary.get("model") or "")
        rows.append(_provenance(run.label, run.command, model, line, run.path, run.environment))
        names.append((run.label,))
    for document in documents:
        rows.append(_provenance(document.label, "", "", document.command, document.path, document.environment))
        names.append((document.label,))
    keys = ("run", "command", "model", "date", "device", "torch", "git", "line", "path")
    heads = {"line": "command line", "git": "revision"}
    columns = tuple(Column(key, heads.get(key, key), importance=i) for i, key in enumerate(keys))
    return Table("runs", "runs", columns, tuple(rows), row_runs=tuple(names)).filled()


def revision(environment: Mapping[str, Any]) -> str:
    """The commit, whether something was on top of it, and which code ran in any case."""
    git = environment.get("git")
    if not isinstance(git, dict):
        return str(git or "")
    dirty = "-dirty" if git.get("dirty") else ""
    code = f", code {environment['code']}" if environment.get("code") else ""
    return f"{str(git.get('revision'))[:10]}{dirty}{code}"


def _provenance(
    label: str, command: str, model: str, line: str, path: Path, environment: Mapping[str, Any]
) -> dict[str, Value]:
    gpus = environment.get("gpus")
    gpu = str(gpus[0].get("name")) if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict) else ""
    versions = environment.get("versions")
    torch = versions.get("torch") if isinstance(versions, dict) else ""
    return {
        "run": label,
        "command": command,
        "model": model,
        "date": str(environment.get("date") or "")[:16].replace("T", " "),
        "device": gpu or str(environment.get("cpu") or ""),
        "torch": str(torch or ""),
        "git": revision(environment),
        "line": line,
        "path": str(path),
    }


def front_line(front: Front) -> str:
    """A front in one line for a terminal."""
    label, percent = quality_label(front.quality)
    steps = [f"{DENSE if c.point.mode == DENSE else c.point.label} {_plain(c.quality, percent)}" for c in front.front]
    beaten = len(front.candidates) - len(front.front)
    return f"{label} against {gain_label(front.gain)}: " + " -> ".join(steps) + f" ({beaten} dominated)"


def _plain(figure: Figure, percent: bool) -> str:
    return f"{100 * figure.value:.1f}" if percent else f"{figure.value:.2f}"
