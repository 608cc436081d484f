"""Record what a checkpoint decides on text: `python -m widecli.evaluate.masks CKPT --text wikitext2 --out FILE`.

The file holds bool [tokens, groups] by "<layer>.<part>", for `python -m wide_kernels.bench --masks FILE`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from widecli.errors import UsageError, WideError

if TYPE_CHECKING:
    from torch import Tensor

    from widecli.model.routed import RoutedModel


def record_masks(routed: RoutedModel, ids: Tensor, window: int) -> dict[str, Tensor]:
    """The decisions of every layer and part on `ids` [tokens], read in windows: bool [tokens, groups] on the CPU."""
    import torch

    device = next(routed.decoder.parameters()).device
    with torch.no_grad(), routed.tracing(keep_masks=True) as trace:
        for part in torch.split(ids, window):
            routed.backbone(input_ids=part[None].to(device), use_cache=False, logits_to_keep=1)
    assert trace.masks is not None
    masks = {f"{layer}.{part}": torch.cat(found) for (layer, part), found in sorted(trace.masks.items())}
    return {name: mask.cpu().contiguous() for name, mask in masks.items()}


def write_masks(
    run: Path,
    text: str,
    out: Path,
    *,
    tokens: int = 16384,
    window: int = 2048,
    model: str | None = None,
    data_root: str | None = None,
) -> dict[str, Tensor]:
    """Record the masks of a checkpoint (or of the newest one of a run) on the first tokens of a text, into `out`.

    `model`: where the backbone lies now, if not where the recipe says. Raises UsageError.
    """
    import torch
    from safetensors.torch import save

    from widecli.data.packing import token_ids
    from widecli.evaluate.texts import check_texts, perplexity_text
    from widecli.model import checkpoint
    from widecli.model.backbone import load_backbone
    from widecli.model.vocabulary import refuse_unknown
    from widecli.storage import write_bytes

    if out.exists():
        raise UsageError(f"{out} exists; name another file")
    check_texts([text])
    folder = checkpoint.resolve(run)
    section = checkpoint.section_of(folder)
    backbone = load_backbone(section.model_copy(update={"name": model}) if model else section)
    backbone.refuse_beyond_positions({"--window": window})
    label, pieces = perplexity_text(text, data_root, offline=False)
    encoded = token_ids(backbone.tokenizer, pieces, tokens)
    if len(encoded) < tokens:
        raise UsageError(f"{text} has {len(encoded)} tokens, fewer than the {tokens} asked for; lower --tokens")
    refuse_unknown(f"the text {text}", encoded[:tokens], backbone.model)
    routed, _ = checkpoint.attach(folder, backbone)
    masks = record_masks(routed, torch.tensor(encoded[:tokens]), window)
    routed.detach()
    write_bytes(out, save(masks, metadata={"model": backbone.identity.id, "text": label, "window": str(window)}))
    return masks


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the checkpoint, the model or the text won't do."""
    parser = argparse.ArgumentParser(prog="python -m widecli.evaluate.masks", description=(__doc__ or "").split(":")[0])
    parser.add_argument("run", type=Path, metavar="CKPT", help="a checkpoint, or a run directory with one")
    parser.add_argument("--text", default="wikitext2", help="wikitext2, pydoc-topics or a .txt or .jsonl[.gz] file")
    parser.add_argument("--out", type=Path, default=Path("masks.safetensors"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=2048, help="tokens read at once (default 2048)")
    parser.add_argument("--model", help="where the backbone lies, if not where the checkpoint's recipe says")
    parser.add_argument("--data-root", help="folder with the data sets under their Hub ids")
    given = vars(parser.parse_args(arguments))
    try:
        masks = write_masks(given.pop("run"), given.pop("text"), given.pop("out"), **given)
    except WideError as error:
        print(error, file=sys.stderr)
        return 2
    for name, mask in masks.items():
        print(f"{name}: {mask.shape[0]} tokens x {mask.shape[1]} groups, density {mask.float().mean():.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
