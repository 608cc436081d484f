"""The machine and software behind a measurement, without anything that names its owner."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from widecli.storage import home

_PACKAGES = ("torch", "triton", "transformers", "peft", "lm-eval", "datasets", "tokenizers", "numpy")


def environment() -> dict[str, Any]:
    """What a reader needs to judge or repeat a figure: date, command line, hardware, versions, git revision."""
    from widecli import __version__

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": [without_home(argument) for argument in _command_line()],
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release().split('-', 1)[0]}",
        "cpu": _cpu_name(),
        "cpu_cores": usable_cores(),
        "ram_bytes": ram_bytes(),
        "gpus": gpus(),
        "gpu_driver": _gpu_driver(),
        "versions": {"wide": __version__, **{name: package_version(name) for name in _PACKAGES}},
        "cuda": _cuda_version(),
        "git": git_revision(),
        "code": code_hash(),
    }


def package_version(name: str) -> str | None:
    """The installed version of a distribution, read without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ram_bytes() -> int | None:
    """Physical memory in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes and compute capability of every visible CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append({"name": properties.name, "memory_bytes": properties.total_memory, "capability": capability})
    return devices


def git_revision() -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it, when this code runs from a clone of the project."""
    root = Path(__file__).resolve().parents[3]
    if not ((root / ".git").exists() and (root / "src" / "widecli").is_dir()):
        return None
    revision = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if revision is None:
        return None
    status = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": bool(status) if status is not None else None}


@cache
def code_hash() -> str:
    """Of all Python files of both packages as they are now: what ran, whatever a checkout has on top of its commit."""
    digest = hashlib.sha256()
    for package in ("widecli", "wide_kernels"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def without_home(text: str) -> str:
    """A path in `text` relative to the working directory, or with `~` for the home directory."""
    for folder, short in ((str(Path.cwd()), ""), (str(home() or ""), "~/")):
        if len(folder) > 1:  # not for "/", the home of some containers
            text = text.replace(f"{folder}/", short)
            if text == folder or text.endswith(f"={folder}"):
                text = text.removesuffix(folder) + (short.rstrip("/") or ".")
    return text


def _command_line() -> list[str]:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return ["wide" if program == "__main__.py" else program, *sys.argv[1:]]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_driver() -> str | None:
    out = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return out.splitlines()[0].strip() if out else None


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
