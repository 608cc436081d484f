"""A Llama-like model whose tokens choose, layer by layer, which head groups and FFN channel groups they run.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The model is transformers' own class of the base architecture, with its attention, caches, generation and devices. Hooks
beside it take the decisions: what enters `o_proj` and `down_proj` is zeroed in the groups that a token skips, and what
compensates for them is added behind. Routers compute in fp32 whatever the model's dtype. The tensors of routers and
compensation lie in files of their own, so that the weights are the base architecture's and no others.

config.json holds, beside what transformers needs to find this file:

  base           {"type": model_type of the base architecture, "config": its settings}
  routing.layers one table a layer, {} for a dense one; its keys, each of which may be missing:
    attention, ffn  who decides: the number of groups = a router; a text such as "1101" = the same groups for every
                    token, 1 runs and 0 is skipped. Missing: all of the part runs.
    shared          true: one router, with one group a part, decides for both parts at once
    heads, kv_heads, channels   sizes of this layer where they are not the base config's (static width pruning)
  routing.tap    what routers read: "residual", or "normalised" = divided by its root mean square
  routing.rank   of the routers; routing.router: their file, null where none decides
  routing.compensation   null, or {"file", "mean": a mean for each skipped group?, "rank": of the bypass, 0 = none}
  routing.modules        where norms and projections are, in the model and in a layer

Not supported, and refused: tensor parallelism (a shard does not hold whole groups), random weights from a config.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import cached_file

FILE = "modeling_wide.py"
PARTS = ("attention", "ffn")
NORM_EPS = 1e-6  # of the normalised tap
# Stands where other classes look for their activation function: they stop with it instead of running this model dense.
REFUSAL = "this model routes: load it by AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)"
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_SPLITTING = ("tp_plan", "tp_size", "device_mesh", "distributed_config")
_NOT_SETTINGS = {"dtype", "torch_dtype", "quantization_config"}


class WideConfig(PretrainedConfig):  # type: ignore[misc]  # transformers is untyped
    """The base architecture's config (`text_config`) and the routing facts (`routing`): see the top of this file."""

    model_type = "wide"

    def __init__(self, base: Any = None, routing: Any = None, hidden_act: str = REFUSAL, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden_act = hidden_act
        self.routing = routing
        self.text_config: Any = None
        if base is not None:
            major = int(transformers.__version__.split(".")[0])
            self.text_config = AutoConfig.for_model(base["type"], **settings_for(base["config"], major))
            if self._attn_implementation is not None:
                self.text_config._attn_implementation = self._attn_implementation

    def to_dict(self) -> dict[str, Any]:
        """Plain data as in config.json."""
        data: dict[str, Any] = super().to_dict()
        base = data.pop("text_config", None) and base_table(self.text_config)
        return data | ({"base": base} if base else {})


def base_table(config: Any) -> dict[str, Any]:
    """`base` of config.json. `model_type` stands apart: the base's own class would take a table that has it for its."""
    settings = json.loads(config.to_json_string())
    return {"type": settings.pop("model_type"), "config": settings}


def settings_for(settings: Mapping[str, Any], major: int) -> dict[str, Any]:
    """A base config's settings as this major version of transformers knows them: 4 lacks `rope_parameters`."""
    known = dict(settings)
    if major < 5 and known.get("rope_parameters"):
        rope = dict(known.pop("rope_parameters"))
        known["rope_theta"] = rope.pop("rope_theta")
        known["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return known


def write_beside_weights(folder: Path, base_config: Any, routing: Mapping[str, Any]) -> None:
    """Make a folder with the base architecture's weights load through this file: its config.json, and a copy of it."""
    config = WideConfig(base_table(base_config), routing, architectures=[WideForCausalLM.__name__])
    own = Path(FILE).stem
    config.auto_map = {"AutoConfig": f"{own}.WideConfig", "AutoModelForCausalLM": f"{own}.WideForCausalLM"}
    (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")
    shutil.copyfile(__file__, folder / FILE)


class Part:
    """One routed part of one layer: who decides, what stands in, and what it decided in the pass that ran last."""

    def __init__(self, decider: int | str, tap: str, tensors: dict[str, Tensor], leader: Part | None) -> None:
        self.tap = tap
        self.tensors = tensors
        self.leader = leader  # the part whose decision this one shares
        if isinstance(decider, str):
            self.tensors["constant"] = torch.tensor([bool(int(digit)) for digit in decider])
        self.mask: Tensor | None = None  # [B, T, groups] bool, True = runs
        self.reduced: Tensor | None = None  # what the bypass has read, [B, T, rank]

    def tensor(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor where and as it is needed. What the model's own dtype and device moves do not touch it."""
        key = f"{name} {device} {dtype}"
        if key not in self.tensors:
            self.tensors[key] = self.tensors[name].to(device, dtype)
        return self.tensors[key]

    def decide(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """In front of the norm, which reads the residual x [B, T, D]."""
        x = args[0]
        if "constant" in self.tensors:
            self.mask = self.tensor("constant", x.device).expand(*x.shape[:-1], -1)
            return
        with torch.autocast(x.device.type, enabled=False):
            features = x.float()
            if self.tap == "normalised":
                features = features * torch.rsqrt(features.square().mean(-1, keepdim=True) + NORM_EPS)
            inner = F.linear(features, *(self.tensor(name, x.device) for name in ("down.weight", "down.bias")))
            logits = F.linear(inner, *(self.tensor(name, x.device) for name in ("up.weight", "up.bias")))
            logits = logits.view(*logits.shape[:-1], -1, 2)
        self.mask = logits[..., 0] - logits[..., 1] >= 0

    def reduce(self, _: nn.Module, args: tuple[Tensor, ...], normed: Tensor) -> None:
        """Behind the norm: what the bypass reads of the part's input."""
        self.reduced = F.linear(normed, self.tensor("down", normed.device, normed.dtype))

    def apply(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        """In front of the projection back to the residual stream: skipped groups become zero."""
        if self.leader is not None:
            self.mask = self.leader.mask
        assert self.mask is not None
        grouped = args[0].reshape(*args[0].shape[:-1], self.mask.shape[-1], -1)
        return (grouped.masked_fill(~self.mask.to(grouped.device).unsqueeze(-1), 0).flatten(-2),)

    def stand_in(self, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Behind that projection: (1 - m) M + u B A n, u the share of groups that the token skips."""
        assert self.mask is not None
        skipped = (~self.mask).to(output.device, output.dtype)
        total = torch.zeros_like(output)
        if "mean" in self.tensors:
            total = skipped @ self.tensor("mean", output.device, output.dtype)
        if self.reduced is not None:
            read = self.reduced.to(output.device, output.dtype) * skipped.mean(-1, keepdim=True)
            total = total + F.linear(read, self.tensor("up", output.device, output.dtype))
        return output + total


class WideForCausalLM(PreTrainedModel):  # type: ignore[misc]  # transformers is untyped
    """Routing for any base architecture. What `from_pretrained` returns is a subclass of the base's own class, too."""

    config_class = WideConfig
    base_class: Any = None
    routing: Mapping[str, Any]
    parts: dict[tuple[int, str], Part]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if self.base_class is None:
            raise ValueError("a routed model has trained routers: it is made by from_pretrained, not from a config")
        super().__init__(config, *args, **kwargs)
        modules = self.routing["modules"]
        for layer, table in zip(self.get_submodule(modules["layers"]), self.routing["layers"], strict=True):
            _resize(layer, table, modules, config)

    @classmethod
    def from_pretrained(cls, place: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """As any transformers model. Raises ValueError for a tensor that is missing, and for what cannot be routed."""
        if split := [name for name in _SPLITTING if kwargs.get(name) is not None]:
            raise ValueError(f"a routed model cannot be split by tensor parallelism ({split[0]}): use device_map")
        hub = {name: kwargs[name] for name in _HUB_OPTIONS if kwargs.get(name) is not None}
        config = config or WideConfig.from_pretrained(place, **hub)
        if getattr(config, "routing", None) is None:
            raise ValueError(f"{place}: the config given says nothing of routing; leave it out")
        settings = copy.deepcopy(config.text_config)
        for name in kwargs.keys() & settings.to_dict().keys() - _NOT_SETTINGS:
            setattr(settings, name, kwargs.pop(name))
        wants_info = kwargs.pop("output_loading_info", False)
        tensors = _routing_tensors(place, config.routing, settings.hidden_size, hub)
        model_class = _class_for(settings, config.routing)
        kwargs |= {"config": settings, "output_loading_info": True}
        model, info = super(WideForCausalLM, model_class).from_pretrained(place, *args, **kwargs)
        if info["missing_keys"]:
            raise ValueError(f"{place} lacks weights: {', '.join(sorted(info['missing_keys']))}")
        model._install(tensors)
        return (model, info) if wants_info else model

    def _install(self, tensors: dict[str, Tensor]) -> None:
        self._tensors, self.parts = tensors, {}
        modules, tables = self.routing["modules"], self.routing["layers"]
        layers = self.get_submodule(modules["layers"])
        for index, part in _routed(tables):
            decider, shared = tables[index][part], tables[index].get("shared")
            needed = _needed(self.routing, index, part, self.config.hidden_size)
            own = {name.split(".", 3)[3]: tensors[name] for name in needed}
            leader = self.parts[index, "attention"] if shared and part == "ffn" else None
            made = self.parts[index, part] = Part(decider, self.routing["tap"], own, leader)
            norm, output = (layers[index].get_submodule(modules[part][name]) for name in ("norm", "output"))
            if output.in_features % _groups(decider):
                raise ValueError(f"layer {index}, {part}: {output.in_features} inputs in {_groups(decider)} groups")
            if leader is None:
                norm.register_forward_pre_hook(made.decide)
            if "down" in own:
                norm.register_forward_hook(made.reduce)
            output.register_forward_pre_hook(made.apply)
            if self.routing["compensation"]:
                output.register_forward_hook(made.stand_in)

    def masks(self) -> dict[tuple[int, str], Tensor]:
        """What the last forward pass decided, by layer and part: bool [B, T, groups], True = runs."""
        return {key: part.mask for key, part in self.parts.items() if part.mask is not None}

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override, unused-ignore]
        """Weights, routing, config and this file: a folder that loads as this one did."""
        if kwargs.pop("push_to_hub", False):
            raise ValueError("push_to_hub: save first, then call model.push_to_hub, which uploads the routing, too")
        super().save_pretrained(save_directory, **kwargs)
        folder = Path(save_directory)
        settings = copy.deepcopy(self.config)
        settings.architectures = [self.base_class.__name__]
        for kind, file in _files(self.routing).items():
            held = {k.removeprefix(f"{kind}."): t for k, t in self._tensors.items() if k.startswith(f"{kind}.")}
            save_file(held, folder / file, metadata={"format": "pt"})
        write_beside_weights(folder, settings, self.routing)


def _class_for(config: Any, routing: Mapping[str, Any]) -> Any:
    """The base architecture's class for this config, with routing on top."""
    base = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # no _auto_class: save_pretrained copies this file itself
    facts = {"base_class": base, "config_class": type(config), "routing": routing, "_auto_class": None}
    return type(WideForCausalLM.__name__, (WideForCausalLM, base), {**facts, "__module__": __name__})


def _resize(layer: nn.Module, table: Mapping[str, Any], modules: Mapping[str, Any], config: Any) -> None:
    """Give a layer that has sizes of its own the linear modules for them."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads = table.get("heads", config.num_attention_heads), table.get("kv_heads", config.num_key_value_heads)
    width, attention, ffn = table.get("channels", config.intermediate_size), modules["attention"], modules["ffn"]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    rows = {attention["query"]: heads * head_dim, ffn["gate"]: width, ffn["up"]: width}
    rows |= {attention[name]: kv_heads * head_dim for name in ("key", "value")}
    columns = {attention["output"]: heads * head_dim, ffn["output"]: width}
    for path in rows | columns:
        old = layer.get_submodule(path)
        sizes = columns.get(path, old.in_features), rows.get(path, old.out_features)
        if sizes != (old.in_features, old.out_features):
            layer.set_submodule(path, nn.Linear(*sizes, old.bias is not None, old.weight.device, old.weight.dtype))
    layer.get_submodule(attention["query"].rpartition(".")[0]).num_key_value_groups = heads // kv_heads


def _files(routing: Mapping[str, Any]) -> dict[str, str]:
    found = {"router": routing["router"], "compensation": (routing["compensation"] or {}).get("file")}
    return {kind: file for kind, file in found.items() if file}


def _groups(decider: int | str) -> int:
    return len(decider) if isinstance(decider, str) else decider


def _routed(tables: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    return [(index, part) for index, table in enumerate(tables) for part in PARTS if table.get(part)]


def _needed(routing: Mapping[str, Any], index: int, part: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors that one part needs, kind of file in front, with their shapes."""
    table, rank, left = routing["layers"][index], routing["rank"], routing["compensation"] or {}
    groups, bypass = _groups(table[part]), left.get("rank")
    owner = "shared" if table.get("shared") else part
    router = {"down.weight": (rank, hidden), "down.bias": (rank,)}
    router |= {"up.weight": (2 * groups, rank), "up.bias": (2 * groups,)}
    needed = {} if isinstance(table[part], str) else {f"router.{index}.{owner}.{k}": v for k, v in router.items()}
    extra = {"mean": (groups, hidden)} if left.get("mean") else {}
    extra |= {"down": (bypass, hidden), "up": (hidden, bypass)} if bypass else {}
    return needed | {f"compensation.{index}.{part}.{k}": v for k, v in extra.items()}


def _routing_tensors(place: Any, routing: Mapping[str, Any], hidden: int, hub: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of the routing files, exactly those that the config asks for, in fp32."""
    found: dict[str, Tensor] = {}
    for kind, file in _files(routing).items():
        found |= {f"{kind}.{key}": tensor.float() for key, tensor in load_file(cached_file(place, file, **hub)).items()}
    expected = dict(pair for at in _routed(routing["layers"]) for pair in _needed(routing, *at, hidden).items())
    wrong = sorted(found.keys() ^ expected.keys())
    wrong += [key for key in expected.keys() & found.keys() if tuple(found[key].shape) != expected[key]]
    if wrong:
        raise ValueError(f"{place}: routing tensors are missing, left over or of another shape: {', '.join(wrong)}")
    return found
