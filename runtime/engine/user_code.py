"""A user's own Python files: the one that `file.py:factory` names, and what it imports beside it.

They are run where the user names the file to a command, or a plan has their digests and the files
still match.  What is run is the text whose digest was compared: no cached bytecode is, and nothing
from the folder that has no digest.  Installed packages, and what PYTHONPATH names, are trusted.

No torch here, and nothing is run by `check_files`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import (
    BuiltinImporter,
    FrozenImporter,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from meshwright.planner.documents.document import is_file
from meshwright.planner.errors import DocumentError

OUR_PACKAGE = "meshwright"
TRUST = "read it, then plan again or add --trust-code"
_IMPORTED: ContextVar[str] = ContextVar("imported", default="")
"""The source whose file is being imported, and not run."""

Made = TypeVar("Made")


class UserFiles:
    """The folder of a user's file, as far as it may be imported.

    With `known` digests, whatever differs from them is refused; without, what is imported is
    written down.
    """

    def __init__(self, source: str, digests: Mapping[str, str] | None) -> None:
        self.source = source
        self.main = _file_of(source)
        self.folder = self.main.parent
        self.known = digests
        self.imported: dict[str, str] = {}

    def load(self) -> ModuleType:
        """Import the user's file anew, and let it import what stands beside it."""
        if self.known is not None:
            check_files(self.source, self.known)
        _refuse_our_name(self.folder, self.source)
        # Of two factories in one process either may have a file of the same name.
        for before in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
            sys.meta_path.remove(before)
            for name in before.found:
                sys.modules.pop(name, None)
        sys.meta_path.insert(0, _Finder(self))
        name = f"_factory_{self.main.stem}"
        loader = _GivenTextLoader(name, self.main, self.text_of(self.main))
        spec = importlib.util.spec_from_file_location(name, self.main, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        token = _IMPORTED.set(self.source)
        try:
            loader.exec_module(module)
        finally:
            _IMPORTED.reset(token)
        return module

    def text_of(self, path: Path) -> bytes:
        """Return the contents of a file, if they are what is known of it."""
        name = path.relative_to(self.folder).as_posix()
        text = _read(path, self.source)
        if self.known is None:
            self.imported[name] = _digest(text)
        else:
            _compare(name, text, self.known, self.source)
        return text


def check_files(source: str, digests: Mapping[str, str] | None) -> None:
    """Refuse a user's file, or one that it imported, which is not what its digest says."""
    main = _file_of(source)
    if not digests or main.name not in digests:
        raise DocumentError(
            "", f"is code, and the document that names it has no digest of it; {TRUST}", file=source
        )
    for name in digests:
        _compare(name, _read(main.parent / name, source), digests, source)


def trains_in_script(source: str) -> bool:
    """Tell whether the file of a MODEL has a `batch` of its own, without running it.

    Its module is then one that a script gives its Engine, and no factory's, which takes tokens.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever imports it gives them
            body = ast.parse(_read(_file_of(source), source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # whoever imports it says so
    names: list[str] = []
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name):
                names.append(name)
            case ast.Assign(targets=targets):
                every = [node for target in targets for node in ast.walk(target)]
                names += [node.id for node in every if isinstance(node, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
            case ast.ImportFrom(names=aliases):
                names += [alias.asname or alias.name for alias in aliases]
    return "batch" in names


def in_users_file(source: str, call: Callable[[], Made]) -> Made:
    """Run a user's code; what goes wrong there is reported as theirs."""
    try:
        return call()
    except DocumentError:
        raise
    except Exception as error:
        raise DocumentError("", f"raised {type(error).__name__}: {error}", file=source) from error


def refuse_while_imported() -> None:
    """Refuse to train where a user's file is imported, and not run."""
    source = _IMPORTED.get()
    if source:
        raise DocumentError(
            "",
            'makes an Engine when it is imported; put what trains under if __name__ == "__main__":',
            file=source,
        )


def _file_of(source: str) -> Path:
    path = Path(source.rpartition(":")[0]).resolve()
    if not is_file(path):
        raise DocumentError("", f"there is no file {path}", file=source)
    return path


def _read(path: Path, source: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DocumentError("", f"{path} cannot be read: {error.strerror}", file=source) from error


def _digest(text: bytes) -> str:
    return "sha256:" + hashlib.sha256(text).hexdigest()


def _compare(name: str, text: bytes, digests: Mapping[str, str], source: str) -> None:
    if name not in digests:
        why = f"imports {name}, which it did not when it was planned"
    elif digests[name] != _digest(text):
        why = f"{name} is not the file that was planned ({digests[name][:23]}...)"
    else:
        return
    raise DocumentError("", f"{why}; {TRUST}", file=source)


def _refuse_our_name(folder: Path, source: str) -> None:
    """Refuse a folder in which `import meshwright` would import another package."""
    ours = importlib.util.find_spec(OUR_PACKAGE)
    for candidate in (folder / f"{OUR_PACKAGE}.py", folder / OUR_PACKAGE / "__init__.py"):
        if candidate.exists() and (ours is None or Path(str(ours.origin)) != candidate):
            raise DocumentError(
                "", f"{candidate} has the name of Meshwright's package; rename it", file=source
            )


class _GivenTextLoader(SourceFileLoader):
    """Runs the text it is given, whatever has become of the file, and no cached bytecode of it."""

    def __init__(self, name: str, path: Path, text: bytes) -> None:
        super().__init__(name, str(path))
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._text, self.path)
        return code


class _Finder:
    """Finds modules in a user's folder, behind all that Python finds elsewhere."""

    def __init__(self, files: UserFiles) -> None:
        self.files = files
        self.found: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = str(self.files.folder)
        if path is None:
            spec = PathFinder.find_spec(name, [folder])
            if spec is None or self._is_elsewhere(name):
                return None
        else:
            inside = [entry for entry in path if Path(entry).is_relative_to(folder)]
            spec = PathFinder.find_spec(name, inside) if inside else None
        if spec is None:
            return None
        self.found.append(name)
        if spec.origin is None:  # a folder without __init__.py holds no code
            return spec
        if not isinstance(spec.loader, SourceFileLoader):
            raise ImportError(f"{spec.origin}: of a model's folder only .py files are imported")
        file = Path(spec.origin)
        spec.loader = _GivenTextLoader(name, file, self.files.text_of(file))
        spec.cached = None
        return spec

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether a module is ours, Python's, installed, or known by another finder."""
        finders: list[Any] = [BuiltinImporter, FrozenImporter]
        finders += [f for f in sys.meta_path if f not in (PathFinder, *finders)]
        if any(f.find_spec(name, None) for f in finders if not isinstance(f, _Finder)):
            return True
        paths = [p for p in sys.path if Path(p or os.curdir).resolve() != self.files.folder]
        return PathFinder.find_spec(name, paths) is not None
