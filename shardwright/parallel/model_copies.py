"""``copy.deepcopy`` of a wrapped model, as `torch.optim.swa_utils.AveragedModel` makes it.

    before the first call   the copy has whole parameters; when the model is called first and its parameters are cut,
                            those of its copies are cut alike, so that slices can be averaged
    after the first call    the copy has slices of its own, on the same ranks

A copy plans at its own first call, with its parameters as they are stored then, and trains independently. Copying
sends nothing between ranks.

Example: a weight [32, 16], cut 4 ways along dim 0. A copy before the first call has the whole [32, 16]; a copy after it
has a slice [8, 16] of its own on each rank.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict

import torch
from torch import Tensor, nn

from ..capture.annotations import CUT
from ..capture.module_calls import ModelAndLoss
from ..errors import SettingError
from ..runtime.deferred_init import put_in_place, substitute
from ..runtime.optimizer_guard import Accumulation
from ..torch_private import MODULE_TABLES
from .setting_methods import SettingMethods

__all__ = ["Followers", "copied"]

#: Attributes of a wrapper whose values a copy shares.
_SHARED = frozenset({"_settings", "_running", "_warned", "_kind", "_wrapper"})


def copied(model: SettingMethods, memo: dict[int, object]) -> SettingMethods:
    """A deep copy of a wrapper and its model.

    Args:
        model: the wrapper.
        memo: see `copy.deepcopy`.

    Raises:
        SettingError: the model waits for its first call to take loaded values, or has whole parameters on one rank
            alone (`whole`); or its ``forward`` was replaced on the object, since a copy of that would go on calling
            the original.
    """
    if model._awaited:
        raise SettingError(
            "copy.deepcopy: the model waits for its first call to take the values that were loaded",
            legal="a copy after the first call of the model",
        )
    if model._whole is not None and model._whole.rank is not None:
        raise SettingError(
            f"copy.deepcopy of the parallel model inside of whole(rank={model._whole.rank})",
            legal="a copy of the plain model, or of the parallel one outside",
        )
    if "forward" in vars(model):
        raise SettingError(
            "copy.deepcopy of a parallel model whose forward was replaced, as accelerate does for mixed precision",
            legal="a copy before it is prepared",
        )
    cut = False
    for module in (model.net, model.loss_fn):
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if hasattr(parameter, CUT) and id(parameter) not in memo:
                memo[id(parameter)] = with_slice(parameter)
            cut = cut or hasattr(parameter, CUT)
    made = type(model).__new__(type(model))
    memo[id(model)] = made
    attributes = made.__dict__
    attributes["net"] = copy.deepcopy(model.net, memo)
    attributes["loss_fn"] = copy.deepcopy(model.loss_fn, memo)
    attributes |= {table: attributes["net"].__dict__[table] for table in MODULE_TABLES}
    attributes |= {
        "_programs": OrderedDict(),
        "_states": {},
        "_accumulation": Accumulation(),
        "_strategy_files": [],
        "_awaited": [],
        "_copies": [],
        "_whole": None,
        "_place": None,
        "_step": None,  # the copy is one of the model: the step goes on calling the original
        "_entry": None,
        "_first_ranks": dict(model._first_ranks),
        "_stored": model._stored if cut else None,
        "_used": model._used if cut else None,
    }
    for key, value in vars(model).items():
        if key not in attributes:
            attributes[key] = value if key in _SHARED else copy.deepcopy(value, memo)
    made._note_parameters()
    if not cut:
        model._copies.append(weakref.ref(made))
    return made


def with_slice(parameter: Tensor) -> nn.Parameter:
    """A parameter with a copy of a rank's slice and the attributes of the original, without a gradient (as torch
    copies)."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  DTensor takes long to import

    from ..runtime.distributed.dtensors import as_dtensor, beginning, leaf_of  # noqa: PLC0415  imports DTensor

    cut = as_dtensor(parameter)
    with torch.no_grad():
        local = cut.to_local()
        copied_local = beginning(leaf_of(cut).clone(), local.shape) if local.numel() else local.clone()
        copied_cut = DTensor.from_local(
            copied_local,
            cut.device_mesh,
            cut.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    made = nn.Parameter(copied_cut, requires_grad=parameter.requires_grad)
    made.__class__ = type(cut)  # type: ignore[assignment]  # nn.Parameter(...) of a DTensor is of DTensor's own class
    vars(made).update(
        (k, v) for k, v in vars(parameter).items() if k not in ("_shardwright_nothing", "_shardwright_closed")
    )
    return made


class Followers:
    """The copies of a model that is called for the first time, and for each copy the names of values equal to the
    model's.

    Args:
        model: the wrapper, with its parameters before they are cut.
    """

    def __init__(self, model: SettingMethods) -> None:
        self._model = model
        self._copies: list[tuple[SettingMethods, set[str]]] = []
        for ref in model._copies:
            made = ref()
            if made is not None and not made._programs and made._stored is None and made._settings == model._settings:
                mine, theirs = _named(model), _named(made)
                self._copies.append((made, {n for n in mine if n in theirs and _alike(mine[n], theirs[n])}))

    def follow(self) -> None:
        """Cut the copies' parameters like the model's. A parameter of a copy that has no values yet takes the model's
        values."""
        self._model._copies.clear()
        for made, same_cut in self._copies:
            mine, theirs = _named(self._model), _named(made)
            further = Followers(made)
            for name in same_cut:
                if theirs[name].is_meta and not hasattr(mine[name], CUT):
                    put_in_place(theirs[name], mine[name].detach().clone())
            if any(hasattr(p, CUT) for p in mine.values()) and not (
                made._running.parameter_broadcast and len(same_cut) < len(theirs)
            ):
                self._cut(made, mine, theirs, same_cut)
            further.follow()

    def _cut(
        self, made: SettingMethods, mine: dict[str, Tensor], theirs: dict[str, Tensor], same_cut: set[str]
    ) -> None:
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  DTensor takes long to import

        from ..runtime.distributed.dtensors import as_dtensor, gathered, with_values  # noqa: PLC0415  imports DTensor

        successors: dict[Tensor, nn.Parameter] = {}
        for name, old in theirs.items():
            if not hasattr(mine.get(name), CUT) or not isinstance(old, nn.Parameter):
                continue
            new = with_slice(mine[name])
            new.requires_grad_(old.requires_grad)
            if name not in same_cut:
                with_values(as_dtensor(new), old.detach())
            successors[old] = new
        names = {old: name for name, old in theirs.items()}

        def cut(old: Tensor, state: Tensor) -> Tensor | None:
            slices = as_dtensor(with_slice(mine[names[old]]))
            if state.shape != old.shape:
                return None if slices.numel() else slices.detach()  # the parameter is on the ranks of another stage
            return with_values(slices, gathered(state) if isinstance(state, DTensor) else state).detach()

        substitute(ModelAndLoss(made.net, made.loss_fn), successors, cut)
        made._stored, made._used = self._model._stored, self._model._used
        made._first_ranks.update(self._model._first_ranks)
        made._note_parameters()


def _named(model: SettingMethods) -> dict[str, Tensor]:
    holder = ModelAndLoss(model.net, model.loss_fn)
    return dict(holder.named_parameters()) | dict(holder.named_buffers())


def _alike(a: Tensor, b: Tensor) -> bool:
    """True where two tensors have the same values, or neither has any."""
    if a.is_meta or b.is_meta:
        return a.is_meta and b.is_meta and a.shape == b.shape
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach(), b.detach())
