"""What a training stage will take, for people (before it starts) and for `--dry-run`."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from widecli.cli.console import console, note
from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.recipe.load import ResolvedRecipe

# A bf16 matrix product measured there, and the memory that its driver reports: the dry run knows no device.
_REFERENCE = ("H200", 790e12, 139.8)
_GIB = 2**30
_LOADING_S = 3.0
_PASSES_OF_THE_START = 4  # over its text, each one forward and some backward


def dry_run_document(resolved: ResolvedRecipe, command: str = "calibrate", ranks: int | None = None) -> dict[str, Any]:
    """Validate a recipe against its model's sizes and estimate the run. Raises UsageError; touches no device.

    `ranks` None: as many as this process has joined.
    """
    from widecli.data.sources import open_source
    from widecli.evaluate.texts import check_texts
    from widecli.model.backbone import load_shape, refuse_beyond_positions
    from widecli.model.budget import Budget
    from widecli.model.plan import RoutingPlan
    from widecli.ranks import current
    from widecli.train.distributed import refuse_shares
    from widecli.train.estimate import efficiency, estimate, longest_sequences, remedies

    recipe = resolved.recipe
    ranks = ranks or current().size
    refuse_shares(recipe.train.batch_size, ranks, recipe.train.micro_batch_size)
    shape = load_shape(recipe.model)
    refuse_beyond_positions(recipe.model, longest_sequences(recipe))
    plan = RoutingPlan.from_recipe(recipe, shape)
    Budget.from_section(recipe.budget, plan, shape, recipe.data.sequence_length)
    value_bytes = 4 if recipe.model.dtype == "float32" else 2
    if recipe.data.source != "self":  # needs the model
        open_source(recipe.data.source, section=recipe.data)
    if recipe.data.validation is not None:
        check_texts([recipe.data.validation])
    card = (recipe.distributed.memory_gib or _REFERENCE[2]) * _GIB
    how: dict[str, Any] = {"value_bytes": value_bytes, "lora": command == "lora", "ranks": ranks}
    figures = estimate(recipe, shape, plan, card_bytes=card, **how)
    reach = efficiency(shape, "cuda", compiled=recipe.train.compile is not False)
    seconds = figures.seconds(_REFERENCE[1] * reach)
    changes = remedies(recipe, shape, plan, card, **how)
    return {
        "schema": "wide.dry_run/1",
        "command": command,
        "recipe": recipe.model_dump(mode="json"),
        "recipe_hash": resolved.hash8,
        "shape": asdict(shape),
        "plan": plan.to_json(),
        "estimate": {
            **asdict(figures),
            "memory_bytes": figures.memory_bytes,
            "seconds_on_reference": seconds,
            "gpu_hours_on_reference": seconds * ranks / 3600,
            "reference": f"{ranks} {_REFERENCE[0]}s" if ranks > 1 else f"one {_REFERENCE[0]}",
            "card_bytes": card,
            "fits": changes == [],
            "changes_to_fit": changes,
        },
    }


def refuse_too_large(document: dict[str, Any]) -> None:
    """Raise UsageError where weights and what is trained alone, without any activation, exceed this machine's memory.

    `document` is the dry run's; its weights are in bf16 unless the recipe says float32.
    """
    import torch

    from widecli.profiling.environment import ram_bytes

    figures, on_gpu = document["estimate"], torch.cuda.is_available()
    there = torch.cuda.get_device_properties("cuda").total_memory if on_gpu else ram_bytes()
    needed = figures["weights_bytes"] + figures["trainable_bytes"]
    if there and needed > there:
        raise UsageError(
            f"this cannot fit: the frozen model takes {_gigabytes(figures['weights_bytes'])} and what is trained "
            f"{_gigabytes(figures['trainable_bytes'])}, and {'the GPU' if on_gpu else 'this machine'} has "
            f"{_gigabytes(there)}; take a smaller routing.rank, compensation.rank or lora.rank, or a smaller model"
        )


def print_dry_run(document: dict[str, Any]) -> None:
    """The dry run as a table."""
    from rich.table import Table

    recipe, shape, figures = document["recipe"], document["shape"], document["estimate"]
    train, plan = recipe["train"], document["plan"]
    table = Table(title="dry run: nothing was loaded or written", show_header=False, title_justify="left")
    heads = f"{shape['num_attention_heads']}/{shape['num_key_value_heads']} heads of {shape['head_dim']}"
    sizes = f"{shape['num_hidden_layers']} layers, D {shape['hidden_size']}, D' {shape['intermediate_size']}, {heads}"
    groups = f"{plan['attention_group_size']} query heads and {plan['ffn_group_size']} channels a group"
    if plan["mode"] != "wide":
        groups = "one group a part" if plan["mode"] == "token" else "one decision a layer"
    per_step = f"{train['batch_size']} x {recipe['data']['sequence_length']}"
    parts = f"weights {_gigabytes(figures['weights_bytes'])}, activations {_gigabytes(figures['activations_bytes'])}"
    time = f"{duration(figures['seconds_on_reference'])} on {figures['reference']}"
    if figures["ranks"] > 1:
        time += f" ({figures['gpu_hours_on_reference']:.1f} GPU hours)"
    time += time_here(figures["flops"])
    if figures["host_bytes"]:
        parts += (
            f"; beside it {_gigabytes(figures['host_bytes'] * figures['ranks'])} of weights in the machine's memory"
        )
    rows = [
        ("model", f"{recipe['model']['name']}: {sizes}"),
        (
            "routing",
            f"{plan['mode']}, {groups}, rank {plan['rank']}: {figures['groups_per_token']:,} decisions a token",
        ),
        *([("FFN channels", _grouping(document))] if plan["mode"] == "wide" else []),
        ("a skipped group leaves", compensation_words(plan) or "nothing: it is not compensated"),
        ("budget", targets(recipe["budget"])),
        *([("objective", _objective(share))] if (share := _teaching(document)) else []),
        ("trainable", _trainable(document)),
        ("steps", f"{train['steps']:,} x {per_step} = {figures['tokens']:,} tokens"),
        ("data", f"{recipe['data']['source']}, packing {recipe['data']['packing']}"),
        ("memory of a GPU, about", f"{_gigabytes(figures['memory_bytes'])} ({parts})"),
        ("", _fit(figures)),
        ("cost, about", f"{figures['flops']:.2g} FLOPs, {time}"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _fit(figures: dict[str, Any]) -> str:
    """Whether it fits, and what to change when not."""
    card, changes = _gigabytes(figures["card_bytes"]), figures["changes_to_fit"]
    if changes is None:
        return f"that does not fit {card}, whatever else is changed: take more or larger GPUs, or shorter sequences"
    return f"that does not fit {card}; this does: {' '.join(changes)}" if changes else f"that fits {card}"


def _grouping(document: dict[str, Any]) -> str:
    """How channels come into groups, in words."""
    if document["plan"].get("grouping") != "clustered":
        return "grouped as they are stored"
    when = "as the calibration regrouped them" if document["command"] == "lora" else "found before the first step"
    return f"regrouped: those that tokens need together share a group; {when}"


def compensation_words(plan: dict[str, Any]) -> str:
    """What a skipped group leaves, in words; empty where it leaves nothing. `plan` as checkpoints store it."""
    held = plan.get("compensation")
    if not held:
        return ""
    mean = ["its mean"] if held["mean"] else []
    return " and ".join([*mean, *([f"a bypass of rank {held['rank']}"] if held["rank"] else [])])


def _teaching(document: dict[str, Any]) -> float:
    """Share of the objective that the dense model's predictions make."""
    recipe = document["recipe"]
    if document["command"] == "lora" and recipe["lora"]["objective"] == "distill":
        return 1.0
    return float(recipe["train"]["distill"])


def _objective(share: float) -> str:
    rest = f", the LM loss {1 - share:.0%}" if share < 1 else ""
    return f"{share:.0%} the KL divergence from the dense model, which runs beside it{rest}"


def _trainable(document: dict[str, Any]) -> str:
    figures, lora = document["estimate"], document["recipe"]["lora"]
    routers = f"{figures['router_parameters']:,} router parameters"
    if figures["compensation_parameters"]:
        routers += f", {figures['compensation_parameters']:,} of compensation"
    if not figures["adapter_parameters"]:
        return routers
    frozen = " (frozen)" if lora["freeze_routers"] else ""
    return f"{figures['adapter_parameters']:,} parameters of a LoRA of rank {lora['rank']}, {routers}{frozen}"


def targets(budget: dict[str, Any]) -> str:
    """The budget in words: `rate 50%`, `parts: attention 50%, ffn 30%`."""
    if budget["kind"] != "parts":
        return f"{budget['kind']} {budget['sparsity']:.0%}"
    named = [f"{part} {budget[part]:.0%}" for part in ("attention", "ffn") if budget[part] is not None]
    return f"parts: {', '.join(named)}"


def print_expected_time(resolved: ResolvedRecipe, document: dict[str, Any]) -> None:
    """Say how long the steps will take on this machine, from a short matrix-product probe."""
    import torch

    from widecli.model.backbone import default_device
    from widecli.model.plan import ModelShape
    from widecli.train.estimate import efficiency

    device = default_device()
    shape = ModelShape(**document["shape"])
    reach = efficiency(shape, device.type, compiled=resolved.recipe.train.compile is not False)
    rate = _matrix_rate(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    ranks = document["estimate"]["ranks"]
    seconds = document["estimate"]["flops"] / (rate * reach * ranks)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    where = f"{ranks} ranks with {where} each" if ranks > 1 else where
    start = ", the closed-form start" if document["command"] == "calibrate" else ""
    steps = resolved.recipe.train.steps
    count = "1 step takes" if steps == 1 else f"{steps} steps take"
    beside = _beside_the_steps(resolved, document) / (rate * reach) + _LOADING_S
    note(
        f"{count} about {duration(seconds)} on {where}; loading{start} and validation about {duration(beside)}, more "
        "with a large model"
    )


def _beside_the_steps(resolved: ResolvedRecipe, document: dict[str, Any]) -> float:
    """FLOPs of the start, as often as it reads its text, and of three looks at the held-out text, here a short one."""
    from widecli.evaluate.texts import PERPLEXITY_TOKEN_CAPS
    from widecli.model.plan import ModelShape
    from widecli.train.estimate import backbone_parameters

    recipe = resolved.recipe
    forward = 2.0 * backbone_parameters(ModelShape(**document["shape"]))
    read = 3.0 * PERPLEXITY_TOKEN_CAPS["pydoc-topics"] if recipe.data.validation else 0.0
    if document["command"] == "calibrate" and recipe.routing.warm_start == "closed_form":
        read += _PASSES_OF_THE_START * recipe.routing.warm_start_tokens
    return forward * read


def time_here(flops: float) -> str:
    """What training FLOPs take on a machine without a GPU, which a dry run otherwise would not say; else nothing."""
    rate = _cpu_rate()
    return f"; on this machine, which has no GPU, about {duration(flops / rate)}" if rate else ""


@functools.cache
def _cpu_rate() -> float | None:
    """FLOP/s that training reaches on this machine's CPU; None where there is a GPU."""
    import torch

    from widecli.model.backbone import default_device
    from widecli.train.estimate import CPU_EFFICIENCY

    device = default_device()
    return _matrix_rate(device, torch.float32) * CPU_EFFICIENCY if device.type == "cpu" else None


def _matrix_rate(device: Any, dtype: Any) -> float:
    """FLOP/s of a matrix product of random values on this device, best of a few."""
    import time

    import torch

    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds as people say them: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
