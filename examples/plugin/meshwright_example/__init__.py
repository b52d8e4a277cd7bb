"""What Meshwright finds by the entry points of this package: two files of data here."""

from importlib.resources import files

STACK = files(__name__) / "stack.yaml"
ACCELERATOR = files(__name__) / "accelerator.yaml"
