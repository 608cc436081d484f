from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from widecli.model import loss as loss_module
from widecli.model.loss import distillation_loss, next_token_loss


def torch_loss(hidden: Tensor, weight: Tensor, ids: Tensor, valid: Tensor | None) -> Tensor:
    """Row by row with torch's own cross-entropy; a target is left out when it or the token before it is padding."""
    total = hidden.new_zeros(())
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1] - 1):
            if valid is None or (bool(valid[b, t]) and bool(valid[b, t + 1])):
                total = total + F.cross_entropy((weight @ hidden[b, t])[None].float(), ids[b, t + 1][None])
    return total


def case(
    seed: int, batch: int, length: int, words: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, 6, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(words, 6, generator=generator).to(dtype)
    return hidden, weight, torch.randint(0, words, (batch, length), generator=generator)


@given(
    seed=st.integers(0, 1000),
    batch=st.integers(1, 3),
    length=st.integers(2, 9),
    words=st.integers(2, 20),
    chunk_rows=st.integers(1, 12),
    padded=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_value_and_gradient_equal_torch_for_any_chunk(
    seed: int, batch: int, length: int, words: int, chunk_rows: int, padded: bool
) -> None:
    hidden, weight, ids = case(seed, batch, length, words)
    valid = None
    if padded:
        lengths = torch.randint(1, length + 1, (batch,), generator=torch.Generator().manual_seed(seed))
        valid = torch.arange(length)[None] < lengths[:, None]
        if seed % 2:
            valid = valid.flip(1)  # left padding
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CHUNK_BYTES", 4 * words * chunk_rows)
        ours = next_token_loss(hidden, weight, ids, valid)
        (gradient,) = torch.autograd.grad(3.0 * ours, hidden)
    expected = torch_loss(hidden, weight, ids, valid)
    wanted = torch.zeros_like(hidden)
    if expected.requires_grad:
        (wanted,) = torch.autograd.grad(3.0 * expected, hidden)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_padding_that_is_the_end_token_is_told_apart_by_the_mask() -> None:
    """Real end tokens count, padding with the same id does not."""
    hidden, weight, ids = case(0, 2, 6, 5)
    end = 1
    ids[:, 2] = end  # a real one inside both rows
    ids[0, 4:] = end  # padding of the first row
    valid = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    ours = next_token_loss(hidden, weight, ids, valid)
    torch.testing.assert_close(ours, torch_loss(hidden, weight, ids, valid))
    by_token_id = sum(
        F.cross_entropy((weight @ hidden[b, t])[None], ids[b, t + 1][None])
        for b in range(2)
        for t in range(5)
        if ids[b, t + 1] != end
    )
    assert not torch.isclose(ours, by_token_id)


def test_what_stands_under_padding_does_not_matter() -> None:
    hidden, weight, ids = case(1, 1, 5, 7)
    valid = torch.tensor([[True, True, True, False, False]])
    other = ids.clone()
    other[0, 3:] = (other[0, 3:] + 1) % 7
    assert torch.equal(next_token_loss(hidden, weight, ids, valid), next_token_loss(hidden, weight, other, valid))


def test_the_last_hidden_state_predicts_nothing() -> None:
    hidden, weight, ids = case(2, 1, 4, 7)
    next_token_loss(hidden, weight, ids, None).backward()
    assert hidden.grad is not None
    assert not bool(hidden.grad[:, -1].any()) and bool(hidden.grad[:, :-1].any())


def test_bf16_states_give_an_fp32_loss_and_a_bf16_gradient() -> None:
    hidden, weight, ids = case(3, 2, 8, 11, torch.bfloat16)
    ours = next_token_loss(hidden, weight, ids, None)
    ours.backward()
    assert ours.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
    exact = torch_loss(hidden.detach().float(), weight.float(), ids, None)
    assert ours.item() == pytest.approx(exact.item(), rel=2e-2)


def test_huge_logits_stay_finite() -> None:
    hidden, weight, ids = case(4, 1, 6, 9)
    ours = next_token_loss(hidden * 1e4, weight, ids, None)
    assert bool(ours.isfinite())
    torch.testing.assert_close(ours, torch_loss(hidden * 1e4, weight, ids, None), rtol=1e-4, atol=1e-2)


@pytest.mark.slow
def test_the_compiled_chunk_agrees_with_the_eager_one() -> None:
    import shutil

    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    hidden, weight, ids = case(5, 2, 8, 11)
    eager = next_token_loss(hidden, weight, ids, None)
    (wanted,) = torch.autograd.grad(eager, hidden)
    compiled = next_token_loss(hidden, weight, ids, None, compiled=True)
    (gradient,) = torch.autograd.grad(compiled, hidden)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(gradient, wanted)


@given(seed=st.integers(0, 1000), words=st.integers(2, 20), chunk_rows=st.integers(1, 12), padded=st.booleans())
@settings(deadline=None, max_examples=30)
def test_distillation_equals_torchs_divergence_for_any_chunk(
    seed: int, words: int, chunk_rows: int, padded: bool
) -> None:
    hidden, weight, ids = case(seed, 2, 7, words)
    teacher, _, _ = case(seed + 1, 2, 7, words)
    valid = torch.arange(7)[None] < torch.tensor([[7], [3]]) if padded else None
    counted = torch.ones(2, 6, dtype=torch.bool) if valid is None else valid[:, :-1] & valid[:, 1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CHUNK_BYTES", 8 * words * chunk_rows)
        objective, divergence, cross_entropy = distillation_loss(hidden, teacher.detach(), weight, ids, valid)
        (gradient,) = torch.autograd.grad(3.0 * objective, hidden)
    student, wanted = ((x[:, :-1] @ weight.T).log_softmax(-1)[counted] for x in (hidden, teacher.detach()))
    expected = F.kl_div(student, wanted, log_target=True, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(3.0 * expected, hidden)
    torch.testing.assert_close(divergence, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cross_entropy, next_token_loss(hidden, weight, ids, valid), rtol=1e-4, atol=1e-5)
    assert not cross_entropy.requires_grad and not divergence.requires_grad
    assert float(objective) == float(divergence)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_mixed_objective_has_the_mixed_gradient(share: float) -> None:
    hidden, weight, ids = case(0, 2, 7, 13)
    teacher, _, _ = case(1, 2, 7, 13)
    objective, divergence, cross_entropy = distillation_loss(hidden, teacher.detach(), weight, ids, None, share=share)
    (gradient,) = torch.autograd.grad(objective, hidden)
    whole, _, _ = distillation_loss(hidden, teacher.detach(), weight, ids, None)
    (of_divergence,) = torch.autograd.grad(whole, hidden)
    (of_loss,) = torch.autograd.grad(next_token_loss(hidden, weight, ids, None), hidden)
    torch.testing.assert_close(gradient, share * of_divergence + (1 - share) * of_loss, rtol=1e-4, atol=1e-5)
    assert float(objective) == pytest.approx(share * float(divergence) + (1 - share) * float(cross_entropy), rel=1e-5)


def test_nothing_is_left_to_learn_from_oneself() -> None:
    hidden, weight, ids = case(0, 2, 6, 11)
    objective, divergence, _ = distillation_loss(hidden, hidden.detach(), weight, ids, None)
    (gradient,) = torch.autograd.grad(objective, hidden)
    assert float(divergence) == 0.0 and not bool(gradient.any())
