"""The processes that work on one run together, as torchrun starts them; a process alone is the first and only one.

`current()` is what code asks: its methods do nothing much when there is one process. All of them are collective: every
rank calls them, in the same order.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from widecli.errors import UsageError, WideError

if TYPE_CHECKING:
    from torch import Tensor

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Long: the others wait while one prepares text. A rank that dies is noticed by whoever started it, not by this.
_PATIENCE_S = 4 * 3600
_VISIBLE_AFTER_S = 5.0  # NFS shows a new file of another machine after its attribute cache has expired
_LOST_CONTACT = (
    "gloo/transport",
    "nccl error",
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
)


def place() -> tuple[int, int, int] | None:
    """(rank, local rank, number of ranks) by the environment; None for a process alone.

    Raises UsageError when `WORLD_SIZE` is set and something that belongs to it is not.
    """
    if "WORLD_SIZE" not in os.environ:
        return None
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but {' and '.join(missing)} not: start with torchrun or "
            f"--nproc, or unset it for one process"
        )
    named = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    try:
        rank, local_rank, size = (int(os.environ[name]) for name in named)
    except ValueError:
        rank, local_rank, size = -1, -1, 0
    if not (0 <= rank < size and local_rank >= 0):
        found = ", ".join(f"{name}={os.environ[name]}" for name in named)
        raise UsageError(f"{found} do not name a process of a group: start with torchrun or --nproc")
    return rank, local_rank, size


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes, logs and prints."""
        return self.rank == 0

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """Every `size`-th of the items, from this rank's on."""
        return items[self.rank :: self.size]

    def total(self, values: Tensor) -> Tensor:
        """Sums over the ranks, a new tensor on the same device, without gradient."""
        if self.size == 1:
            return values
        import torch.distributed as dist

        summed = values.detach().clone()
        with _lost_contact_named():
            dist.all_reduce(summed)
        return summed

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank. Waits for all of them, but for no device."""
        if self.size == 1:
            return flag
        import torch

        return bool(self.total(torch.tensor([int(flag)])))

    def wait(self) -> None:
        """Until every rank is here."""
        self.any(False)

    def gather(self, value: Any) -> list[Any]:
        """Plain data of every rank, by rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with _lost_contact_named():
            dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """The first rank's plain data."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        with _lost_contact_named():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by the first rank's, in place: what every rank computed may differ in the last bit."""
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        with torch.no_grad(), _lost_contact_named():
            for tensor in tensors:
                # gloo does not send booleans
                dist.broadcast(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor.detach(), src=0)

    @contextmanager
    def one_a_machine_first(self) -> Iterator[None]:
        """The block runs on the first rank of each machine, then on the others: they find its files and caches."""
        if self.local_rank:
            self.wait()
        yield
        if not self.local_rank:
            self.wait()

    def refuse_differences(self, facts: Mapping[str, Any]) -> None:
        """Raise UsageError, on every rank, naming the first fact that is not the same everywhere."""
        everyone = self.gather((socket.gethostname(), dict(facts)))
        for rank, (host, theirs) in enumerate(everyone):
            ours = everyone[0][1]
            for name in dict.fromkeys([*ours, *theirs]):
                if ours.get(name) != theirs.get(name):
                    raise UsageError(
                        f"the ranks do not run the same: {name} is {theirs.get(name)} on rank {rank} ({host}) and "
                        f"{ours.get(name)} on rank 0; start all of them with the same command, recipe and code"
                    )

    def refuse_private_folder(self, folder: Path) -> None:
        """Raise UsageError, on every rank, when a folder that the first one has is not seen by all."""
        if self.size == 1:
            return
        mark = folder / f".seen-by-all-{self.from_first(uuid.uuid4().hex)}"
        if self.is_first:
            mark.touch()
        self.wait()
        deadline = time.monotonic() + _VISIBLE_AFTER_S
        while not mark.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                os.listdir(folder)  # noqa: PTH208 - makes NFS look again
            time.sleep(0.1)
        blind = [
            f"{rank} ({host})" for rank, (seen, host) in enumerate(self.gather((mark.exists(), _host()))) if not seen
        ]
        if self.is_first:
            mark.unlink(missing_ok=True)
        if blind:
            raise UsageError(
                f"{folder} of rank 0 ({self.from_first(_host())}) is not seen by rank {', '.join(blind)}: name a "
                f"folder on a disk that all machines share, with --run-dir"
            )


ALONE = Ranks()
_joined: list[Ranks] = []


def current() -> Ranks:
    """The group this process has joined, else itself alone."""
    return _joined[-1] if _joined else ALONE


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the group that the environment names for the block: NCCL between GPUs, gloo for what lies on the CPU."""
    found = place()
    if found is None or _joined:
        yield current()
        return
    import datetime

    import torch
    import torch.distributed as dist

    rank, local_rank, size = found
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        if local_rank >= (there := torch.cuda.device_count()):
            raise UsageError(
                f"LOCAL_RANK={local_rank} has no GPU of its own ({there} visible): start {there} processes a machine"
            )
        torch.cuda.set_device(local_rank)
    with _lost_contact_named():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=_PATIENCE_S)
        )
    _joined.append(Ranks(rank, local_rank, size))
    try:
        yield _joined[-1]
    except BaseException as error:
        # leaving in order would wait for ranks that may be gone
        if getattr(error, "exit_code", None) == 75:
            dist.destroy_process_group()
        raise
    else:
        dist.destroy_process_group()
    finally:
        _joined.pop()


class LostContactError(WideError):
    """Another rank is gone; its own error is the one to tell."""


def is_lost_contact(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, LostContactError):
        return True
    together = "WORLD_SIZE" in os.environ
    return together and isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _LOST_CONTACT)


@contextmanager
def _lost_contact_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_lost_contact(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise LostContactError(f"lost contact with the other ranks ({reason}); --resume continues") from error


def _host() -> str:
    return socket.gethostname()
