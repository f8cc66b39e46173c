"""Conditions of a captured program: what its forward has asked of a call, besides the attributes that guards compare.

    torch.is_grad_enabled(), h.requires_grad   a program of calls with gradients, another one of calls without
    float(self.scale), self.table.tolist()     a program for these values of the tensor, which no operator reads
    x.stride(), x.is_contiguous()              a program for contiguous inputs: others are refused (`check_layouts`)

While a forward is captured, the functions and methods that ask are replaced by ones that note the question and ask it.
A guard repeats each question before a call (`Condition`). A forward that asks nothing costs nothing.

Small tensors are compared by their values, larger ones by the number of their changes in place. A number that was
computed from tensors before Python took it (``float(self.scale * 2)``) has no name: all plain tensors that the forward
has read are compared then. So is a tensor that the forward has read and no operator of the program reads: torch takes
its number (``x.roll(self.shift)``) where no method of the tensor is called.

Example: a forward with ``if torch.is_grad_enabled():`` is called once as it is and once under `torch.no_grad`. Each of
the 2 programs has the condition "torch.is_grad_enabled()", with the value True in one and False in the other.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..errors import SettingError
from ..graph import Graph, values_in
from ..identity_tables import IdentityMap, IdentitySet
from ..torch_private import FakeTensor, buffer_table, parameter_table, version_of
from .guards import CONTAINERS, Condition, GuardedPlace
from .outlines import Differs, Outline, memory_of
from .source_lines import calling_line, is_users
from .watched_calls import Files, in_all_files

__all__ = ["Conditions", "StridesAsked", "check_layouts", "path_of", "watched_conditions"]

#: The most elements of a tensor whose values are compared; more are compared by the number of changes in place.
FEW = 64

_LAYERS = torch.nn.__file__.rsplit("/", 1)[0] + "/"

#: Functions of torch that tell the mode of a call.
_GRADIENTS, _INFERENCE = "is_grad_enabled", "is_inference_mode_enabled"
_MODES: dict[str, Callable[[], bool]] = {name: getattr(torch, name) for name in (_GRADIENTS, _INFERENCE)}
#: Attributes of a tensor that depend on whether gradients are enabled.
_GRADIENT_ATTRIBUTES = ("requires_grad", "grad_fn", "is_leaf")
#: Methods of a tensor, and functions of torch, that give Python its values.
_VALUE_METHODS = (
    "item",
    "tolist",
    "numpy",
    "equal",
    "allclose",
    "is_nonzero",
    "__array__",
    "__bool__",
    "__complex__",
    "__float__",
    "__index__",
    "__int__",
)
_VALUE_FUNCTIONS = ("equal", "allclose", "is_nonzero")
_LAYOUT_METHODS = ("stride", "is_contiguous", "storage_offset", "dim_order")


class StridesAsked(NamedTuple):
    """A question of a forward for the strides of a tensor.

    Args:
        line: the user's line; "": there is no such question.
        of_input: True where the tensor is an input or a view of one. Strides of a result follow those of inputs in
            floating point: an embedding of indices has strides of its own.
    """

    line: str = ""
    of_input: bool = False


class Conditions:
    """The questions of one forward.

    Attributes:
        strides: the question for strides.
    """

    def __init__(self) -> None:
        self.strides = StridesAsked()
        self._modes: dict[str, None] = {}  # names of functions in `_MODES`
        self._tensors: IdentitySet[torch.Tensor] = IdentitySet()  # tensors with values that Python took
        self._computed = False  # True where Python took a number that was computed from tensors
        self._inputs: frozenset[object] = frozenset()  # memories of the inputs
        self._leaves: IdentitySet[torch.Tensor] = IdentitySet()  # the inputs

    def begin(self, inputs: Iterable[object]) -> None:
        """Note the inputs of the forward, which begins."""
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        self._inputs, self._leaves = frozenset(map(memory_of, tensors)), IdentitySet(tensors)

    def note_mode(self, name: str) -> None:
        self._modes[name] = None

    def note_gradient(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, nn.Parameter) and tensor not in self._leaves:
            self.note_mode(_GRADIENTS)

    def note_values(self, values: Iterable[object]) -> None:
        for x in values:
            if isinstance(x, torch.Tensor):
                if isinstance(x, (FakeTensor, Outline)) or type(x).__module__.startswith("torch._"):
                    self._computed = True
                else:
                    self._tensors.add(x)

    def note_layout(self, tensor: torch.Tensor) -> None:
        of_input = memory_of(tensor) in self._inputs
        if not isinstance(tensor, nn.Parameter) and (not self.strides.line or of_input > self.strides.of_input):
            self.strides = StridesAsked(calling_line() or "the forward", of_input)

    def asked(self, reads: Iterable[GuardedPlace], graph: Graph, modules: Iterable[nn.Module]) -> list[Condition]:
        """The questions, with the present answers.

        Args:
            reads: the places that the forward has read.
            graph: the captured program.
            modules: those of the model, whose parameters and buffers are no plain tensors.
        """
        made = [Condition(f"torch.{name}()", _MODES[name], _MODES[name](), quiet=True) for name in self._modes]
        named: IdentityMap[torch.Tensor, str] = IdentityMap()  # tensors that were read, with their paths
        for place in reads:
            value = place.get()
            if isinstance(value, (torch.Tensor, tuple, *CONTAINERS)):
                for path, tensor in _tensors_in(value, place.path, IdentitySet()):
                    named.setdefault(tensor, path)
        if not named and not self._tensors:
            return made
        for module in modules:
            for registered in (*parameter_table(module).values(), *buffer_table(module).values()):
                if registered is not None:
                    named.pop(registered, None)
        compared = IdentityMap((x, f"a tensor of shape {list(x.shape)}") for x in self._tensors)
        beside: list[torch.Tensor] = []
        live = _live(graph)
        for tensor, path in named.items():
            absent = memory_of(tensor) not in live
            if tensor in compared or self._computed or (absent and tensor.numel() == 1):
                compared[tensor] = path
            elif absent and not tensor.is_inference():
                beside.append(tensor)
        made += [Condition(path, functools.partial(_values, x), _values(x)) for x, path in compared.items()]
        if beside:
            name = f"the number of changes in place of {named[beside[0]]}"
            ask = functools.partial(_versions, beside)
            made.append(Condition(name, ask, ask()))
        return made


def _live(graph: Graph) -> set[object]:
    """The memories of the constants that operators or results of a program read."""
    names = {v.name for op in graph.ops for v in op.inputs} | {v.name for v in values_in(graph.outputs)}
    return {memory_of(tensor) for name, tensor in graph.constants.items() if name in names}


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(version_of, tensors))


def _tensors_in(value: object, path: str, seen: IdentitySet[object]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a place, and of the containers in it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, *CONTAINERS)) and value not in seen:
        seen.add(value)
        for key, entry in [*dict.items(value)] if isinstance(value, dict) else enumerate(list(value)):
            yield from _tensors_in(entry, f"{path}[{key!r}]", seen)


def path_of(places: Iterable[GuardedPlace], tensor: object) -> str | None:
    """The user's name of a tensor that the forward has read: that of its attribute, list or variable."""
    if not isinstance(tensor, torch.Tensor):
        return None
    memory = memory_of(tensor)
    found = (named for place in places for named in _tensors_in(place.get(), place.path, IdentitySet()))
    return next((path for path, candidate in found if memory_of(candidate) == memory), None)


def _values(tensor: torch.Tensor) -> str:
    """A text that is another one where the values of a tensor may be others."""
    few = tensor.numel() <= FEW and tensor.device.type == "cpu" and tensor.layout is torch.strided
    if few or tensor.is_inference():  # torch does not count the changes of inference tensors
        return repr(tensor.tolist())
    return f"values after {version_of(tensor)} changes in place"


# -- questions of a forward --------------------------------------------------------------------------------------------


class _Relevant(dict[str, bool]):
    """File -> True where its questions count: the user's files, and torch's own layers."""

    def __missing__(self, file: str) -> bool:
        found = self[file] = is_users(file) or file.startswith(_LAYERS)
        return found


@contextlib.contextmanager
def watched_conditions(found: Conditions, running: Callable[[], bool], seen: Files) -> Iterator[None]:
    """Note the questions of a forward in `found`.

    Args:
        found: receives the questions.
        running: returns True while the forward runs.
        seen: the user's files, which may have torch's functions by names of their own.
    """
    relevant = _Relevant()

    def of_mode(name: str) -> Callable[[], bool]:
        plain = _MODES[name]

        def ask() -> bool:
            if relevant[sys._getframe(1).f_code.co_filename] and running():
                found.note_mode(name)
            return plain()

        return ask

    def of_gradient(name: str) -> property:
        plain: types.GetSetDescriptorType | property = getattr(torch.Tensor, name)

        def get(tensor: torch.Tensor) -> object:
            if relevant[sys._getframe(1).f_code.co_filename] and running():
                found.note_gradient(tensor)
                if name != "requires_grad" and isinstance(tensor, Outline):  # of every outline as of a leaf
                    raise Differs(f"the forward asks for {name}")
            return plain.__get__(tensor)

        return property(get, plain.__set__ if name == "requires_grad" else None)

    def of_values(plain: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(plain)
        def call(*args: object, **kwargs: object) -> object:
            if running():
                found.note_values((*args, *kwargs.values()))
            return plain(*args, **kwargs)

        return call

    def of_inference(plain: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(plain)
        def call(tensor: torch.Tensor) -> object:
            if relevant[sys._getframe(1).f_code.co_filename] and running():
                found.note_mode(_INFERENCE)
            return plain(tensor)

        return call

    def of_layout(plain: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(plain)
        def call(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            if relevant[sys._getframe(1).f_code.co_filename] and running():
                found.note_layout(tensor)
            return plain(tensor, *args, **kwargs)

        return call

    functions: dict[str, object] = {name: of_mode(name) for name in _MODES}
    functions |= {name: of_values(getattr(torch, name)) for name in _VALUE_FUNCTIONS}
    with contextlib.ExitStack() as stack:
        in_all_files(seen, [(getattr(torch, name), ours) for name, ours in functions.items()])
        for owner, name, ours in (
            *((torch, name, ours) for name, ours in functions.items()),
            *((torch.Tensor, name, of_gradient(name)) for name in _GRADIENT_ATTRIBUTES),
            *((torch.Tensor, name, of_values(getattr(torch.Tensor, name))) for name in _VALUE_METHODS),
            (torch.Tensor, "is_inference", of_inference(torch.Tensor.is_inference)),
            *((torch.Tensor, name, of_layout(getattr(torch.Tensor, name))) for name in _LAYOUT_METHODS),
        ):
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, ours)
        yield


# -- inputs of a call --------------------------------------------------------------------------------------------------


def check_layouts(leaves: Sequence[object], strides: StridesAsked, changed: Sequence[int]) -> None:
    """Check that a program stands for the strides of its inputs, and for inputs that share memory.

    Args:
        leaves: the inputs of the call.
        strides: the forward's question for strides.
        changed: the numbers of the tensors that the forward changes in place.

    Raises:
        SettingError: an input that is not contiguous, where the forward asks; an input that shares elements with one
            that the forward changes.
    """
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    for i, x in enumerate(tensors if strides.line else ()):
        matters = strides.of_input or x.is_floating_point() or x.is_complex()
        if matters and x.layout is torch.strided and not x.is_contiguous():
            raise SettingError(
                "the forward asks for the strides of a tensor, and the program is that of contiguous inputs: "
                f"input {i} of shape {list(x.shape)} has strides {list(x.stride())}",
                source=strides.line,
                legal="x.contiguous() before the call; or a forward that does not ask",
            )
    for i in changed:
        for j, x in enumerate(tensors):
            if j != i and _share(tensors[i], x):
                raise SettingError(
                    f"the forward changes input {i} in place, and input {j} shares memory with it: the change would "
                    "not be seen there",
                    legal="a clone() of one of the two, before the call",
                )


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where two tensors have an element in common."""
    if a.layout is not torch.strided or b.layout is not torch.strided or not a.numel() or not b.numel():
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (first, past), (begin, end) = _extent(a), _extent(b)
    if past <= begin or end <= first:
        return False
    if a.element_size() != b.element_size():
        return True
    memory = torch.zeros(max(past, end) // a.element_size(), dtype=torch.bool)
    memory.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(memory.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one past its last."""
    first = int(x.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return first * x.element_size(), (last + 1) * x.element_size()
