"""Writes checkpoints until it is killed, or once under a file size limit: `checkpoint_writer.py FOLDER [BYTES]`."""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from widecli.errors import WideError
from widecli.model import checkpoint
from widecli.model.identity import BackboneIdentity
from widecli.model.plan import RoutingPlan
from widecli.model.router import Router

RECIPE = "a: 1\n" * 20_000  # large enough that a kill finds a write under way


def seeded_routers(seed: int) -> nn.ModuleDict:
    router = Router(256, 16, 16)
    router.reset(torch.Generator().manual_seed(seed))
    return nn.ModuleDict({"0": nn.ModuleDict({"ffn": router})})


def write(directory: Path, step: int) -> None:
    identity = BackboneIdentity("some/model", None, "c0ffee", "abc")
    config = checkpoint.CheckpointConfig(identity, RoutingPlan(1, 16, rank=16), step, "12345678", {})
    checkpoint.save(directory, seeded_routers(step % 2), config, RECIPE)


def main() -> None:
    root = Path(sys.argv[1])
    if len(sys.argv) > 2:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            write(root / "c", 1)
        except WideError as error:
            print("said:", error)
        return
    print("ready", flush=True)
    step = 0
    while True:
        step += 1
        write(root / "checkpoints" / f"step-{step:06d}", step)


if __name__ == "__main__":
    main()
