"""One of two ranks: runs whole commands with the other in one start, and stores how each ended.

python rank_worker.py FOLDER, with the variables of torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from whole_commands import BATCH, QUESTIONS, STRONG, invoke

from widecli import ranks
from widecli.errors import UsageError
from widecli.train import speed


def refusal(call: Any, *arguments: Any) -> str | None:
    try:
        call(*arguments)
    except UsageError as error:
        return str(error)
    return None


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    with ranks.joined() as group:

        def run(name: str, *arguments: object) -> None:
            done = invoke(*arguments, "--json")
            found[name] = {"code": done.code, "out": done.out, "err": done.err}

        calibrate = ("calibrate", "tiny.yaml", *BATCH)
        run("replicated", *calibrate, "--run-dir", "replicated")
        run(
            "sharded", *calibrate, "distributed.shard=full", "train.activation_checkpointing=true", "--run-dir", "shard"
        )
        padded = (*calibrate, "data.packing=sample", "train.micro_batch_size=1")
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if on two machines: each holds all parts
        run("padded", *padded, "distributed.offload=true", "--run-dir", "padded")
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        lora = ("lora", "one", "lora.dropout=0", "train.steps=4", *STRONG)
        run("lora", *lora, "distributed.shard=full", "lora.objective=distill", "--run-dir", "lora")
        run("eval", "eval", "one", "--no-dense", *QUESTIONS, "--run-dir", "eval-two")
        run("few windows", "eval", "one", "--no-dense", "eval.perplexity_windows=1", "--run-dir", "eval-few")
        sys.argv = ["speed.py", "tiny.yaml", *BATCH, "--random", "--layout", "dealt", "--out", "speed.json"]
        speed.main()

        # one rank's own idea of things
        found["differences"] = refusal(group.refuse_differences, {"train.seed": 3, "train.steps": group.rank})
        found["same"] = refusal(group.refuse_differences, {"train.seed": 3})
        own = folder / f"disk-of-{group.rank}"
        own.mkdir()
        ranks._VISIBLE_AFTER_S = 0.3
        found["private"] = refusal(group.refuse_private_folder, own)
        found["shared"] = refusal(group.refuse_private_folder, folder)
        run("other recipe", *calibrate, f"train.learning_rate=0.0{group.rank + 1}", "--run-dir", "never")
    (folder / f"rank-{group.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
