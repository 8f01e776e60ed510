"""What training minimises, as pure functions of tensors, and the configuration of one training run."""

from components.objectives.config import LoraConfig, TermsConfig, TrainConfig

__all__ = ["LoraConfig", "TermsConfig", "TrainConfig"]
