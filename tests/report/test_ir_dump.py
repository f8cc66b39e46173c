"""The dumps and the table of a plan, as a person reads them."""

import inspect
import io
import re

import operator_functional
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import shardwright as sw
from shardwright.report.ir_dump import begin_text, execute_text, write_dumps
from shardwright.report.tables import explain

ALL = "(0, 1, 2, 3, 4, 5, 6, 7)"


def line_of(text: str) -> str:
    """``operator_functional.py:35`` of the line of the tutorial's network that holds `text`."""
    lines, first = inspect.getsourcelines(operator_functional.Network)
    return f"operator_functional.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def planned(net: nn.Module, shape=(16, 16), devices=8, **settings) -> sw.Plan:
    return sw.plan(net, (torch.empty(shape, device="meta"),), devices=devices, **settings)


@pytest.fixture(scope="module")
def tutorial() -> sw.Plan:
    image, label = torch.empty(32, 1, 28, 28, device="meta"), torch.empty(32, dtype=torch.int64, device="meta")
    return sw.plan(operator_functional.Network(), (image,), nn.CrossEntropyLoss(), label, devices=8)


class Mixed(nn.Module):
    """Several outputs of an operator, a residual, a softmax and a maximum over a cut dim, a result with an open sum."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.soft = sw.shard(torch.softmax, ((2, 4),))
        self.largest = sw.shard(torch.amax, ((2, 4),))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x)) + x
        left, right = torch.chunk(x, 2, -1)
        x = torch.cat([right, left], -1)
        return self.soft(x, -1).mean(0), self.largest(x, -1)


def collectives(text: str) -> list[tuple[str, tuple[int, ...], int]]:
    found = re.findall(r"^%\d+ = (\w+)\(\S+\)  \{ranks: \(([\d, ]+)\), bytes: (\d+)", text, re.M)
    return [(op, tuple(map(int, ranks.split(","))), int(count)) for op, ranks, count in found]


def test_operators_are_dumped_with_strategy_shapes_and_line(tutorial):
    lines = begin_text(tutorial, 5).splitlines()
    call = line_of("self.matmul1(")
    assert (
        "%2 = matmul(%1, %w1)  {in_strategy: ((2, 4), (4, 1))}  f32[32, 784], f32[784, 512] -> f32[32, 512]"
        f"   # matmul1  {call}"
    ) in lines
    assert f"%3 = relu(%2)  {{in_strategy: ((4, 1),)}}  f32[32, 512] -> f32[32, 512]   # relu1  {call}" in lines
    assert (
        "%6 = matmul(%5, %w3)  {in_strategy: ((8, 1), (1, 1))}  f32[32, 512], f32[512, 10] -> f32[32, 10]"
        f"   # matmul_2  {line_of('return x @')}  (batch)"
    ) in lines
    assert "# parameter %w1  f32[784, 512]  layout [4@1, -]  stored [196:392, 0:512] = f32[196, 512]" in lines
    assert "# devices: 8, mode: semi_auto, rank: 5, plan: " + tutorial.fingerprint in lines


def test_program_of_a_rank(tutorial):
    text = execute_text(tutorial, 5)
    forward = text[text.index("# forward") :].splitlines()
    call = line_of("self.matmul1(")
    assert forward[2:6] == [
        "%2 = slice(%1)  {index: [16:32, 196:392]}  f32[32, 784] -> f32[16, 196]   # for matmul1",
        f"%3 = matmul(%2, %w1)  f32[16, 196], f32[196, 512] -> f32[16, 512]   # matmul1  {call}",
        "%4 = all_reduce(%3)  {ranks: (4, 5, 6, 7), bytes: 32768}  f32[16, 512] -> f32[16, 512]   # completes %3",
        "%5 = slice(%4)  {index: [0:8, 0:512]}  f32[16, 512] -> f32[8, 512]   # for relu1",
    ]
    assert (
        f"%10 = reduce_scatter(%9)  {{ranks: {ALL}, bytes: 65536, scatter_dim: 0}}  f32[32, 512] -> f32[4, 512]"
        "   # completes %9 for relu2"
    ) in forward


def test_backward_stands_in_the_order_in_which_it_runs(tutorial):
    text = execute_text(tutorial, 5)
    backward = text[text.index("# backward") :]
    causes = re.findall(r"= (all_\w+|reduce_scatter)\(.*   # (.*)", backward)
    assert re.fullmatch(r"gradient of %[34], transpose of (all_reduce, )?slice for relu1", causes.pop(4)[1])
    assert causes == [
        ("all_reduce", "gradient of w3 for matmul_2"),
        ("all_gather", "gradient of %9, transpose of reduce_scatter for relu2"),
        ("all_to_all", "gradient of %6, transpose of slice, all_to_all for matmul2"),
        ("all_gather", "gradient of %6, transpose of slice, all_to_all for matmul2"),
        ("all_reduce", "gradient of w1 for matmul1"),
    ]
    last = backward.splitlines()[-1]
    w1 = re.search(r"(%\d+) = all_reduce\(%\d+\)  \{ranks: \(1, 5\), bytes: 401408\}", backward)[1]
    assert last.startswith(f"gradients {{w1: {w1}, w2: ")


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_a_dump_has_the_collectives_of_the_plan(tutorial, rank):
    for plan in (tutorial, planned(Mixed())):
        expected = [(c.op, c.ranks, c.bytes) for c in plan.collectives(rank)]
        assert expected and collectives(execute_text(plan, rank)) == expected


def test_messages_under_way_are_dumped_where_they_are_issued_and_waited_for():
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    x = torch.empty(16, 16, device="meta")
    hsdp = {"threshold": 0, "optimizer_level": "level3"}
    plan = sw.plan(net, (x,), nn.MSELoss(), x, devices=8, parallel_mode="data_parallel", hsdp=hsdp)
    text = execute_text(plan, 5)
    forward, _, backward = text.partition("# backward")
    found = re.search(
        rf"\nissue (\d+): all_gather  \{{ranks: {re.escape(ALL)}, bytes: 128\}}   # weights of 1: weight\n", forward
    )
    assert found is not None
    at = lambda part, line: part.index(f"\n{line}")
    # The second layer's weight is issued before the first layer computes, and waited for in front of its gather's line.
    assert found.start() < forward.index("= linear(") < at(forward, f"wait {found[1]} ")
    assert re.search(rf"\nwait {found[1]}   # all_gather, weights of 1\n%\d+ = all_gather\(%1.weight\)", forward)
    # Scatters are waited for at the end, gathers of the backward one layer ahead.
    numbers = re.findall(r"\nissue (\d+): reduce_scatter", backward)
    assert len(numbers) == 3
    end = backward.index("\ngradients {")
    waits = [at(backward, f"wait {number}") for number in numbers]
    assert waits == sorted(waits) and "=" not in backward[waits[0] : end]
    assert re.search(r"\nissue \d+: all_gather .*   # weights of 1, again: weight\n", backward)
    for action, number, kind in re.findall(r"^(issue|wait) (\d+)(?::|   #) (\w+)", text, re.M):
        assert plan.schedule.messages[int(number)].kind == kind and action in ("issue", "wait")


def test_every_value_is_defined_before_it_is_used(tutorial):
    for plan in (tutorial, planned(Mixed()), planned(Mixed(), parallel_mode="data_parallel")):
        for text in (begin_text(plan, 3), execute_text(plan, 3)):
            known = set(re.findall(r"^# (?:input|parameter|buffer|constant) (%\S+)", text, re.M))
            for line in (line for line in text.splitlines() if not line.startswith("#")):
                code = line.split("   # ")[0]
                made, _, used = code.rpartition(" = ")
                assert set(re.findall(r"%[\w.]+", used)) <= known, line
                new = set(re.findall(r"%\w+", made))
                assert not known & new, line
                known |= new


def test_a_maximum_over_ranks_and_what_shares_its_gradient():
    text = execute_text(planned(Mixed()), 1)
    assert re.search(r"all_reduce\(%\d+\)  \{ranks: \(0, 1, 2, 3\), bytes: 32, reduction: max\}", text)
    assert re.search(r"all_reduce\(%\d+\)  \{ranks: \(0, 1, 2, 3\), bytes: 32\} .*: the ties of all ranks", text)
    assert re.search(r"= add\(%\d+, %\d+\) .* # gradient of %\d+ from 2 uses", text)


def test_layouts_and_out_strategies_are_shown():
    layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(16, 16))
            self.mm = sw.shard(
                torch.matmul,
                (layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")),
                (layout(("mp", "sp", "dp"), "None"),),
            )

        def forward(self, x):
            return self.mm(x, self.w)

    plan = planned(Net())
    assert (
        "{in_strategy: ((2, 4), (4, 1)), in_layout: ([2@1, 2@2·2@4], [2@2·2@4, -]), "
        "out_strategy: ((8, 1),), out_layout: ([2@1·2@2·2@4, -])}"
    ) in begin_text(plan, 0)
    assert "reduce_scatter(%2)  {ranks: (0, 2, 4, 6), bytes: 512, scatter_dim: 0}" in execute_text(plan, 0)


def test_parameters_named_by_numbers_keep_their_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("1", "2"):
                self.register_parameter(name, nn.Parameter(torch.ones(16, 16)))

        def forward(self, x):
            return x @ getattr(self, "1") @ getattr(self, "2")

    assert "%4 = matmul(%3, %2)" in begin_text(planned(Net()), 0)


def test_the_same_plan_gives_the_same_bytes(tmp_path):
    for folder in ("one", "two"):
        write_dumps(planned(Mixed()), tmp_path / folder, [0, 6])
    for name in ("rank_0/execute.ir", "rank_6/execute.ir", "rank_6/step_parallel_begin.ir"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_thousand_devices_and_only_the_ranks_asked_for(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(8192, 8192, device="meta"))
            self.mm = sw.shard(torch.matmul, ((64, 16), (16, 1)))

        def forward(self, x):
            return self.mm(x, self.w).relu()

    plan = planned(Net(), (8192, 8192), devices=1024)
    write_dumps(plan, tmp_path, [700])
    assert [p.name for p in tmp_path.iterdir()] == ["rank_700"]
    text = (tmp_path / "rank_700" / "execute.ir").read_text()
    assert "{index: [5504:5632, 6144:6656]}" in text
    assert f"(%2)  {{ranks: {tuple(range(688, 704))}, bytes: 4194304" in text
    with pytest.raises(sw.PlanError, match="rank 1024 is outside the 1024 devices"):
        write_dumps(plan, tmp_path, [1024])


def test_the_wrapper_writes_the_dumps_of_all_ranks(tmp_path):
    net = Mixed()
    sw.AutoParallel(net, save_graphs=tmp_path).dataset_strategy("full_batch")(torch.randn(16, 16))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"rank_{r}" for r in range(8)]
    assert (tmp_path / "rank_5" / "execute.ir").read_text() == execute_text(planned(net), 5)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(plan: sw.Plan, width: int | None = None) -> str:
    file = io.StringIO()
    explain(plan, file, width)
    return file.getvalue()


def test_the_table_shows_operators_traffic_and_parameters(tutorial):
    text = table(tutorial, 240)
    rows = {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()}
    assert rows["matmul1"] == [
        "matmul1",
        line_of("self.matmul1("),
        "((2, 4), (4, 1))",
        "[2@4, 4@1] [4@1, -] -> [2@4, -]",
        "16x196 196x512 -> 16x512",
        "all_reduce/4",
        "48 KiB",
        "392 KiB",
    ]
    assert rows["matmul2"][5:] == ["all_to_all/4", "reduce_scatter/8", "62 KiB", "14 KiB"]
    assert rows["matmul_2"][2] == "((8, 1), (1, 1)) batch"
    assert rows["w1"] == ["w1", "784x512", "196x512", "(4, 1)", "[4@1, -]", "392 KiB"]
    sent = {
        phase: sum(c.sent for c in tutorial.collectives(0) if c.phase == phase)
        for phase in ("forward", "backward", "gradient")
    }
    assert sum(sent.values()) == tutorial.sent
    assert (
        f"a rank sends in a step: forward {sent['forward'] / 1024:.0f} KiB, backward {sent['backward'] / 1024:.0f} "
        f"KiB, gradient {sent['gradient'] / 1024:.0f} KiB, together {tutorial.sent / 1024:.0f} KiB"
    ) in text
    assert "\x1b" not in text


class Product(nn.Module):
    def __init__(self, strategy):
        super().__init__()
        self.w, self.product = nn.Parameter(torch.zeros(8, 8)), sw.shard(torch.matmul, strategy)

    def forward(self, x):
        return self.product(x, self.w)


def test_the_table_tells_layouts_of_equal_cuts_apart():
    layout, x = sw.Layout((2, 2, 2), ("dp", "sp", "mp")), torch.zeros(16, 8)
    texts = []
    for strategy in [((2, 4), (4, 1)), (layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None"))]:
        texts.append(table(sw.plan(Product(strategy), (x,), devices=8), 240))
    for text, shown in zip(texts, ("[2@4, 4@1] [4@1, -] -> [2@4, -]", "[2@1, 2@2·2@4] [2@2·2@4, -] -> [2@1, -]")):
        assert "((2, 4), (4, 1))" in text and shown in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_fits_its_width_and_loses_nothing(tutorial, width):
    text = table(tutorial, width)
    assert max(map(len, text.splitlines())) <= width
    squeezed = re.sub(r"\s", "", text)
    for part in ("matmul1", "w3", "392KiB", "427KiB"):
        assert part in squeezed
    if width >= 80:
        assert "((2, 4), (4, 1))" in text and "reduce_scatter/8" in text


def test_the_table_shows_notes_and_names_in_brackets():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"[red]": nn.Linear(16, 16)})

        def forward(self, x):
            return F.relu(self.layers["[red]"](x))

    plan = planned(Net(), (4, 16))
    text = table(plan)
    shared = "the batch of 4 is cut 4 ways on 8 devices; 2 devices repeat the same work"
    assert plan.notes == (f"linear: {shared}", f"relu: {shared}")
    assert f"note: layers.[red], relu: {shared}" in " ".join(text.split())
    assert "layers.[red].weight" in text


def test_the_wrapper_prints_the_table(capsys):
    model = sw.AutoParallel(Mixed()).dataset_strategy("full_batch")
    model(torch.randn(16, 16))
    model.explain()
    assert "soft (softmax)" in capsys.readouterr().out
