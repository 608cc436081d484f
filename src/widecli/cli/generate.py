"""`wide generate`: a checkpoint or a dense model continues a prompt, and says how fast that was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from widecli.cli import options
from widecli.cli.console import emit_json, note, stdout_for_document
from widecli.errors import UsageError

if TYPE_CHECKING:
    from widecli.engine.generate import Generation
    from widecli.engine.model import InferenceModel
    from widecli.engine.sampling import Sampling

SCHEMA = "wide.generation/1"
_NEW_TOKENS = 128

Checkpoint = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CHECKPOINT]",
        help="A checkpoint or a run directory (default: the newest below runs/).",
        show_default=False,
    ),
]
Prompt = Annotated[str | None, typer.Option("--prompt", help="Text to continue.")]
PromptFile = Annotated[Path | None, typer.Option("--prompt-file", help="File with it; - = standard input.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", help="Tokens to generate at most.", show_default="128, or what fits"),
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 takes the most likely token, always.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the smallest set with this share of the mass.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the draws.")]
Chat = Annotated[bool, typer.Option("--chat", help="The prompt is a user's turn in the model's chat template.")]
Dense = Annotated[bool, typer.Option("--dense", help="Run the checkpoint's dense backbone.")]


def generate(
    checkpoint: Checkpoint = None,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    chat: Chat = False,
    dense: Dense = False,
    model: options.Model = None,
    beyond_positions: options.BeyondPositions = None,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Continue a prompt. The text goes to stdout as it comes; speed and the share skipped go to stderr.

    With --model and no checkpoint: that dense model.
    """
    from widecli.engine.sampling import Sampling
    from widecli.engine.text import refuse_undecoded

    options.go_offline(offline)
    options.trust_remote_code(trust_remote_code)
    with stdout_for_document(json):
        text = _prompt(prompt, prompt_file)
        refuse_undecoded(text)
        sampling = Sampling(temperature, top_p, seed)
        loaded, source = _load(checkpoint, model, dense=dense, beyond_positions=bool(beyond_positions))
        document = _run(loaded, text, max_new_tokens, sampling, chat=chat, stream=not json)
        if json:
            emit_json({**document, "checkpoint": source})


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise UsageError("give the text to continue with --prompt TEXT or --prompt-file FILE, one of the two")
    if file is None:
        assert prompt is not None
        return prompt
    from_stdin = str(file) == "-"
    try:
        # bytes, decoded here: what stdin does with those that are no UTF-8 depends on the locale
        return (sys.stdin.buffer.read() if from_stdin else file.read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        where = "standard input" if from_stdin else file
        raise UsageError(f"{where} cannot be read as UTF-8 text ({error})") from error


def _load(
    checkpoint: Path | None, model: str | None, *, dense: bool, beyond_positions: bool
) -> tuple[InferenceModel, str | None]:
    """The model and the checkpoint it came from."""
    if model is not None and checkpoint is not None:
        raise UsageError(f"{checkpoint} names its own model; leave out --model, or the checkpoint")
    if model is None and checkpoint is None:
        checkpoint = options.newest_checkpoint()
        if checkpoint is None:
            raise UsageError("there is no checkpoint below runs/: name one, or a dense model with --model")
        note(f"the newest checkpoint, {checkpoint}")
    from widecli.engine.model import InferenceModel

    if checkpoint is not None:
        found = InferenceModel.from_checkpoint(checkpoint, dense=dense, beyond_positions=beyond_positions)
        return found, str(checkpoint)
    from widecli.model.backbone import load_backbone
    from widecli.model.standalone import dense_alone
    from widecli.recipe.schema import ModelSection

    assert model is not None
    if said := dense_alone(model):
        note(said)
    section = ModelSection(name=model, beyond_positions=beyond_positions)
    return InferenceModel.from_dense(load_backbone(section)), None


def _run(
    model: InferenceModel, prompt: str, max_new_tokens: int | None, sampling: Sampling, *, chat: bool, stream: bool
) -> dict[str, Any]:
    """Generate, streaming the text to stdout or not; returns the document."""
    from widecli.engine import generate as engine
    from widecli.engine.text import encode, stop_tokens, text_stream

    backbone = model.backbone
    assert backbone is not None
    ids = encode(backbone, prompt, chat=chat)
    if max_new_tokens is None:
        max_new_tokens = max(1, min(_NEW_TOKENS, model.max_tokens - len(ids)))
    session = engine.open_session(model, [ids], max_new_tokens)
    # imports, compiles and tunes what the timed pass then only runs; kernels depend on the prompt's length
    session.prefill(engine.as_batch([ids if backbone.device.type == "cuda" else ids[:1]]))

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    show = text_stream(backbone, write if stream else lambda text: None)
    done = engine.generate(
        session,
        [ids],
        max_new_tokens,
        sampling=sampling,
        stop=stop_tokens(backbone),
        on_token=lambda _, token: show(token),
    )
    show(-1)
    if stream:
        write("\n")
    document = _document(model, prompt, sampling, done)
    _report(document)
    return document


def _document(model: InferenceModel, prompt: str, sampling: Sampling, done: Generation) -> dict[str, Any]:
    backbone = model.backbone
    assert backbone is not None
    (tokens,) = done.tokens
    skipped = done.skipped.summary(done.prompt_tokens + len(tokens)) if done.skipped else {}
    return {
        "schema": SCHEMA,
        "model": backbone.identity.id,
        "checkpoint": None,
        "routed": model.plan is not None,
        "device": str(backbone.device),
        "dtype": str(model.weights.dtype).removeprefix("torch."),
        "prompt": prompt,
        "text": backbone.tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": list(tokens),
        "finish": done.finish[0],
        "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed},
        "prefill": {
            "tokens": done.prompt_tokens,
            "seconds": done.prefill_seconds,
            "tokens_per_second": done.prefill_tokens_per_second,
        },
        "decode": {
            "tokens": done.decode_steps,
            "seconds": done.decode_seconds,
            "tokens_per_second": done.decode_tokens_per_second,
        },
        "skip_rate": skipped.get("skip_rate"),
        "flops_skipped": skipped.get("flops_skipped"),
    }


def _report(document: dict[str, Any]) -> None:
    """Speed and what was skipped, for people."""
    prefill, decode = document["prefill"], document["decode"]
    speed = f"prefill {prefill['tokens']} tokens, {prefill['tokens_per_second']:,.0f} tokens/s"
    if decode["tokens_per_second"] is not None:
        speed += f"; decode {decode['tokens']} tokens, {decode['tokens_per_second']:,.1f} tokens/s"
    note(f"{speed} ({document['device']}, {document['dtype']})")
    if rate := document["skip_rate"]:
        from widecli.report.flops import in_words

        shown = ", ".join(f"{part} {value:.1%}" for part, value in rate.items() if value is not None)
        note(f"skipped: {shown}; FLOPs: {in_words(document['flops_skipped'])}")
        if document["device"] == "cpu":
            note("on a CPU the operators compute everything and mask: what is skipped here saves no time")
