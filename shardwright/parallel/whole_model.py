"""`AutoParallel.whole`: the plain model with plain whole parameters, inside a ``with`` block.

    enter   per parameter: its slices are gathered, and an ordinary `nn.Parameter` takes its place in the model
    body    the user's own model: generate, evaluation, export, save_pretrained
    exit    the sharded parameters come back, the same objects; a changed value is written into the slices

A change is found by comparison with the slices, which are gathered again: `_version` does not count writes through
``.data``. The exit ends in an error, alike on every rank, where a change cannot be written back: a gradient, a
parameter that is new or of another shape, values that differ between the ranks. Then, and after an error in the body,
nothing is written back.

`refuse_calls_of_parts` refuses calls of a module with slices by itself. `forwarded_attributes` decides which
attributes of a wrapper are those of its model.

Example: a weight [32, 16], of which each of 4 ranks has a slice [8, 16]. Inside of the block the weight is [32, 16] on
every rank. After ``net.weight.data.mul_(2)`` in the block, each rank's slice has doubled values.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..capture.annotations import CUT, whole_shape
from ..capture.hybrid_models import own_parameters
from ..capture.module_calls import ModelAndLoss, refuses_others
from ..capture.source_lines import user_frame
from ..errors import SettingError
from ..identity_tables import IdentitySet
from ..process_runtime import current
from ..runtime.optimizer_guard import close_to_steps, open_to_steps
from ..torch_private import buffer_table, parameter_table, version_of
from .setting_methods import OpenWhole, SettingMethods

if TYPE_CHECKING:
    pass

__all__ = ["WholeModel", "refuse_calls_of_parts"]

_CALLS = "with model.whole() as net: net(…), net.generate(…), …; model(…) is the parallel model"


class WholeModel:
    """The context manager of `AutoParallel.whole`.

    Args:
        model: the wrapper.
        rank: the rank that gets whole parameters; None: all ranks.
        device: the device of the whole parameters; None: that of the run.
    """

    def __init__(self, model: SettingMethods, rank: int | None = None, device: torch.device | None = None) -> None:
        self.model, self.rank, self._device = model, rank, device
        self._outer: OpenWhole | None = None
        self._state: _Swapped | None = None

    def __enter__(self) -> nn.Module | None:
        model, runtime = self.model, current()
        parts = runtime.processes and model.settings.parallel_mode != "stand_alone"
        if self.rank is not None and (
            isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 0 <= self.rank < (runtime.devices or 1)
        ):
            raise SettingError(
                f"whole(rank={self.rank!r}) of {runtime.devices or 1} ranks", legal="a rank, or None for all"
            )
        self._outer = model._whole
        if self._outer is not None:
            if self._outer.rank is not None and self.rank != self._outer.rank:
                raise SettingError(
                    f"whole(rank={self.rank}) inside of whole(rank={self._outer.rank}): other ranks have slices",
                    legal="whole() around both",
                )
            return self._net(parts, runtime.rank)
        _check(model)
        if parts and _is_cut(model):
            self._state = _Swapped(model, self.rank, runtime.rank, self._device)
        model.__dict__["_whole"] = self
        return self._net(parts, runtime.rank)

    def _net(self, parts: bool, rank: int) -> nn.Module | None:
        return self.model.net if self.rank in (None, rank) or not parts else None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self._outer is not None:
            return
        self.model.__dict__["_whole"] = None
        if self._state is not None:
            state, self._state = self._state, None
            state.leave(error)


def _check(model: SettingMethods) -> None:
    """Check that the model has whole values.

    Raises:
        SettingError: parameters without values, or that differ from rank to rank by design.
    """
    holder = ModelAndLoss(model.net, model.loss_fn)
    layerwise = sorted(own_parameters(holder))
    if layerwise:
        raise SettingError(
            f"the parameter {layerwise[0]!r} is layerwise_parallel, another slice on each rank: no whole model exists",
            legal="sw.save_checkpoint, which stacks the ranks' slices",
        )
    unborn = next((n for n, t in [*holder.named_parameters(), *holder.named_buffers()] if t.is_meta), None)
    if unborn is not None:
        raise SettingError(f"whole(): {unborn!r} has no values yet", legal="whole() after the first call of the model")
    if model._awaited:
        raise SettingError(
            "whole(): the model waits for its first call to take the values that were loaded",
            legal="whole() after the first call of the model",
        )


def _is_cut(model: SettingMethods) -> bool:
    return any(hasattr(p, CUT) for p in model.net.parameters()) or (
        isinstance(model.loss_fn, nn.Module) and any(hasattr(p, CUT) for p in model.loss_fn.parameters())
    )


class _Swapped:
    """Whole parameters in the place of slices.

    Args:
        rank: the rank that gets them; None: all.
        here: this rank.
    """

    def __init__(self, model: SettingMethods, rank: int | None, own_rank: int, device: torch.device | None) -> None:
        from ..runtime.distributed.rank_messages import ranks_of_now  # noqa: PLC0415  needed in processes alone

        self.holder = ModelAndLoss(model.net, model.loss_fn)
        self.rank, self.mine = rank, rank is None or rank == own_rank
        self.ranks = ranks_of_now("whole models")
        asked = self.ranks.exchanged(rank)
        if len(set(asked)) > 1:
            raise SettingError(
                f"whole() is asked for {', '.join(f'rank={r}' for r in asked)} on ranks 0 to {len(asked) - 1}",
                legal="the same on every rank",
            )
        #: Name of a parameter or buffer of one pipeline stage -> the rank that broadcasts it.
        self.stage: dict[str, int] = model._first_ranks
        named = {p: n for n, p in reversed(list(self.holder.named_parameters())) if hasattr(p, CUT)}
        self.cut: dict[str, nn.Parameter] = {n: p for p, n in reversed(named.items())}
        self.whole: dict[str, nn.Parameter] = {}
        for name, parameter in self.cut.items():
            value = self._gathered(name, parameter)
            if self.mine:
                made = nn.Parameter(
                    value if device is None else value.to(device), requires_grad=parameter.requires_grad
                )
                vars(made).update((k, v) for k, v in vars(parameter).items() if not k.startswith("_shardwright"))
                self.whole[name] = made
        self.buffers = dict(self.holder.named_buffers())
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                if name in self.stage:
                    value = _broadcast(buffer, self.stage[name])
                    if not _same(value, buffer):
                        buffer.copy_(value)
        self.began = {name: buffer.clone() for name, buffer in self.buffers.items()}
        #: The parameter and buffer table of each module, with its entries before the swap.
        self.tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        names = {p: n for n, p in self.cut.items()}
        for module in self.holder.modules():
            for table in (parameter_table(module), buffer_table(module)):
                self.tables.append((table, dict(table)))
                table.update(
                    (key, self.whole[names[tensor]])
                    for key, tensor in self.tables[-1][1].items()
                    if names.get(tensor) in self.whole
                )
        self.children = [(module._modules, dict(module._modules)) for module in self.holder.modules()]
        for parameter in self.cut.values():
            close_to_steps(parameter)
        self.versions = {name: _versions(parameter) for name, parameter in self.cut.items()}

    def _gathered(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The whole value of a parameter, on every rank, in memory of its own."""
        from ..runtime.distributed.dtensors import as_dtensor, gathered  # noqa: PLC0415  imports DTensor

        with torch.no_grad():
            if whole_shape(parameter) != parameter.shape:  # a parameter of another pipeline stage
                value = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device=parameter.device)
            else:
                value = gathered(as_dtensor(parameter))
            return _broadcast(value, self.stage[name]) if name in self.stage else value

    def leave(self, error: BaseException | None) -> None:
        """Put the sharded parameters back; write changed values into the slices.

        Args:
            error: the exception that ended the body; None: none.

        Raises:
            ShardwrightError: the error of another rank's body; a change that cannot be written back.
        """
        wrong, now = self._restored()
        if error is not None:
            self._undo()
            if isinstance(error, Exception):  # the other ranks wait for its error; this rank raises its own
                with contextlib.suppress(Exception):
                    self.ranks.agreed(error)
            return
        try:
            self.ranks.agreed(wrong)
            self._write_back(now)
        except Exception:  # of any kind: raised again, with the model as it was
            self._undo()
            raise

    def _restored(self) -> tuple[SettingError | None, dict[str, Tensor]]:
        """Restore the tables of the model, but for values. Returned are an error for a change that cannot be written
        back, and the tensors that the body left, by name."""
        names = {p: n for n, p in (self.cut | self.buffers).items()}
        back = set(self.whole.values())
        now: dict[str, Tensor] = {}
        wrong: list[tuple[str, str]] = []
        elsewhere = "changes of the model's structure before its first call, or in a copy.deepcopy(net)"
        for table, before in self.tables:
            for key, tensor in before.items():
                name, present = names.get(tensor), table.get(key)
                if name is None:
                    if present is not tensor:
                        wrong.append((f"{key!r} was replaced", elsewhere))
                    continue
                expected = self.whole.get(name, tensor)
                if present is None:
                    wrong.append((f"{name!r} was removed", elsewhere))
                elif whole_shape(present) != whole_shape(expected) or present.dtype != expected.dtype:
                    wrong.append(
                        (
                            f"{name!r} of shape {tuple(whole_shape(expected))} and {expected.dtype} became "
                            f"{tuple(whole_shape(present))} and {present.dtype}",
                            elsewhere,
                        )
                    )
                elif present is expected and present.requires_grad != tensor.requires_grad:
                    wrong.append((f"requires_grad of {name!r} was changed", "requires_grad_() outside of whole()"))
                elif now.get(name, present) is not present:
                    wrong.append(
                        (f"{name!r} is tied, and was replaced in one of its places", "the same tensor in all of them")
                    )
                if self.mine or name in self.buffers:
                    now[name] = present if present is not None else expected
            wrong += [
                (f"{key!r} of shape {tuple(table[key].shape)} is new", elsewhere)
                for key in table
                if key not in before and table[key] is not None and table[key] not in back
            ]
            table.clear()
            table.update(before)
        known = IdentitySet(table for table, _ in self.tables)
        for module in self.holder.modules():
            if module._parameters not in known:
                wrong += [
                    (
                        f"{type(module).__name__} has a new parameter {key!r} of shape {tuple(parameter.shape)}",
                        elsewhere,
                    )
                    for key, parameter in module._parameters.items()
                    if parameter is not None and parameter not in back
                ]
        for name, parameter in self.whole.items():
            if parameter.grad is not None:
                wrong.append(
                    (
                        f"{name!r} has a gradient, of the whole tensor that goes now",
                        "torch.no_grad(), or zero_grad() at "
                        "the end of the body; model(…).backward() for gradients of the parallel model",
                    )
                )
                break
        for name, parameter in self.cut.items():
            open_to_steps(parameter)
            if _versions(parameter) != self.versions[name]:
                wrong.append(
                    (f"the slice of {name!r} was changed", "changes of the whole tensor, or outside of whole()")
                )
        if not wrong and [dict(table) for table, _ in self.children] != [children for _, children in self.children]:
            wrong.append(
                (
                    "modules were added, removed or replaced",
                    "the same in a copy: copy.deepcopy(net).merge_and_unload(), say",
                )
            )
        if not wrong:
            return None, now
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return SettingError(
            f"a change inside of whole() cannot be written back: {wrong[0][0]}{more}; nothing was written back",
            legal=wrong[0][1],
        ), now

    def _undo(self) -> None:
        """Restore the modules and buffers from before the body."""
        for table, children in self.children:
            if table != children:
                table.clear()
                table.update(children)
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                if not _same(buffer, self.began[name]):
                    buffer.copy_(self.began[name])

    def _write_back(self, now: dict[str, Tensor]) -> None:
        """Write changed values into slices and buffers.

        Args:
            now: the tensors that the body left, by name.

        Raises:
            SettingError: ranks have changed different tensors, or have different values.
        """
        from ..runtime.distributed.dtensors import as_dtensor, with_values  # noqa: PLC0415  imports DTensor

        tensors = {**self.cut, **self.buffers}
        changed: list[str] = []
        for name, parameter in self.cut.items():
            before = self._gathered(name, parameter)
            if self.mine and not _same(now[name].to(before.device), before):
                changed.append(name)
        changed += [name for name in self.buffers if not _same(now[name], self.began[name])]
        changed_by_rank = self.ranks.exchanged(changed)
        giver = 0 if self.rank is None else self.rank
        if self.rank is None:
            apart = sorted(
                {
                    name
                    for names in changed_by_rank
                    for name in names
                    if any(name not in other for other in changed_by_rank)
                }
            )
            if apart:
                where = [str(r) for r, names in enumerate(changed_by_rank) if apart[0] in names]
                raise _differ(apart, f"rank {', '.join(where)} alone changed it")
        elif any(set(names) - set(self.cut) for r, names in enumerate(changed_by_rank) if r != giver):
            raise _differ(
                sorted({n for r, names in enumerate(changed_by_rank) if r != giver for n in names}),
                f"a rank other than {giver} changed it",
            )
        values: dict[str, Tensor] = {}
        differ: list[str] = []
        with torch.no_grad():
            for name in changed_by_rank[giver]:
                like = tensors[name]
                value = torch.empty(whole_shape(like), dtype=like.dtype, device=like.device)
                if self.ranks.rank == giver:
                    value.copy_(now[name].detach())
                value = _broadcast(value, giver)
                if self.mine and not _same(value, now[name].detach().to(value.device)):
                    differ.append(name)
                if self.rank is not None:  # otherwise each rank has the whole value already
                    values[name] = value
            self.ranks.agreed(_differ(differ, "the ranks have different values") if differ else None)
            for name in changed_by_rank[giver]:
                value = values[name] if self.rank is not None else now[name].detach()
                if name in self.buffers:
                    self.buffers[name].copy_(value)
                else:
                    with_values(as_dtensor(self.cut[name]), value)


def _differ(names: list[str], how: str) -> SettingError:
    more = f", and {len(names) - 1} more," if len(names) > 1 else ""
    return SettingError(
        f"a change inside of whole() cannot be written back: {names[0]!r}{more} was changed, and {how}; nothing "
        "was written back",
        legal="the same change on every rank, or whole(rank=0)",
    )


def _versions(parameter: nn.Parameter) -> tuple[int, int]:
    """The numbers of in-place changes of a parameter and of its slice."""
    from ..runtime.distributed.dtensors import as_dtensor  # noqa: PLC0415  imports DTensor

    with torch.no_grad():
        return version_of(parameter), version_of(as_dtensor(parameter).to_local())


def _broadcast(tensor: Tensor, source: int) -> Tensor:
    """The values that a tensor has on rank `source`, on every rank; for any dtype, in contiguous memory."""
    tensor = tensor.detach().contiguous()
    dist.broadcast(tensor.reshape(-1).view(torch.uint8), source)
    return tensor


def _same(a: Tensor, b: Tensor) -> bool:
    """True where two tensors have the same values: equal or both NaN, element by element."""
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))


# -- parts of the model that are called by themselves ----------------------------------------------------------------


_refusing: list[object] = []


def refuse_calls_of_parts() -> None:
    """Refuse, from now on, a call of a module by itself while its parameters are slices, and in a step function calls
    of modules that are none of its models. The error names the alternative."""
    if not _refusing:
        _refusing.append(register_module_forward_pre_hook(_refuse))


def _refuse(module: nn.Module, args: tuple[object, ...]) -> None:
    if not module._parameters or isinstance(module, SettingMethods):
        return
    if refuses_others() and any(p is not None and p.requires_grad for p in module._parameters.values()):
        _refuse_stranger(module)
    for key, parameter in module._parameters.items():
        if parameter is not None and hasattr(parameter, CUT):  # (a compiler of another model reads this, too)
            frames = [(f.filename, f.lineno or 0) for f in traceback.extract_stack()]
            # the call site to name is the user's, not a library's in between
            frames = [f for f in frames if "site-packages" not in f[0]] or frames
            raise SettingError(
                f"{type(module).__name__} is called by itself, and of its {key!r} (parameter "
                f"{getattr(parameter, CUT)!r}) this rank has a slice",
                source=user_frame(frames) or None,
                legal=_CALLS,
            )


def _refuse_stranger(module: nn.Module) -> None:
    if any(p is not None and hasattr(p, CUT) for p in module._parameters.values()):
        return  # a part of a model of the step: `_refuse` says what to call
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_stack()]
    raise SettingError(
        f"{type(module).__name__} is called in a step function, and belongs to none of its models: the gradients of "
        "its parameters would be each rank's own",
        source=user_frame([f for f in frames if "site-packages" not in f[0]] or frames) or None,
        legal="AutoParallel(step, net=…) with all models of the step; or requires_grad_(False) where it is not trained",
    )


#: Marks a hook that is not the user's. Code that runs or looks for global hooks of modules skips it.
_refuse.of_shardwright = True  # type: ignore[attr-defined]
