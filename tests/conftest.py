"""Lets every test import the helpers in tests/support and the oracle in tests/conformance."""

import sys
from pathlib import Path

for folder in ("support", "conformance"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
