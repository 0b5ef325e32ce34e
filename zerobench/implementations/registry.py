"""From a reference to an implementation, and the strict edge of the package: a bad plug-in is refused by name.

A reference is an entry point's name (`zero2`, group `zerobench.implementations`), `package.module:Class`, or a file,
`path/to/file.py:Class`; what it names may be a class or an instance. `resolve` imports, and is called in ranks only.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from zerobench.claims import Claims
from zerobench.implementations.protocol import ENGINE_METHODS, IMPLEMENTATION_METHODS, OPTIONAL_METHODS, Implementation

GROUP = "zerobench.implementations"

_NAME = re.compile(r"[a-z0-9-]+")
_CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "claims": (1, ()),
    "build": (1, ()),
    "forward": (1, ("last",)),
    "backward": (1, ("last",)),
    "set_lr_factor": (1, ()),
    "save": (1, ()),
    "load": (1, ()),
}
"""How zerobench calls a method: how many positional arguments, which keywords. The others are called without any."""


class BadPlugin(Exception):
    """An implementation that cannot be used: says which one, whose, and what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """A registered implementation. value: "package.module:Class". distribution, version: who registers it."""

    name: str
    value: str
    distribution: str
    version: str


def names() -> list[Entry]:
    """What is registered on this machine, by name. Nothing is imported, so a broken plug-in hides no other."""
    return sorted(
        {_entry(point) for point in entry_points(group=GROUP)}, key=lambda entry: (entry.name, entry.distribution)
    )


def absolute(reference: str) -> str:
    """The same reference for a process with another working directory: a file's path is made absolute."""
    place, _, attribute = reference.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{attribute}" if _is_file(place) else reference


def resolve(reference: str) -> Implementation:
    """The implementation that `reference` names, ready to be asked. Raises BadPlugin."""
    place, colon, attribute = reference.rpartition(":")
    if not colon:
        entry = find(reference)
        who = f"implementation {reference!r} ({entry.value}, from {entry.distribution} {entry.version})"
        place, _, attribute = entry.value.partition(":")
    else:
        who = f"implementation {reference!r}"
    if not place or not attribute:
        raise BadPlugin(f"{who}: expected a name, package.module:Class or path/to/file.py:Class")
    module = _load_file(Path(place), who) if _is_file(place) else _load_module(place, who)
    return _implementation(_attribute(module, attribute, who), who)


def check_engine(engine: Any, claims: Claims) -> None:
    """Raises BadPlugin unless `engine` has the methods of an Engine and those that its claims announce."""
    who = f"engine {_title(type(engine))}"
    promised = {m: feature for feature in sorted(claims.supports) for m in OPTIONAL_METHODS.get(feature, ())}
    _check_methods(engine, ENGINE_METHODS, who)
    missing = [method for method in promised if not callable(getattr(engine, method, None))]
    if missing:
        said = ", ".join(f"{method}() ({promised[method]!r})" for method in missing)
        raise BadPlugin(f"{who}: its claims announce what it lacks: {said}")
    _check_methods(engine, promised, who)


def _entry(point: EntryPoint) -> Entry:
    return Entry(
        point.name, point.value, point.dist.name if point.dist else "?", point.dist.version if point.dist else "?"
    )


def find(name: str) -> Entry:
    """The entry of that name. Raises BadPlugin where there is none, or more than one."""
    found = sorted({_entry(point) for point in entry_points(group=GROUP, name=name)}, key=lambda e: e.distribution)
    if len(found) > 1:
        owners = " and ".join(f"{e.distribution} {e.version} ({e.value})" for e in found)
        raise BadPlugin(f"implementation {name!r} is registered twice, by {owners}; name one as package.module:Class")
    if not found:
        known = sorted({entry.name for entry in names()})
        raise BadPlugin(f"unknown implementation {name!r}{_near(name, known)}; known: {', '.join(known) or 'none'}")
    return found[0]


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _load_module(name: str, who: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise BadPlugin(f"{who} cannot be imported: {_cause(error)}") from error


def _load_file(path: Path, who: str) -> ModuleType:
    """The module of a file, under a name of its own in sys.modules: dataclasses and pickle look it up there."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise BadPlugin(f"{who}: there is no file {path}")
    name = f"zerobench_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadPlugin(f"{who}: {path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.path.insert(0, folder)  # its siblings first, as for a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise BadPlugin(f"{who} cannot be imported: {_cause(error)}") from error
    finally:
        sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)  # last: siblings that it imports later are found, and shadow nothing
    return module


def _attribute(module: ModuleType, attribute: str, who: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [n for n, v in vars(found).items() if not n.startswith("_") and not isinstance(v, ModuleType)]
            raise BadPlugin(f"{who}: {getattr(found, '__name__', found)} has no {part!r}{_near(part, known)}")
        found = getattr(found, part)
    return found


def _implementation(found: Any, who: str) -> Implementation:
    if inspect.isroutine(found) or isinstance(found, (ModuleType, str, int, float, tuple, list, dict, type(None))):
        raise BadPlugin(f"{who} is a {type(found).__name__}, not a class of an implementation nor an instance of one")
    missing = [method for method in IMPLEMENTATION_METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise BadPlugin(f"{who} lacks {_listed(missing)}")
    if inspect.isclass(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise BadPlugin(f"{who}: {found.__name__}() cannot be made without arguments: {_cause(error)}") from error
    name = getattr(found, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadPlugin(f"{who} needs a name of [a-z0-9-]+, which stands in ids; it has {name!r}")
    _check_methods(found, IMPLEMENTATION_METHODS, who)
    return found  # type: ignore[no-any-return]


def _check_methods(owner: Any, methods: Iterable[str], who: str) -> None:
    """Whether they are there, and take what zerobench passes. What has no signature to inspect is taken at its word."""
    methods = list(methods)
    missing = [method for method in methods if not callable(getattr(owner, method, None))]
    if missing:
        raise BadPlugin(f"{who} lacks {_listed(missing)}")
    for method in methods:
        positional, keywords = _CALLS.get(method, (0, ()))
        try:
            signature = inspect.signature(getattr(owner, method))
        except ValueError:
            continue
        try:
            signature.bind(*(None,) * positional, **dict.fromkeys(keywords))
        except TypeError as error:
            call = ", ".join([*("..." for _ in range(positional)), *(f"{keyword}=..." for keyword in keywords)])
            raise BadPlugin(f"{who}: {method}{signature} cannot be called as {method}({call}): {error}") from None


def _cause(error: BaseException) -> str:
    """What and where: the innermost line that is not the import system's."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return what  # has its file and line in it
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    return f"{what} ({frames[-1].filename}:{frames[-1].lineno})" if frames else what


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _listed(methods: Iterable[str]) -> str:
    return ", ".join(f"{method}()" for method in methods)


def _title(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
