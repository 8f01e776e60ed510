"""What to prune, how to choose it, and on which text to judge it (EffiR, spec section 4)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from components.section import Section


class CalibrationConfig(Section):
    """The text on which importance is measured. EffiR takes 256 samples of 2048 tokens; the defaults suit two CPUs."""

    source: str = "corpus"
    """`corpus` (the run's documents), a .parquet file or folder with a `text` column, or a .txt file (one a line)."""
    samples: int = Field(default=16, ge=1)
    """Packed rows."""
    tokens: int = Field(default=128, ge=2)
    """Tokens of a packed row; rows are always full, so nothing is padded."""
    seed: int = 42
    batch_size: int = Field(default=4, ge=1)
    """Rows a forward pass. It changes speed and memory, not the scores."""
    skip_first_token: bool = False
    """Leave the first token of each row out of the means: its massive activation is an outlier (spec trap 35)."""


class PruneConfig(Section):
    """Whole sub-layers to drop (EffiR 4.1) and the share of the remaining MLP neurons to remove (4.2)."""

    enabled: bool = True
    """False copies the model as it is, whatever the other keys say."""
    drop_mlps: int = Field(default=0, ge=0)
    """MLP sub-layers to drop, each with its norm. EffiR drops half of them."""
    drop_attentions: int = Field(default=0, ge=0)
    """Attention sub-layers to drop; the paper's comparison, it hurts retrieval much more."""
    drop_blocks: int = Field(default=0, ge=0)
    """Whole layers to drop, chosen before MLPs and attentions; the paper's comparison."""
    method: Literal["importance", "magnitude", "random", "last"] = "importance"
    """How sub-layers are chosen: lowest 1 - cosine (EffiR), smallest mean |weight|, by chance, or the last ones."""
    iterative: bool = False
    """Score again after every drop instead of once on the intact model (the paper's default is once)."""
    protect_growth: float | None = Field(default=None, gt=1)
    """Never drop a sub-layer that makes the state of any calibration token this many times longer: it writes the
    massive activation of an attention sink, which the mean cosine overlooks (in SmolLM2-135M the MLP of layer 11: one
    token 130 times longer, S in mid-field, the model ruined without it). None, as published, protects none.
    """
    width_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the remaining MLP neurons to remove, ranked over all layers; EffiR removes 0.3."""
    width_method: Literal["wanda", "magnitude", "random"] = "wanda"
    """Neuron score where no trained gates are at hand: activation × weight norm (Wanda), weight norm, or chance."""
    width_scope: Literal["global", "layer"] = "global"
    """Rank neurons over all layers, or remove the same share of each: equal widths load with stock transformers."""
    min_width: int = Field(default=8, ge=1)
    """Neurons that every remaining MLP keeps at least (spec trap 41)."""
    round_to: int = Field(default=1, ge=1)
    """Widths are rounded up to a multiple of this (never above the original width)."""
    speed_rounds: int = Field(default=2, ge=0)
    """Alternating timings of the full and the pruned model; 0 measures no speed."""
    calibration: CalibrationConfig = CalibrationConfig()

    @model_validator(mode="after")
    def _possible(self) -> PruneConfig:
        if self.iterative and self.method != "importance":
            raise ValueError(
                f"iterative=true scores again after every drop, which method={self.method!r} does not depend on: "
                f"set iterative=false or method=importance"
            )
        if self.iterative and not self.drops:
            raise ValueError("iterative=true but nothing is dropped: set drop_mlps, drop_attentions or drop_blocks")
        if not self.width_fraction and self.width_scope == "layer":
            raise ValueError("width_scope=layer but width_fraction=0 removes no neuron: set width_fraction")
        return self

    @property
    def drops(self) -> int:
        """Sub-layers and layers to drop in all."""
        return self.drop_mlps + self.drop_attentions + self.drop_blocks

    @property
    def active(self) -> bool:
        """Whether the pruned model differs from the full one."""
        return self.enabled and bool(self.drops or self.width_fraction)

    def check_layers(self, layers: int) -> None:
        """Raise a ValueError that names the numbers when a model of `layers` layers cannot lose so many parts."""
        if self.drop_blocks >= layers:
            raise ValueError(
                f"prune.drop_blocks={self.drop_blocks} but the model has {layers} layers and must keep one: "
                f"at most {layers - 1} can be dropped"
            )
        left = layers - self.drop_blocks
        for key, number in (("drop_mlps", self.drop_mlps), ("drop_attentions", self.drop_attentions)):
            if number > left:
                after = f" after drop_blocks={self.drop_blocks}" if self.drop_blocks else ""
                raise ValueError(
                    f"prune.{key}={number} but the model has {left} of them{after}: lower it to at most {left}"
                )
        if self.width_fraction and self.drop_mlps == left:
            raise ValueError(
                f"prune.width_fraction={self.width_fraction} but drop_mlps={self.drop_mlps} leaves no MLP to narrow: "
                f"lower drop_mlps or set width_fraction=0"
            )
