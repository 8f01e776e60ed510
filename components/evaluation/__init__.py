"""How good a ranking is: trec_eval measures, a BM25 baseline, significance, and a report that people read."""
