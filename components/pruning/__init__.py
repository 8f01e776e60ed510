"""EffiR (arXiv 2512.20612): which sub-layers and neurons of an LM matter least, dropping them, saving what is left.

Only the configuration section is re-exported here, so that reading a configuration does not import torch.
"""

from components.pruning.config import CalibrationConfig, PruneConfig

__all__ = ["CalibrationConfig", "PruneConfig"]
