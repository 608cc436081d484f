"""What this machine can do: one check a capability, each saying what its absence prevents and how to get it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from widecli.errors import WideError
from widecli.profiling.environment import gpus, package_version, ram_bytes, usable_cores, without_home
from widecli.storage import user_cache

State = Literal["ok", "missing", "limited"]
GIB = 2**30
_HUB_SECONDS = 4.0
_LOW_SPACE_BYTES = 5 * GIB

_REQUIRED = ("transformers", "tokenizers", "datasets", "lm-eval", "peft", "gguf", "safetensors", "pandas")
_OPTIONAL = {
    "matplotlib": ("plots in reports", "pip install 'widecli[plots]'"),
    "submitit": ("sweeps on a cluster's scheduler", "pip install 'widecli[cluster]'"),
}
# Hub ids of the sets behind the paper's seven tasks and WikiText-2, as a data root lays them out.
_DATA_SETS = (
    "allenai/ai2_arc",
    "aps/super_glue",
    "allenai/winogrande",
    "baber/piqa",
    "allenai/openbookqa",
    "Rowan/hellaswag",
    "EleutherAI/wikitext_document_level",
)


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: State
    detail: str
    prevents: str = ""
    """What does not work without it; empty when all is well."""
    get: str = ""
    """How to get it."""
    required: bool = False
    """Whether nothing works without it."""


def checkup(data_root: str | None = None, offline: bool = False) -> list[Check]:
    """Runs every check; none raises, and the Hub's takes a few seconds at most."""
    return [
        *_software(),
        *_devices(),
        _embedded_model(),
        _hub(offline),
        _wandb(),
        *([_data_root(data_root)] if data_root is not None else []),
        *_folders(),
    ]


def _software() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", "ok", version, required=True)
    yield _imported("torch", "everything", required=True)
    for name in _REQUIRED:
        found = package_version(name)
        if found:
            yield Check(name, "ok", found, required=True)
        else:
            yield Check(name, "missing", "not installed", "calibrate and eval", f"pip install {name}", required=True)
    yield _imported("triton", "the GPU kernels; calibrate and eval work without them")
    yield _kernels()
    for name, (prevents, get) in _OPTIONAL.items():
        found = package_version(name)
        if found:
            yield Check(name, "ok", found)
        else:
            yield Check(name, "limited", "not installed (optional)", prevents, get)


def _imported(name: str, prevents: str, *, required: bool = False) -> Check:
    if importlib.util.find_spec(name) is None:
        return Check(name, "missing", "not installed", prevents, f"pip install {name}", required)
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken build shows only when it is imported
        reason = f"installed but broken: {_first_line(error)}"
        return Check(name, "missing", reason, prevents, f"pip install --force-reinstall {name}", required)
    return Check(name, "ok", package_version(name) or "installed", required=required)


def _kernels() -> Check:
    try:
        kernels = importlib.import_module("wide_kernels")
    except Exception as error:
        return Check("wide_kernels", "missing", _first_line(error), "the fast path", "install the whole project again")
    backends = getattr(kernels, "available_backends", None)
    if backends is None:
        return Check("wide_kernels", "limited", "no operators in this version", "the fast path; the rest is unaffected")
    return Check("wide_kernels", "ok", ", ".join(map(str, backends())))


def _devices() -> Iterator[Check]:
    memory = ram_bytes()
    size = f", {memory / GIB:.0f} GiB" if memory else ""
    yield Check("cpu", "ok", f"{usable_cores()} cores{size}")
    try:
        devices = gpus()
    except Exception as error:
        yield Check("gpu", "missing", _first_line(error), "runs at speed", "check the driver with nvidia-smi")
        return
    for index, device in enumerate(devices):
        memory_gib = device["memory_bytes"] / GIB
        detail = f"{device['name']}, {memory_gib:.0f} GiB, compute capability {device['capability']}"
        yield Check(f"gpu {index}", "ok", detail)
    if not devices:
        yield Check(
            "gpu",
            "missing",
            "no CUDA device that PyTorch can use",
            "large models and speed; small models run on the CPU",
            "a CUDA build of PyTorch and an NVIDIA driver",
        )


def _embedded_model() -> Check:
    try:
        from widecli.model.backbone import GET_EMBEDDED, embedded_file

        file = embedded_file()
    except Exception as error:
        return Check("embedded model", "missing", _first_line(error), "wide demo", "repair the installation")
    if file is None:
        return Check("embedded model", "missing", "not installed", "wide demo without a Hub", GET_EMBEDDED)
    return Check("embedded model", "ok", f"smollm2-135m, {file.stat().st_size / 1e6:.0f} MB")


def _hub(offline: bool) -> Check:
    prevents = "models and data sets from the Hub; local folders, the embedded model and stdlib text work"
    if offline or _hub_is_off():
        return Check("hub", "limited", "offline as asked", prevents, "unset HF_HUB_OFFLINE")
    try:
        from huggingface_hub import constants, get_token

        endpoint, token = constants.ENDPOINT, get_token()
    except Exception as error:
        return Check("hub", "missing", _first_line(error), prevents, "pip install huggingface_hub")
    problem = _unreachable(endpoint)
    if problem is not None:
        return Check(
            "hub", "missing", f"not reachable: {problem}", prevents, "network access, or HF_ENDPOINT for a mirror"
        )
    if token is None:
        return Check("hub", "limited", "reachable, not logged in", "gated models such as Llama", "hf auth login")
    return Check("hub", "ok", "reachable, logged in")


def _hub_is_off() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_is_reachable() -> bool:
    """Whether the Hub may be asked and answers within seconds."""
    return not _hub_is_off() and _hub(offline=False).state != "missing"


def _unreachable(url: str) -> str | None:
    """Why `url` gives no answer, or None when it does; in a thread, as resolving a name can outlast any time-out."""
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_HUB_SECONDS):
                outcome.append(None)
        except urllib.error.HTTPError as error:
            outcome.append(None if error.code in (401, 405, 429) else f"HTTP {error.code}")
        except Exception as error:
            outcome.append(_first_line(getattr(error, "reason", None) or error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS + 1)
    return outcome[0] if outcome else f"no answer in {_HUB_SECONDS:.0f} s"


def _wandb() -> Check:
    try:
        from widecli.track.wandb import decide_mode

        mode, reason = decide_mode("auto")
    except Exception as error:
        return Check("w&b", "limited", _first_line(error), "tracking there; runs are recorded locally")
    if mode == "online":
        return Check("w&b", "ok", f"online: {reason}")
    return Check(
        "w&b", "limited", f"{mode}: {reason}", "tracking online; runs are recorded locally all the same", "wandb login"
    )


def _data_root(name: str) -> Check:
    root = Path(name).expanduser()
    prevents = "eval --data-root on the tasks that read them"
    if not root.is_dir():
        return Check(
            "data root",
            "missing",
            f"{without_home(name)} is not a folder",
            prevents,
            "name the folder above the owners",
        )
    missing = [data_set for data_set in _DATA_SETS if not (root / data_set).is_dir()]
    if missing:
        state: State = "missing" if len(missing) == len(_DATA_SETS) else "limited"
        return Check("data root", state, f"lacks {', '.join(missing)}", prevents, "lay them out under their Hub ids")
    return Check("data root", "ok", f"{without_home(name)} has all {len(_DATA_SETS)} sets")


def _folders() -> Iterator[Check]:
    try:
        cache = user_cache()
    except WideError as error:
        yield Check("token cache", "missing", str(error), "calibrate and eval", "XDG_CACHE_HOME")
        return
    hub_cache = Path(os.environ.get("HF_HOME") or cache.parent / "huggingface")
    for name, folder in (("hub cache", hub_cache), ("token cache", cache), ("runs", Path.cwd() / "runs")):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        detail = f"{without_home(str(folder)) or '.'}, {free / GIB:.0f} GiB free"
        if not os.access(existing, os.W_OK):
            yield Check(name, "missing", f"{detail}, not writable", "everything that writes there", "permissions")
        elif free < _LOW_SPACE_BYTES:
            yield Check(name, "limited", detail, "large models, caches or checkpoints", "free some space")
        else:
            yield Check(name, "ok", detail)


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
