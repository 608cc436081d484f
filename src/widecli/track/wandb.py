"""Mirrors a run to Weights & Biases: never a prompt, never a crash, nothing imported unless it is used.

`track.wandb` decides: `online`, `offline`, `off`, or `auto` = online if logged in, else offline, else (not installed)
off. In `auto` the variables WANDB_MODE and WANDB_DISABLED decide first. W&B's other variables (WANDB_API_KEY,
WANDB_BASE_URL, WANDB_DIR, WANDB_ENTITY, ...) act as its client documents them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import netrc
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from widecli.recipe.schema import TrackSection
from widecli.storage import home, plain, write_json
from widecli.track.run import Run

Mode = Literal["online", "offline", "off"]
_INIT_SECONDS = 30  # an unreachable server must not hold a run for W&B's own 90


class Tracker:
    """What a command logs to; in mode `off` every method does nothing."""

    def __init__(self, mode: Mode, reason: str, warn: Callable[[str], None], client: Any = None) -> None:
        self.mode = mode
        self.reason = reason
        self._warn = warn
        self._client = client

    @property
    def description(self) -> str:
        """One line for people: the mode, why, and where to look."""
        url = getattr(self._client, "url", None) if self.mode == "online" else None
        return f"W&B: {self.mode} ({self.reason}){f' {url}' if url else ''}"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs one step's metrics; a failure of W&B warns once and turns tracking off."""
        self._attempt(lambda: self._client.log(plain(metrics), step=step))

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Stores the run's summary."""
        self._attempt(lambda: self._client.summary.update(plain(summary)))

    def finish(self, exit_code: int = 0) -> None:
        """Ends the W&B run; in mode `online` it waits for the upload."""
        self._attempt(lambda: self._client.finish(exit_code=exit_code))
        self._client = None

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._client is None:
            return
        try:
            action()
        except Exception as error:  # whatever a tracking client does, the run goes on
            self._client = None
            self.mode, self.reason = "off", "failed"
            self._warn(f"W&B failed and is off for the rest of this run: {_first_line(error)}")


def start_wandb(
    section: TrackSection, run: Run, config: Mapping[str, Any], warn: Callable[[str], None] | None = None
) -> Tracker:
    """Starts tracking as `section.wandb` asks, falling back from online to offline to off.

    Args:
        section: mode and project.
        run: its directory holds W&B's files (unless WANDB_DIR says otherwise) and the W&B run id, so that a resumed
            run continues the same W&B run.
        config: the resolved recipe as plain data.
        warn: takes a warning line; default: stderr.
    """
    if warn is None:
        from widecli.cli.console import warn as warn_people

        warn = warn_people
    mode, reason = decide_mode(section.wandb)
    if mode == "off":
        if section.wandb in ("online", "offline"):
            warn(f"W&B is off: {reason}.")
        return Tracker("off", reason, warn)
    if mode == "offline" and section.wandb == "online":
        warn(f"W&B runs offline: {reason}.")
    attempts: tuple[Literal["online", "offline"], ...] = ("online", "offline") if mode == "online" else ("offline",)
    for attempt in attempts:
        try:
            client = _initialise(attempt, section, run, config)
        except Exception as error:
            fallback = "offline" if attempt == "online" else "off"
            reason = f"{attempt} start failed"
            warn(f"W&B could not start {attempt} and is {fallback} now: {_first_line(error)}")
            _forget_failed_start()
            continue
        return Tracker(attempt, reason, warn, client)
    return Tracker("off", reason, warn)


def decide_mode(asked: str) -> tuple[Mode, str]:
    """The mode that a recipe's `track.wandb` comes to here, and why."""
    if asked == "off":
        return "off", "track.wandb=off"
    if asked == "auto":
        from_environment = _mode_from_environment()
        if from_environment == "off":
            return "off", "switched off by the environment"
        if importlib.util.find_spec("wandb") is None:
            return "off", "wandb is not installed"
        if from_environment == "offline":
            return "offline", f"WANDB_MODE={os.environ['WANDB_MODE']}"
    if importlib.util.find_spec("wandb") is None:
        return "off", "wandb is not installed (pip install wandb)"
    if asked == "offline":
        return "offline", "track.wandb=offline"
    if is_logged_in():
        return "online", "logged in"
    return "offline", "not logged in (`wandb login`, or set WANDB_API_KEY)"


def is_logged_in() -> bool:
    """Whether a key for the W&B server is at hand: in the environment, or in netrc, where its client keeps it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(_server_url()).hostname
    named = os.environ.get("NETRC")
    own = home()
    candidates = [own / ".netrc", own / "_netrc"] if own else []
    if named:
        candidates = [Path(named)]
    for path in candidates:
        try:
            entries = netrc.netrc(str(path.expanduser()))
        except (OSError, netrc.NetrcParseError):
            continue
        if host in entries.hosts and entries.hosts[host][2]:
            return True
    return False


def _server_url() -> str:
    """The server that W&B's client will talk to; asked of the client itself, whose default changes with versions."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    try:
        import wandb

        return str(wandb.Settings().base_url)
    except Exception:  # a broken installation shows again, and is reported, when the run starts
        return ""


def _mode_from_environment() -> Mode | None:
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return "off"
    return "offline" if mode in ("offline", "dryrun") else None


def _initialise(mode: Literal["online", "offline"], section: TrackSection, run: Run, config: Mapping[str, Any]) -> Any:
    import wandb

    settings = wandb.Settings(
        console="off",  # the terminal belongs to the command
        silent=True,
        init_timeout=_INIT_SECONDS,
        login_timeout=_INIT_SECONDS,
    )
    with _no_standard_input():
        return wandb.init(
            mode=mode,
            project=os.environ.get("WANDB_PROJECT") or section.project,
            name=run.path.name,
            id=_run_id(run),
            resume="allow" if mode == "online" else None,
            dir=os.environ.get("WANDB_DIR") or str(run.path),
            config=dict(config),
            settings=settings,
        )


@contextlib.contextmanager
def _no_standard_input() -> Iterator[None]:
    """W&B's client asks for a key only at a terminal: while this is open there is none."""
    kept = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = kept


def _forget_failed_start() -> None:
    """A start that failed keeps its run id until the client's background service ends."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()


def _run_id(run: Run) -> str:
    """The W&B id of this run: the one from its first start, so that resuming continues it."""
    path = run.path / "wandb.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        identity = secrets.token_hex(4)
        write_json(path, {"id": identity})
        return identity


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
