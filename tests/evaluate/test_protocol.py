from __future__ import annotations

import json
from pathlib import Path

from widecli.evaluate.protocol import PAPER_TASKS, EvalProtocol, expand_tasks
from widecli.recipe.schema import EvalSection


def test_expansion_keeps_order_and_drops_repetitions() -> None:
    assert expand_tasks(["sciq", "paper", "piqa", "sciq"]) == ("sciq", *PAPER_TASKS)
    assert expand_tasks([]) == ()


def test_batch_size_is_no_part_of_the_protocol() -> None:
    assert EvalProtocol.from_section(EvalSection(batch_size=4)) == EvalProtocol.from_section(EvalSection())
    assert EvalProtocol.from_section(EvalSection(limit=4)) != EvalProtocol.from_section(EvalSection())


def test_an_edited_text_file_is_another_protocol(tmp_path: Path) -> None:
    path = tmp_path / "held_out.txt"
    path.write_text("one")
    before = EvalProtocol.from_section(EvalSection(perplexity=(str(path),)))
    path.write_text("two")
    after = EvalProtocol.from_section(EvalSection(perplexity=(str(path),)))
    assert before != after
    assert str(tmp_path) not in json.dumps(before.as_dict())


def test_rows_with_another_text_in_the_same_file_are_another_protocol(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "x", "summary": "y"}\n')
    section = EvalSection(perplexity=(str(path),))
    protocols = [EvalProtocol.from_section(section, field) for field in ("text", "body", "summary")]
    assert len({protocol.perplexity for protocol in protocols}) == 3
    assert EvalProtocol.from_section(section) == protocols[0]


def test_a_moved_data_root_is_the_same_protocol_and_a_changed_one_not(hub_folder: Path) -> None:
    before = EvalProtocol.from_section(EvalSection(data_root=str(hub_folder)))
    moved = hub_folder.rename(hub_folder.parent / "elsewhere")
    assert EvalProtocol.from_section(EvalSection(data_root=str(moved))) == before
    (moved / "allenai/openbookqa/main/test.jsonl").write_text("{}\n")
    assert EvalProtocol.from_section(EvalSection(data_root=str(moved))) != before
