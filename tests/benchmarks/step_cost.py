"""How a step's cost grows with its groups: `python -m tests.benchmarks.step_cost [--groups 32 128 512] [--steps 3]`

Runs the product at each number of groups (of 8 continuations, on the testbed) and prints the median seconds of a step, the
least-squares line through them, and how far each lies from it.
"""

import argparse
import statistics
import tempfile

import numpy as np

from tests.benchmarks.step_overhead import WARM_UP, loop_timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--steps", type=int, default=2, help="measured, after a warm-up")
    args = parser.parse_args()
    seconds = []
    for groups in args.groups:
        with tempfile.TemporaryDirectory() as folder:
            timings = loop_timings(groups, WARM_UP + args.steps, folder)
        seconds.append(statistics.median(timings["timing_s/step"]))
    slope, intercept = np.polyfit(args.groups, seconds, 1)
    print(f"\n{'groups':>8}{'seconds':>10}{'per group':>12}{'line':>10}")
    for groups, value in zip(args.groups, seconds, strict=True):
        print(f"{groups:>8}{value:>10.2f}{1000 * value / groups:>9.1f} ms{slope * groups + intercept:>10.2f}")
    print(f"slope {1000 * slope:.1f} ms per group, intercept {intercept:.2f} s")


if __name__ == "__main__":
    main()
