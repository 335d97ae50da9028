"""Shared test doubles live beside this file; make them importable as `doubles`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
