"""Streams: each rank brings rows of its own, nobody knows how many, and all stop together with every row used."""

from __future__ import annotations

import io
import itertools
import logging
import os
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, gradient_of, opened, two_layers
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from rex_ray.core.errors import ConfigError, DataError, RexError
from rex_ray.core.types import Allocation
from rex_ray.worker.data.stream_likeness import alike_in_words, first_rows_digest
from rex_ray.worker.link import IncidentRecord
from rex_ray.worker.session import Session

LENGTHS = (50, 70, 30)
ROWS = Rows(150)


class Shard(IterableDataset[Any]):
    """One rank's rows of all; its loader processes take turns."""

    def __init__(self, rank: int, lengths: Sequence[int] = LENGTHS) -> None:
        first = sum(lengths[:rank])
        self.rows = range(first, first + lengths[rank])
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        process, num_processes = (0, 1) if info is None else (info.id, info.num_workers)
        for row in self.rows[process::num_processes]:
            yield (*ROWS[row], self.epoch)


class CountedShard(Shard):
    def __len__(self) -> int:
        return len(self.rows)


class StatefulShard(Shard):
    """Goes on where its state says, and tells how many rows were read to get there."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.at = self.num_read = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.rows):
            row = self.rows[self.at]
            self.at += 1
            self.num_read += 1
            yield (*ROWS[row], self.epoch)
        self.at = 0


def started(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = two_layers()
    net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    return net, optimizer


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    F.mse_loss(model(batch[1]), batch[2]).backward()
    optimizer.step()
    optimizer.zero_grad()


class Told(logging.Handler):
    """What rank 0 logs, also where no test looks."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        log = logging.getLogger("rex_ray")
        log.addHandler(self)
        log.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("rex_ray").removeHandler(self)


def train(
    rank: int, end: str, script: Mapping[int, Allocation], first: tuple[int, ...], epochs: int, options: Any
) -> tuple[list[list[int]], list[tuple[int, ...]], list[str], list[int]]:
    """Row ids per epoch, the sizes used in the weights per step, the log, and the rows of the records."""
    seen: list[list[int]] = []
    sizes: list[tuple[int, ...]] = []
    link = ScriptedLink(first, script)
    with Told() as lines, opened(link, control_interval_steps=2) as session:
        net, optimizer = started(session)
        loader = session.loader(CountedShard(rank), end=end, **options)
        for epoch in session.epochs(epochs):
            ids: list[int] = []
            for batch in loader:
                step = session._tracker.in_hand
                assert step is not None
                assert len(batch[0]) == step.num_rows
                assert set(batch[3].tolist()) <= {epoch}
                ids += batch[0].tolist()
                sizes.append(step.plan.num_rows)
                update(net, optimizer, batch)
            seen.append(ids)
    return seen, sizes, [line for line in lines if "ends before" in line], [r.num_rows for r in link.steps]


@pytest.mark.dist
def test_a7_streams_of_unequal_length_stop_together_and_say_what_was_left_out(ranks: GlooGroup) -> None:
    shortest = ranks.run(train, "shortest", {}, (12, 12, 12), 1, {})
    assert [len(seen[0]) for seen, *_ in shortest] == [36, 36, 30]
    assert [sizes for _, sizes, *_ in shortest] == [[(12, 12, 12), (12, 12, 12), (12, 12, 6)]] * 3
    (line,) = shortest[0][2]
    assert "14 rows of rank 0" in line
    assert "34 rows of rank 1" in line
    assert "the stream of rank 2 is exhausted" in line
    both = ranks.run(train, "all", {}, (12, 12, 12), 2, {})
    for epoch in range(2):
        assert sorted(row for seen, *_ in both for row in seen[epoch]) == list(range(150))
    assert both[0][1][:6] == [(12, 12, 12), (12, 12, 12), (12, 12, 6), (12, 12, 0), (2, 12, 0), (0, 10, 0)]
    assert both[0][1] == both[1][1] == both[2][1]
    assert both[1][3] == [sizes[1] for sizes in both[1][1]]
    assert ["none left out" in line for line in both[0][2]] == [True, True]


def random_script(seed: int) -> dict[int, Allocation]:
    draw = torch.Generator().manual_seed(seed)
    script = {}
    for version, poll in enumerate(range(1, 12, 2), start=1):
        sizes = [int(size) for size in torch.randint(0, 9, (3,), generator=draw)]
        script[poll] = Allocation(version=version, local_batch_sizes=(sizes[0] + 1, *sizes[1:]))
    return script


@pytest.mark.dist
@pytest.mark.parametrize(
    ("seed", "options"),
    [(1, {}), (2, {"num_workers": 2}), (3, {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": False})],
)
def test_shares_that_change_amid_streams_lose_no_row_and_weigh_by_the_rows_that_are_there(
    ranks: GlooGroup, seed: int, options: Any
) -> None:
    results = ranks.run(train, "all", random_script(seed), (0, 5, 3), 2, options, limit_s=100.0)
    for epoch in range(2):
        assert sorted(row for seen, *_ in results for row in seen[epoch]) == list(range(150))
    assert results[0][1] == results[1][1] == results[2][1]
    for rank, (_, sizes, _, records) in enumerate(results):
        assert records == [step[rank] for step in sizes]
    assert len(set(results[0][1])) > 6


def leave_early(rank: int) -> list[int]:
    """Leave the first epoch's loop after two batches, take it up for one more, then train a whole epoch."""
    seen: list[int] = []
    with opened(ScriptedLink((5, 7, 3))) as session:
        net, optimizer = started(session)
        loader = session.loader(Shard(rank))
        for epoch in session.epochs(2):
            for stop in (2, 1) if epoch == 0 else (None,):
                for batch in itertools.islice(loader, stop):
                    update(net, optimizer, batch)
                    seen += batch[0].tolist()
    return seen


@pytest.mark.dist
def test_an_epoch_of_streams_that_is_left_early_leaves_nothing_behind(ranks: GlooGroup) -> None:
    results = ranks.run(leave_early)
    for rank, share in enumerate((5, 7, 3)):
        own = list(Shard(rank).rows)
        assert results[rank] == own[: 3 * share] + own


def gradient_of_step(rank: int) -> float:
    """Distance of a stream's step, in which rank 2 has run out, to the gradient of all its rows on one process."""
    with opened(ScriptedLink((3, 4, 5))) as session:
        net, _ = started(session)
        for batch in session.loader(Shard(rank, (6, 8, 2))):
            F.mse_loss(net(batch[1]), batch[2]).backward()
            if session.step == 1:
                ours = gradient_of(net)
                break
            net.zero_grad()
    alone = two_layers()
    rows = [*range(3, 6), *range(10, 14)]
    F.mse_loss(alone(ROWS.inputs[rows]), ROWS.targets[rows]).backward()
    return float((ours - gradient_of(alone)).abs().max())


@pytest.mark.dist
def test_a_rank_that_ran_out_weighs_nothing_and_the_gradient_is_the_mean_over_the_rows_left(ranks: GlooGroup) -> None:
    assert max(ranks.run(gradient_of_step)) < 1e-10


# --- rows of unequal length, weighted by their tokens

TOKENS = ((10, 2), (200, 7, 30), (35,))
"""Of each rank's rows; steps take two, two and one."""


class Sentences(IterableDataset[Any]):
    def __init__(self, rank: int) -> None:
        self.lengths = TOKENS[rank]
        self.seed = 10 * rank

    def __iter__(self) -> Iterator[Any]:
        return (sentence(self.seed + k, length) for k, length in enumerate(self.lengths))


def sentence(seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = {"dtype": torch.float64, "generator": draw}
    return torch.randn(length, 6, **shape), torch.randn(length, 1, **shape)


def padded(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs, targets = (nn.utils.rnn.pad_sequence(list(column), batch_first=True) for column in zip(*rows, strict=True))
    lengths = torch.tensor([len(row) for row, _ in rows])
    return inputs, targets, torch.arange(inputs.shape[1]) < lengths[:, None]


def token_gradients(rank: int) -> list[float]:
    """Distance of each step's gradient to that of the mean over the tokens that all ranks had in it."""
    distances = []
    with opened(ScriptedLink((2, 2, 1)), weight_by="tokens") as session:
        net, _ = started(session)
        for step, (inputs, targets, mask) in enumerate(session.loader(Sentences(rank), collate_fn=padded)):
            num_tokens = int(mask.sum())
            loss = ((net(inputs) - targets).square()[mask]).sum() / max(num_tokens, 1)
            session.backward(loss, weight=num_tokens)
            alone = two_layers()
            rows = [
                sentence(10 * r + k, length)
                for r, lengths in enumerate(TOKENS)
                for k, length in enumerate(lengths)
                if k // (2, 2, 1)[r] == step
            ]
            sum((alone(x) - y).square().sum() for x, y in rows).div(sum(len(x) for x, _ in rows)).backward()  # type: ignore[union-attr]
            distances.append(float((gradient_of(net) - gradient_of(alone)).abs().max()))
            net.zero_grad()
    return distances


@pytest.mark.dist
def test_b2_streams_of_unequal_rows_give_the_mean_over_tokens_also_when_ranks_run_out(ranks: GlooGroup) -> None:
    for distances in ranks.run(token_gradients):
        assert len(distances) == 2
        assert max(distances) < 1e-10


# --- evaluating


class Plain(IterableDataset[Any]):
    def __init__(self, first: int, stop: int) -> None:
        self.rows = range(first, stop)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def evaluate(rank: int) -> tuple[list[int], list[float]]:
    """Rows over all ranks of streams of their own, and of one that every rank is given."""
    sums, seen = [], []
    with opened() as session:
        for dataset, options in (
            (Plain(0, 7) if rank == 0 else Plain(7 * rank, 7 * rank + rank), {}),
            (Plain(0, 10), {"whole": True}),
            (Plain(0, 10), {"whole": True, "num_workers": 1}),
        ):
            rows = [int(row) for batch in session.eval_loader(dataset, local_batch_size=2, **options) for row in batch]
            sums.append(session.pool(float(sum(rows)), len(rows)))
            seen.append(len(rows))
    return seen, sums


@pytest.mark.dist
def test_streams_are_evaluated_exactly_each_ranks_own_or_one_that_all_are_given(ranks: GlooGroup) -> None:
    results = ranks.run(evaluate)
    own = [*range(7), 7, 14, 15]
    assert [sums for _, sums in results] == [[sum(own) / len(own), 4.5, 4.5]] * 3
    assert [seen for seen, _ in results] == [[7, 4, 4], [1, 3, 3], [2, 3, 3]]


# --- resuming


def run_to(
    rank: int, shard: type[Shard], restored: Any, stop: int | None, options: Any
) -> tuple[list[int], Any, int, list[str]]:
    """Train up to ``stop`` steps from a save on; return the rows, a save from there, rows read anew, and warnings."""
    reporter = MemoryReporter(None if restored is None else torch.load(io.BytesIO(restored[rank]), weights_only=True))
    seen: list[int] = []
    dataset = shard(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opened(ScriptedLink((5, 7, 3)), reporter, checkpoint_interval_s=0.0) as session:
            net, optimizer = started(session)
            loader = session.loader(dataset, **options)
            if restored is not None:  # a save before the first pass holds the same place
                session.report({})
                place = reporter.restored["stream"] if session._tracker.progress.position.cursor else None
                assert reporter.saves[-1][1]["stream"] == place
            for _ in session.epochs(1):
                for batch in itertools.islice(loader, stop):
                    update(net, optimizer, batch)
                    seen += batch[0].tolist()
                session.report({})
    buffer = io.BytesIO()
    torch.save(reporter.saves[-1][1], buffer)
    messages = [str(warning.message) for warning in caught if "begins anew" in str(warning.message)]
    return seen, buffer.getvalue(), getattr(dataset, "num_read", 0), messages


@pytest.mark.dist
@pytest.mark.parametrize(("shard", "options"), [(StatefulShard, {}), (Shard, {"num_workers": 2}), (Shard, {})])
def test_a_stream_goes_on_behind_the_rows_that_were_used(ranks: GlooGroup, shard: type[Shard], options: Any) -> None:
    before = ranks.run(run_to, shard, None, 3, options)
    after = ranks.run(run_to, shard, [save for _, save, *_ in before], None, options)
    assert [len(seen) for seen, *_ in before] == [15, 21, 9]
    assert sorted(row for seen, *_ in [*before, *after] for row in seen) == list(range(150))
    assert not any(messages for *_, messages in after)
    if shard is StatefulShard:  # by its state, rather than by reading all that had been read
        assert [read for _, _, read, _ in after] == [35, 49, 21]


@pytest.mark.dist
def test_a_stream_that_cannot_go_on_begins_its_epoch_anew_and_says_what_is_seen_twice(ranks: GlooGroup) -> None:
    before = ranks.run(run_to, Shard, None, 3, {})
    after = ranks.run(run_to, Shard, [save for _, save, *_ in before], None, {"num_workers": 2})
    assert sorted(row for seen, *_ in after for row in seen) == list(range(150))
    for *_, messages in after:
        (message,) = messages
        assert "45 rows of it are trained on a second time" in message
        assert "[1, 1, 1] loader processes read them then and [2, 2, 2] do now" in message


# --- one stream for all


class Undivided(IterableDataset[Any]):
    """What every rank brings whole, since it forgets to divide it."""

    def __iter__(self) -> Iterator[Any]:
        return (ROWS[row] for row in range(30))


def first_step(rank: int, divided: bool) -> list[str]:
    with Told() as lines, opened(ScriptedLink((5, 7, 4))) as session:
        net, optimizer = started(session)
        for batch in session.loader(Shard(rank) if divided else Undivided()):
            update(net, optimizer, batch)
    return [line for line in lines if "begin with the same" in line]


@pytest.mark.dist
@pytest.mark.parametrize("divided", [True, False])
def test_a_stream_that_every_rank_brings_whole_is_told_of_once(ranks: GlooGroup, divided: bool) -> None:
    told, *others = ranks.run(first_step, divided)
    assert others == [[], []]
    assert len(told) == (0 if divided else 1)
    assert all("ranks 0, 1 and 2" in line and "session.world_size" in line for line in told)


def test_rows_are_alike_whatever_follows_them_and_few_of_them_tell_nothing() -> None:
    rows = (torch.arange(12, dtype=torch.bfloat16), ["text"] * 12, torch.tensor(3.0))
    digest = first_rows_digest(rows, 12)
    assert digest == first_rows_digest((rows[0][:5], ["text"] * 5, torch.tensor(4.0)), 5) != 0
    assert digest != first_rows_digest((rows[0].flip(0),), 12)
    assert (
        first_rows_digest((rows[0][:3],), 3) == first_rows_digest(["text"] * 12, 12) == first_rows_digest(None, 0) == 0
    )
    texts = [["a", "b", "c", "d"], ["a", "b", "c", "e"]]
    labels = torch.tensor([0, 1, 0, 0])
    assert len({first_rows_digest((each, labels), 4) for each in texts} - {0}) == 2
    assert first_rows_digest(([object()] * 4, labels), 4) == 0, "labels of what is not looked at"
    assert first_rows_digest(torch.zeros(4, 100), 4) == 0, "silence"
    assert alike_in_words([1, 2, 3]) is None
    assert alike_in_words([0, 0, 5]) is None
    assert "ranks 1 and 2 begin" in (alike_in_words([4, 5, 5]) or "")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_first_rows_of_any_kind_of_tensor_can_be_looked_at() -> None:
    numbers = torch.arange(12.0).reshape(4, 3)
    for tensor in (numbers.to(torch.cfloat).conj(), numbers > 4, numbers.T.contiguous().T, numbers.bfloat16()):
        assert first_rows_digest((tensor, numbers), 4) not in (0, first_rows_digest(numbers, 4))
    nested = torch.nested.nested_tensor([torch.zeros(length, 2) for length in (1, 2, 4, 4)])
    for tensor in (nested, numbers.to("meta"), numbers.to_sparse(), numbers.new_zeros(4, 0)):
        assert first_rows_digest((tensor, numbers), 4) == first_rows_digest(numbers, 4) != 0


# --- what a loop may do, on one rank


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (ROWS[row] for row in range(30))


def test_a_stray_batch_comes_again_and_a_loop_left_early_goes_on() -> None:
    with opened() as session:
        net, optimizer = started(session)
        loader, seen = session.loader(Numbers()), []
        stray = next(iter(loader))
        for batch in itertools.islice(loader, 1):
            assert torch.equal(stray[0], batch[0])
            update(net, optimizer, batch)
            seen += batch[0].tolist()
        for batch in loader:
            update(net, optimizer, batch)
            seen += batch[0].tolist()
        assert seen == list(range(30))
        assert session.step == 3


def test_a_stream_has_no_length_and_says_what_to_do() -> None:
    with opened() as session:
        loader = session.loader(Numbers())
        with pytest.raises(ConfigError, match=r"Numbers.*step it once per epoch"):
            len(loader)
        with pytest.raises(TypeError):
            len(loader)
    with opened() as session, pytest.raises(ConfigError, match="end='first'"):
        session.loader(Numbers(), end="first")


def test_iterating_a_stream_twice_within_one_epoch_is_an_error() -> None:
    with opened() as session:
        net, optimizer = started(session)
        loader = session.loader(Numbers())
        for _ in session.epochs(1):
            for batch in loader:
                update(net, optimizer, batch)
            with pytest.raises(RexError, match="epoch 0 is complete"):
                iter(loader)


def keep_even(rows: list[Any]) -> Any:
    kept = [row for row in rows if row[0] % 2 == 0]
    return torch.utils.data.default_collate(kept) if kept else None


def test_a_stream_is_weighted_by_the_rows_that_collate_fn_kept_and_the_journal_is_told_once() -> None:
    link = ScriptedLink()
    with opened(link) as session:
        net, optimizer = started(session)
        for batch in session.loader(Numbers(), collate_fn=keep_even):
            update(net, optimizer, batch)
    assert [record.num_rows for record in link.steps] == [6, 6, 3]
    (incident,) = [record for record in link.records if isinstance(record, IncidentRecord)]
    assert incident.kind == "rows_left_out"
    assert "given 12 rows and returned a batch of 6" in incident.message


def keep_from_12(rows: list[Any]) -> Any:
    kept = [row for row in rows if row[0] >= 12]
    return torch.utils.data.default_collate(kept) if kept else None


def test_rows_that_are_all_left_out_make_no_step_and_shares_still_change_in_time() -> None:
    script = {poll: Allocation(version=poll, local_batch_sizes=(poll + 3,)) for poll in range(1, 9)}
    with opened(ScriptedLink((4,), script), control_interval_steps=1) as session:
        net, optimizer = started(session)
        seen = []
        for step, batch in enumerate(session.loader(Numbers(), collate_fn=keep_from_12)):
            assert session.step == step
            assert session._feed._source.next_undrawn <= step + 2, "one step is read ahead, whatever was left out"
            update(net, optimizer, batch)
            seen += batch[0].tolist()
    assert seen == list(range(12, 30))


# --- failures


class Faulty(Shard):
    """Raises on row 20 of rank 1, or kills the process that reads its row 4, while the loop waits for it."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(rank)
        self.how = how if rank == 1 else ""

    def __iter__(self) -> Iterator[Any]:
        for k, row in enumerate(super().__iter__()):
            if k == 20 and self.how == "raises":
                raise ValueError("not a picture")
            if k == 4 and self.how == "dies":
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            yield row


def train_on_faulty(rank: int, how: str, options: Any) -> tuple[str, int]:
    with opened(ScriptedLink((8, 8, 8)), collective_timeout_s=300.0) as session:
        net, optimizer = started(session)
        steps = 0
        try:
            for batch in session.loader(Faulty(rank, how), **options):
                update(net, optimizer, batch)
                steps += 1
        except DataError as error:
            return str(error), steps
    return "not caught", steps


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "options", "at", "says"),
    [
        ("raises", {}, 2, "row 20 of this pass over the stream could not be read: ValueError: not a picture"),
        ("raises", {"num_workers": 1}, 2, "ValueError: not a picture\nIn the loader process"),
        ("dies", {"num_workers": 1}, 0, "fewer num_workers"),
    ],
)
def test_a_stream_that_fails_ends_training_at_one_step_on_all_ranks_long_before_the_limit(
    ranks: GlooGroup, how: str, options: Any, at: int, says: str
) -> None:
    results = ranks.run(train_on_faulty, how, options, limit_s=100.0)
    assert [steps for _, steps in results] == [at, at, at]
    assert says in results[1][0]
    assert f"rank 1, epoch 0, step {at}" in results[1][0]
    for rank in (0, 2):
        assert f"rank {rank}, epoch 0, step {at}" in results[rank][0]
        assert "the stream of rank 1 failed" in results[rank][0]


def mixed(rank: int) -> str:
    with opened() as session, pytest.raises(ConfigError) as raised:
        session.loader(Rows(50) if rank else Shard(rank))
    return str(raised.value)


@pytest.mark.dist
def test_a_stream_on_some_ranks_only_is_refused_on_all(ranks: GlooGroup) -> None:
    assert ["two kinds (a stream, 50 rows, 50 rows)" in message for message in ranks.run(mixed)] == [True] * 3
