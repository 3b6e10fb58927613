"""Hugging Face's Trainer trains like itself in one process on the same global batches, whatever the shares."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gloo_group import GlooGroup
from launched import SHARES, Sentences, flat, launched
from scripted import MemoryReporter

from rex_ray.core.errors import ConfigError
from rex_ray.worker.data.sampler import epoch_order

pytest.importorskip("transformers")
# Each process imports these libraries first, which takes half a minute on a busy machine.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS, BATCH = 40, sum(SHARES)


def tiny_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=19,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).double()


def arguments(folder: str, **options: Any) -> Any:
    from transformers import TrainingArguments

    options = {"num_train_epochs": 2, "per_device_train_batch_size": BATCH, **options}
    return TrainingArguments(
        output_dir=folder,
        learning_rate=0.5,
        optim="sgd",
        max_grad_norm=0.5,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


class InOrder(torch.utils.data.Dataset[Any]):
    """The rows of both epochs in the session's order, for one process that goes through them once."""

    def __init__(self, rows: Sentences) -> None:
        self.rows = rows
        self.order = torch.cat([epoch_order(0, epoch, NUM_ROWS) for epoch in range(2)]).tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return self.rows[self.order[index]]


def loss_in_double(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The loss of a causal language model, whose own is computed in single precision.

    It is divided by all labels, as the Trainer counts them where it does not know that the first one is dropped.
    """
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
    return total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def one_process(rows: Sentences, folder: str, loss: Any) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """The plain Trainer's own loop, its batches cut where the session's are."""
    from transformers import Trainer

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            starts = [epoch * NUM_ROWS + start for epoch in range(2) for start in range(0, NUM_ROWS, BATCH)]
            stops = [*starts[1:], 2 * NUM_ROWS]
            batches = [list(range(start, stop)) for start, stop in zip(starts, stops, strict=True)]
            return torch.utils.data.DataLoader(InOrder(rows), batch_sampler=batches)

    trainer = Plain(
        model=tiny_model(),
        args=arguments(folder, num_train_epochs=1),
        train_dataset=InOrder(rows),
        compute_loss_func=loss,
    )
    trainer.train()
    return flat(trainer.model), [log for log in trainer.state.log_history if "loss" in log]


def mixed_trainer(folder: str, rows: Any, loss: Any = None, **options: Any) -> Any:
    from transformers import Trainer

    from rex_ray.integrations.huggingface import RexTrainerMixin

    class Mixed(RexTrainerMixin, Trainer):
        pass

    return Mixed(model=tiny_model(), args=arguments(folder, **options), train_dataset=rows, compute_loss_func=loss)


def mixed(
    rank: int, folder: str, padded: bool, weight_by: str, loss: Any
) -> tuple[torch.Tensor, list[dict[str, float]]]:
    with launched(rank, weight_by=weight_by):
        trainer = mixed_trainer(folder, Sentences(NUM_ROWS, padded=padded), loss)
        trainer.train()
        return flat(trainer.model), [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    ("padded", "weight_by", "loss", "within"),
    [
        (False, "samples", loss_in_double, 1e-12),
        (True, "tokens", loss_in_double, 1e-12),
        (True, "tokens", None, 1e-6),  # the model's own loss, divided by num_items_in_batch
    ],
    ids=["rows", "tokens", "model's own loss"],
)
def test_a_trainer_equals_itself_in_one_process(
    pair: GlooGroup, tmp_path: Path, padded: bool, weight_by: str, loss: Any, within: float
) -> None:
    expected, logs = one_process(Sentences(NUM_ROWS, padded=padded), str(tmp_path), loss)
    assert len(logs) == 8
    for parameters, own_logs in pair.run(mixed, str(tmp_path), padded, weight_by, loss):
        assert torch.allclose(parameters, expected, rtol=0, atol=within)
        for name in ("loss", "grad_norm", "learning_rate"):
            assert [log[name] for log in own_logs] == pytest.approx([log[name] for log in logs], rel=1e-5)


class InterruptError(Exception):
    """The machine goes away."""


def train_on_from_a_save(rank: int, folder: str) -> tuple[torch.Tensor, int, float, int]:
    """Die in the sixth step, with the save of the fifth; another Trainer goes on from there."""
    from transformers import TrainerCallback

    class Dies(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise InterruptError

    rows, reporter = Sentences(NUM_ROWS, padded=True), MemoryReporter()
    options = {"weight_by": "tokens", "checkpoint_interval_s": 0.0}
    with contextlib.suppress(InterruptError), launched(rank, reporter=reporter, **options):
        trainer = mixed_trainer(folder, rows, loss_in_double)
        trainer.add_callback(Dies())
        trainer.train()
    saved = pickled(reporter.saves[-1][1]) if rank == 0 else None
    with launched(rank, reporter=MemoryReporter(saved), **options) as session:
        trainer = mixed_trainer(folder, rows, loss_in_double)
        trainer.train()
        return flat(trainer.model), trainer.state.global_step, trainer.state.log_history[-2]["loss"], session.step


def pickled(state: Any) -> Any:
    """Return what a file would hold: the state's tensors are the model's own, and change with it."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_a_trainer_resumes_at_the_next_batch(pair: GlooGroup, tmp_path: Path) -> None:
    expected, logs = one_process(Sentences(NUM_ROWS, padded=True), str(tmp_path), loss_in_double)
    for parameters, global_step, last_loss, step in pair.run(train_on_from_a_save, str(tmp_path)):
        assert (global_step, step) == (8, 8)
        assert torch.allclose(parameters, expected, rtol=0, atol=1e-12)
        assert last_loss == pytest.approx(logs[-1]["loss"], rel=1e-6)


def what_is_refused(rank: int, folder: str) -> list[str]:
    told = []

    def refused(**options: Any) -> None:
        with launched(rank):
            resume = options.pop("resume", None)
            try:
                mixed_trainer(folder, Sentences(24, padded=False), **options).train(resume_from_checkpoint=resume)
            except ConfigError as error:
                told.append(str(error))

    refused(gradient_accumulation_steps=2)
    refused(train_sampling_strategy="group_by_length")
    refused(train_sampling_strategy="sequential")
    return told


def test_what_would_not_be_exact_is_refused_with_a_remedy(pair: GlooGroup, tmp_path: Path) -> None:
    for accumulation, grouped, sequential in pair.run(what_is_refused, str(tmp_path)):
        assert "set it to 1, and the rows of a step by RexConfig.global_batch_size" in accumulation
        assert "LengthGroupedSampler, whose choice of rows would be lost" in grouped
        assert "make it with shuffle=True" in sequential
