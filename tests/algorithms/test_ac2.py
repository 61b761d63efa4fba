"""AC2 against its plain restatement, on scripted rollouts through the coordinator's real planning, tables, credit and buffers."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from algorithms.ac2_memory import AC2Memory, rank_correlation
from algorithms.self_critic import SelfCriticPrompt
from algorithms.types import Group, ObservedGroup, Problem, Step
from pipelines.config.run import ASSETS
from pipelines.engines.self_critic import SelfCritic
from pipelines.rollout import schema
from pipelines.rollout.stages import credit
from pipelines.store import checkpoint
from tests.conftest import configure
from tests.pipelines.rollout.test_coordinator import make
from tests.reference.ac2 import AC2Reference

BUDGET, CHUNK, GRID = 40, 10, 10
ANSWERED, END = 99, 1  # tokens of a complete answer and of a response's end
PROMPT = SelfCriticPrompt((), (2,), (3,), (4, 2), tuple((10 + i, END) for i in range(11)))
PROBLEMS = [Problem(f"p{i:02d}", "chain_arithmetic", [1, 2, 3], "33") for i in range(12)]


class World:
    """Scripted: every answer follows from what is asked. The critic grows accurate, with invalid answers now and then."""

    def __init__(self, problems):
        self.difficulty = {problem: (i + 1) / (len(problems) + 1) for i, problem in enumerate(problems)}

    @staticmethod
    def _rng(*key):
        return np.random.default_rng([abs(hash(part)) % 2**31 if isinstance(part, tuple) else part for part in key])

    def continuations(self, step, problem, prefix, n, tokens):
        number, made = int(problem[1:]), []
        rng = self._rng(step, number, len(prefix), sum(prefix), tokens)
        for _ in range(n):
            length = int(rng.integers(12, BUDGET + 8))  # the whole response's; beyond the budget it is cut off
            new = max(1, length - len(prefix))
            ids = [int(i) for i in rng.integers(20, 90, size=new)]
            if rng.random() < 0.1:
                ids[len(ids) // 2] = ANSWERED
            finished = new <= tokens
            ids = [*ids[:-1], END] if finished else ids[:tokens]
            reward = None if rng.random() < 0.05 else self.reward(rng, self.difficulty[problem])
            made.append((tuple(ids), "stop" if finished else "length", reward))
        return made

    @staticmethod
    def reward(rng, share):
        return float(rng.random() < share)

    def value(self, step, problem, state):
        rng = self._rng(step, int(problem[1:]), len(state), sum(state), 7)
        if rng.random() < 0.06:
            return None
        noise = rng.normal() * 0.5 / step
        return round(min(max(self.difficulty[problem] + noise, 0.0), 1.0), 1)

    def entropy(self, step):
        return 0.28 + 0.1 * np.sin(step)

    def changes(self, step):
        return [1.0, 0.5], 3.5 if step % 5 in (1, 2, 3) else 2.0


class Sevenths(World):
    """Graded in sevenths, as proofs are; a judge's answer arrives with six digits."""

    @staticmethod
    def reward(rng, share):
        return round(float(rng.binomial(7, share)) / 7, 6)


class ScriptedLearner:
    """Where the real trainer would compute, this one looks up; it keeps what it was told to learn."""

    def __init__(self, coordinator, world, step):
        self.coordinator, self.world, self.number, self.actor_steps = coordinator, world, step, 0

    def receive(self, groups, forwards):
        assert list(forwards) == ["policy"]
        assert forwards["policy"](SimpleNamespace(actor_mask=False, from_prompt=True))
        return [SimpleNamespace(from_prompt=True, entropy=np.full(2, self.world.entropy(self.number)))]

    def recall(self):
        self.recalled = self.coordinator.recall(self.number, 0, 1)
        return self.recalled

    def total(self, values):
        return values

    def minibatches(self, batch, count, balanced):
        assert (count, balanced) == (2, True)  # a group's continuations can fall into both
        return [[], []]

    def step(
        self, optimizer, samples, loss, *, measure_change, weightless_tokens=0, aggregation="token-mean", lr=None, temperature=None
    ):
        assert measure_change
        if optimizer == "self_critic":
            assert (self.actor_steps, aggregation, temperature) == (1, "sum", 1.0)  # between the two of the actor
            self.lessons, self.lr = samples, lr
            return Step(tokens=1, change=self.world.changes(self.number)[1])
        assert aggregation == "token-mean"
        self.actor_steps += 1
        return Step(tokens=1, change=self.world.changes(self.number)[0][self.actor_steps - 1])

    def remember(self, values):
        self.coordinator.remember(values)


def algorithm(**fields):
    base = configure("algorithm=ac2").algorithm
    small = dataclasses.replace(
        base,
        problems_per_step=10,
        group_size=8,
        max_new_tokens=BUDGET,
        chunk_tokens=CHUNK,
        replay=dataclasses.replace(base.replay, capacity=7, refill_problems=3, cut_grid=GRID),
        self_critic=dataclasses.replace(base.self_critic, buffer_pairs=45, pairs_per_update=20),
        entropy=dataclasses.replace(base.entropy, target=0.28),
        judge_failure="zero",
    )
    return dataclasses.replace(small, **fields)


def coordinator_of(tmp_path, chosen, state=None):
    return make(tmp_path, state, chosen, problems=PROBLEMS, self_critic_prompt=PROMPT, context_limit=1000)


def rolled_out(table, world, step):
    """The planned table after generation and judging by the script."""
    queries = SelfCritic(PROMPT, 1000, complete_answer="<answer>")
    columns = {name: [] for name, _ in schema.GENERATE + schema.JUDGE}
    for row in table.to_pylist():
        prefix, problem = tuple(row["prefix_ids"]), row["problem_id"]
        made = world.continuations(step, problem, prefix, row["n"], row["max_new_tokens"])
        texts = ["</think><answer>" if ANSWERED in ids else "" for ids, _, _ in made]
        owned = [queries.scores(row, text, reason) for (_, reason, _), text in zip(made, texts, strict=True)]
        columns["response_ids"].append([list(ids) for ids, _, _ in made])
        columns["response_text"].append(texts)
        columns["rollout_logprobs"].append([[-0.1] * len(ids) for ids, _, _ in made])
        columns["finish_reason"].append([reason for _, reason, _ in made])
        columns["truncated"].append([reason == "length" and not row["chunk"] for _, reason, _ in made])
        columns["self_scored"].append(owned)
        columns["endpoint_value"].append(
            [world.value(step, problem, prefix + ids) if own else None for (ids, _, _), own in zip(made, owned, strict=True)]
        )
        columns["prefix_value"].append(world.value(step, problem, prefix) if row["ask_value"] else None)
        columns["reference_left_out"].append(False)
        columns["reward"].append([None if own else reward for (_, _, reward), own in zip(made, owned, strict=True)])
        columns["acc"].append(columns["reward"][-1])
        failed = ["error: no answer" if reward is None else "ok" for _, _, reward in made]
        columns["reward_status"].append(["self_critic" if own else status for own, status in zip(owned, failed, strict=True)])
    generated = schema.append(table, {name: columns[name] for name, _ in schema.GENERATE}, "generate")
    return schema.append(generated, {name: columns[name] for name, _ in schema.JUDGE}, "judge")


def real_step(coordinator, chosen, world, step):
    """A step on the real path; its credited rows, and the learner with what it was taught."""
    assert coordinator.plan(step, 0, step - 1)
    table = credit(rolled_out(coordinator.rows(0, 1), world, step), chosen)
    coordinator.ingest(table)
    learner = ScriptedLearner(coordinator, world, step)
    metrics = chosen.update(learner, [row for row in table.to_pylist() if row["keep"]])
    coordinator.finish_step(step, metrics)
    return table.to_pylist(), learner


def reference_of(world, chosen):
    r, critic = chosen, chosen.self_critic
    return AC2Reference(
        world, [p.problem_id for p in PROBLEMS], seed=0, n_refill=r.replay.refill_problems, n_batch=r.problems_per_step,
        g=r.group_size, b=r.chunk_tokens, budget=r.max_new_tokens, capacity=r.replay.capacity, grid=r.replay.cut_grid,
        max_fraction=0.9, alpha=r.audit_fraction, pairs_kept=critic.buffer_pairs, pairs_drawn=critic.pairs_per_update, window=5,
        tau_global=0.20, tau_local=0.18, min_valid=r.min_valid, least=r.reference_reward, lr=critic.rate.initial,
        floor=critic.rate.floor, target_entropy=0.28, grouped=r.grouped,
    )  # fmt: skip


@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "single_chunks"])
@pytest.mark.parametrize("kind", [World, Sevenths])
def test_thirty_steps_agree_with_the_plain_restatement(tmp_path, kind, grouped):
    """Judge and critic fail now and then; references are shown as the plan found them."""
    world = kind([p.problem_id for p in PROBLEMS])
    chosen = algorithm(grouped=grouped, audit_fraction=0.25 if grouped else 0.0)
    coordinator, reference = coordinator_of(tmp_path, chosen), reference_of(world, chosen)
    seen = set()
    for step in range(1, 31):
        rows, learner = real_step(coordinator, chosen, world, step)
        rolled, lessons, lr = reference.step(step)
        assert len(rows) == len(rolled)
        for row, one in zip(rows, rolled, strict=True):
            assert (row["problem_id"], tuple(row["prefix_ids"]), row["n"], row["max_new_tokens"], row["purpose"]) == (
                one["problem"], one["prefix"], one["n"], one["tokens"], one["purpose"],
            )  # fmt: skip
            assert row["advantages"] == pytest.approx(one["advantages"], abs=1e-6)
            assert row["actor_mask"] == one["mask"]
            assert row["reference_ids"] == (None if one["reference"] is None else list(without_end(one["reference"])))
            assert row["self_critic_target"] == (None if one["target"] is None else pytest.approx(one["target"]))
            seen |= {row["purpose"], "chunk" if row["chunk"] else "full", *row["finish_reason"], *row["reward_status"]}
            seen |= {
                "no value" for value, own in zip(row["endpoint_value"], row["self_scored"], strict=True) if own and value is None
            }
            seen |= {"invalid V(s)"} if row["purpose"] == "train" and row["prefix_value"] is None else set()
            seen |= {"reference"} if row["reference_ids"] is not None else set()
        memory = coordinator.memory
        assert memory.readiness.ready == reference.ready
        assert memory.readiness.last_error == pytest.approx(reference.last_error)
        assert {p: tuple(ids.tolist()) for p, ids in memory.bank.items()} == {p: without_end(r) for p, r in reference.bank.items()}
        pairs = [(p.problem_id, tuple(p.prefix_ids.tolist()), pytest.approx(p.target)) for p in memory.pairs]
        assert pairs == [(p, prefix, target) for p, prefix, target in reference.pairs]
        stored = [(t.problem_id, tuple(coordinator.prefix(t, t.length))) for t in coordinator.trajectories()]
        assert stored == reference.buffer
        assert_lessons(learner, lessons)
        assert (memory.clip_offset, learner.lr) == (pytest.approx(reference.k), pytest.approx(lr))
        assert (memory.self_critic_lr, memory.streak) == (pytest.approx(reference.lr), reference.streak)
    assert seen >= {
        "refill",
        "train",
        "chunk",
        "full",
        "stop",
        "length",
        "self_critic",
        "ok",
        "no value",
        "invalid V(s)",
        "reference",
    }
    assert ("audit" in seen) == grouped
    assert "error: no answer" in seen
    assert len(reference.ready) >= 3
    assert reference.lr == reference.floor


def without_end(response):
    return tuple(response[:-1] if response[-1] == END else response)


def assert_lessons(learner, expected):
    """The self-critic's samples are the lessons of the restatement, in any order."""
    assert learner.recalled.weight == pytest.approx(sum(w for *_, w in expected))
    wanted = sorted(
        ([*PROMPT.query([1, 2, 3], prefix, None if ref is None else without_end(ref)).tolist(), *PROMPT.answer(target)], w)
        for _, prefix, ref, target, w in expected
    )
    assert sorted((sample.ids.tolist(), sample.columns["weight"]) for sample in learner.lessons) == wanted
    assert all(sample.response_length == len(PROMPT.answer(0.5)) for sample in learner.lessons)


def test_a_restored_run_goes_on_the_same(tmp_path):
    world, chosen = World([p.problem_id for p in PROBLEMS]), algorithm()
    first = coordinator_of(tmp_path, chosen)
    for step in range(1, 16):
        real_step(first, chosen, world, step)
    saved = checkpoint.folder(str(tmp_path), 15)
    saved.mkdir(parents=True)
    checkpoint.write_coordinator(saved, first.state())
    (saved / "manifest.json").write_text("{}")
    json.loads((saved / "coordinator.json").read_text())
    second = coordinator_of(tmp_path / "second", chosen, checkpoint.read_coordinator_whole(saved))
    second._replay = first._replay  # the same files; a copy of the folder is another test
    for step in (16, 17):
        assert second.plan(step, 0, step - 1) == first.plan(step, 0, step - 1)
        assert second.rows(0, 1).equals(first.rows(0, 1))
        table = credit(rolled_out(first.rows(0, 1), world, step), chosen)
        for coordinator in (first, second):
            coordinator.ingest(table)
            chosen.update(ScriptedLearner(coordinator, world, step), [])
        assert second.memory.state()[0] == first.memory.state()[0]
        for name, array in second.memory.state()[1].items():
            assert np.array_equal(array, first.memory.state()[1][name])
        first._training.pop(step), second._training.pop(step)


def group_of(values, self_scored, rewards, prefix_value=0.5):
    n = len(values)
    return Group(np.array(rewards, float), np.zeros(n, bool), np.array(values, float), np.array(self_scored), prefix_value)


NAN = float("nan")


def test_single_chunks_have_the_prefix_value_as_their_baseline():
    chosen = algorithm(grouped=False, audit_fraction=0.0)
    credited = chosen.credit(group_of([0.8], [True], [NAN]))
    assert (credited.advantages.tolist(), credited.actor_mask.tolist(), credited.self_critic_target) == (
        [pytest.approx(0.3)],
        [True],
        0.8,
    )
    credited = chosen.credit(group_of([NAN], [False], [1.0]))  # the chunk ended the response
    assert (credited.advantages.tolist(), credited.self_critic_target) == ([0.5], 1.0)
    for lost in (group_of([NAN], [True], [NAN]), group_of([0.8], [True], [NAN], prefix_value=None)):
        credited = chosen.credit(lost)  # in neither loss
        assert (credited.actor_mask.tolist(), credited.self_critic_target) == ([False], None)
    failed = chosen.credit(group_of([NAN], [False], [NAN]))  # the judge failed: reward 0 for the actor, nothing for the critic
    assert (failed.advantages.tolist(), failed.actor_mask.tolist(), failed.self_critic_target) == ([-0.5], [True], None)


def test_a_critic_without_values_makes_it_prefix_grpo_and_says_so(tmp_path):
    class Silent(World):
        def value(self, step, problem, state):
            return None

    world, chosen = Silent([p.problem_id for p in PROBLEMS]), algorithm()
    coordinator = coordinator_of(tmp_path, chosen)
    for step in range(1, 8):
        rows, _ = real_step(coordinator, chosen, world, step)
        assert not any(row["chunk"] for row in rows)
    assert coordinator._last["ac2/invalid_prefix_fraction"] == 1.0
    assert "no grid value for 7 steps" in coordinator.progress()["warnings"][0]


def test_a_critic_that_is_a_constant_is_said_to_be_blind_however_small_its_error():
    chosen = algorithm()
    memory = AC2Memory(chosen.self_critic, chosen.readiness, chosen.entropy, PROMPT, context_limit=100, spread_floor=0.1)
    for correlation in (0.1,) * 6:
        memory.note_answers([0.9], correlation)
    assert memory.warnings() == []  # nothing is trusted to it yet
    memory.readiness.ready.add("p00")
    for correlation in (0.1, 0.2, 0.29, 0.0, -0.3):
        assert memory.warnings() == []
        memory.note_answers([0.9], correlation)
    (warning,) = memory.warnings()
    assert "for 5 steps the critic's values have hardly ranked the states" in warning
    memory.note_answers([0.9], 0.5)
    assert memory.warnings() == []


def test_single_chunks_come_from_separate_prefixes_of_ready_problems(tmp_path):
    world, chosen = World([p.problem_id for p in PROBLEMS]), algorithm(grouped=False, audit_fraction=0.0)
    coordinator = coordinator_of(tmp_path, chosen)
    for step in range(1, 31):
        rows, _ = real_step(coordinator, chosen, world, step)
    ready = [row for row in rows if row["chunk"]]
    assert ready
    assert {row["n"] for row in ready} == {1}
    assert {row["n"] for row in rows if row["purpose"] == "train" and not row["chunk"]} <= {1, chosen.group_size}
    assert sum(row["n"] == 1 for row in rows if row["purpose"] == "train") % chosen.group_size == 0


def test_references_may_be_too_long_and_pairs_too():
    chosen = algorithm()
    plain = dataclasses.replace(chosen.self_critic, overlong_reference="plain")
    memory = AC2Memory(plain, chosen.readiness, chosen.entropy, PROMPT, context_limit=12, spread_floor=0.1)

    def pair(problem, length):
        ids = np.arange(20, 20 + length)
        credit = {"self_critic_target": 0.1, "return_std": None}
        group = ObservedGroup(problem, "train", np.array([1]), ids, 0.1, np.zeros(1), credit, lambda i: ids)
        memory.add_pairs([group], np.random.default_rng(0))

    memory.bank = {"short": np.array([5]), "long": np.arange(9)}
    for problem, length in (("short", 2), ("long", 2), ("none", 2), ("none", 50)):
        pair(problem, length)
    recalled = memory.recall(np.random.default_rng(0))
    assert recalled.weight == 3
    assert sorted(e.weight for e in recalled.lessons) == [0.5, 0.5, 1.0, 1.0]
    assert (recalled.metrics["ac2/overlong_pairs"], recalled.metrics["ac2/overlong_references"]) == (1, 1)
    memory.config = dataclasses.replace(chosen.self_critic, overlong_reference="skip")  # as the paper does
    recalled = memory.recall(np.random.default_rng(0))
    assert recalled.weight == 2
    assert sorted(e.weight for e in recalled.lessons) == [0.5, 0.5, 1.0]
    assert (recalled.metrics["ac2/overlong_pairs"], recalled.metrics["ac2/overlong_references"]) == (2, 0)


def test_noise_normalization_weighs_pairs_by_the_inverse_spread_of_their_values():
    """Spreads 0.5 and 0 with the floor 0.25 get 2/3 and 4/3; a pair of two prompts has its weight on both together."""
    plain = algorithm()
    chosen = dataclasses.replace(plain, self_critic=dataclasses.replace(plain.self_critic, noise_normalization=True))
    memory = AC2Memory(chosen.self_critic, chosen.readiness, chosen.entropy, PROMPT, context_limit=100, spread_floor=0.25)
    for problem, spread in (("noisy", 0.5), ("flat", 0.0)):
        ids = np.array([20])
        credit = {"self_critic_target": 0.1, "return_std": spread}
        group = ObservedGroup(problem, "train", ids, ids, 0.1, np.zeros(1), credit, lambda i: np.array([5]))
        memory.add_pairs([group], np.random.default_rng(0))
    memory.bank = {"flat": np.array([5])}
    recalled = memory.recall(np.random.default_rng(0))
    assert recalled.weight == 2
    assert sorted(e.weight for e in recalled.lessons) == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    assert recalled.metrics["ac2/noise_weight/max"] == pytest.approx(4 / 3)
    again = AC2Memory(chosen.self_critic, chosen.readiness, chosen.entropy, PROMPT, context_limit=100, spread_floor=0.25)
    again.restore(*memory.state())
    assert [pair.spread for pair in again.pairs] == [0.5, 0.0]
    values = Group(np.array([0.2, 0.6]), np.zeros(2, bool), np.array([np.nan, np.nan]), np.zeros(2, bool))
    assert chosen.credit(values).return_std == pytest.approx(0.2)


def test_rank_correlation_by_hand():
    assert rank_correlation(np.array([1, 2, 3.0]), np.array([10, 20, 90.0])) == pytest.approx(1)
    assert rank_correlation(np.array([1, 1, 2.0]), np.array([1, 2, 3.0])) == pytest.approx(np.sqrt(3) / 2)
    assert rank_correlation(np.array([1, 1, 1.0]), np.array([1, 2, 3.0])) == 0.0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.group_size=1", "at least 2"),
        ("algorithm.chunk_tokens=104", "not below the response budget"),
        ("algorithm.replay.cut_grid=100", "every prefix would be empty"),
        ("algorithm.min_valid=9", "min_valid"),
        ("algorithm.audit_fraction=2", "audit_fraction"),
        ("algorithm.grouped=false", "audit_fraction=0"),
        ("algorithm.entropy.initial=1", "minimum and maximum"),
    ],
)
def test_what_cannot_work_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        configure("algorithm=ac2", override)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """A model folder whose context holds the paper's sequences."""
    folder = tmp_path_factory.mktemp("model") / "long"
    shutil.copytree(ASSETS / "tiny", folder)
    shape = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 262_144}
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def of_paper(experiment, model, *overrides):
    files = ["task.train.files=[train.parquet]", "task.validation.files=[validation.parquet]"]
    return configure(f"experiment={experiment}", f"model.path={model}", *files, *overrides)


def test_table_4_number_for_number(long_model):
    run = of_paper("ac2_paper", long_model)
    a = run.algorithm
    assert (a.group_size, a.audit_fraction, a.problems_per_step, a.replay.refill_problems, a.replay.capacity) == (
        16,
        0.25,
        192,
        192,
        256,
    )
    assert (a.max_new_tokens, a.chunk_tokens, a.replay.cut_grid, a.replay.max_cut_fraction) == (50_000, 10_000, 10_000, 0.9)
    assert (a.self_critic.buffer_pairs, a.self_critic.pairs_per_update, a.min_valid) == (1920, 768, 8)
    assert run.optimizer.lr == 2e-6
    assert (a.self_critic.rate.initial, a.self_critic.rate.floor) == (
        pytest.approx(2 * np.sqrt(2) * 1e-6),
        pytest.approx(5 * np.sqrt(2) * 1e-7),
    )
    assert a.problems_per_step * a.group_size // a.minibatches == 1536
    assert (a.self_critic.clip_grad_norm, a.self_critic.betas, a.self_critic.eps) == (0.2, (0.9, 0.999), 1e-8)
    assert (a.readiness.window, a.readiness.global_threshold, a.readiness.local_threshold) == (5, 0.20, 0.18)
    assert (run.sampling.temperature, run.sampling.top_p, run.sampling.top_k) == (0.8, 1.0, -1)
    e = run.evaluation
    assert (e.n, e.every, e.temperature, e.top_p, e.top_k, run.task.max_new_tokens) == (16, 10, 0.8, 0.95, 20, 50_000)
    # Appendix C, beside the table.
    assert 5 / 7 < a.reference_reward <= 6 / 7
    assert (a.self_critic.rate.ratio, a.self_critic.rate.patience) == (2.0, 2)
    assert (run.optimizer.clip_grad_norm, run.optimizer.weight_decay, a.dual_clip) == (0.3, 0.01, 3.0)
    k = a.entropy
    assert (k.target, k.step, k.minimum, k.maximum, k.initial, a.clip_low, a.clip_high) == (
        0.28,
        0.02,
        -0.08,
        0.08,
        0.06,
        0.2,
        0.28,
    )


def test_the_baselines_of_the_paper(long_model):
    grpo, prefix = (of_paper("ac2_paper", long_model, f"algorithm={name}") for name in ("grpo", "prefix_grpo"))
    assert (grpo.algorithm.problems_per_step, grpo.algorithm.group_size, grpo.algorithm.replay) == (256, 16, None)
    assert (prefix.algorithm.problems_per_step, prefix.algorithm.group_size) == (192, 16)
    assert prefix.algorithm.replay == of_paper("ac2_paper", long_model).algorithm.replay
    for one in (grpo, prefix):
        assert (one.optimizer.lr, one.sampling.temperature, one.evaluation.n) == (2e-6, 0.8, 16)


def test_each_variant_is_ac2_but_for_its_own_fields():
    base = configure("algorithm=ac2").algorithm
    changed = {
        "ac2_no_audit": {"audit_fraction"},
        "ac2_no_group": {"audit_fraction", "grouped"},
        "ac2_no_local_readiness": {"audit_fraction", "grouped", "readiness"},
        "ac2_correct_only": {"replay"},
        "ac2_short_chunks": {"chunk_tokens", "replay"},
        "ac2_stale": {"replay"},
        "ac2_no_reference": {"self_critic"},
        "ac2_long_responses": {"max_new_tokens"},
    }
    for name, fields in changed.items():
        variant = configure(f"algorithm={name}").algorithm
        assert {f.name for f in dataclasses.fields(base) if getattr(base, f.name) != getattr(variant, f.name)} == fields | {
            "name"
        }, name
    assert configure("algorithm=ac2_correct_only").algorithm.replay.least_reward == base.reference_reward
    stale = configure("algorithm=ac2_stale").algorithm.replay
    assert stale.refill_problems == stale.capacity == base.replay.refill_problems * stale.refill_every


def test_a_stale_buffer_is_filled_at_once_and_a_correct_only_one_keeps_the_correct(tmp_path):
    world = World([p.problem_id for p in PROBLEMS])
    base = algorithm()
    stale = dataclasses.replace(base, replay=dataclasses.replace(base.replay, refill_every=4, refill_problems=9, capacity=9))
    coordinator = coordinator_of(tmp_path / "stale", stale)
    held = []
    for step in range(1, 10):
        rows, _ = real_step(coordinator, stale, world, step)
        assert sum(row["purpose"] == "refill" for row in rows) == (9 if step in (1, 5, 9) else 0)
        held.append({t.step for t in coordinator.trajectories()})
    assert held == [{1}] * 4 + [{5}] * 4 + [{9}]
    correct = dataclasses.replace(base, replay=dataclasses.replace(base.replay, least_reward=6 / 7))
    coordinator = coordinator_of(tmp_path / "correct", correct)
    for step in range(1, 8):
        real_step(coordinator, correct, world, step)
    assert {t.reward for t in coordinator.trajectories()} == {1.0}


def seen(problem, size, prediction=0.5, target=0.5):
    ids = np.array([1, 2])
    credit = {"self_critic_target": target, "return_std": 0.0}
    return ObservedGroup(problem, "train", ids, ids[:0], prediction, np.full(size, np.nan), credit, lambda i: ids)


def test_the_ready_fraction_counts_states_and_not_their_chunks(tmp_path):
    """Figure 8: without groups 35 of 192 sampled problems are ready, and each of them is 16 rows."""
    coordinator = coordinator_of(tmp_path, chosen := algorithm(group_size=16, grouped=False, audit_fraction=0.0))
    memory = coordinator.memory
    memory.readiness.ready = {f"r{i}" for i in range(35)}
    groups = [seen(f"r{i}", 1) for i in range(35) for _ in range(16)] + [seen(f"u{i}", 16) for i in range(157)]
    assert chosen.observe(memory, groups, np.random.default_rng(0))["ac2/ready_fraction"] == pytest.approx(35 / 192)


def test_an_invalid_baseline_without_a_group_is_an_error_of_one_and_no_pair(tmp_path):
    coordinator = coordinator_of(tmp_path, chosen := algorithm(group_size=16, grouped=False, audit_fraction=0.0))
    groups = [*[seen("p", 1, prediction=None, target=None)] * 3, seen("p", 1)]
    metrics = chosen.observe(coordinator.memory, groups, np.random.default_rng(0))
    assert metrics["ac2/critic_mae"] == coordinator.memory.readiness.global_error() == 0.75
    assert len(coordinator.memory.pairs) == 1


def test_of_more_pairs_than_the_buffer_holds_those_that_enter_are_drawn_at_random(tmp_path):
    coordinator = coordinator_of(tmp_path, chosen := algorithm(group_size=16, grouped=False, audit_fraction=0.0))
    capacity = chosen.self_critic.buffer_pairs
    groups = [seen(f"p{i}", 1) for i in range(3 * capacity)]
    chosen.observe(coordinator.memory, groups, np.random.default_rng(0))
    entered = [int(pair.problem_id[1:]) for pair in coordinator.memory.pairs]
    assert len(entered) == capacity
    assert entered == sorted(entered)
    assert min(entered) < capacity < 2 * capacity < max(entered)
