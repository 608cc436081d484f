"""The comparison runs the same weights, times what it says, and its steps come after the prompt."""

from __future__ import annotations

import pytest
import torch

from tiny_models import FAMILIES, random_ids, tiny_model
from widecli.engine.model import InferenceModel
from widecli.profiling import hugging_face
from widecli.profiling.hugging_face import HuggingFace


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_timed_on_the_weights_of_the_engine(family: str) -> None:
    model = tiny_model(family, **({"sliding_window": 64} if family == "mistral" else {}))
    engine = InferenceModel.from_dense(model)
    ids = random_ids(2, 9)
    logits = []
    model.register_forward_hook(lambda module, args, output: logits.append(output.logits[:, -1]))
    theirs = HuggingFace(model)
    call, facts = theirs.first_token(ids)
    (time,) = call()
    assert time > 0 and facts == {"attention": None, "compiled": False}
    torch.testing.assert_close(logits[-1], engine.session(2, 9).prefill(ids), rtol=0, atol=1e-4)

    seen = []
    model.model.layers[0].register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["position_ids"].flatten().tolist()), with_kwargs=True
    )
    call, _ = theirs.further_tokens(ids, 5)
    for _ in range(2):  # every call starts from the same place
        seen.clear()
        times = call()
        assert len(times) == 5 and min(times) > 0
        # the first one follows the prompt; it is not among the times
        assert [positions[0] for positions in seen] == list(range(9, 15))


def test_settings_of_the_model_neither_stop_it_nor_draw() -> None:
    model = tiny_model()
    model.generation_config.do_sample = True
    model.generation_config.eos_token_id = list(range(96))  # whatever it says would end it
    call, _ = HuggingFace(model).further_tokens(random_ids(1, 4), 6)
    assert len(call()) == 6


def test_after_a_minute_of_setting_up_no_more_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = HuggingFace(tiny_model())
    theirs.first_token(random_ids(1, 4))
    assert theirs.may_set_up
    monkeypatch.setattr(hugging_face, "_SECONDS", 0.0)
    theirs.further_tokens(random_ids(1, 4), 2)
    assert not theirs.may_set_up
