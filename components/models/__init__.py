"""Models in one process (torch): sources, backbone, pooling, attention masks, query encoders, sparse head, document
encoder.

Only the configuration sections are re-exported here, so that reading a configuration does not import torch.
"""

from components.models.config import ModelConfig, RetrieverConfig

__all__ = ["ModelConfig", "RetrieverConfig"]
