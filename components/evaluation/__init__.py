"""How good a ranking is: trec_eval measures, a BM25 baseline, significance, and a report that people read."""

from components.evaluation.config import EvaluateConfig
from components.evaluation.metrics import KNOWN_METRICS, METRICS, Evaluation, Ranking, evaluate_run, write_run

__all__ = ["KNOWN_METRICS", "METRICS", "EvaluateConfig", "Evaluation", "Ranking", "evaluate_run", "write_run"]
