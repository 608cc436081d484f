"""What a recipe may say: one typed section for each component, unknown keys refused.

A recipe is the only description of a run. Defaults suit one GPU and the embedded model; `recipes/` holds named ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
LARGEST = 2**63 - 1
"""Of whole numbers: what torch and NumPy take."""
PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]


NO_COMPENSATION: dict[str, Any] = {"mean": False, "rank": 0}


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which backbone to route."""

    name: str = Field("smollm2-135m", description="Hub id, local folder, or smollm2-135m (embedded)")
    revision: str | None = Field(None, description="Hub revision: branch, tag or commit")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="backbone weights and compute; auto = bfloat16 on a GPU, float32 on a CPU"
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="attention implementation of the backbone; auto = what the backbone prefers"
    )
    beyond_positions: bool = Field(
        False, description="let sequences, windows and prompts be longer than the backbone is made for"
    )


class DataSection(Section):
    """What text the routers learn from."""

    source: str | tuple[str, ...] = Field(
        "stdlib", description="Hub id, local files or globs (.jsonl[.gz], .txt, .parquet), self, or stdlib"
    )
    subset: str | None = Field(None, description="configuration name of a Hub data set")
    split: str = Field("train", description="split of a Hub data set")
    text_field: str = Field("text", description="field that holds the text")
    sequence_length: Annotated[int, Field(ge=2, le=LARGEST)] = Field(
        1024, description="tokens in one training sequence"
    )
    packing: Literal["concat", "sample"] = Field(
        "concat", description="concat = documents joined and cut; sample = one document a sequence, padded"
    )
    max_tokens: PositiveInt | None = Field(
        None, description="tokens to prepare; default: what the steps need, up to the next power of two"
    )
    validation: str | None = Field(
        "pydoc-topics", description="held-out text whose perplexity is reported before and after; null = none"
    )


class LayerSection(Section):
    """What one layer does differently from the plan."""

    parts: Literal["all", "attention", "ffn", "none"] | None = None
    attention_group_size: PositiveInt | None = None
    ffn_group_size: PositiveInt | None = None


class RoutingSection(Section):
    """What a token may skip and how the routers start."""

    mode: Literal["wide", "token", "layer"] = Field(
        "wide",
        description="wide = groups; token = one group a part (SkipGPT's scheme); layer = one decision a layer",
    )
    parts: Literal["all", "attention", "ffn"] = Field("all", description="which parts of a layer are routed")
    attention_group_size: PositiveInt | None = Field(
        None, description="query heads in a group; default: one GQA group (query heads / KV heads)"
    )
    ffn_group_size: PositiveInt = Field(64, description="intermediate channels in a group (multiple of 16)")
    grouping: Literal["clustered", "contiguous"] = Field(
        "clustered",
        description="clustered = channels that tokens need together share a group; contiguous = as they are stored "
        "(the paper's; the only one where mode has no groups, and its default there)",
    )
    rank: PositiveInt = Field(32, description="bottleneck of the router")
    tap: Literal["residual", "normalised"] = Field("residual", description="what the router reads")
    warm_start: Literal["closed_form", "random"] = Field("closed_form", description="how the routers start")
    warm_start_tokens: PositiveInt = Field(65536, description="tokens behind the closed form")
    layers: dict[int, LayerSection] = Field(default_factory=dict, description="per-layer overrides")

    @model_validator(mode="before")
    @classmethod
    def _grouping_suits_mode(cls, data: Any) -> Any:
        if isinstance(data, dict) and "grouping" not in data and data.get("mode", "wide") in ("token", "layer"):
            return {**data, "grouping": "contiguous"}
        return data


class CompensationSection(Section):
    """What stands in for skipped groups. Off in the modes that skip whole parts, unless asked for."""

    mean: bool = Field(True, description="a skipped group adds its learned mean instead of nothing")
    rank: Count = Field(
        32, description="of a bypass from a part's input to its output, scaled by the share skipped; 0 = none"
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        3e-3, description="peak for means and bypass, which have no weight decay"
    )


class BudgetSection(Section):
    """How much to skip, and how that is counted."""

    kind: Literal["rate", "parts", "uniform", "flops"] = Field(
        "flops",
        description="flops = share of the prunable FLOPs, net of what routers and compensation cost; rate = mean of "
        "both parts' skip rates (the paper's); parts = a target a part; uniform = every layer meets the target",
    )
    sparsity: Fraction = Field(0.5, description="target for rate, uniform and flops")
    attention: Fraction | None = Field(None, description="target of the attention part (kind = parts)")
    ffn: Fraction | None = Field(None, description="target of the FFN part (kind = parts)")
    weight: Annotated[float, Field(ge=0.0)] = Field(20.0, description="weight of the budget term in the loss")
    start_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.5, description="share of the budget that the closed form already skips; training closes the gap"
    )
    ramp_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0, description="share of the steps over which the target rises from start_share to the whole; 0 = at once"
    )

    @model_validator(mode="after")
    def _targets_match_kind(self) -> BudgetSection:
        named = self.attention is not None or self.ffn is not None
        if self.kind == "parts" and not named:
            raise ValueError("budget.kind=parts needs budget.attention or budget.ffn (or both)")
        if self.kind != "parts" and named:
            raise ValueError(f"budget.attention and budget.ffn need budget.kind=parts, not {self.kind}")
        return self


class TrainSection(Section):
    """The optimisation."""

    steps: Count = Field(300, description="optimiser steps; 0 = the warm start alone")
    batch_size: PositiveInt = Field(32, description="sequences in a step")
    micro_batch_size: PositiveInt | None = Field(
        None, description="sequences in one forward; default: halved on out-of-memory until it fits"
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(2e-3, description="routers' peak, reached after the warm-up")
    warmup_ratio: Fraction = Field(0.1, description="share of the steps with a rising learning rate")
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    temperature_start: Annotated[float, Field(gt=0)] = Field(2.0, description="Gumbel-softmax temperature, first step")
    temperature_end: Annotated[float, Field(gt=0)] = Field(0.5, description="Gumbel-softmax temperature, last step")
    distill: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.0,
        description="share of the objective that is the KL divergence from the dense model; the rest is the LM loss",
    )
    seed: Count = Field(0, description="of the order of the text, the noise and the dropout")
    compile: bool | Literal["auto"] = Field(
        "auto", description="torch.compile the decoder layer and the loss; auto = on a GPU (twice as fast there)"
    )
    scale_features: bool = Field(
        False, description="train the routers on features scaled channel by channel; no gain was measured so far"
    )
    activation_checkpointing: bool = Field(False, description="recompute layers in the backward pass: less memory")
    save_every: PositiveInt = Field(100, description="steps between checkpoints")

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> TrainSection:
        if self.micro_batch_size and self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"train.micro_batch_size={self.micro_batch_size} is larger than train.batch_size={self.batch_size}"
            )
        return self


class DistributedSection(Section):
    """How several GPUs hold the frozen backbone. Results do not depend on it; one plain process ignores it."""

    shard: Literal["auto", "none", "node", "full"] = Field(
        "auto",
        description="none = every GPU holds it whole; node = dealt to the GPUs of each machine; full = dealt to all; "
        "auto = none where it takes at most 40 % of a GPU's memory",
    )
    offload: bool = Field(
        False, description="keep the dealt weights in the machine's memory (works with --nproc 1 too)"
    )
    memory_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="memory of one GPU to plan with; default: what it says, in a dry run an H200's"
    )


class LoraSection(Section):
    """The second stage: a LoRA adapter on the linear layers while the routers train on."""

    rank: PositiveInt = Field(16, description="rank of the adapter's matrices")
    alpha: PositiveInt = Field(32, description="the adapter's output is scaled by alpha / rank")
    dropout: Fraction = Field(0.1, description="dropout on the adapter's input")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        2e-4, description="peak for the adapter; train.learning_rate is the routers'"
    )
    freeze_routers: bool = Field(False, description="train the adapter alone, under the decisions of inference")
    objective: Literal["lm", "distill"] = Field(
        "lm", description="lm = next-token loss; distill = KL divergence to the dense model's predictions"
    )


class EvalSection(Section):
    """What is measured, and under which protocol."""

    tasks: tuple[str, ...] = Field((), description="lm-eval task names; paper = the paper's seven")
    limit: PositiveInt | None = Field(None, description="documents a task; default: all")
    batch_size: PositiveInt | Literal["auto"] = "auto"
    max_length: PositiveInt = Field(2048, description="longest sequence scored, tokens")
    data_root: str | None = Field(
        None, description="folder with data sets under their Hub ids, read instead of the Hub"
    )
    perplexity: tuple[str, ...] = Field(
        ("pydoc-topics",),
        description="texts for token perplexity: wikitext2, pydoc-topics or a file; name@60 = first 60 windows",
    )
    perplexity_window: PositiveInt = Field(2048, description="tokens in one window of the perplexity")
    perplexity_windows: PositiveInt | None = Field(None, description="windows a text; default: all")


class TrackSection(Section):
    """Where a run is recorded."""

    wandb: Literal["auto", "online", "offline", "off"] = Field(
        "auto", description="auto = online if logged in, else offline, else off"
    )
    project: str = "wide"
    run_dir: str | None = Field(None, description="default: runs/<command>-<name>")


class SlurmSection(Section):
    """What `wide sweep --executor slurm` asks of the cluster, for every run alike."""

    partition: str | None = Field(None, description="default: the cluster's")
    account: str | None = Field(None, description="who pays; default: yours")
    time: str | PositiveInt = Field(
        "4:00:00",
        description="minutes, or Slurm's D-HH:MM:SS; a training that is not done by then goes on in a next turn",
    )
    gpus: Count = Field(1, description="GPUs of a run; 0 = CPU only")
    cpus: PositiveInt = Field(4, description="CPU cores of a run")
    mem: str | None = Field(None, description="memory of a run, such as 64G; default: the cluster's")
    extra: dict[str, Any] = Field(
        default_factory=dict, description="further sbatch options by their long names: {qos: low, constraint: h100}"
    )
    setup: tuple[str, ...] = Field((), description="shell lines before each run, such as module load cuda")
    max_jobs: PositiveInt = Field(100, description="most jobs of the sweep in the queue at once, waiting or running")
    notice: PositiveInt = Field(120, description="seconds before the time limit at which a run is asked to save")
    poll: Annotated[float, Field(gt=0)] = Field(10.0, description="seconds between looks at the queue")

    @model_validator(mode="after")
    def _extra_is_extra(self) -> SlurmSection:
        own = {"partition": "partition", "account": "account", "time": "time", "mem": "mem", "cpus-per-task": "cpus"}
        own |= {"gpus-per-node": "gpus", "gpus": "gpus", "array": "max_jobs", "signal": "notice"}
        for name in self.extra:
            plain = name.lstrip("-").replace("_", "-")
            if plain in own:
                raise ValueError(f"{plain} is no extra option of sbatch here: set sweep.slurm.{own[plain]}")
            if plain in ("job-name", "output", "error", "open-mode", "requeue", "no-requeue", "chdir"):
                raise ValueError(f"the sbatch option {plain} belongs to the sweep and cannot be set")
        return self


class SweepSection(Section):
    """A grid of runs around the rest of the recipe; read by `wide sweep` alone."""

    axes: dict[str, Any] = Field(
        default_factory=dict, description="recipe key -> its values: a list, or a range such as 0.1:0.7:0.1"
    )
    stages: tuple[str, ...] = Field(
        ("calibrate", "eval"), description="commands run for each point: calibrate, lora, eval, profile"
    )
    lora: dict[str, Any] = Field(
        default_factory=dict, description="recipe key -> value that the second stage takes instead of the first's"
    )
    executor: Literal["local", "slurm"] = Field("local", description="this machine, or the cluster that it submits to")
    retries: Count = Field(0, description="times that a run which failed is started again")
    slurm: SlurmSection = SlurmSection()


class Recipe(Section):
    """Everything a run depends on."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    routing: RoutingSection = RoutingSection()
    compensation: CompensationSection = CompensationSection()
    budget: BudgetSection = BudgetSection()
    train: TrainSection = TrainSection()
    distributed: DistributedSection = DistributedSection()
    lora: LoraSection = LoraSection()
    eval: EvalSection = EvalSection()
    track: TrackSection = TrackSection()
    sweep: SweepSection = SweepSection()

    @model_validator(mode="before")
    @classmethod
    def _compensation_suits_mode(cls, data: Any) -> Any:
        """Without a word on it, modes that skip whole parts have none: that is how others describe them."""
        if not isinstance(data, dict):
            return data
        routing, section = data.get("routing") or {}, data.get("compensation") or {}
        mode = routing.get("mode", "wide") if isinstance(routing, dict) else getattr(routing, "mode", "wide")
        if mode in ("token", "layer") and isinstance(section, dict):
            return {**data, "compensation": {**NO_COMPENSATION, **section}}
        return data
