"""Tokens a second of several models, measured by turns so that a noisy machine hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from components.pruning.architecture import model_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def tokens_per_second(models: Mapping[str, PreTrainedModel], ids: Tensor, rounds: int) -> dict[str, float]:
    """Median tokens a second of each model over `rounds` forward passes of `ids` int [B, T], without the LM head.

    Each model first runs once unmeasured on one row.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        _forward(model, ids[:1])
    for turn in range(rounds):
        names = list(models) if turn % 2 == 0 else list(models)[::-1]
        for name in names:
            started = time.perf_counter()
            _forward(models[name], ids)
            seconds[name].append(time.perf_counter() - started)
    return {name: ids.numel() / statistics.median(times) for name, times in seconds.items()}


def _forward(model: PreTrainedModel, ids: Tensor) -> None:
    device = model_device(model)
    model.base_model(input_ids=ids.to(device), use_cache=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
