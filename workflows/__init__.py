"""The jobs: one file a stage, one a whole job; each runs alone with `python workflows/X.py`."""

import sys
from pathlib import Path

# `python workflows/X.py` puts this folder first on the path, where its tabulate.py would stand for the library of that name,
# in the driver and in every Ray worker (which takes the script's folder over from the driver's path).
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
