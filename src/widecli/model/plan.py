"""Which groups of which layers are routed: the shapes of a backbone and the plan laid over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.recipe.schema import CompensationSection, Recipe, RoutingSection

Mode = Literal["wide", "token", "layer"]
Tap = Literal["residual", "normalised"]
Grouping = Literal["clustered", "contiguous"]
PartName = Literal["attention", "ffn"]
PARTS: tuple[PartName, ...] = ("attention", "ffn")
GROUP_MULTIPLE = 16  # smallest slice of K that a tensor-core instruction consumes


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-like decoder, in the words of its Hugging Face config."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Read the sizes from a Hugging Face config; `head_dim` falls back to hidden size / heads only when absent."""
        heads = int(config.num_attention_heads)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            num_hidden_layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            num_attention_heads=heads,
            num_key_value_heads=int(kv_heads),
            head_dim=int(head_dim),
            vocab_size=int(config.vocab_size),
        )

    @property
    def query_heads_per_kv_head(self) -> int:
        """H_q / H_k: the query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    def valid_attention_group_sizes(self) -> list[int]:
        """Query heads a group may hold: divisors of H_q that are a multiple or a divisor of H_q / H_k."""
        heads, ratio = self.num_attention_heads, self.query_heads_per_kv_head
        return [n for n in range(1, heads + 1) if heads % n == 0 and (n % ratio == 0 or ratio % n == 0)]

    def valid_ffn_group_sizes(self) -> list[int]:
        """Channels a group may hold: multiples of 16 that divide D'."""
        width = self.intermediate_size
        return [n for n in range(GROUP_MULTIPLE, width + 1, GROUP_MULTIPLE) if width % n == 0]


@dataclass(frozen=True)
class CompensationPlan:
    """What stands in for skipped groups: a mean for each (`mean`), and a bypass of `rank` (0 = none) a part."""

    mean: bool = True
    rank: int = 32

    @classmethod
    def from_section(cls, section: CompensationSection) -> CompensationPlan | None:
        """What a recipe asks for; None = nothing."""
        return cls(section.mean, section.rank) if section.mean or section.rank else None

    @property
    def described(self) -> str:
        """In a few words."""
        return " and ".join([*(["means"] if self.mean else []), *([f"rank {self.rank}"] if self.rank else [])])


@dataclass(frozen=True)
class LayerPlan:
    """Group counts of one layer; 0 = that part always runs. `shared`: one decision serves both parts."""

    attention_groups: int
    ffn_groups: int
    shared: bool = False

    def groups(self, part: PartName) -> int:
        """Groups of one part."""
        return self.attention_groups if part == "attention" else self.ffn_groups


@dataclass(frozen=True)
class LayerOverride:
    """What one layer does differently; None keeps the plan's choice."""

    parts: Literal["all", "attention", "ffn", "none"] | None = None
    attention_group_size: int | None = None
    ffn_group_size: int | None = None


@dataclass(frozen=True)
class RoutingPlan:
    """Group sizes, router rank and routed parts for a whole model; independent of its weights."""

    attention_group_size: int
    ffn_group_size: int
    rank: int = 32
    mode: Mode = "wide"
    parts: Literal["all", "attention", "ffn"] = "all"
    tap: Tap = "residual"
    overrides: Mapping[int, LayerOverride] = field(default_factory=dict)
    grouping: Grouping = "contiguous"
    compensation: CompensationPlan | None = None

    @classmethod
    def from_recipe(cls, recipe: Recipe, shape: ModelShape) -> RoutingPlan:
        """Build and validate the plan a recipe asks for. Raises UsageError listing the valid sizes."""
        return cls.from_section(recipe.routing, shape, CompensationPlan.from_section(recipe.compensation))

    @classmethod
    def from_section(
        cls, section: RoutingSection, shape: ModelShape, compensation: CompensationPlan | None = None
    ) -> RoutingPlan:
        """The plan of a routing section. Raises UsageError listing the valid sizes."""
        plan = cls(
            attention_group_size=section.attention_group_size or shape.query_heads_per_kv_head,
            ffn_group_size=section.ffn_group_size,
            rank=section.rank,
            mode=section.mode,
            parts=section.parts,
            tap=section.tap,
            overrides={i: LayerOverride(**layer.model_dump()) for i, layer in sorted(section.layers.items())},
            grouping=section.grouping,
            compensation=compensation,
        )
        plan.validate(shape)
        return plan

    def validate(self, shape: ModelShape) -> None:
        """Raise UsageError when a group size or an override does not fit the backbone."""
        if self.mode == "layer" and self.parts != "all":
            raise UsageError(
                f"routing.mode=layer decides for both parts at once; routing.parts={self.parts} cannot hold"
            )
        for index in self.overrides:
            if not 0 <= index < shape.num_hidden_layers:
                raise UsageError(
                    f"routing.layers names layer {index}, but the model has layers 0 to {shape.num_hidden_layers - 1}"
                )
        if self.grouping == "clustered" and not self.by_groups:
            raise UsageError(f"routing.mode={self.mode} has no groups of channels; routing.grouping must be contiguous")
        if not 1 <= self.rank <= shape.hidden_size:
            raise UsageError(f"routing.rank={self.rank} must lie between 1 and the hidden size {shape.hidden_size}")
        if self.compensation and not 0 <= self.compensation.rank <= shape.hidden_size:
            raise UsageError(
                f"compensation.rank={self.compensation.rank} must lie between 0 and the hidden size {shape.hidden_size}"
            )
        for index in range(shape.num_hidden_layers):
            self._validate_sizes(shape, index)

    def _validate_sizes(self, shape: ModelShape, index: int) -> None:
        attention, ffn, parts = self._layer_choices(index)
        if parts in ("all", "attention") and attention not in shape.valid_attention_group_sizes():
            raise UsageError(
                f"attention group size {attention} does not fit {shape.num_attention_heads} query heads with "
                f"{shape.num_key_value_heads} KV heads; valid sizes: "
                + ", ".join(map(str, shape.valid_attention_group_sizes()))
            )
        if self.by_groups and parts in ("all", "ffn") and ffn not in shape.valid_ffn_group_sizes():
            raise UsageError(
                f"FFN group size {ffn} must be a multiple of {GROUP_MULTIPLE} that divides the intermediate size "
                f"{shape.intermediate_size}; valid sizes: " + ", ".join(map(str, shape.valid_ffn_group_sizes()))
            )

    def _layer_choices(self, index: int) -> tuple[int, int, str]:
        override = self.overrides.get(index, LayerOverride())
        return (
            override.attention_group_size or self.attention_group_size,
            override.ffn_group_size or self.ffn_group_size,
            override.parts or self.parts,
        )

    @property
    def by_groups(self) -> bool:
        """Whether parts are cut into groups; the other modes decide for whole parts or layers."""
        return self.mode == "wide"

    def layer(self, shape: ModelShape, index: int) -> LayerPlan:
        """Group counts of layer `index`."""
        attention_size, ffn_size, parts = self._layer_choices(index)
        attention = shape.num_attention_heads // attention_size if self.by_groups else 1
        ffn = shape.intermediate_size // ffn_size if self.by_groups else 1
        return LayerPlan(
            attention_groups=attention if parts in ("all", "attention") else 0,
            ffn_groups=ffn if parts in ("all", "ffn") else 0,
            shared=self.mode == "layer" and parts == "all",
        )

    def layers(self, shape: ModelShape) -> tuple[LayerPlan, ...]:
        """Group counts of every layer, in order."""
        return tuple(self.layer(shape, i) for i in range(shape.num_hidden_layers))

    def to_json(self) -> dict[str, Any]:
        """Plain data for `wide_config.json`."""
        data = asdict(self)
        data["overrides"] = {str(i): asdict(o) for i, o in self.overrides.items()}
        # left out where off, so that plans from before these existed read and compare as they did
        if self.grouping == "contiguous":
            del data["grouping"]
        if self.compensation is None:
            del data["compensation"]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RoutingPlan:
        """Inverse of `to_json`. Raises ValueError, TypeError or KeyError for what no plan holds."""
        overrides = {int(i): LayerOverride(**o) for i, o in data.get("overrides", {}).items()}
        compensation = CompensationPlan(**data["compensation"]) if data.get("compensation") else None
        plan = cls(**{**data, "overrides": overrides, "compensation": compensation})
        plan._refuse_odd_values()
        return plan

    def _refuse_odd_values(self) -> None:
        """Raise ValueError for values that no recipe lets in: a file can hold anything."""
        for name, known in (("mode", Mode), ("tap", Tap), ("grouping", Grouping)):
            if (value := getattr(self, name)) not in get_args(known):
                raise ValueError(f"{name} {value!r} is not one of {', '.join(get_args(known))}")
        if self.parts not in ("all", *PARTS):
            raise ValueError(f"parts {self.parts!r} is not one of all, {', '.join(PARTS)}")
        sizes = {"rank": self.rank}
        for where, holder in (("", self), *((f"layer {i}'s ", o) for i, o in self.overrides.items())):
            for name in ("attention_group_size", "ffn_group_size"):
                if holder is self or getattr(holder, name) is not None:
                    sizes[f"{where}{name}"] = getattr(holder, name)
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} is {size!r}, not a whole number above 0")
        if self.compensation and (type(self.compensation.rank) is not int or self.compensation.rank < 0):
            raise ValueError(f"the compensation's rank is {self.compensation.rank!r}, not a whole number")
