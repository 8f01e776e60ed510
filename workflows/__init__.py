"""The jobs: one file a stage, one a whole job; each runs alone with `python workflows/X.py`."""
