"""What Adam does to a gradient before it becomes a step, for norms that speak of the step.

Adam divides each entry by the root of its mean square. Noise in entries that it divides by much moves the weights
little, so the noise scale of the bare gradient says little about them; Pollux (Qiao et al. 2021, OSDI) takes both
norms after ``P = 1 / (sqrt(v) + eps)``. ``v`` is that of *before* the step, which no gradient of the step has touched,
so estimates stay unbiased; it is the same on all ranks, because their updates are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from rex_ray.core.types import OptimizerFamily
from rex_ray.worker.user_warning import warn

__all__ = ["AdamPreconditioner", "optimizer_family"]

Correction: TypeAlias = float | torch.Tensor
_State: TypeAlias = tuple[torch.Tensor, Correction, float]
"""Mean square, its correction for having begun at zero, and what keeps the root from nothing."""


def optimizer_family(optimizer: torch.optim.Optimizer) -> OptimizerFamily:
    """Return ``"adam"`` for what divides each entry by its running size: Adam, AdamW, NAdam, RAdam, Adamax.

    They are told by their options, two ``betas`` and an ``eps``, so that those of other libraries are too.
    """
    betas, eps = optimizer.defaults.get("betas"), optimizer.defaults.get("eps")
    return "adam" if isinstance(betas, (tuple, list)) and len(betas) == 2 and isinstance(eps, float) else "sgd"


class AdamPreconditioner:
    """Takes squared norms of ``P g``.

    Args:
        optimizer: one of Adam's family; its state is read and never written.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: Mapping[torch.Tensor, Mapping[str, Any]] = {}
        self._scaling: dict[torch.Tensor, torch.Tensor] = {}
        self._warned = False

    def begin(self) -> None:
        """Begin with a step: options may have been scheduled, groups added, and the mean squares have moved."""
        self.release()
        self._groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}

    def release(self) -> None:
        """Let go of what was computed for the step: one copy of the parameters, in single precision or their own."""
        self._scaling.clear()

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether there is a mean square of this parameter's gradient yet: not before its first step."""
        state = self._optimizer.state.get(parameter)
        if not state or parameter not in self._groups:
            return False
        mean_square = _mean_square(state, self._groups[parameter])
        readable = (
            mean_square is not None
            and mean_square.shape == parameter.shape
            and _num_steps(state, self._groups[parameter]) is not None
        )
        if not readable and not self._warned:
            self._warned = True
            warn(
                f"{type(self._optimizer).__name__} keeps no exp_avg_sq in its parameters' shapes and a count of steps, "
                "so gradient norms cannot be taken after its preconditioner, and the noise scale stays unknown"
            )
        return readable and mean_square is not None and mean_square.device == parameter.device

    def squared_norm(self, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return ``|P g|^2`` as a 0-d tensor, at least in single precision.

        Args:
            gradients: dense, in the shapes of their parameters.
            parameters: known ones, as many.
        """
        scaling = self._scaling_of(parameters)
        if gradients[0].is_cuda:
            total: torch.Tensor = torch.nn.utils.get_total_norm(torch._foreach_mul(scaling, list(gradients)))
            return total.square()
        # On a host one after the other is quicker: the product stays in its cache.
        squares = []
        for gradient, factor in zip(gradients, scaling, strict=True):
            product = (gradient * factor).reshape(-1)
            squares.append(torch.dot(product, product))
        return torch.stack(squares).sum()

    def _scaling_of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``P`` per parameter, computed once a step: that is most of the cost."""
        missing = [parameter for parameter in parameters if parameter not in self._scaling]
        states = [self._state_of(parameter) for parameter in missing]
        if missing and missing[0].is_cuda and all(isinstance(correction, float) for _, correction, _ in states):
            self._scaling.update(zip(missing, _scaling_at_once(states), strict=True))
        else:
            for parameter, (square, correction, eps) in zip(missing, states, strict=True):
                self._scaling[parameter] = square.sqrt().div_(correction**0.5).add_(eps).reciprocal_()
        return [self._scaling[parameter] for parameter in parameters]

    def _state_of(self, parameter: torch.Tensor) -> _State:
        state, group = self._optimizer.state[parameter], self._groups[parameter]
        square = _mean_square(state, group)
        assert square is not None, "norms are taken of parameters that are known"
        if square.dtype in (torch.float16, torch.bfloat16):
            square = square.float()
        return square, _bias_correction(_num_steps(state, group), group["betas"][1]), float(group["eps"])


def _scaling_at_once(states: Sequence[_State]) -> list[torch.Tensor]:
    """Return ``P`` of many tensors in a few launches."""
    roots = list(torch._foreach_sqrt([square for square, _, _ in states]))
    torch._foreach_div_(roots, [float(correction) ** 0.5 for _, correction, _ in states])
    torch._foreach_add_(roots, [eps for _, _, eps in states])
    torch._foreach_reciprocal_(roots)
    return roots


def _mean_square(state: Mapping[str, Any], group: Mapping[str, Any]) -> torch.Tensor | None:
    square = state.get("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
    return square if isinstance(square, torch.Tensor) and square.is_floating_point() else None


def _num_steps(state: Mapping[str, Any], group: Mapping[str, Any]) -> Any:
    """Return the steps behind the mean square: beside it in torch, in the group in other libraries."""
    return state.get("step", group.get("step"))


def _bias_correction(step: Any, beta: Any) -> Correction:
    """Return ``1 - beta^step``; where the count lives on the device it stays there, since reading it would wait."""
    if isinstance(step, torch.Tensor):
        if step.device.type != "cpu" or isinstance(beta, torch.Tensor):
            correction: torch.Tensor = 1.0 - torch.pow(beta, step)
            return correction
        step = step.item()
    return float(1.0 - float(beta) ** float(step))
