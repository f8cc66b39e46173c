"""Saved tensors that do not stay in memory until the backward: recomputed regions, and regathered weights.

1. Recomputation (`LoweredRegions`, `RegionRun`, `Saver`, `Dropped`). Autograd saves tensors through hooks around the
   nodes that save a dropped value. A tensor that lies in the memory of a dropped value is saved as a `Dropped`
   instead; the inputs of the region are kept. The first `Dropped` that a backward asks for runs the region's nodes
   once more, as in the forward, and fills all other `Dropped` of the region; each is freed when its own backward is
   done. Both runtimes use this: a value is one tensor, or a list of the ranks' shards.

2. Gathered weights (`RegatheredWeights`). Operators also save views of a weight;
   `torch.autograd.graph.saved_tensors_hooks` sees them all, and the memory that a tensor lies in tells whether it
   belongs to a gathered weight.

    forward     a weight is gathered, used, freed; where an operator saves a tensor in its memory, only the place
                is saved
    backward    the first consumer of such a tensor regathers the weight; the other consumers share it; after the
                last one it is freed

These are two mechanisms, because their hooks span different code: those of 1 a single node, whose results have known
memory only after it has run; those of 2 the whole call, in which any operator may save a view of a weight. Their
tensors live differently too: each recomputed tensor is freed with its own backward, while all consumers of a weight
share one memory, which is freed after the last consumer and regathered for a further backward.

Private name of torch used here: ``_top_saved_tensors_default_hooks``, the hooks around a node (a user's, or those of
`RegatheredWeights`), which receive the tensors that are not dropped.

Example: h = x @ w, f32[32, 8], and y = gelu(h) in a recomputed region. In place of the 1,024 bytes of h the graph holds
a `Dropped`. The backward of gelu asks for it, and the product runs once more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ..errors import SettingError
from ..identity_tables import IdentityMap
from ..partition.rematerialization import Region
from ..sharded_plan import Plan
from ..torch_private import storage_id, top_saved_tensors_hooks, version_of
from .lowering import Lowered, Node, number_of_result
from .profile_ranges import RECOMPUTED, REGATHERED, gather_text, named_when_profiled, profiling, range_of

__all__ = ["LoweredRegions", "RegatheredWeights", "RegionRun", "Saver", "check_checkpointed", "hooks_aside", "keep"]

#: A function that computes a node of the program from the values of other nodes, by key.
Step = Callable[[Any], Any]


#: The key of a value: the number of its slot in the local runtime, the name of its node on a rank.
Key = TypeVar("Key", bound=Hashable)


#: Values of a region that ran again, by key; and the tensors that nodes saved.
Values = Mapping[Hashable, Any]
Take = Callable[[Values, Values], Any]


class Dropped:
    """A saved tensor that was dropped or is about to be; filled when its region has run again."""

    __slots__ = ("tensor", "run", "take", "__weakref__")

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        self.run: RegionRun | None = None
        self.take: Take | None = None

    def drop(self, run: RegionRun, take: Take) -> Dropped:
        """Free the tensor; `take` will find it in a region that ran again, among the values and the tensors that nodes
        saved."""
        self.tensor, self.run, self.take = None, run, take
        run.waiting.add(self)
        return self

    def pass_on(self, pack: Callable[[Tensor], object], unpack: Callable[[object], Tensor]) -> Dropped:
        """Save the tensor through the surrounding hooks, without dropping it."""
        assert self.tensor is not None
        packed, self.tensor = pack(self.tensor), None
        self.take = lambda *_: unpack(packed)
        return self

    def get(self) -> Any:
        """The tensor, or the value that another region lends as an input."""
        if self.run is None:
            return self.tensor if self.take is None else self.take({}, {})
        if self.tensor is None:
            self.run.fill()
        return self.tensor


@dataclass(frozen=True)
class _Recompute:
    """The recomputation of a region: its nodes in order, and the nodes whose own saved tensors are collected.

    Attributes:
        frees: for each step, the keys of the values that no later step and no `Dropped` needs.
        named: the steps as ranges of a profile.
    """

    steps: tuple[tuple[Hashable, Step], ...]
    internal: frozenset[Hashable]
    frees: tuple[tuple[Hashable, ...], ...]
    named: Callable[[], tuple[tuple[Hashable, Step], ...]]

    def __call__(self, env: dict[Hashable, object]) -> tuple[dict[Hashable, object], dict[Hashable, list[Tensor]]]:
        internal: dict[Hashable, list[Tensor]] = {}
        with torch.enable_grad():  # some operators compute differently without it
            for (key, step), frees in zip(self.named() if profiling() else self.steps, self.frees, strict=True):
                if key in self.internal:
                    packed: list[Tensor] = []
                    # Detached: an output's graph would hold the output.
                    with saved_tensors_hooks(partial(_collect, packed), lambda x: x):
                        made = step(env)
                    internal[key] = packed
                else:
                    made = step(env)
                env[key] = _leaves(made, {})
                del made  # its graph has saved tensors
                for unused in frees:
                    env.pop(unused, None)
        return env, internal


def _collect(packed: list[Tensor], x: Tensor) -> None:
    packed.append(x.detach())


class RegionRun:
    """One region in one call of the program.

    Attributes:
        inputs: the inputs of the region, by key: values, or a `Dropped` of another region.
        waiting: all `Dropped` of the region that some backward still holds.
    """

    def __init__(self, recompute: _Recompute) -> None:
        self.recompute = recompute
        self.waiting: weakref.WeakSet[Dropped] = weakref.WeakSet()
        self.inputs: dict[Hashable, object] = {}
        self.versions: dict[Hashable, list[int]] = {}

    def keep(self, key: Hashable, value: object, copy: bool = False) -> None:
        """Keep an input value; `copy`: it will be changed in place after the forward, so a clone is kept."""
        value = _leaves(value, {})
        self.inputs[key] = _mapped(value, Tensor.clone) if copy else value
        self.versions[key] = [version_of(x) for x in _tensors(self.inputs[key])]

    def fill(self) -> None:
        """Recompute the region and fill all `Dropped` that wait for it.

        Raises:
            RuntimeError: an input has been changed in place since the forward.
        """
        env = {}
        for key, value in self.inputs.items():
            env[key] = value.get() if isinstance(value, Dropped) else value
            if key in self.versions and [version_of(x) for x in _tensors(value)] != self.versions[key]:
                raise RuntimeError(
                    f"{key}, of which a part of the model is to be recomputed, has been changed in place "
                    "after the forward"
                )
        values, internal = self.recompute(env)
        with torch.no_grad():
            for dropped in list(self.waiting):
                if dropped.tensor is None:
                    assert dropped.take is not None
                    dropped.tensor = dropped.take(values, internal)


@dataclass(frozen=True)
class Saver(Generic[Key]):
    """A node that saves dropped values.

    Attributes:
        inputs: (region, key) of each dropped value that the node reads.
        outputs: (region, key, number of the result; None where the node has one result) of each dropped value that it
            produces.
        internal: (region, key of the node) where the tensors that only the node itself saves are dropped; else None.
    """

    inputs: tuple[tuple[int, Key], ...]
    outputs: tuple[tuple[int, Key, int | None], ...]
    internal: tuple[int, Key] | None

    def __call__(self, runs: Sequence[RegionRun], values: Sequence[object], call: Callable[[], object]) -> object:
        """The result of ``call()``; tensors that autograd saves meanwhile are dropped as planned. `values` are those of
        `inputs`."""
        known = _by_memory(zip(self.inputs, values))
        pending: list[tuple[int, Dropped]] = []
        count = 0

        def pack(x: Tensor) -> object:
            nonlocal count
            count += 1
            found, dropped = known.get(storage_id(x.untyped_storage())), Dropped(x.detach())
            if found is None:
                pending.append((count - 1, dropped))
            elif not _drop(dropped, runs, *found) and outer is not None:
                dropped.pass_on(*outer)
            return dropped

        outer = top_saved_tensors_hooks(True)
        with saved_tensors_hooks(pack, _unpack):
            made = call()
        known.clear()  # the graph holds `pack`, and `pack` holds this
        if pending:
            results = _by_memory([(entry[:2], _item(made, entry[2])) for entry in self.outputs])
            for index, dropped in pending:
                assert dropped.tensor is not None
                found = results.get(storage_id(dropped.tensor.untyped_storage()))
                if found is not None and _drop(dropped, runs, *found):
                    continue
                if found is None and self.internal is not None:
                    region, key = self.internal
                    dropped.drop(runs[region], partial(_internal, key, index))
                elif outer is not None:
                    dropped.pass_on(*outer)
        return made


def _internal(key: Hashable, index: int, _: Values, internal: Mapping[Hashable, Sequence[Tensor]]) -> Tensor:
    """One of the tensors that a node alone has saved, in a region that ran again."""
    return internal[key][index]


def _lent(key: Hashable, values: Values, _: Values) -> object:
    """A value of a region that ran again."""
    return values[key]


def _unpack(packed: Any) -> Tensor:
    return packed.get() if isinstance(packed, Dropped) else packed


def _item(made: Any, which: int | None) -> object:
    """The result number `which`, of one tuple or of each rank's tuple."""
    if which is None:
        return made
    return [m[which] for m in made] if isinstance(made, list) and isinstance(made[0], (list, tuple)) else made[which]


def _by_memory(values: Any) -> dict[int, tuple[int, Hashable, int | None, Tensor]]:
    """Memory of a tensor -> (region, key, rank, tensor) of the first value in that memory."""
    out: dict[int, tuple[int, Hashable, int | None, Tensor]] = {}
    for (region, key), value in values:
        for rank, x in enumerate(value) if isinstance(value, (list, tuple)) else ((None, value),):
            out.setdefault(storage_id(x.untyped_storage()), (region, key, rank, x))
    return out


def _drop(
    dropped: Dropped, runs: Sequence[RegionRun], region: int, key: Hashable, rank: int | None, base: Tensor
) -> bool:
    """Drop a tensor that lies in the memory of `base`. False where it is not a plain view of `base`, and stays."""
    x = dropped.tensor
    assert x is not None
    if x.dtype != base.dtype or x.is_conj() != base.is_conj() or x.is_neg() != base.is_neg():
        return False
    view = None
    if (x.shape, x.stride(), x.storage_offset()) != (base.shape, base.stride(), base.storage_offset()):
        view = x.shape, x.stride(), x.storage_offset() - base.storage_offset()

    def take(values: Values, _: Values) -> Tensor:
        recomputed = (values[key] if rank is None else values[key][rank]).detach()
        return (
            recomputed
            if view is None
            else recomputed.as_strided(view[0], view[1], recomputed.storage_offset() + view[2])
        )

    dropped.drop(runs[region], take)
    return True


def _mapped(value: object, change: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_mapped(v, change) for v in value) if isinstance(value, (list, tuple)) else value


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for v in value for x in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _leaves(value: object, memo: dict[Tensor, Tensor]) -> object:
    """The same tensors detached from their graph; an object that occurs twice stays one object."""

    def leaf(x: Tensor) -> Tensor:
        if x not in memo:
            memo[x] = x.detach().requires_grad_(x.requires_grad)
        return memo[x]

    return _mapped(value, leaf)


class LoweredRegions(Generic[Key]):
    """The regions of a lowered program, by its nodes.

    Args:
        lowered: the program.
        key: node -> the key of its value in the `env` of a step.

    Attributes:
        savers: node -> its `Saver`.
        reads: node -> (region, key, node, copy) of each value that regions keep before the node runs.
    """

    def __init__(self, lowered: Lowered, key: Callable[[Node], Key]) -> None:
        plan = lowered.plan
        self.regions, instructions, self.key, self._lowered = plan.regions, plan.program.instructions, key, lowered
        self.savers: dict[Node, Saver[Key]] = {}
        self.reads: dict[Node, list[tuple[int, Key, Node, bool]]] = {}
        if not self.regions:
            return
        number = IdentityMap((i, k) for k, i in enumerate(instructions))
        self.values: dict[str, Node] = {}  # name of an instance -> its node
        self.nodes: dict[int, list[Node]] = {}  # instruction -> its nodes
        for node in lowered.nodes:
            if node.op == "output":
                continue
            if "instance" in node.meta:
                self.values[node.meta["instance"].name] = node
            base = node if "instruction" in node.meta or node.op == "placeholder" else node.args[0]
            if base.op != "placeholder":
                self.nodes.setdefault(number[base.meta["instruction"]], []).append(node)
        self.owner = {name: k for k, region in enumerate(self.regions) for name in region.dropped}
        for k, region in enumerate(self.regions):
            for i in region.savers:
                self.savers.setdefault(self.nodes[i][0], self._saver(i))
            self._keep(k, region, plan)

    def _saver(self, i: int) -> Saver[Key]:
        node, *items = self.nodes[i]
        reads = dict.fromkeys(a.meta["instance"].name for a in node.all_input_nodes)
        makes = [
            (n.meta["instance"].name, n, None if n is node else number_of_result(n))
            for n in (node, *items)
            if "instance" in n.meta
        ]
        return Saver(
            tuple((self.owner[n], self.key(self.values[n])) for n in reads if n in self.owner),
            tuple((self.owner[n], self.key(made), which) for n, made, which in makes if n in self.owner),
            next(((k, self.key(node)) for k, region in enumerate(self.regions) if i in region.internal), None),
        )

    def _keep(self, k: int, region: Region, plan: Plan) -> None:
        changed = {plan.program.buffers[name].name for name in plan.program.updates}
        wanted = set(region.inputs)
        for i in region.recompute_set:
            first = self.nodes[i][0]
            for value in first.all_input_nodes:
                name = value.meta["instance"].name
                if name in wanted:
                    wanted.discard(name)
                    self.reads.setdefault(first, []).append((k, self.key(value), value, name in changed))
        assert not wanted, wanted

    def watched(self, node: Node) -> list[Node]:
        """The nodes of a saver's dropped inputs, in its order."""
        reads = dict.fromkeys(a.meta["instance"].name for a in node.all_input_nodes)
        return [self.values[n] for n in reads if n in self.owner]

    def another(self, k: int, name: str) -> int | None:
        """The region that drops an input of region `k`; None where no other region does."""
        return self.owner.get(name) if name not in self.regions[k].dropped else None

    def _named(
        self, nodes: Sequence[Node], steps: Sequence[tuple[Hashable, Step]]
    ) -> tuple[tuple[Hashable, Step], ...]:
        texts = [self._lowered.names.of_instruction(node.meta.get("instruction")) for node in nodes]
        return tuple(
            (key, step if text is None else named_when_profiled(step, text + RECOMPUTED))
            for text, (key, step) in zip(texts, steps)
        )

    def _frees(self, region: Region, nodes: Sequence[Node]) -> tuple[tuple[Key, ...], ...]:
        """For each node of a region's recomputation, the keys of the values that nothing needs after it."""
        dropped = {self.key(self.values[name]) for name in region.dropped}
        last: dict[Key, int] = {}
        for place, node in enumerate(nodes):
            last.update((self.key(read), place) for read in (*node.all_input_nodes, node))
        out: list[list[Key]] = [[] for _ in nodes]
        for key, place in last.items():
            if key not in dropped:
                out[place].append(key)
        return tuple(map(tuple, out))

    def recomputation(self, step: Callable[[Node], Step]) -> Callable[[], list[RegionRun]]:
        """A function that begins a call and returns a `RegionRun` for each region.

        Args:
            step: node -> a function that computes it from the values by their keys.
        """
        made = []
        for region in self.regions:
            nodes = [n for i in region.recompute_set for n in self.nodes[i]]
            steps = tuple((self.key(n), step(n)) for n in nodes)
            internal = frozenset(self.key(self.nodes[i][0]) for i in region.internal)
            made.append(_Recompute(steps, internal, self._frees(region, nodes), partial(self._named, nodes, steps)))
        lent = [
            (k, self.key(self.values[n]), other)
            for k, region in enumerate(self.regions)
            for n in region.inputs
            for other in [self.another(k, n)]
            if other is not None
        ]

        def begin() -> list[RegionRun]:
            runs = [RegionRun(recomputed) for recomputed in made]
            for k, key, other in lent:
                runs[k].inputs[key] = Dropped(None).drop(runs[other], partial(_lent, key))
            return runs

        return begin


def keep(runs: list[RegionRun] | None, region: int, key: Hashable, value: object, copy: bool) -> None:
    """Keep a value for a region, unless another region lends it."""
    if runs is not None and key not in runs[region].inputs:
        runs[region].keep(key, value, copy)


# -- weights that are regathered in the backward


class _Weight:
    """One gathered weight of one forward, on the ranks of this process."""

    def __init__(self, name: str, stored: Sequence[Tensor], gather: Callable[[], Sequence[Tensor]]) -> None:
        self.name, self._gather = name, gather
        self._stored = [(x, version_of(x)) for x in stored]
        self._saved = self._due = 0
        self._gathered: Sequence[Tensor] | None = None

    def save(self) -> None:
        """Count one more saved tensor."""
        self._saved, self._due = self._saved + 1, self._due + 1

    def gathered(self, index: int) -> Tensor:
        """The gathered weight on the rank number `index`, for one of the saved tensors."""
        if any(version_of(x) != version for x, version in self._stored):
            raise SettingError(
                f"the parameter {self.name!r} has been changed between a forward and its backward, "
                "which gathers it again",
                legal='optimizer.step() after backward(), or optimizer_level="level2"',
            )
        if self._gathered is None:
            with torch.no_grad(), range_of(gather_text(self.name) + REGATHERED):
                self._gathered = self._gather()
        gathered, self._due = self._gathered[index], self._due - 1
        if not self._due:  # all are served; a second backward through the same graph gathers again
            self._gathered, self._due = None, self._saved
        return gathered


class RegatheredWeights:
    """The gathered weights of the current forward. While it is active, operators do not save them."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[StorageWeakRef, _Weight, int]] = {}
        self._hooks: Any = None

    def __enter__(self) -> RegatheredWeights:
        self._places = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack_weight)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._places = {}

    def note(
        self, name: str, stored: Sequence[Tensor], gathered: Sequence[Tensor], gather: Callable[[], Sequence[Tensor]]
    ) -> None:
        """Note that a weight has been gathered.

        Args:
            name: of the parameter, for the error.
            stored: the tensors that it is gathered from; none of them may be changed before the backward.
            gathered: one tensor a rank of this process.
            gather: gathers again, in the same way.
        """
        weight = _Weight(name, stored, gather)
        for index, tensor in enumerate(gathered):
            # Hardly documented, though torch's own multiprocessing uses it: while it is held, no other memory gets
            # its number.
            memory = StorageWeakRef(tensor.untyped_storage())
            self._places.setdefault(memory.cdata, (memory, weight, index))

    def _pack(self, x: Tensor) -> object:
        _, weight, index = self._places.get(storage_id(x.untyped_storage()), (None, None, 0))
        if weight is None:
            return x.detach()  # detached: the graph of an output would hold the output in a cycle
        weight.save()
        return weight, index, x.dtype, x.storage_offset(), x.shape, x.stride()


def _unpack_weight(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    weight, index, dtype, offset, shape, stride = packed
    gathered = weight.gathered(index)
    return torch.empty(0, dtype=dtype, device=gathered.device).set_(gathered.untyped_storage(), offset, shape, stride)


@contextlib.contextmanager
def hooks_aside() -> Iterator[None]:
    """Keep tensors that are saved inside the ``with`` block from the hooks around it: a capture inside of
    ``torch.utils.checkpoint`` saves some, and a checkpoint counts those that its second run has to save again."""
    with saved_tensors_hooks(lambda x: x, lambda x: x) if top_saved_tensors_hooks(True) else contextlib.nullcontext():
        yield


def check_checkpointed(changes: str) -> None:
    """Check that a program may run inside of ``torch.utils.checkpoint``, if it does. Without ``use_reentrant`` the
    second run ends as soon as all saved tensors are there, before the program has ended.

    Args:
        changes: the program's changes besides its result; "": none.

    Raises:
        SettingError: a program with such changes.
    """
    hooks = top_saved_tensors_hooks(True)
    if hooks and changes and getattr(hooks[0], "__module__", "") == checkpoint.__module__:
        raise SettingError(
            f"torch.utils.checkpoint around a parallel model that {changes}: the second run would leave that out, "
            "where one device does it twice",
            legal="sw.recompute(net), which runs operators again and nothing else; checkpoint(…, use_reentrant=True)",
        )
