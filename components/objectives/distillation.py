"""Learning from other scores."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax


def kl_to_teacher(student: Tensor, teacher: Tensor, masked: Tensor | None = None) -> Tensor:
    """[]: KL(softmax(teacher) ‖ softmax(student)) over each row, summed, divided by the rows; the teacher is detached.

    No T² factor (LightRetriever A.4). `masked` bool marks entries left out of both. ValueError: the shapes differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(f"student scores are {tuple(student.shape)}, teacher scores {tuple(teacher.shape)}")
    teacher = teacher.detach()
    if masked is not None:
        least = -1e9
        student, teacher = student.masked_fill(masked, least), teacher.masked_fill(masked, least)
    return kl_div(log_softmax(student, dim=1), log_softmax(teacher, dim=1), reduction="batchmean", log_target=True)
