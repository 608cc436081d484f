"""This machine as an executor: one process a GPU (or several), or on its CPU where there is none."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from widecli.sweep.jobs import Job
from widecli.sweep.logs import last_error, opened_log

_PR_SET_PDEATHSIG = 1
PROGRAM = (sys.executable, "-m", "widecli")


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES would name them; makes no CUDA context."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


class LocalExecutor:
    """Starts commands as child processes, each of which sees one GPU, or the CPU when there is none."""

    outlives = False

    def __init__(
        self,
        gpus: Sequence[str],
        jobs_per_gpu: int = 1,
        environment: Mapping[str, str] | None = None,
        keep_open: Sequence[int] = (),
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """Args.

        gpus: names for CUDA_VISIBLE_DEVICES; empty = the CPU, whose cores its jobs share.
        environment: variables set for the children besides this process's own.
        keep_open: file descriptors that children inherit, which a lock lives in.
        """
        devices: Sequence[str | None] = gpus or (None,)
        self._devices = [device for _ in range(jobs_per_gpu) for device in devices]
        self._free = list(range(len(self._devices)))
        self._environment = dict(environment or {})
        self._keep_open = tuple(keep_open)
        self._program = tuple(program)
        self._ends_with_us = _ends_with_parent()
        self.slots = len(self._devices)

    def has_room(self) -> bool:
        """Whether a device is free."""
        return bool(self._free)

    def start(self, job: Job, arguments: Sequence[str]) -> _Child:
        """Start `wide ARGUMENTS` on the next free device."""
        assert job.log is not None
        slot = self._free.pop(0)
        gpu = self._devices[slot]
        environment = {**os.environ, **self._environment}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            with opened_log(job.log, arguments) as output:
                begins = output.tell()
                process = self._spawn(arguments, environment, output)
        except BaseException:
            self._release(slot)
            raise
        where = "CPU" if gpu is None else f"GPU {gpu}"
        return _Child(process, where, job.log, begins, lambda: self._release(slot))

    def submit(self) -> None:
        """Nothing is left to do: `start` has started it."""

    def _spawn(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal reaches the sweep alone, which asks the children to save
            pass_fds=self._keep_open,
            preexec_fn=self._ends_with_us,
        )

    def _release(self, slot: int) -> None:
        self._free.append(slot)
        self._free.sort()


class _Child:
    def __init__(
        self, process: subprocess.Popen[bytes], where: str, log: Path, begins: int, ended: Callable[[], None]
    ) -> None:
        self.where = where
        self.since = time.monotonic()
        self._process = process
        self._log, self._begins = log, begins
        self._ended: Callable[[], None] | None = ended

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._ended:
            self._ended()
            self._ended = None
        return code

    def error(self) -> str:
        return last_error(self._log, self._begins, self._process.returncode)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()


def _ends_with_parent() -> Callable[[], None] | None:
    """What a child calls so that it is asked to save and end when the sweep itself is killed; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    control = ctypes.CDLL(None).prctl  # looked up here: after a fork a child should do as little as it can

    def ask() -> None:
        control(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask
