"""Deferred initialisation: parameters are planned before they have values, and are created as slices.

1. Inside `no_init_parameters` every tensor is on the meta device, and the operators that would have filled it are
   recorded on a tape.
2. `materialize` replays the tape in its order, from the random state at the begin of the tape, tensor by tensor. Each
   rank keeps its slice and frees the rest. Of a large tensor that is filled by ``uniform_``, ``normal_`` or
   ``trunc_normal_``, and changed element by element, a rank computes a part alone (`slice_initialization`).
3. The values are those of an ordinary construction on one device under the same seed, bit for bit.
4. A tensor that a checkpoint will fill (`filled_later`) is not drawn. Where such tensors have all random numbers of the
   tape, the tape's calls for the others alone are replayed, such as the table of a non-persistent buffer.

Functions that need all numbers (``orthogonal_``) draw the whole tensor.

`put_in_place` and `substitute` exchange a model's parameters, also in the optimizers that were built before.

Example: ``nn.Linear(1024, 1024)`` inside of `no_init_parameters` has a weight on the meta device. On 8 ranks that store
it in slices each rank keeps [128, 1024], 512 KiB of the 4 MiB.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..accelerators import sum_type
from ..capture.source_lines import calling_line
from ..cost.memory_timeline import OptimizerState, optimizer_state
from ..errors import SettingError
from ..identity_tables import IdentitySet
from ..torch_private import TorchDispatchMode, move_gradient_hooks, parameter_table, pytree, storage_id, version_of
from .slice_initialization import Call, Meta, Numbers, compute, draws, metas, noted, parts_of

__all__ = [
    "beginnings",
    "filled_later",
    "materialize",
    "no_init_parameters",
    "optimizer_finder",
    "put_in_place",
    "substitute",
]

_TAPE, _VERSION, _FILLED = "_shardwright_tape", "_shardwright_version", "_shardwright_filled"
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]  # a property, which torch types as its value


@dataclass(eq=False)
class _Tape:
    """Operators in order, as (function, args, kwargs, result), and the calls before which the user changed the random
    state."""

    state: torch.Tensor
    calls: list[Call] = field(default_factory=list)
    reseeded: dict[int, torch.Tensor] = field(default_factory=dict)
    latest: torch.Tensor | None = None

    def note_seed(self) -> None:
        """Note a random state that the user has set before this call, so that the replay sets it at the same place."""
        state = torch.get_rng_state()
        if not torch.equal(state, self.state if self.latest is None else self.latest):
            self.reseeded[len(self.calls)] = self.latest = state

    def note(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], result: object
    ) -> None:
        self.calls.append((function, *pytree.tree_map(noted, (args, kwargs, result))))


class _Record(TorchDispatchMode):
    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.tape.note_seed()
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            self.tape.latest = torch.get_rng_state()  # the operator itself drew on a real device; the user did not seed
        self.tape.note(function, args, kwargs or {}, result)
        return result


class _Construction(TorchFunctionMode):
    """Exceptions to the meta device. ``torch.tensor([…])`` has values to keep and stays real. Functions of
    `torch.nn.init` that look at values on the way (``trunc_normal_``, ``orthogonal_``) skip a meta tensor; each is
    recorded as one call."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function == _IS_META and result:
            frame = sys._getframe(1)
            if frame.f_code.co_filename == nn.init.__file__:
                names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
                arguments = {name: frame.f_locals[name] for name in names}
                self.tape.note_seed()
                self.tape.note(getattr(nn.init, frame.f_code.co_name), (), arguments, args[0])
        return result


@contextlib.contextmanager
def no_init_parameters() -> Iterator[None]:
    """Build a model (and its optimizer) without allocating its parameters.

    The parameters get values when the wrapped model first runs. Each rank then holds its slice alone, with the values
    that an ordinary construction would have had under the same seed. An optimizer may be built inside the block or
    right after it.

    Returns:
        A context manager; its value is None.

    Example:
        >>> with sw.no_init_parameters():
        ...     large = nn.Linear(1024, 1024)
        >>> large.weight.device.type  # nothing is allocated
        'meta'
    """
    tape = _Tape(torch.get_rng_state())
    made: list[torch.Tensor] = []

    def remember(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.is_meta:
            setattr(tensor, _TAPE, tape)
            made.append(tensor)

    def remember_copies(module: nn.Module, name: str, sub: nn.Module | None) -> None:
        for tensor in [] if sub is None else [*sub.parameters(), *sub.buffers()]:
            remember(module, name, tensor)  # a deep copy registers its module, not its tensors

    hooks = (
        register_module_parameter_registration_hook(remember),
        register_module_buffer_registration_hook(remember),
        register_module_module_registration_hook(remember_copies),
    )
    try:
        with torch.device("meta"), _Construction(tape), _Record(tape):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for tensor in made:
            setattr(tensor, _VERSION, version_of(tensor))
        if made:
            _unmade.add(tape)
            if not _refusing:
                _refusing.append(register_module_forward_pre_hook(_refuse_unmade))


#: The tapes of models that have no values yet, and the hook of all modules while there are any.
_unmade: weakref.WeakSet[_Tape] = weakref.WeakSet()
_refusing: list[RemovableHandle] = []


def _refuse_unmade(module: nn.Module, args: tuple[object, ...]) -> None:
    """Refuse the call of a module whose parameters have no values, with a tensor that has some.

    On the meta device operators return memory that nothing has written, or fail without the reason.
    """
    for name, parameter in parameter_table(module).items():
        if parameter is None or not parameter.is_meta or not hasattr(parameter, _TAPE):
            continue
        real = any(type(x) in (torch.Tensor, nn.Parameter) and not x.is_meta for x in pytree.tree_leaves(args))
        if real and not any(kind.__module__.startswith("shardwright.") for kind in type(module).__mro__):
            raise SettingError(
                f"{type(module).__name__} is called, and its parameter {name!r} has no values yet: the model was built "
                "under no_init_parameters",
                source=calling_line(),
                legal="model = AutoParallel(net, …), whose first call makes them: model(…); or a model that is built "
                "outside of no_init_parameters",
            )


#: Marks a hook that is not the user's; see `whole_model.refuse_calls_of_parts`.
_refuse_unmade.of_shardwright = True  # type: ignore[attr-defined]


def _made(tapes: Iterable[_Tape]) -> None:
    """Note that models have their values; the last one ends the watch over calls."""
    for tape in tapes:
        _unmade.discard(tape)
    if not _unmade and _refusing:
        _refusing.pop().remove()


def beginnings(module: nn.Module) -> dict[str, float | str]:
    """A short fingerprint of each parameter's initial values, by name; ranks compare it.

    The fingerprint is the sum of the values, or for a parameter without values a hash of the random states that they
    will be drawn from. A parameter that is already a DTensor has none.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  a second to import; processes alone use it

    out: dict[str, float | str] = {}
    sums: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}  # one copy from each device
    for name, parameter in module.named_parameters():
        tape = getattr(parameter, _TAPE, None)
        if parameter.is_meta:
            states = [] if tape is None else [tape.state, *tape.reseeded.values()]
            out[name] = hashlib.sha256(b"".join(s.numpy().tobytes() for s in states)).hexdigest()
        elif not isinstance(parameter, DTensor):
            values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
            total = values.sum(dtype=sum_type(values.device))
            sums.setdefault((total.device, total.dtype), {})[name] = total
            out[name] = 0.0  # the name's place in the order
    for each in sums.values():
        out.update(zip(each, torch.stack([*each.values()]).tolist()))
    return out


def filled_later(module: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Note the parameters and buffers of a model whose values come from elsewhere right after they are made, and no
    others: for those without memory nothing is computed."""
    for tensor in (*module.parameters(), *module.buffers()):
        vars(tensor).pop(_FILLED, None)
    for tensor in tensors:
        if tensor.is_meta:
            setattr(tensor, _FILLED, True)


def _storage(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def materialize(
    module: nn.Module,
    keep: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | None],
    device: torch.device | str = "cpu",
    real: bool = True,
    part: Callable[[str, torch.Tensor], Sequence[slice] | None] = lambda name, tensor: None,
) -> None:
    """Give values to the parameters and buffers of `module` that have none.

    The tensor objects stay the same, so that an optimizer that holds them goes on holding the right ones.

    Args:
        module: the model.
        keep: ``(name, object, whole tensor) -> the tensor to put in its place``; None where `keep` has taken care of
            it itself (see `substitute`).
        device: of the whole tensors handed to `keep`.
        real: True where tensors that already have values go through `keep` too.
        part: ``(name, object) -> the slice of each dim that `keep` reads``; None: all. Other elements of the whole
            tensor may have any values, and lie in the same memory as others.

    Raises:
        SettingError: a meta parameter that was not made inside `no_init_parameters`, or was written to after it.
    """
    names: dict[torch.Tensor, str] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        names.setdefault(tensor, name)
    waiting: dict[int, list[tuple[str, torch.Tensor]]] = {}
    filled: set[torch.Tensor] = set()
    tapes = IdentitySet[_Tape]()
    for tensor, name in names.items():
        if tensor.is_meta:
            tape = getattr(tensor, _TAPE, None)
            if getattr(tensor, _VERSION, version_of(tensor)) != version_of(tensor):
                raise SettingError(
                    f"{name!r} was written to after `no_init_parameters`, when it had no values yet",
                    legal="initialise inside of the block, load values after the first call",
                )
            if tape is not None:
                tapes.add(tape)
            waiting.setdefault(_storage(tensor), []).append((name, tensor))
        elif real:
            _put(keep, name, tensor, tensor.detach())
    for key in [
        k for k, entries in waiting.items() if all(hasattr(t, _FILLED) and hasattr(t, _TAPE) for _, t in entries)
    ]:
        entries = waiting.pop(key)
        filled.update(tensor for _, tensor in entries)
        flat = _unfilled(entries[0][1], device)
        for name, tensor in entries:
            _put(keep, name, tensor, torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset()))
    late = filled | {tensor for entries in waiting.values() for _, tensor in entries}
    for tape in tapes:
        _replay(tape, waiting, keep, torch.device(device), part)
    _made(tapes)
    if waiting:
        without_values = ", ".join(name for entries in waiting.values() for name, _ in entries)
        raise SettingError(
            f"parameters on the meta device that nothing initialises: {without_values}",
            legal="build the model, and convert it, inside `with sw.no_init_parameters():`",
        )
    for optimizer in _optimizers() if late else ():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in late and not parameter.is_meta and _is_unmade(optimizer.state.get(parameter, {})):
                    optimizer.state[parameter] = _made_anew(optimizer, group, parameter)


def _replay(
    tape: _Tape,
    waiting: dict[int, list[tuple[str, torch.Tensor]]],
    keep: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | None],
    device: torch.device,
    part: Callable[[str, torch.Tensor], Sequence[slice] | None],
) -> None:
    replayed = _needed(tape, waiting)
    parts = parts_of((tape.calls[i] for i in replayed), waiting, part)
    last: dict[int, int] = {}
    for i in replayed:
        _, args, kwargs, result = tape.calls[i]
        for x in pytree.tree_leaves((args, kwargs, result)):
            if isinstance(x, Meta):
                last[x.key] = i
    real: dict[int, torch.Tensor] = {}
    numbers = Numbers()

    def of(x: object) -> object:
        if isinstance(x, torch.device):
            return torch.device("cpu") if x.type == "meta" else x
        return torch.as_strided(real[x.key], x.shape, x.stride, x.offset) if isinstance(x, Meta) else x

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_rng_state(tape.state)
        for i in replayed:
            function, args, kwargs, result = tape.calls[i]
            if i in tape.reseeded:
                torch.set_rng_state(tape.reseeded[i])
                numbers.pending = 0
            computed = next((parts[x.key] for x in metas(tape.calls[i]) if x.key in parts), None)
            if computed is None:
                if draws(function):
                    numbers.arrive()
                got = function(*pytree.tree_map(of, args), **pytree.tree_map(of, kwargs))
            else:
                got = compute(tape.calls[i], of, computed, real, numbers)
            for x, y in zip(pytree.tree_leaves(result), pytree.tree_leaves(got)):
                if isinstance(x, Meta) and x.key not in real:
                    real[x.key] = torch.as_strided(y, (y.untyped_storage().nbytes() // y.element_size(),), (1,), 0)
            for key in [k for k in real if last[k] == i]:
                flat = real.pop(key)
                for name, tensor in waiting.pop(key, ()):
                    whole = (
                        parts[key].whole(flat, tensor)
                        if key in parts
                        else torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())
                    )
                    _put(keep, name, tensor, whole.to(device))


def _unfilled(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A flat tensor for the storage of a meta tensor. Its memory is not touched, so that it takes none on the host."""
    return torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device=device)


def _needed(tape: _Tape, waiting: Collection[int]) -> Sequence[int]:
    """The calls to be replayed for the values of some storages: those that touch the storages, directly or through
    others. Where one of them draws random numbers, all calls before it are replayed too."""
    wanted, found, latest = set(waiting), [], -1
    for i in reversed(range(len(tape.calls))):
        function, *rest = tape.calls[i]
        keys = {x.key for x in metas(rest)}
        if not wanted.isdisjoint(keys):
            wanted |= keys
            found.append(i)
            if latest < 0 and draws(function):
                latest = i
    return [*range(latest + 1), *(i for i in reversed(found) if i > latest)]


def _put(
    keep: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor | None],
    name: str,
    tensor: torch.Tensor,
    whole: torch.Tensor,
) -> None:
    made = keep(name, tensor, whole)
    try:
        if made is not None:
            put_in_place(tensor, made)
    except RuntimeError as error:
        raise SettingError(
            f"{name!r} cannot come into being later: {error}",
            legal="a module that is built outside of `no_init_parameters`",
        ) from None


def put_in_place(old: torch.Tensor, new: torch.Tensor) -> None:
    """Put `new` in the place of `old`; the tensor object stays the same."""
    if new is old:
        return
    wrapped = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    # Keep the attributes that users have set.
    vars(wrapped).update((k, v) for k, v in vars(old).items() if k not in (_TAPE, _VERSION, _FILLED))
    try:
        torch.utils.swap_tensors(old, wrapped)
    except RuntimeError:
        if old.is_meta:
            raise
        old.data = new.detach()  # something holds a weak reference to the tensor, which has values already
        return
    move_gradient_hooks(old, old)  # autograd keeps hooks by the memory, the tensor by the object


def _optimizers() -> list[torch.optim.Optimizer]:
    """All live optimizers, found by their types: an object refers to its type. (This takes half the time of listing all
    objects.)"""
    kinds: set[type] = set()
    found: list[type] = [torch.optim.Optimizer]
    while found:
        kinds.update(found)
        below: list[type] = []
        for kind in found:
            below += type.__subclasses__(kind)
        found = [kind for kind in below if kind not in kinds]
    return [x for x in gc.get_referrers(*kinds) if type(x) in kinds]


def optimizer_finder(modules: Iterable[nn.Module]) -> Callable[[], OptimizerState | None]:
    """A function that looks for the optimizers of the parameters of modules, at each of its calls.

    Args:
        modules: a model and its loss, which the function does not keep alive.
    """
    references = [weakref.ref(module) for module in modules]

    def find() -> OptimizerState | None:
        alive = [module for ref in references if (module := ref()) is not None]
        return optimizer_state(_optimizers(), [p for m in alive for p in m.parameters() if p.requires_grad])

    return find


def substitute(
    module: nn.Module,
    successors: Mapping[torch.Tensor, nn.Parameter],
    cut: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None] | None = None,
) -> None:
    """Replace parameter objects of a model, in its modules and in every optimizer that holds them.

    Args:
        module: the model.
        successors: old parameter -> the new one. (A tensor cannot become a DTensor in place with
            `put_in_place`; therefore the optimizers that were built before are looked up, once.)
        cut: ``(old parameter, a tensor of its shape) -> this rank's slice of the tensor``, None where it has another
            shape. It is applied to state that an optimizer already has for the parameter: Adagrad has state when it
            is built, others after ``load_state_dict``. None: state is kept whole.

    Raises:
        SettingError: an optimizer's state for a parameter has another shape than the parameter.
    """
    for sub in module.modules():
        for name, parameter in parameter_table(sub).items():
            if parameter is not None and parameter in successors:
                parameter_table(sub)[name] = successors[parameter]
    places = {old: place for place, old in enumerate(successors)}

    def first(optimizer: torch.optim.Optimizer) -> int:
        """A number by which all ranks order their optimizers alike: `cut` may gather."""
        return min((places.get(p, len(places)) for g in optimizer.param_groups for p in g["params"]), default=0)

    for optimizer in sorted(_optimizers(), key=first):
        for group in optimizer.param_groups:
            for old in [p for p in group["params"] if p in successors]:
                if old in optimizer.state:
                    new, state = successors[old], optimizer.state[old]
                    optimizer.state[new] = state if cut is None else _cut_state(optimizer, group, old, new, cut)
                    del optimizer.state[old]
            group["params"] = [successors.get(p, p) for p in group["params"]]


def _cut_state(
    optimizer: torch.optim.Optimizer,
    group: dict[str, object],
    old: torch.Tensor,
    new: nn.Parameter,
    cut: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None],
) -> dict[str, object]:
    """An optimizer's state for a parameter, cut as the parameter is."""
    state = optimizer.state[old]
    if _is_unmade(state):
        return _made_anew(optimizer, group, new)
    out = dict(state)
    for key, x in state.items():
        if isinstance(x, torch.Tensor) and x.dim():
            part = cut(old, x)
            if part is None:
                raise SettingError(
                    f"{type(optimizer).__name__} has noted {key!r} of shape {tuple(x.shape)} for a "
                    f"parameter of shape {tuple(old.shape)}, which is cut now",
                    legal="an optimizer that is built, or loaded, after the first call",
                )
            out[key] = part
    return out


def _is_unmade(state: dict[str, object]) -> bool:
    """True where the state was made while the parameter had no values yet."""
    return any(isinstance(x, torch.Tensor) and x.is_meta for x in state.values())


def _made_anew(
    optimizer: torch.optim.Optimizer, group: dict[str, object], parameter: torch.Tensor
) -> dict[str, object]:
    """The state that a newly built optimizer has for a parameter."""
    settings: dict[str, Any] = {name: group[name] for name in optimizer.defaults}
    return type(optimizer)([parameter], **settings).state[parameter]
