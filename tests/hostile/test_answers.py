"""Responses that want more than a score: what each of them gets. The table is the documentation.

`CANARY` stands for code that writes a file; no response may make it exist, whether the answer is refused before it is parsed or
evaluated where nothing can be written.
"""

import time
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from serve.sandbox import Sandbox
from serve.verifiers import VERIFIERS, find
from serve.verifiers.answer_guard import GUARDS, refused

pytestmark = pytest.mark.slow

PAYLOADS = {
    "call": "__import__('os').system('touch CANARY')",
    "list": "[__import__('os').system('touch CANARY')]",
    "product": "x + __import__('os').system('touch CANARY')*0",
    "dict": "{'a': __import__('os').system('touch CANARY')}",
    "nested": "eval(\"__import__('os').system('touch CANARY')\")",
    "balanced": "1) + __import__('os').system('touch CANARY') + (1",
    "walrus": "[y := __import__('os'), y.system('touch CANARY')]",
    "classes": "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0]('touch CANARY', shell=True)",
    "lambda": "(lambda: open('CANARY', 'w'))()",
    "format": "'{0.__class__}'.format(1) + str(open('CANARY', 'w'))",
}

# Answers that only ask for time or memory, for each verifier that computes with them: (source, truth, answer).
ENDLESS = {
    "tower": ("math", "2", "\\boxed{9^{9^{9^{9}}}}"),
    "tower of three": ("math", "2", "\\boxed{10^{10^{10}}}"),
    "large exponent": ("math", "2", "\\boxed{3^{999999999}}"),
    "factorial": ("math", "2", "\\boxed{99999999!}"),
    "factorial of a factorial": ("math", "2", "\\boxed{((9!)!)!}"),
    "binomial": ("math", "2", "\\boxed{\\binom{99999999}{9999999}}"),
    "braces": ("math", "2", "\\boxed{" + "{" * 20_000 + "}" * 20_000 + "}"),
    "parentheses": ("math", "2", "$" + "(" * 20_000 + "1" + ")" * 20_000 + "$"),
    "many boxes": ("math", "2", "\\boxed{1}" * 20_000),
    "long number": ("math", "2", "\\boxed{" + "9" * 500_000 + "}"),
    "roots of roots": ("math", "2", "\\boxed{" + "\\sqrt{" * 3_000 + "2" + "}" * 3_000 + "}"),
    "long sum": ("math", "2", "\\boxed{" + "+".join(f"x_{{{i}}}" for i in range(5_000)) + "}"),
    "fractions": ("math", "2", "\\boxed{" + "\\frac{1}{1+" * 2_000 + "x" + "}" * 2_000 + "}"),
    "spaces": ("math", "2", "\\boxed{1" + " " * 500_000 + "}"),
    "open tags": ("math", "2", "<think>" * 100_000 + "\\boxed{3}"),
    "backslashes": ("math", "2", "$" + "\\" * 100_000 + "$"),
    "dollars": ("math", "2", "$" * 100_000 + "3"),
}


@pytest.fixture(scope="module")
def box():
    with Sandbox(timeout_s=3.0) as box:
        yield box


@pytest.fixture(scope="module")
def entries() -> dict[str, dict]:
    """A problem of every dataset that can be made without options."""
    return {name: create_dataset(name, size=1, seed=1)[0] for name in sorted(DATASETS) if name != "composite"}


@pytest.fixture
def canary(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "canary"


def score(box: Sandbox, source: str, truth: str, response: str, extra: dict | None = None) -> float | str:
    (found,) = box.score(source, [{"response": response, "ground_truth": truth, "extra_info": extra or {}}])
    return found


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
@pytest.mark.parametrize("dataset", GUARDS)
def test_what_is_evaluated_lets_no_code_through(dataset, payload, canary, entries):
    """In this process, without the sandbox behind it."""
    answer = payload.replace("CANARY", str(canary))
    extra = {"entry": entries[dataset]}
    worth = find("reasoning_gym/x").load()(f"<answer>{answer}</answer>", "", extra)
    assert not canary.exists()
    assert worth <= 0.01
    if dataset not in ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"):
        assert refused(dataset, answer)
    elif "walrus" not in payload and payload[0] != "1":  # those are no expressions, which `eval` itself refuses
        assert refused(dataset, answer) or payload.startswith("[y :=")


def test_no_other_dataset_evaluates_answers(entries, canary):
    """The audit: every payload to every dataset that has no guard, in this process. What is evaluated and fails is noticed too."""
    verifier = find("reasoning_gym/x").load()
    evaluated = []
    for name in sorted(set(entries) - set(GUARDS)):
        for payload in PAYLOADS.values():
            try:
                verifier(f"<answer>{payload.replace('CANARY', str(canary))}</answer>", "", {"entry": entries[name]})
            except NameError:
                evaluated.append(name)
            except Exception:  # a scorer may refuse what it cannot read
                continue
            assert not canary.exists(), name
    assert not evaluated


def test_right_answers_pass_the_guards():
    for name in GUARDS:
        dataset = create_dataset(name, size=60, seed=2)
        right = [entry for entry in dataset if "Integral(" not in str(entry["answer"])]  # unevaluated: no answer at all
        assert len(right) > 40
        for entry in right:
            assert refused(name, str(entry["answer"])) is None, entry["answer"]
            worth = find("reasoning_gym/x").load()(f"<answer>{entry['answer']}</answer>", "", {"entry": entry})
            assert worth == 1.0, entry["answer"]


@pytest.mark.parametrize("formula", ["x**9999", "2**2**2**2", "x**(64*64*64*64)", "9**(9**9)", "x**-(9**9)", "(x**64)**(64*64)"])
def test_exponents_are_bounded_before_they_are_evaluated(formula):
    assert "exponent" in (refused("polynomial_multiplication", formula) or "")
    assert refused("polynomial_multiplication", "x**(2*n) + y**(3/2) - x**-2") is None


@pytest.mark.parametrize(("source", "truth", "answer"), ENDLESS.values(), ids=ENDLESS.keys())
def test_what_asks_for_time_costs_the_clock_at_most(box, source, truth, answer):
    start = time.monotonic()
    found = score(box, source, truth, answer)
    assert found == 0.0 or (isinstance(found, str) and found.startswith(("timeout", "error"))), found
    assert time.monotonic() - start < 60  # it came back at all
    assert score(box, "math", "2", "\\boxed{2}") == 1.0


LONG = {
    "number_walk": ("00>99/99", ["00+1=01;" * 125_000, "00+1=01;00-1=00;" * 60_000 + "#", "#" * 1_000_000, " " * 1_000_000]),
    "chain_arithmetic": ("33", ["#33 " * 250_000, "#33" + " " * 1_000_000 + "x", "#" * 1_000_000, "\n" * 1_000_000]),
    "graded_chain": ("37+5-9", ["37+5=42;" * 125_000 + "#42", ";" * 1_000_000 + "#00", "#33" * 300_000]),
}


@pytest.mark.parametrize("source", [name for name, verifier in VERIFIERS.items() if not (verifier.killable or verifier.asks_model)])
def test_verifiers_that_cannot_be_killed_take_a_megabyte_in_no_time(source):
    """A quadratic one would take minutes; every verifier that works in the judge's own process is here."""
    truth, responses = LONG[source]
    start = time.monotonic()
    for response in responses:
        find(source).load()(response, truth, {})
    assert time.monotonic() - start < 20
