"""Final answers: a table of pairs (the place for a user's report), and two public sets, each against itself and near misses."""

import csv
import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.verifiers import find
from serve.verifiers.answer_form import AnswerConfig
from serve.verifiers.math_answer import score, truths_of, why_unusable
from serve.verifiers.plain_text import plain
from serve.verifiers.written_number import number_at
from tests.conftest import SHARED_DATA

TABLE = [json.loads(line) for line in Path(__file__).with_name("answers.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("line", TABLE, ids=lambda line: f"{line['ground_truth']!s:.20}|{line['response'][-25:]}")
def test_an_answer_is_right_or_wrong(line):
    item = {"extra_info": {}, **line}
    assert find(line["data_source"]).score(item) == line["right_reward"]


def test_the_table_has_lines_of_every_kind():
    assert len(TABLE) >= 120
    assert {line["right_reward"] for line in TABLE} == {0, 1}


def imo_answers():
    file = SHARED_DATA / "imobench/answerbench_v2.csv"
    if not file.exists():
        pytest.skip(f"IMO-AnswerBench is not at {file}: its 400 answers go untested")
    with open(file, newline="") as stream:
        return [row["Short Answer"].strip() for row in csv.DictReader(stream)]


def in_dollars(answer):
    return answer if answer.startswith("$") else f"${answer}$"


IMO_FORMS = {
    "boxed": (lambda answer: f"So it is \\boxed{{{answer}}}", 398),
    "dollars": (lambda answer: f"Therefore\n\n{in_dollars(answer)}", 398),
    "bold": (lambda answer: f"Thus\n\n**{answer}**", 398),
    "sentence": (lambda answer: f"We are done. The answer is {answer}.", 390),
}


def changed(answer):
    """The answer with its last digit one higher; None if it has none."""
    digits = list(re.finditer(r"\d", answer))
    if not digits:
        return None
    at = digits[-1].start()
    return f"{answer[:at]}{(int(answer[at]) + 1) % 10}{answer[at + 1 :]}"


@pytest.mark.parametrize("form", IMO_FORMS)
def test_olympiad_answers_are_right_and_their_last_digit_counts(form):
    write, least = IMO_FORMS[form]
    right, slowest = 0, 0.0
    for answer in imo_answers():
        start = time.monotonic()
        right += score(write(answer), answer, {})
        slowest = max(slowest, time.monotonic() - start)
        if (other := changed(answer)) is not None:
            assert score(write(other), answer, {}) == 0.0, (answer, other)
    assert right >= least
    print(f"slowest {slowest:.2f} s")


@pytest.mark.parametrize("form", IMO_FORMS)
def test_a_list_without_one_of_its_items_is_wrong(form):
    lists = [answer for answer in imo_answers() if "," in answer and len(items := plain(answer).split(",")) > 1 and all(items)]
    assert len(lists) > 40
    for answer in lists:
        items = answer.strip("$ .").split(",")
        for i in range(len(items)):
            less = ",".join(items[:i] + items[i + 1 :])
            assert score(IMO_FORMS[form][0](less), answer, {}) == 0.0, (answer, less)


GSM8K_FORMS = {
    "bare": "{}",
    "hash": "48+24\n#### {}",
    "hash and text": "#### {} apples in 2 baskets",
    "hash and a question": "#### {}\n\nQuestion: 13 rolls, 4 sold?\nAnswer: 13-4=9\n#### 9",
    "tag": "<think>6*7</think><answer>{}</answer>",
    "boxed": "So it is $\\boxed{{{}}}$.",
    "bold": "She has **{}** of them.",
    "sentence": "With 3 and 4 added, the answer is {}.",
    "last number": "First 3, then 4: in the end she makes ${} every day.",
}


@pytest.mark.parametrize("source", ["gsm8k", "math"])
@pytest.mark.parametrize("form", GSM8K_FORMS)
def test_grade_school_answers_are_right_in_every_form(form, source):
    file = SHARED_DATA / "gsm8k/test.jsonl"
    if not file.exists():
        pytest.skip(f"GSM8K is not at {file}: its solutions go untested")
    for line in file.read_text().splitlines()[:200]:
        solution = json.loads(line)["answer"]
        answer = solution.rpartition("####")[2].strip()
        item = {"data_source": source, "extra_info": {}}
        for truth in (answer, solution):
            right = item | {"ground_truth": truth, "response": GSM8K_FORMS[form].format(answer)}
            assert find(source).score(right) == 1.0, answer
        wrong = item | {"ground_truth": answer, "response": GSM8K_FORMS[form].format(changed(answer))}
        assert find(source).score(wrong) == 0.0, answer


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{:,}", "{}", "${:,}$", "{}.", "{} dollars", "**{}**", "\\text{{{}}}"]))
def test_whole_numbers_are_read_exactly(number, way):
    read = number_at(plain(way.format(number)))
    assert read is not None
    assert read.value == number


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_fractions_are_equal_only_to_themselves(up, down, other):
    written = f"\\frac{{{up}}}{{{down}}}"
    assert score(f"\\boxed{{{up}/{down}}}", written, {}) == 1.0
    assert score(f"\\boxed{{{up}/{other}}}", written, {}) == float(Fraction(up, down) == Fraction(up, other))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=5, unique=True), st.randoms())
def test_order_counts_in_tuples_alone(items, rng):
    shuffled = rng.sample(items, len(items))
    text, other = (", ".join(map(str, one)) for one in (items, shuffled))
    assert score(f"\\boxed{{{other}}}", text, {}) == 1.0
    assert score(f"\\boxed{{\\{{{other}\\}}}}", f"\\{{{text}\\}}", {}) == 1.0
    assert score(f"\\boxed{{({other})}}", f"({text})", {}) == float(items == shuffled)


@given(st.text(max_size=200), st.sampled_from(["72", "\\frac{1}{2}", "1, 2", "(1,2)", "x+1", "B", "All powers of 2"]))
def test_any_text_gets_a_verdict(text, truth):
    assert score(text, truth, {}) in (0.0, 1.0)


@pytest.mark.parametrize("truth", ["1 if n is even, otherwise 2", "All powers of 2", "60, 100, 8p (for all odd primes p)"])
def test_a_truth_in_words_is_refused_unless_words_are_compared(truth):
    assert "in words" in why_unusable(truth, "refuse")
    assert why_unusable(truth, "compare") is None
    assert score(f"\\boxed{{\\text{{{truth}}}}}", truth, {}) == 1.0


@pytest.mark.parametrize("truth", ["72", "18 dollars", "$x+1$", "B", "Paris", ["7", "8"], 42, 0.5, "\\sin x", "(1,2)"])
def test_other_truths_can_be_compared(truth):
    assert why_unusable(truth, "refuse") is None


@pytest.mark.parametrize("truth", ["", " ", [], True, {"a": 1}, [None]])
def test_a_truth_that_says_nothing_is_an_error(truth):
    with pytest.raises(ValueError, match="truth"):
        truths_of(truth)
    assert why_unusable(truth, "compare") is not None


def test_an_error_in_the_comparison_is_no_verdict(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such simplification")

    monkeypatch.setattr("serve.verifiers.formulas.verify", broken)
    with pytest.raises(RuntimeError, match="no such simplification"):
        score("\\boxed{x > 3}", "x \\ge 3", {})


@pytest.mark.parametrize("name", ["form", "words", "percent"])
def test_settings_that_are_none_are_refused(name):
    with pytest.raises(ValueError, match=rf"task.answer.{name}=other: use one of"):
        AnswerConfig(**{name: "other"})
