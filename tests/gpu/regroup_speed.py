"""How long clustering the channels of a large FFN takes, and how much of a planted structure it finds.

`python tests/gpu/regroup_speed.py --layers 32 --channels 14336 --width 128 --tokens 4096` prints seconds a layer, the
share of planted pairs (two channels of one planted group) that share a group in the result, and the energy captured.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from widecli.model.clustering import captured_energy, cluster_channels


def planted_energy(tokens: int, channels: int, width: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Energy fp16 [T, C] of channels that come and go in scattered groups, and each channel's group [C]."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = channels // width
    runs = torch.rand(tokens, groups, generator=generator, device=device) < 0.4
    strength = 0.1 + runs * torch.rand(tokens, groups, generator=generator, device=device)
    group = torch.randperm(channels, generator=generator, device=device) // width
    noise = torch.randn(tokens, channels, generator=generator, device=device).square()
    energy = strength[:, group] * noise
    return (energy / energy.sum(1, keepdim=True)).half(), group


def pairs_found(order: Tensor, group: Tensor, width: int) -> float:
    """Share of the pairs of channels of one planted group that share a group of `order`."""
    groups = len(group) // width
    found = torch.zeros(groups, groups, device=group.device)
    found.index_put_((torch.arange(len(group), device=group.device) // width, group[order]), found.new_ones(()), True)
    return float((found * (found - 1)).sum() / (groups * width * (width - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--channels", type=int, default=14336)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds = []
    for layer in range(arguments.layers):
        energy, group = planted_energy(arguments.tokens, arguments.channels, arguments.width, layer, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        order = cluster_channels(energy, arguments.width).cpu()  # waits for the device
        seconds.append(time.perf_counter() - start)
        order = order.to(device)
        print(
            f"layer {layer}: {seconds[-1]:.2f} s, {pairs_found(order, group, arguments.width):.1%} of planted pairs, "
            f"captured {captured_energy(energy, order, arguments.width):.4f} (planted order "
            f"{captured_energy(energy, group.argsort(stable=True), arguments.width):.4f})",
            flush=True,
        )
    print(f"{sum(seconds):.1f} s for {arguments.layers} layers; the first {seconds[0]:.2f} s", end="")
    if device.type == "cuda":
        print(f"; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", end="")
    print()


if __name__ == "__main__":
    main()
