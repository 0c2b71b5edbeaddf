"""The suite is a package of the repository, not of the library."""

import sys
from pathlib import Path

if (root := str(Path(__file__).parents[3])) not in sys.path:
    sys.path.insert(0, root)
