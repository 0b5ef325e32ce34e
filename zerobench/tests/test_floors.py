"""Imports go down the floors, and the judging side never sees torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent

FLOORS = {
    0: "terms units codec files trace_folder interrupt",
    1: "claims scenarios case readings record finding loader coherence shape shipped suite",
    2: "analytic predict derived recipes stats sequential gloo nccl nvml accelerators",
    3: "models implementations probes device rank oracle difference digest globalstate options libraries",
    4: "numerics session worker traced launch simulation mutants",
    5: "checks explain judge store shelf lines plausible provenance baseline baseline_file baseline_times machine history",
    6: "report doctor runner tracing selftest ab cli __main__ commands commands_info commands_explain "
    "commands_ab commands_baseline commands_history commands_job commands_report "
    "pytest_plugin pytest_suite pytest_session",
}
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names.split()}
NEVER = {5: {3, 4}}
"""Checks and stores read records; what made them they do not know."""


def modules() -> list[Path]:
    return [
        p
        for p in sorted(PACKAGE.rglob("*.py"))
        if "tests" not in p.relative_to(PACKAGE).parts and p.parent != PACKAGE / "_data"
    ]


def unit(parts: tuple[str, ...]) -> str:
    """The row of the table that a module belongs to: its first name below the package."""
    return parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "zerobench" else {node.module}
            )
    return {n.removeprefix("zerobench.") for n in names if n.startswith("zerobench.")}


def test_every_module_has_a_floor() -> None:
    rows = {unit(p.relative_to(PACKAGE).parts) for p in modules()} - {"__init__"}
    assert rows == set(FLOOR)


def test_imports_go_down() -> None:
    wrong = []
    for path in modules():
        here = unit(path.relative_to(PACKAGE).parts)
        if here == "__init__":
            continue
        for name in imported(ast.parse(path.read_text())):
            there = name.split(".")[0]
            if there == "__version__" or there == here:
                continue
            if FLOOR[there] > FLOOR[here] or FLOOR[there] in NEVER.get(FLOOR[here], set()):
                wrong.append(
                    f"{path.relative_to(PACKAGE)} (floor {FLOOR[here]}) imports zerobench.{name} (floor {FLOOR[there]})"
                )
    assert not wrong, "\n".join(wrong)


def test_the_judging_side_starts_without_torch() -> None:
    upper = [
        p.relative_to(PACKAGE) for p in modules() if FLOOR.get(unit(p.relative_to(PACKAGE).parts), 0) in (0, 1, 2, 5, 6)
    ]
    names = [".".join(("zerobench", *p.with_suffix("").parts)).removesuffix(".__init__") for p in upper]
    names = [n for n in names if not n.endswith("__main__")]
    code = f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\nassert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rank_needs_torch_and_the_standard_library_only() -> None:
    code = (
        "import sys, builtins\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import zerobench.worker, zerobench.launch.ranks\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "third = {'numpy', 'pydantic', 'yaml', 'pandas', 'pytest', 'pynvml'} & new\n"
        "assert not third, third\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
