"""What a plug-in answers: every strange answer of the fault matrix is refused by the method's name, or left to a check."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zerobench.claims import Claims
from zerobench.implementations import answers
from zerobench.implementations.protocol import StepReport
from zerobench.implementations.registry import BadPlugin
from zerobench.terms import Category, Stage
from zerobench.tests.faults.strange import ANSWERS, Fickle

WEIGHTS = {"head": torch.ones(1), "body": torch.ones(2, 3)}
LOSS = torch.ones(3, requires_grad=True).sum()
RIGHT: dict[str, Any] = {
    "unavailable": None,
    "claims": Claims(Stage.GRADIENT),
    "forward": LOSS,
    "step": StepReport(),
    "model_states": {
        category: (torch.ones(3),) for category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)
    },
    "full_parameters": WEIGHTS,
    "full_gradients": WEIGHTS,
}
CHECK = re.compile(r"[a-z]+\.[a-z_]+")
DEEPER = ("does not require grad",)  # torch says it, in backward
ROWS = [
    (method, name, make, says)
    for method, rows in ANSWERS.items()
    if method in RIGHT
    for name, make, says in rows
    if "hung" not in says
]


def ask(method: str, answer: Any) -> Any:
    if method == "claims":
        return answers.claimed(answer)
    if method == "unavailable":
        return answers.reason(answer)
    engine = answers.Answering(SimpleNamespace(**{method: lambda *_, **__: answer}))
    return engine.forward((), last=True) if method == "forward" else getattr(engine, method)()


@pytest.mark.parametrize("method", RIGHT)
def test_right_answers_pass(method: str) -> None:
    assert ask(method, RIGHT[method]) == RIGHT[method]


@pytest.mark.parametrize(("method", "name", "make", "says"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_wrong_answers(method: str, name: str, make: Any, says: str) -> None:
    answer = make(RIGHT[method])
    if CHECK.fullmatch(says) or says in DEEPER or says == "unavailable: ":
        ask(method, answer)  # a matter of values, which is not judged here
        return
    with pytest.raises(BadPlugin) as caught:
        ask(method, answer)
    assert re.search(says, str(caught.value).replace("\n", " "))


def test_state_of_the_optimizer() -> None:
    right = {"w": {"exp_avg": torch.ones(2), "step": torch.tensor(3)}}
    assert ask("full_optimizer_state", right) == right
    with pytest.raises(BadPlugin, match=r"full_optimizer_state\(\)\['w'\] returned None; it returns a mapping"):
        ask("full_optimizer_state", {"w": None})
    with pytest.raises(BadPlugin, match=r"returned a float 1\.0 as 'exp_avg' of 'w'; it returns tensors"):
        ask("full_optimizer_state", {"w": {"exp_avg": 1.0}})


@pytest.mark.parametrize("number", [2, 2.0, torch.tensor(2.0), torch.tensor([2]), np.float32(2), np.int64(2)])
def test_numbers_of_torch_and_numpy_are_numbers(number: Any) -> None:
    report = ask("step", StepReport(skipped=np.bool_(True), grad_norm=number, loss_scale=number))  # type: ignore[arg-type]
    assert report == StepReport(True, 2.0, 2.0)
    assert [type(report.skipped), type(report.grad_norm), type(report.loss_scale)] == [bool, float, float]


def test_claims_are_read_once() -> None:
    claims = ask("claims", Fickle(Stage.GRADIENT))
    assert type(claims) is Claims
    assert claims.stage is claims.stage


def test_modules() -> None:
    assert answers.modules(["a", "b.c"]) == ("a", "b.c")
    for wrong in ("os", None, (1,), ("",), {"os": 1}):
        with pytest.raises(BadPlugin, match=r"imports is .*; it is a tuple of names of modules"):
            answers.modules(wrong)
