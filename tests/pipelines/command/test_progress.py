from ray.exceptions import RayTaskError

from pipelines.command.progress import clock, describe, flops, table
from pipelines.trainer.failures import root_cause


def test_numbers_for_people():
    assert [flops(v) for v in (12.0, 3.5e9, 2e13, 4e15, 7.9e19)] == [
        "12 FLOP",
        "3.50 GFLOP",
        "20.00 TFLOP",
        "4.00 PFLOP",
        "79.00 EFLOP",
    ]
    assert [clock(v) for v in (5, 65, 3661)] == ["0:05", "1:05", "1:01:01"]
    assert table([("a", "1"), ("long", "2")]) == "  a     1\n  long  2"


def test_the_line_before_and_after_the_first_step():
    progress = {"step": 0, "steps": 60, "score": None, "evaluations": {}, "step_s": None, "tokens_per_s": None, "decode_flops": 0}
    progress |= {"restarts": 0, "alarm": False, "warnings": []}
    assert describe(progress, 12) == "step 0/60  starting trainer and engines, 0:12"
    progress |= {
        "step": 20,
        "score": 0.5,
        "evaluations": {0: 0.3, 10: 0.4},
        "step_s": 6.0,
        "tokens_per_s": 5000.0,
        "decode_flops": 2e12,
    }
    line = describe(progress, 130)
    assert line == "step 20/60  score 0.500  validation 0.400 (step 10)  5,000 tok/s  6.0 s/step  decode 2.00 TFLOP  ETA 4:00"
    assert "ALARM: engine and trainer disagree" in describe(progress | {"alarm": True}, 130)
    assert "1 warnings" in describe(progress | {"warnings": ["a file was skipped"]}, 130)
    assert describe(progress | {"restarts": 1}, 130) == line + "  trainer restarted 1 x"


def test_the_innermost_reason_is_what_is_said():
    inner = ValueError("row 3: no column 'x'")
    outer = RuntimeError("training failed")
    outer.__cause__ = RayTaskError("read", "Traceback ...", inner)
    assert root_cause(outer) == "row 3: no column 'x'"
    assert root_cause(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_cause_that_names_itself_ends():
    error = RuntimeError("loop")
    error.__cause__ = error
    assert root_cause(error) == "loop"
