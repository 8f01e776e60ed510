"""The base of every configuration section: typed, frozen, and deaf to no typing error (unknown keys are refused)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration tree. It lies in the file of the code that it configures."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
