"""Text from a data set on the Hugging Face Hub, streamed: only what is read is fetched."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from widecli.data.file_formats import fields_named
from widecli.data.sources import encodable
from widecli.errors import UsageError, WideError
from widecli.storage import user_cache, write_json

_TIMEOUT_S = 10
_SHUFFLE_DOCUMENTS = 2048
# Where the Hub keeps its own conversion of data sets that consist of a loading script, which `datasets` no longer runs.
_CONVERTED = "refs/convert/parquet"


class HubDataset:
    """One split of a Hub data set, shuffled through a buffer.

    The revision is looked up once and remembered, so that prepared tokens are found again without a network.
    """

    def __init__(
        self,
        name: str,
        *,
        subset: str | None,
        split: str,
        text_field: str,
        offline: bool = False,
        cache_dir: Path | None = None,
    ) -> None:
        self.name = name
        self.subset = subset
        self.split = split
        self.text_field = text_field
        self.offline = offline
        root = cache_dir if cache_dir is not None else user_cache()
        self._remembered = root / "hub" / f"{name.replace('/', '--')}.json"
        self._revision: str | None = None

    def identity(self) -> dict[str, str | int]:
        """Id, subset, split, field and revision (a commit). Asks the Hub unless offline."""
        return {
            "kind": "hub",
            "id": self.name,
            "subset": self.subset or "",
            "split": self.split,
            "text_field": self.text_field,
            "revision": self.revision(),
            "shuffle_documents": _SHUFFLE_DOCUMENTS,
        }

    def revision(self) -> str:
        """The commit to read: the newest; without a network the one seen last.

        Raises UsageError if there is no such data set, WideError if the Hub cannot be reached and never was.
        """
        if self._revision is None:
            self._revision = self._seen_last() if self._is_offline() else self._ask()
        return self._revision or "unknown"

    def documents(self) -> Iterator[str]:
        """The documents, as they arrive. Raises UsageError (no such split or field), WideError (network)."""
        rows = self._open()
        number = 0
        iterator = iter(rows)
        while True:
            try:
                row = next(iterator, None)
            except Exception as error:
                raise WideError(
                    f"Reading {self.name} from the Hub broke off after {number} documents ({_reason(error)}): "
                    "try again, or name local files in data.source"
                ) from error
            if row is None:
                return
            number += 1
            text = row.get(self.text_field)
            if text is None and self.text_field not in row:
                raise UsageError(
                    f"{self.name} has no field {self.text_field!r} (data.text_field); {fields_named(list(row))}"
                )
            if text is not None and not isinstance(text, str):
                raise UsageError(
                    f"{self.name}: field {self.text_field!r} (data.text_field) holds {type(text).__name__}, not text; "
                    f"{fields_named([key for key, value in row.items() if isinstance(value, str)])}"
                )
            if text and text.strip():
                yield encodable(text)

    def _is_offline(self) -> bool:
        from huggingface_hub import constants

        return self.offline or bool(constants.HF_HUB_OFFLINE)

    def _seen_last(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self._remembered.read_text(encoding="utf-8"))["revision"])
        return ""

    def _ask(self) -> str:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

        try:
            sha = HfApi().dataset_info(self.name, timeout=_TIMEOUT_S).sha or ""
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise UsageError(
                f"There is no data set {self.name!r} on the Hub that this account can read, and no such local file: "
                "check data.source; for a gated or private one set HF_TOKEN"
            ) from error
        except Exception as error:  # the client's transport errors have no common base
            seen = self._seen_last()
            if seen:
                return seen
            raise WideError(
                f"The Hub cannot be reached for data.source={self.name!r} ({_reason(error)}): "
                "name local files, stdlib or self, or try again"
            ) from error
        with contextlib.suppress(OSError):  # remembering is a convenience
            write_json(self._remembered, {"revision": sha})
        return sha

    def _open(self) -> Any:
        revision = self.revision()
        pinned = None if revision == "unknown" else revision
        if self._is_offline():
            return self._load_cached(pinned)
        try:
            try:
                rows = self._load(pinned, streaming=True)
            except RuntimeError as error:
                if "script" not in str(error):
                    raise
                rows = self._load(_CONVERTED, streaming=True)
            return rows.shuffle(seed=0, buffer_size=_SHUFFLE_DOCUMENTS)
        except ValueError as error:  # a subset or split that isn't there: the message lists those that are
            raise UsageError(
                f"{self.name} cannot be read with data.subset={self.subset} data.split={self.split}: {_reason(error)}"
            ) from error
        except Exception as error:
            raise WideError(
                f"{self.name} cannot be read from the Hub ({_reason(error)}): try again, or name local files"
            ) from error

    def _load_cached(self, revision: str | None) -> Any:
        """What an earlier `load_dataset` left in the Hub's own cache."""
        try:
            with _network_off():
                return self._load(revision, streaming=False).shuffle(seed=0)
        except Exception as error:
            raise UsageError(
                f"data.source={self.name!r} is not on this machine and the network is off (--offline or "
                "HF_HUB_OFFLINE): prepare it once with a network, or name local files, stdlib or self"
            ) from error

    def _load(self, revision: str | None, *, streaming: bool) -> Any:
        import datasets

        options: dict[str, Any] = {}
        if not streaming:
            options["download_config"] = datasets.DownloadConfig(local_files_only=True)
        return datasets.load_dataset(
            self.name, self.subset, split=self.split, revision=revision, streaming=streaming, **options
        )


@contextlib.contextmanager
def _network_off() -> Iterator[None]:
    """Both libraries read HF_HUB_OFFLINE at import only; without this they would retry for half a minute."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _reason(error: BaseException) -> str:
    """The first sentence of an error, without its stack of causes."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
