"""Terms of the loss against slow references (spec invariants 5, 6; cases T-021, T-041)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from components.objectives.contrastive import contrastive_loss, equal_document_mask, scores_QD
from components.objectives.distillation import kl_to_teacher
from components.objectives.sparsity import collapse, flops, flops_estimate, l1, ramp


def test_contrastive_loss_by_hand() -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(3, 5), torch.randn(6, 5)
    found = contrastive_loss(scores_QD(queries, documents, 0.5), group=2)
    wanted = 0.0
    for i in range(3):
        scores = [float(queries[i] @ documents[j]) / 0.5 for j in range(6)]
        wanted += -scores[2 * i] + math.log(sum(math.exp(score) for score in scores))
    assert float(found) == pytest.approx(wanted / 3, abs=1e-5)


def test_the_same_document_in_a_batch_is_no_negative() -> None:
    """T-021: two pairs with the same positive; and a mined negative that is another query's positive stays one."""
    keys = torch.tensor([7, 1, 7, 2])
    masked = equal_document_mask(keys, group=2)
    assert masked.tolist() == [[False, False, True, False], [True, False, False, False]]
    scores = torch.zeros(2, 4)
    assert float(contrastive_loss(scores, 2, masked)) == pytest.approx(math.log(3), abs=1e-6)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wanted \[2, 4\]"):
        contrastive_loss(torch.zeros(2, 3), 2)
    with pytest.raises(ValueError, match="teacher scores"):
        kl_to_teacher(torch.zeros(2, 3), torch.zeros(2, 4))


def test_scores_are_fp32_under_autocast() -> None:
    """T-011, spec trap 8: two documents whose scores differ by 1e-4 stay apart."""
    query = torch.zeros(1, 64)
    query[0, 0] = 1
    documents = query.repeat(2, 1)
    documents[1, 0] = 1 - 1e-4
    with torch.autocast("cpu", torch.bfloat16):
        found = scores_QD(query.bfloat16(), documents, 1.0)
    assert found.dtype == torch.float32
    assert float(found[0, 0] - found[0, 1]) == pytest.approx(1e-4, rel=0.01)


def test_kl_by_hand_and_no_gradient_to_the_teacher() -> None:
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    found = kl_to_teacher(student, teacher)
    p, q = teacher.softmax(1), student.softmax(1)
    assert float(found) == pytest.approx(float((p * (p.log() - q.log())).sum() / 2), abs=1e-6)
    found.backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_flops_of_copies_and_of_disjoint_documents() -> None:
    """Invariant 5."""
    document = torch.tensor([[1.0, 2.0, 0.0, 3.0]])
    assert float(flops(document.repeat(5, 1))) == pytest.approx(14.0)
    disjoint = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    assert float(flops(disjoint)) == pytest.approx(14.0 / 9)
    assert float(flops(disjoint)) == pytest.approx(sum((disjoint[:, v].sum() / 3) ** 2 for v in range(3)))
    assert float(l1(disjoint)) == pytest.approx(2.0)


def test_flops_from_sampled_columns_is_unbiased() -> None:
    torch.manual_seed(2)
    values: Tensor = torch.rand(4, 50)
    picks = [torch.randperm(50)[:10] for _ in range(4000)]
    mean = sum(float(flops_estimate(values[:, pick], 50)) for pick in picks) / len(picks)
    assert mean == pytest.approx(float(flops(values)), rel=0.01)


@pytest.mark.parametrize(("step", "share"), [(0, 0.0), (2000, 0.25), (4000, 1.0), (9000, 1.0)])
def test_ramp(step: int, share: float) -> None:
    """Invariant 6."""
    assert ramp(step, 4000) == share


def test_the_alarm_for_a_collapsed_representation() -> None:
    assert collapse(50, 0.3) is None
    assert "active terms" in str(collapse(0.5, 0.3))
    assert "alike" in str(collapse(50, 0.99))
