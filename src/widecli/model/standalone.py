"""Exported models that transformers loads and routes by itself: what their config.json says, how widecli reads it.

A merged export holds the base architecture's weights, the routing files and `remote/modeling_wide.py`, which its
config.json names as its code. Here that code is not needed: widecli takes the base architecture's config from it, loads
the dense model as ever and attaches the routing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from widecli.model.checkpoint import COMPENSATION, ROUTERS
from widecli.model.families import Family, family_of_config
from widecli.model.plan import PARTS, LayerPlan, ModelShape, RoutingPlan


def write_standalone(folder: Path, config: Any, facts: Mapping[str, Any]) -> None:
    """Make `folder`, with a model's weights and its routing files, load by transformers alone and route.

    `config` is the Hugging Face config of the model, `facts` what `routing_facts` or `static_facts` says. Writes
    config.json and the modelling file.
    """
    from widecli.model.remote.modeling_wide import write_beside_weights

    write_beside_weights(folder, config, facts)


def write_refusal(folder: Path, base: str) -> None:
    """Make transformers refuse `folder`, which holds routing without its model, by a sentence that says what it needs.

    It repeats a model type that it does not know.
    """
    needed = (
        f"none: here is the routing of {base} without the model. `wide export --merge` writes both, to be loaded so"
    )
    (folder / "config.json").write_text(json.dumps({"model_type": needed}, indent=2) + "\n", encoding="utf-8")


def routing_facts(config: Any, plan: RoutingPlan) -> dict[str, Any]:
    """The `routing` table of config.json for a plan; `remote/modeling_wide.py` says what its keys mean."""
    left = plan.compensation
    return {
        "tap": plan.tap,
        "rank": plan.rank,
        "router": ROUTERS,
        "compensation": {"file": COMPENSATION, "mean": left.mean, "rank": left.rank} if left else None,
        "layers": [_layer_facts(layer) for layer in plan.layers(ModelShape.from_config(config))],
        "modules": _module_paths(family_of_config(config)),
    }


def static_facts(config: Any, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `routing` table of a model without routers, whose layers are cut or masked for all tokens alike.

    One table a layer: `heads`, `kv_heads`, `channels` where its weights are narrower than the config says, `attention`
    and `ffn` a text of 1 (runs) and 0 (is skipped), one a group; empty for a dense layer.
    """
    modules = _module_paths(family_of_config(config))
    nothing = {"tap": "residual", "rank": None, "router": None, "compensation": None}
    return {**nothing, "layers": [dict(layer) for layer in layers], "modules": modules}


def _layer_facts(layer: LayerPlan) -> dict[str, Any]:
    facts: dict[str, Any] = {part: layer.groups(part) for part in PARTS if layer.groups(part)}
    return {**facts, "shared": True} if layer.shared else facts


def _module_paths(family: Family) -> dict[str, Any]:
    """The `routing.modules` table of config.json: where a family keeps what routing touches."""
    return {
        "layers": family.layers,
        "attention": {
            "norm": family.attention_norm,
            "output": family.attention_output,
            "query": family.query,
            "key": family.key,
            "value": family.value,
        },
        "ffn": {"norm": family.ffn_norm, "output": family.ffn_output, "gate": family.gate, "up": family.up},
    }


def dense_alone(name: str) -> str | None:
    """What to say where the dense model alone is taken of a folder whose model routes; None for any other model."""
    try:
        settings = json.loads((Path(name).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # no folder of a model: whoever loads it says so
    if not isinstance(settings, dict) or settings.get("model_type") != "wide":
        return None
    return f"{name} holds a model that routes; as --model it is its dense model alone, without --model it routes"


def base_config(place: str | Path, **options: Any) -> Any | None:
    """The dense model's config of an exported model (a folder or a Hub id); None for any other model.

    `options` (a revision) go to transformers, which raises OSError for what is not there.
    """
    from transformers import PretrainedConfig

    settings, _ = PretrainedConfig.get_config_dict(str(place), **options)
    if settings.get("model_type") != "wide":
        return None
    from widecli.model.remote.modeling_wide import WideConfig

    return WideConfig(**settings).text_config


def config_of(place: str | Path, **options: Any) -> Any:
    """As `AutoConfig.from_pretrained`, and of an exported model the config of its dense model."""
    from transformers import AutoConfig

    return base_config(place, **options) or AutoConfig.from_pretrained(place, **options)
