"""What Meshwright finds by the entry points of this package: two files of data here."""

from importlib.resources import files

FRAMEWORK = files(__name__) / "framework.yaml"
ACCELERATOR = files(__name__) / "accelerator.yaml"
