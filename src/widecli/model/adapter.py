"""A LoRA adapter on the backbone's linear layers: PEFT's own modules, files and merging.

Attach it before the routers: the mask that a router's decision puts on the input of `o_proj` and `down_proj` then
reaches the base weight and the adapter alike, so a skipped group adds nothing on either path and merging changes no
decision. Adapter weights are fp32 whatever the backbone's dtype (bf16 would round small updates away).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from widecli.errors import UsageError
from widecli.model.channel_order import in_present_order, in_stored_order
from widecli.model.families import family_of
from widecli.model.finite import first_not_finite

if TYPE_CHECKING:
    from widecli.recipe.schema import LoraSection

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class Adapter:
    """The adapter that a backbone carries. `Adapter.new` starts one, `Adapter.load` reads one."""

    def __init__(self, model: Any, config: Any) -> None:
        from peft import get_peft_model

        family_of(model)
        config.base_model_name_or_path = None  # PEFT warns about a name that it would replace
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is going away
            self._peft: Any = get_peft_model(model, config)
        self._base: Any = model
        self._set_dropout(False)  # new modules start in training mode, even inside a model that is not

    @classmethod
    def new(cls, model: nn.Module, section: LoraSection, seed: int) -> Adapter:
        """Wrap every linear layer of every decoder layer; the model computes what it did until a step is taken."""
        from peft import LoraConfig

        config = LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            lora_dropout=section.dropout,
            target_modules=list(family_of(model).linears),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU, from the global generator
            torch.manual_seed(seed)
            return cls(model, config)

    @classmethod
    def load(cls, model: nn.Module, folder: Path) -> Adapter:
        """Read an adapter folder, exactly. Raises UsageError naming files or tensors that are missing or do not fit."""
        from peft import LoraConfig, PeftConfig

        refuse_incomplete(folder)
        try:
            config = PeftConfig.from_pretrained(str(folder))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{folder / CONFIG} cannot be read ({error}); take another checkpoint") from error
        if not isinstance(config, LoraConfig):
            raise UsageError(f"{folder} holds an adapter of type {config.peft_type}; only LoRA is supported")
        try:
            adapter = cls(model, config)
        except ValueError as error:  # none of the target layers is there
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{folder} does not fit the model: {reason}") from error
        adapter.restore(folder)
        return adapter

    def restore(self, folder: Path) -> None:
        """Take over the weights of an adapter folder. Raises UsageError naming tensors that are missing or odd."""
        from peft import set_peft_model_state_dict
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        refuse_incomplete(folder)
        try:
            tensors = load_file(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{folder / WEIGHTS} cannot be read ({error}); take another checkpoint") from error
        if problems := _problems(self.state(), tensors):
            raise UsageError(f"{folder} does not fit the model and its {CONFIG}: {'; '.join(problems)}")
        if odd := first_not_finite(tensors.items()):
            raise UsageError(f"{folder / WEIGHTS} is not finite: {odd} holds NaN or infinity; take another checkpoint")
        set_peft_model_state_dict(self._peft, in_present_order(self._base, tensors))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The adapter's matrices by their names in the backbone, `...q_proj.lora_A.default.weight`."""
        return {name: p for name, p in self._base.named_parameters() if ".lora_" in name}

    def state(self) -> dict[str, Tensor]:
        """What `adapter_model.safetensors` holds, under PEFT's keys: channels as the base model stores them.

        So PEFT alone loads it onto that model, whatever order the routed one is in.
        """
        from peft import get_peft_model_state_dict

        state: dict[str, Tensor] = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return in_stored_order(self._base, state)

    def facts(self) -> dict[str, Any]:
        """Rank, alpha, dropout, the adapted layers' names and the number of parameters, as plain data."""
        config = self._peft.peft_config["default"]
        return {
            "rank": config.r,
            "alpha": config.lora_alpha,
            "dropout": config.lora_dropout,
            "targets": sorted(config.target_modules),
            "parameters": sum(p.numel() for p in self.named_parameters().values()),
        }

    def save(self, folder: Path, base_name: str) -> None:
        """Write a folder that `PeftModel.from_pretrained(base, folder)` loads; `base_name` is where the base is from.

        PEFT's own `save_pretrained` would add a card about a folder in our cache.
        """
        import copy

        from safetensors.torch import save_file

        folder.mkdir()
        config = copy.copy(self._peft.peft_config["default"])
        config.inference_mode = True  # loaded to be used; training sets it otherwise
        config.base_model_name_or_path = base_name
        config.target_modules = sorted(config.target_modules)  # a set: its order would differ from file to file
        config.save_pretrained(str(folder))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state().items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The bare backbone inside the block."""
        self._peft.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self._peft.base_model.enable_adapter_layers()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Dropout on, and inputs left in the backbone's dtype for `autocast`, inside the block."""
        from peft.helpers import disable_input_dtype_casting

        self._set_dropout(True)
        try:
            with disable_input_dtype_casting(self._base):
                yield
        finally:
            self._set_dropout(False)

    def autocast(self) -> torch.autocast:
        """Compute in the backbone's dtype while the weights stay fp32; a training pass runs inside it."""
        dtype, device = self._base.dtype, self._base.device.type
        return torch.autocast(device, dtype=dtype if dtype != torch.float32 else None, enabled=dtype != torch.float32)

    def merge(self) -> None:
        """Fold the adapter into the backbone's weights; the backbone is a plain model again.

        Detach the routers first and attach them anew: the layers they hang on are replaced.
        """
        self._peft.merge_and_unload()

    def unload(self) -> None:
        """Take the adapter off: the backbone is the dense model again. Detach the routers first, as for `merge`."""
        self._peft.unload()

    def _set_dropout(self, on: bool) -> None:
        from peft.tuners.lora import LoraLayer

        for module in self._base.modules():
            if isinstance(module, LoraLayer):
                module.lora_dropout.train(on)


def refuse_incomplete(folder: Path) -> None:
    """Raise UsageError naming the files that an adapter folder lacks."""
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise UsageError(f"{folder} lacks {' and '.join(missing)}; take another checkpoint of the run")


def _problems(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """What keeps tensors from fitting, a few names each."""
    problems = []
    for word, names in (("missing", expected.keys() - found.keys()), ("unexpected", found.keys() - expected.keys())):
        if names:
            shown = ", ".join(sorted(names)[:3])
            problems.append(f"{word} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
    for name in sorted(expected.keys() & found.keys()):
        if expected[name].shape != found[name].shape:
            shapes = f"{tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
            problems.append(f"{name} has shape {shapes}")
            break
    return problems
