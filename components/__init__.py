"""What can be computed in one process: data, models, objectives, pruning, lookup, indexing, evaluation. No ray, no mlflow, no HTTP."""
