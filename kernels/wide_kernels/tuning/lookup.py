"""Which configuration a launch takes: the benchmark's, else the tuner's of this machine, else the table's.

What none of them names keeps the value that the launcher computed from the sizes.
"""

from __future__ import annotations

import torch

from wide_kernels.tuning.disk import read_tuned
from wide_kernels.tuning.table import TABLES, Entries, Key, forced

_kept: dict[tuple[int, Key], Entries] = {}


def token_bucket(rows: int) -> int:
    """The power of two that holds `rows`: token counts enter keys only so."""
    return 1 << max(rows - 1, 0).bit_length()


def tuned(kernel: str, rows: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Entries of the configuration of `kernel` on the current GPU, for `rows` tokens and groups of `width` channels."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = Key(kernel, token_bucket(rows), width, str(dtype).removeprefix("torch."))
    found = _kept.get((device, key))
    if found is None:
        found = _kept[device, key] = _on_device(device, key)
    return {**found, **forced(kernel)}


def overlapped(config: dict[str, int]) -> dict[str, int]:
    """With PDL set, also the launch option: the kernel starts while the one before it ends, and waits for it there."""
    return {**config, "launch_pdl": 1} if config["PDL"] else config


def forget() -> None:
    """Look everything up again, after the tuner has written."""
    _kept.clear()
    read_tuned.cache_clear()


def _on_device(device: int, key: Key) -> Entries:
    """The table of the GPU's family, then what the tuner found on this GPU."""
    if device < 0:
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    table = TABLES.get(f"sm_{major}{minor}", {})
    measured = read_tuned(torch.cuda.get_device_name(device))
    return {**table.get(key, {}), **measured.get(key, {})}
