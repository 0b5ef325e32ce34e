"""Files from strangers: suites, excuses, baselines and results that somebody else wrote, given to the commands by which a
user would open them. Each is refused with the exit code of its kind and a word on what and where, soon, in little memory;
nothing of it is run, and nothing outside the folder is touched."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zerobench.record import SCHEMA
from zerobench.tests.faults.bench import SHORT, Bench
from zerobench.tests.faults.mutate import dumped, made_results
from zerobench.tests.faults.row import Row, Wrong

SOON_S = 20.0  # the limit of a busy machine; on a free one each takes less than 1 s
MEMORY = 3 << 30  # of address space, for everything: the interpreter and its libraries take a part of it
MOST_LINES, MOST_CHARACTERS = 60, 30_000
HUGE = 100 << 20
LEVELS = 100_000
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CANARY = "canary"
PLUGIN = f"import pathlib\npathlib.Path(__file__).with_name({CANARY!r}).touch()\n"
EXCUSES = "- {check: traffic.volume, reason: known}\n"
Edit = Callable[[str], str | bytes]

# How a user opens a file of each kind: words of the command line, and the exit codes that a bad one ends with.
READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "suite.yaml": (("validate", "suite.yaml"), ("run", "suite.yaml")),
    "excuses.yaml": (("conform", "zero2", "--xfails", "excuses.yaml"),),
    "baseline.json": (("compare", "right.jsonl", "baseline.json"),),
    "results.jsonl": (
        ("report", "results.jsonl"),
        ("run", "short.yaml", "--resume", "results.jsonl"),
        ("matrix", "results.jsonl"),
        ("compare", "results.jsonl", "baseline.json"),
        ("accept", "results.jsonl", "--baselines", "new"),
        ("history", "results.jsonl"),
        ("explain", "results.jsonl", "zero2"),
    ),
}


class Stranger:
    """A folder with one good file of each kind, and a way to spoil one and see what the commands say of it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench.apart("stranger")
        self.around = self.bench.folder / "around"  # what must stay as it is
        self.here = self.around / "here"
        self.here.mkdir(parents=True)
        (self.around / "outside.py").write_text(PLUGIN)
        (self.around / "precious").write_text("as it was\n")
        self.seen: list[str] = []
        self.good = {
            "suite.yaml": SHORT,
            "excuses.yaml": EXCUSES,
            "results.jsonl": "".join(dumped(line) + "\n" for line in made_results()),
        }
        for name in ("suite.yaml", "excuses.yaml", "results.jsonl"):
            self.write(name, self.good[name])
        self.write("short.yaml", SHORT)
        self.write("right.jsonl", self.good["results.jsonl"])
        code, out, err = self.bench.run("accept", "right.jsonl", "--bytes", "--baselines", "b", cwd=self.here)
        if code:
            raise AssertionError(f"a good result is not accepted: {out}{err}")
        self.good["baseline.json"] = (self.here / "b" / "bytes" / "made.json").read_text()
        self.write("baseline.json", self.good["baseline.json"])
        self.before = self._outside()

    def write(self, name: str, content: str | bytes) -> None:
        (self.here / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    def spoil(self, name: str, content: str | bytes, says: str, *, readers: int = 1) -> None:
        """One file is spoilt; so many of its readers must refuse it with a word that has `says` (a pattern) in it."""
        self.write(name, content)
        for words in READERS[name][:readers]:
            self.refused(words, says)
        self.write(name, self.good[name])

    def refused(self, words: tuple[str, ...], says: str, codes: tuple[int, ...] = (2, 3)) -> str:
        began = time.monotonic()
        code, out, err = self.bench.run(*words, cwd=self.here, preexec_fn=_limit)
        took = time.monotonic() - began
        shown = f"zerobench {' '.join(words)}: exit code {code}: {(out[-300:] + err[-600:])}"
        if "Traceback" in out + err or code not in codes or not re.search(says, err):
            raise Wrong("wrong verdict" if code == 0 else "not told", f"{shown}; wanted {says!r}")
        if len(err.splitlines()) > MOST_LINES or len(err) > MOST_CHARACTERS or took > SOON_S:
            raise Wrong("not told", f"{took:.1f} s, {len(err.splitlines())} lines, {len(err)} characters: {shown}")
        if found := sorted(path.name for path in self.around.rglob(CANARY)):
            raise Wrong("wrong verdict", f"code of the stranger's ran: {found}: {shown}")
        if self._outside() != self.before:
            raise Wrong("file left", f"outside the folder something changed: {shown}")
        self.seen.append(next(line for line in err.splitlines() if re.search(says, line)))
        return err

    def _outside(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.around.iterdir() if path.is_file()}

    def said(self) -> str:
        """The first answer, and how many there were."""
        more = f" (and {len(self.seen) - 1} more alike)" if len(self.seen) > 1 else ""
        return self.seen[0].replace(str(self.here) + os.sep, "")[:240] + more


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def rows() -> list[Row]:
    def row(name: str, done: str, act: Callable[[Stranger], None], times: int, quick: bool = False) -> Row:
        def whole(bench: Bench) -> str:
            stranger = Stranger(bench)
            act(stranger)
            if bench.whole and len(stranger.seen) != times:
                raise AssertionError(f"{len(stranger.seen)} answers, and the row says {times}")
            return stranger.said()

        return Row("a stranger's file", name, done, "all: exit code 2 or 3, nothing is run", whole, quick, times)

    return [
        row("alias bomb", "nine aliases that stand for a billion values", _bomb, 3, True),
        row("100 MB", "files of 100 MB: one line, brackets only, and lines of zeros", _huge, 9),
        row("deep nesting", f"{LEVELS:,} brackets, one in another", _deep, 6),
        row("tags", "!!python tags that would run a command", _tags, 8),
        row("10^12 cases", "a suite whose matrix has more than 10^12 cells", _many, 2),
        row("many excuses", "thousands of excuses, exclusions and unknown names; one name of a megabyte", _excuses, 6),
        row("NaN and infinity", "numbers that are none, or are past every float", _numbers, 11),
        row("no such world", "-1 ranks, no parameters, steps before their time", _worlds, 9),
        row("paths", "names that lead out of the folder; a plug-in outside it", _paths, 4),
        row("symbolic links", "links to devices, to themselves, to files outside", _links, 7),
        row("not ours", "JSON and YAML of another program", _not_ours, 12),
        row("newer", "a schema number of a later zerobench", _newer, 9),
        row("pickles", "a pickle under the name of a suite, a baseline, a result", _pickles, 11),
        row("not a file", "a folder, a pipe, a socket or /dev/zero in a file's place", _not_files, 44, True),
        row("encodings", "invalid UTF-8, UTF-16, a zero byte, a mark of byte order inside", _encodings, 11),
        row("twice", "keys that stand there twice", _twice, 4),
    ]


def _bomb(stranger: Stranger) -> None:
    stranger.spoil(
        "suite.yaml", BOMB + SHORT, r"suite.yaml:\d+:\d+: .*aliases expanded", readers=2 if stranger.bench.whole else 1
    )
    if stranger.bench.whole:
        stranger.spoil("excuses.yaml", BOMB, r"excuses.yaml:\d+:\d+: .*aliases expanded")


def _huge(stranger: Stranger) -> None:
    for content in (b"a: " + b"x" * HUGE, b"[" * HUGE, b"0\n" * (HUGE // 2)):
        stranger.spoil("suite.yaml", content, "suite.yaml: larger than 1,000,000 bytes")
        stranger.spoil("baseline.json", content, "baseline.json: larger than")
        stranger.spoil("results.jsonl", content, r"results.jsonl:1: (a line of more than|neither a record)")


def _deep(stranger: Stranger) -> None:
    head = stranger.good["results.jsonl"].partition("\n")[0]
    stranger.spoil("suite.yaml", "[" * LEVELS, r"suite.yaml:1:\d+: nested deeper", readers=2)
    stranger.spoil("baseline.json", '{"runs":' * LEVELS, "baseline.json: nested too deeply")
    stranger.spoil("results.jsonl", "[" * LEVELS + "\n", "results.jsonl:1: nested too deeply", readers=2)
    stranger.spoil("results.jsonl", head + "\n" + '{"record":' * LEVELS + "\n", "results.jsonl:2: nested too deeply")


def _tags(stranger: Stranger) -> None:
    run = f'!!python/object/apply:os.system ["touch {stranger.around / CANARY}"]'
    for tag in (
        run,
        f"!!python/object/new:os.system ['touch {CANARY}']",
        "!!python/module:antigravity",
        "!!python/name:exit",
    ):
        stranger.spoil("suite.yaml", SHORT.replace("Four runs.", tag), r"suite.yaml:3:8: about: the tag .* is refused")
        stranger.spoil("excuses.yaml", f"- {tag}\n", r"excuses.yaml:1:3: 0: the tag .* is refused")


def _many(stranger: Stranger) -> None:
    """Counted and refused before it is spread out."""
    axes = {
        "implementation": [f"m{i}:A{i}" for i in range(1000)],
        "world_size": list(range(1, 4001)),
        "A": list(range(1, 4001)),
        "model": ["mlp-tiny", "gpt-tiny", "mlp-8m", "gpt-8m", *(f"x{i}" for i in range(20))],
        "precision": ["fp32", "bf16", "fp16"],
    }
    suite = json.dumps({"version": 1, "suite": "many", "checks": ["memory.at_rest"], "matrix": axes})
    stranger.spoil("suite.yaml", suite, r"suite.yaml:1:\d+: matrix: 1,152,000,000,000 cases; at most 20,000", readers=2)


def _excuses(stranger: Stranger) -> None:
    some = {"implementation": ["ddp"], "model": ["mlp-tiny"], "precision": ["fp32"], "world_size": list(range(1, 4001))}
    entry = {"check": "memory.at_rest", "reason": "x", "A": 1}
    body = {"version": 1, "suite": "many", "checks": ["memory.at_rest"], "matrix": some}
    most = [{"world_size": list(range(1, 4000))}, *[{"world_size": 1}] * 1000]
    stranger.spoil(
        "suite.yaml", json.dumps(body | {"xfail": [entry] * 1800, "exclude": [{"A": 2}]}), "2 is not in matrix.A"
    )
    stranger.spoil("suite.yaml", json.dumps(body | {"exclude": [{"A": 1}] * 4000}), "exclude: no case is left")
    stranger.spoil(
        "suite.yaml", json.dumps(body | {"xfail": [{**entry, "world_size": 1}] * 700, "exclude": most}), "matches no"
    )
    names = [f"{'x' * 40}-{i}" for i in range(5000)]
    body["matrix"] = some | {"model": names, "world_size": [2]}
    stranger.spoil("suite.yaml", json.dumps(body), "unknown model", readers=2)
    body["matrix"] = some | {"model": ["x" * 900_000], "world_size": [2]}
    stranger.spoil("suite.yaml", json.dumps(body), "unknown model")


def _numbers(stranger: Stranger) -> None:
    for word in (".nan", ".inf", "1e999", "-.inf"):
        stranger.spoil("suite.yaml", SHORT + f"deadline_s: {word}\n", r"suite.yaml:10:1: deadline_s: ")
    option = SHORT + "options: {ddp: {x: .inf}}\n"
    stranger.spoil("suite.yaml", option, r"suite.yaml:10:\d+: options.ddp.x: an option's number is finite")
    for word, said in (("NaN", "NaN is not JSON"), ("1e999", "past any float"), ("9" * 400, "more than 64 bits")):
        text = re.sub(r'"schema": 1', f'"schema": {word}', stranger.good["baseline.json"])
        stranger.spoil("baseline.json", text, rf"baseline.json:\d+: .*{said}")
    for word, said in (
        ("Infinity", "Infinity is not JSON"),
        ("9" * 400, "more than 64 bits"),
        ('"nan"', "record.model.psi"),
    ):
        text = stranger.good["results.jsonl"].replace('"psi":1200', f'"psi":{word}')
        stranger.spoil("results.jsonl", text, rf"results.jsonl:2: .*{said}")


def _worlds(stranger: Stranger) -> None:
    good = stranger.good["results.jsonl"]
    for old, new, said in (
        ('"world_size":4', '"world_size":-1', r"1: provenance.cases\[0\].world_size: -1, not 1 or more"),
        ('"world_size":4', f'"world_size":{10**15}', r"1: provenance.cases\[0\].world_size: 1000000000000000"),
        ('"precision":"bf16"', '"precision":"fp7"', r"1: provenance.cases\[0\].precision: 'fp7' is none of"),
        ('"judge":"paper"', '"judge":"mine"', "1: provenance.judge: 'mine' is neither"),
        ('"psi":1200', '"psi":0', "2: record.model.psi: 0, not 1 or more"),
        ('"rank":3', '"rank":2', r"2: record.samples: ranks \[0, 1, 2, 2\] of 4"),
        ('"times_s":[0.01', '"times_s":[-0.01', r"2: record.samples\[0\].times_s\[0\]: -0.01 is not a positive"),
        ('"status":"ok"', '"status":"fine"', "2: record.status: 'fine' is none of"),
        ('"claims":{', '"claims":null,"x":{', "2: record: a run that is ok has claims"),
    ):
        if old not in good:
            raise AssertionError(f"no {old} in a good file")
        stranger.spoil("results.jsonl", good.replace(old, new), f"results.jsonl:{said}")


def _paths(stranger: Stranger) -> None:
    """A suite may name a plug-in wherever it is: that is what `run` runs. Reading the suite runs nothing."""
    named = SHORT.replace("[ddp, zero2]", "[ddp, ../outside.py:Engine]")
    stranger.write("suite.yaml", named + "deadline: 3\n")
    stranger.refused(("validate", "suite.yaml"), "suite.yaml:10:1: deadline: unknown key")
    stranger.refused(("run", "suite.yaml"), "suite.yaml:10:1: deadline: unknown key")
    stranger.spoil(
        "suite.yaml",
        SHORT.replace("suite: short", "suite: ../precious"),
        "suite.yaml:2:1: suite: should be small letters",
    )
    text = stranger.good["results.jsonl"].replace('"suite":"made"', '"suite":"../../precious"')
    stranger.write("results.jsonl", text)
    stranger.refused(("accept", "results.jsonl", "--bytes", "--baselines", "b"), r"no suite is called '../../precious'")


def _links(stranger: Stranger) -> None:
    here = stranger.here
    for name, target in (
        ("zero.yaml", "/dev/zero"),
        ("loop.yaml", "loop.yaml"),
        ("gone.yaml", "nowhere"),
        ("up.yaml", ".."),
    ):
        (here / name).symlink_to(target)
        stranger.refused(("run", name), f"{name}")
    (here / "zero.jsonl").symlink_to("/dev/zero")
    stranger.refused(("report", "zero.jsonl"), "zero.jsonl: cannot be read: is a pipe, a socket or a device")
    (here / "out.jsonl").symlink_to("../precious")
    stranger.refused(("run", "short.yaml", "--resume", "out.jsonl"), "out.jsonl")
    baseline = here / "b" / "bytes" / "made.json"
    baseline.unlink()
    baseline.symlink_to("../../../precious")
    stranger.refused(("accept", "right.jsonl", "--bytes", "--baselines", "b"), "made.json:1: not JSON")


def _not_ours(stranger: Stranger) -> None:
    for content in ('{"version": 1, "dependencies": {}}\n', "[1, 2, 3]\n", '"text"\n', "7\n"):
        stranger.spoil("suite.yaml", content, "suite.yaml:1:1: ")
        stranger.spoil("baseline.json", content, "baseline.json:1: not a baseline of zerobench")
        stranger.spoil(
            "results.jsonl", content, "results.jsonl:1: neither a record nor a provenance of zerobench; name a file"
        )


def _newer(stranger: Stranger) -> None:
    good = stranger.good
    stranger.spoil("suite.yaml", SHORT.replace("version: 1", "version: 2"), "suite.yaml:1:1: version: .* not 2")
    text = re.sub(r'"schema": \d+', f'"schema": {SCHEMA + 1}', good["baseline.json"])
    stranger.spoil(
        "baseline.json", text, rf"baseline.json:\d: schema {SCHEMA + 1}; this zerobench reads up to .*upgrade"
    )
    text = good["results.jsonl"].replace(f'"schema":{SCHEMA}', f'"schema":{SCHEMA + 1}')
    stranger.spoil("results.jsonl", text, f"results.jsonl:1: schema {SCHEMA + 1}; .* upgrade it$", readers=7)


class _Trap:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def _pickles(stranger: Stranger) -> None:
    for protocol in (0, 5):  # the old one is text
        trap = pickle.dumps(_Trap(stranger.around / CANARY), protocol)
        stranger.spoil("suite.yaml", trap, "suite.yaml")
        stranger.spoil("excuses.yaml", trap, "excuses.yaml")
        stranger.spoil("baseline.json", trap, "baseline.json:1: not (JSON|text in UTF-8)")
    stranger.spoil("results.jsonl", trap + b"\n", "results.jsonl:1: .*not UTF-8", readers=5)


@contextmanager
def _odd(path: Path, kind: str) -> Iterator[None]:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as held:
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            name = os.open(path.parent, os.O_RDONLY)  # a socket's name is short
            held.bind(f"/proc/self/fd/{name}/{path.name}")
            os.close(name)
        yield
    path.rmdir() if kind == "folder" else path.unlink()


def _not_files(stranger: Stranger) -> None:
    """Nobody writes to the pipe: who opens it to read waits for ever. history takes a folder, of results."""
    for kind in ("folder", "pipe", "device", "socket") if stranger.bench.whole else ("pipe",):
        for name, readers in READERS.items():
            with _odd(stranger.here / name, kind):
                for words in readers if stranger.bench.whole else readers[:1]:
                    stranger.refused(words, name)
            stranger.write(name, stranger.good[name])


def _encodings(stranger: Stranger) -> None:
    for spoilt, said in (
        (b"\xff\xfe", "not UTF-8"),
        ("é".encode("latin-1"), "not UTF-8"),
        (b"\0", "not allowed|control"),
    ):
        stranger.spoil("suite.yaml", SHORT.encode().replace(b"Four", spoilt), f"suite.yaml:3:.*({said})", readers=2)
    for content in (SHORT.encode("utf-16"), "\ufeff".join(SHORT).encode()):
        stranger.spoil("suite.yaml", content, r"suite.yaml:\d+:\d+: ")
    stranger.spoil("baseline.json", b"\xff", "baseline.json:1: not text in UTF-8, so not a baseline")
    stranger.spoil("results.jsonl", b"\xff\n", "results.jsonl:1: byte 0xff at 1 is not UTF-8")
    stranger.spoil("results.jsonl", stranger.good["results.jsonl"].encode("utf-16"), "results.jsonl:1: ")


def _twice(stranger: Stranger) -> None:
    stranger.spoil("suite.yaml", SHORT + "suite: other\n", r"suite.yaml:10:1: suite: duplicate key \(first at line 2\)")
    stranger.spoil("excuses.yaml", EXCUSES.replace("}", ", check: a.b}"), r"excuses.yaml:1:\d+: 0.check: duplicate key")
    text = stranger.good["baseline.json"].replace('"schema": 1', '"schema": 1, "schema": 1')
    stranger.spoil("baseline.json", text, r"baseline.json:\d: 'schema' stands there twice")
    text = stranger.good["results.jsonl"].replace('"status":"ok"', '"status":"error","status":"ok"')
    stranger.spoil("results.jsonl", text, "results.jsonl:2: 'status' stands there twice")
