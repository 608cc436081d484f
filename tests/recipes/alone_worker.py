"""What somebody without widecli does with an export: `alone_worker.py FOLDER TASK.json OUT`, a process of its own.

Runs the code of the folder's card, scores a task and some texts by lm-eval's own Hugging Face model, stores logits and
masks, and prints one JSON document.
"""

from __future__ import annotations

import importlib.abc
import json
import re
import sys
from pathlib import Path
from typing import Any


class _NotHere(importlib.abc.MetaPathFinder):
    """Also where an installed package would be found."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.split(".")[0] in ("widecli", "wide_kernels"):
            raise ModuleNotFoundError(f"No module named {fullname!r}: it must not be needed here")


def main(folder: str, task: str, out: str) -> None:
    sys.meta_path.insert(0, _NotHere())
    (code,) = re.findall(r"```python\n(.*?)```", Path(folder, "README.md").read_text(encoding="utf-8"), re.DOTALL)
    printed: list[str] = []
    names: dict[str, Any] = {"print": printed.append}
    exec(code.replace("FOLDER", folder), names)
    model = names["model"]

    import torch
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from safetensors.torch import save_file

    said = json.loads(Path(task).read_text(encoding="utf-8"))
    with torch.no_grad():
        logits = model(torch.tensor(said["ids"])).logits
    masks = {f"{layer}.{part}": mask.contiguous() for (layer, part), mask in model.masks().items()}
    save_file({"logits": logits, **masks}, out)
    harness = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", batch_size=2)
    scored = simple_evaluate(
        model=harness,
        tasks=[ConfigurableTask(config=said["config"])],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    requests = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(said["pairs"])]
    found = harness.loglikelihood(requests, disable_tqdm=True)
    document = {"printed": printed, "results": scored["results"], "loglikelihoods": [value for value, _ in found]}
    print(json.dumps(document, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
