"""``RexConfig``: everything a user can set, validated before anything starts, and one to one with a YAML file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from rex_ray.config.checks import Mode, OnNonFinite, OnOutOfMemory, SmallDataset, WeightBy, problems_of
from rex_ray.config.layers import Layers
from rex_ray.config.plain_yaml import write_document
from rex_ray.core.errors import ConfigError
from rex_ray.core.measuring import DENSE_STEPS, INTERVAL_STEPS
from rex_ray.policies.base import Policy
from rex_ray.policies.bsp import FixedBatch
from rex_ray.policies.registry import make_policy
from rex_ray.policies.split.fixed import shares_by_hand
from rex_ray.worker.options import WorkerOptions

__all__ = ["RexConfig"]

LINEAR_LR_SLEW = 0.02
"""A doubled rate takes 36 steps: linear scaling needs a gradual warm-up (Goyal et al. 2017, arXiv:1706.02677)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RexConfig:
    """What a run adapts, within which limits.

    Attributes:
        global_batch_size: rows per optimizer step over all workers at the start (``M0``).
        policy: ``"rex"``, or another by its name: ``"bsp"``, ``"dlb"``, ``"lb_bsp"``, ``"omnilearn"``, ``"pollux"``,
            ``"growth10"``, ``"cannikin"``.
        max_global_batch_size: growth never goes beyond it; default ``8 * global_batch_size``.
        policy_options: hyperparameters of the policy by name, e.g. ``{"min_gain": 0.05}`` for ``"rex"``, or for
            ``"bsp"`` shares set by hand: ``{"local_batch_sizes": {"T4": 33, "V100": 95}}``.
        mode: ``"auto"`` decides and applies, ``"advise"`` decides and logs only, ``"off"`` keeps equal shares.
        seed: seeds each epoch's order and every random choice of the controller.
        device_label: node label that names a worker's kind of device.
        control_interval_steps: most steps between two control boundaries; steps of 0.1 s and more use 1.
        norm_interval_steps: gradient norms are taken on every such step; 0 takes none; default: where the policy
            grows the batch by them and ``max_global_batch_size`` leaves it room, 4, and each of the first 40 steps of
            every global batch; else none.
        lr_slew: most that the global batch's factor on the learning rate rises by per step, as a share; 0: at once;
            default: 0.02 under ``policy_options={"lr_rule": "linear"}``, whose jumps need a warm-up, else at once.
        warm_up_steps: first steps after start, resume or resize that are not evidence.
        collective_timeout_s: limit of every collective among the workers.
        join_timeout_s: limit of the hand-shake between workers and controller.
        placement_timeout_s: how long to wait for nodes that meet the label selector before giving up.
        checkpoint_interval_s: shortest time between two saves through ``session.report``.
        small_dataset: ``"error"`` refuses a data set smaller than the global batch, ``"clamp"`` lowers the batch.
        weight_by: ``"samples"`` (default) or ``"tokens"``.
        on_non_finite: what all ranks do together when the reduced gradient holds a NaN or an infinity on account of
            any one: ``"stop"`` ends the run with the rank's name, ``"skip"`` leaves the update out, ``"ignore"``
            updates as plain PyTorch would. On a device ``"stop"`` looks two updates late, but before anything is
            saved, and ``"skip"`` waits for the device at each update. A gradient scaler goes on skipping what
            overflows; then ``"stop"`` is for a loss that is not finite, and for a scale below 1.
        on_out_of_memory: ``"retry"`` has ``session.train_step`` cut the share smaller in place, ``"stop"`` fails.
        replica_check_interval_steps: the ranks' parameters are compared by a hash every so many steps, at the end of
            each pass over the data and before a save; 0: never. A hash takes a host about 1 ns per number and 30 us per
            tensor, so 500 steps apart it costs less than a thousandth of any step.
        snapshot_interval_s: shortest time between two local snapshots, from which a restart resumes where they are
            newer than the last save; 0: none.
        storage_retry_s: how long a failing save is tried again, with growing pauses, before it is given up.
        local_batch_multiple: every share is a multiple of it, and so is every global batch, for kernels and compilers
            that want few shapes, or whole tiles; an epoch's last batch has what is left, in any rows.
        learn_from: profiles of device kinds, or the folder of a past run that saved some, to begin with; default: the
            run's own, where it is taken up again under its name.
        preflight: look at every worker before training, and have them reduce a vector once.
        preflight_timeout_s: limit of that.

    Raises:
        ConfigError: a value that cannot work; the message names it and the remedy.
    """

    global_batch_size: int
    policy: str = "rex"
    max_global_batch_size: int | None = None
    policy_options: dict[str, Any] = field(default_factory=dict)
    mode: Mode = "auto"
    seed: int = 0
    device_label: str = "ray.io/accelerator-type"
    control_interval_steps: int = 4
    norm_interval_steps: int | None = None
    lr_slew: float | None = None
    warm_up_steps: int = 3
    collective_timeout_s: float = 60.0
    join_timeout_s: float = 30.0
    placement_timeout_s: float = 60.0
    checkpoint_interval_s: float = 60.0
    small_dataset: SmallDataset = "error"
    weight_by: WeightBy = "samples"
    on_non_finite: OnNonFinite = "stop"
    on_out_of_memory: OnOutOfMemory = "retry"
    replica_check_interval_steps: int = 500
    snapshot_interval_s: float = 10.0
    storage_retry_s: float = 60.0
    local_batch_multiple: int = 1
    learn_from: str | None = None
    preflight: bool = True
    preflight_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        values = {known.name: getattr(self, known.name) for known in dataclasses.fields(self)}
        if problems := problems_of(values):
            raise ConfigError("\n".join(problem.text for problem in problems))

    @property
    def growth_limit(self) -> int:
        """The largest global batch that growth may reach: ``max_global_batch_size`` or its default."""
        return self.max_global_batch_size or 8 * self.global_batch_size

    def make_policy(self) -> Policy[Any]:
        """Build the configured policy.

        Raises:
            ConfigError: an unknown policy or option (the nearest name is given), or a value that cannot work.
        """
        return make_policy(self.policy, self.policy_options)

    def worker_options(self) -> WorkerOptions:
        """Return the part of the configuration that a worker session needs."""
        return WorkerOptions(
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            control_interval_steps=self.control_interval_steps,
            norm_interval_steps=self._norm_interval_steps(),
            norm_dense_steps=DENSE_STEPS if self.norm_interval_steps is None else 0,
            lr_slew=self._lr_slew(),
            warm_up_steps=self.warm_up_steps,
            collective_timeout_s=self.collective_timeout_s,
            join_timeout_s=self.join_timeout_s,
            checkpoint_interval_s=self.checkpoint_interval_s,
            small_dataset=self.small_dataset,
            weight_by=self.weight_by,
            on_non_finite=self.on_non_finite,
            on_out_of_memory=self.on_out_of_memory,
            replica_check_interval_steps=self.replica_check_interval_steps,
            snapshot_interval_s=self.snapshot_interval_s,
            storage_retry_s=self.storage_retry_s,
            preflight_timeout_s=self.preflight_timeout_s if self.preflight else None,
            local_batch_multiple=self.local_batch_multiple,
        )

    def _norm_interval_steps(self) -> int:
        """Norms cost time on measured steps, so nobody measures what nothing decides on."""
        if self.norm_interval_steps is not None:
            return self.norm_interval_steps
        may_grow = self.mode != "off" and self.growth_limit > self.global_batch_size
        return INTERVAL_STEPS if may_grow and _grows(self.make_policy()) else 0

    def _lr_slew(self) -> float | None:
        slew = self.lr_slew
        if slew is None:
            slew = LINEAR_LR_SLEW if self.policy_options.get("lr_rule") == "linear" else 0.0
        return slew or None

    def check_group(
        self, num_workers: int, dataset_size: int | None = None, devices: Sequence[str] | None = None
    ) -> None:
        """Check what only the size of the group, and if known the data set's, can tell.

        Args:
            num_workers: the most workers that the group may have.
            dataset_size: rows of the training set, or None where only the workers will know.
            devices: kinds of device of the workers in any order, or None where only the workers will know.

        Raises:
            ConfigError: no workers, fewer rows in a global batch than workers, fewer in the data set than in it, or
                shares set by hand that fit neither the workers nor the batch.
        """
        if num_workers < 1:
            raise ConfigError(
                f"num_workers={num_workers}: there is nobody to train; set ScalingConfig(num_workers=1) or more"
            )
        if self.global_batch_size < num_workers:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is below num_workers={num_workers}, so some worker would "
                f"never have a row; use at least {num_workers} rows or at most {self.global_batch_size} workers"
            )
        if self.global_batch_size < num_workers * self.local_batch_multiple:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is below num_workers={num_workers} times "
                f"local_batch_multiple={self.local_batch_multiple}, so some worker would never have a row; use at "
                f"least {num_workers * self.local_batch_multiple} rows, or a smaller multiple"
            )
        if dataset_size is not None and dataset_size < self.global_batch_size and self.small_dataset == "error":
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is above the {dataset_size} rows of the data set; lower "
                f"it to at most {dataset_size}, or set small_dataset='clamp' to have it lowered for you"
            )
        shares = self.policy_options.get("local_batch_sizes")
        if isinstance(shares, Mapping) and devices is not None:
            shares_by_hand(shares, devices, self.global_batch_size, self.local_batch_multiple)
        elif shares is not None and not isinstance(shares, Mapping):
            shares_by_hand(shares, [""] * num_workers, self.global_batch_size, self.local_batch_multiple)

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        **chosen: Any,
    ) -> RexConfig:
        """Read a configuration from a file and the environment.

        Later ones win: defaults, the file, the environment, ``chosen``. A variable is named ``REX_RAY_`` and the key in
        capitals, ``REX_RAY_POLICY_OPTIONS__`` and the option for one option of the policy; its value is read as in a
        file. ``RexConfig(...)``, ``from_yaml`` and ``from_mapping`` never look at the environment.

        Args:
            path: a YAML file that maps field names to values; None reads none.
            environ: variables; default: those of this process; ``{}``: none.
            defaults: a program's own, in place of those here.
            chosen: values by field, such as those of a command line.

        Raises:
            ConfigError: all that is wrong, a line each with the file's line or the variable: unknown keys and variables
                (the nearest is named), values that cannot work, a file that cannot be read.
        """
        return cls(**cls.layers(path, environ=environ, defaults=defaults, **chosen).effective())

    @classmethod
    def layers(
        cls,
        path: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        **chosen: Any,
    ) -> Layers:
        """Gather what ``load`` builds from, with the origin of every value; arguments as there.

        Raises:
            ConfigError: the file cannot be read, or is no YAML mapping.
        """
        layers = Layers(defaults=cls._defaults() | dict(defaults or {}))
        if path is not None:
            layers.add_file(path)
        layers.add_environment(os.environ if environ is None else environ)
        layers.add_mapping(chosen)
        return layers

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RexConfig:
        """Build a configuration from plain values, as a YAML file holds them.

        Raises:
            ConfigError: all that is wrong, a line each: an unknown key (the nearest one is named), a missing
                ``global_batch_size``, a bad value.
        """
        layers = Layers(defaults=cls._defaults())
        layers.add_mapping(values)
        return cls(**layers.effective())

    @classmethod
    def from_yaml(cls, path: str | Path) -> RexConfig:
        """Read a configuration from a YAML file that maps field names to values, and from nothing else.

        Raises:
            ConfigError: the file is missing, is no YAML mapping, or holds something that cannot work.
        """
        return cls.load(path, environ={})

    def to_mapping(self) -> dict[str, Any]:
        """Return every field as plain values; ``from_mapping`` takes them back."""
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        """Return the YAML text that ``from_yaml`` reads back into an equal configuration."""
        return write_document(self.to_mapping())

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for known in dataclasses.fields(cls):
            if known.default is not MISSING:
                found[known.name] = known.default
            elif known.default_factory is not MISSING:
                found[known.name] = known.default_factory()
        return found


def _grows(policy: Any) -> bool:
    """Whether a policy, under its wrappers, has the global batch follow the noise scale."""
    while hasattr(policy, "inner"):
        policy = policy.inner
    return not isinstance(getattr(policy, "growth", None), FixedBatch)
