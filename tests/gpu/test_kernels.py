"""The compiled kernels on a GPU: right on awkward cases, beyond 2^31 elements, replayed as graphs, repeatable."""

from __future__ import annotations

import pytest
import torch

import wide_kernels as wk
from wide_kernels.benchmarks.awkward import (
    BF16_ACCUMULATION,
    LARGE,
    SMALL,
    TOLERANCE,
    Case,
    errors,
    operands,
    relative_error,
)
from wide_kernels.counters import capture_number, counters
from wide_kernels.norm_route.reference import reduced_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
BACKENDS = ("triton", "gluon")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_agree_with_float64_and_only_what_is_executed_is_read(
    backend: str, case: Case, dtype: torch.dtype
) -> None:
    found = list(errors(case, dtype, "cuda", backend))
    if not found:
        pytest.skip("gluon leaves this case to triton")
    assert [f"{what}: {error:.2e}" for what, error, bound in found if not error <= bound] == []


@pytest.mark.parametrize("width", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", [129, 300, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gluon_takes_every_width_and_ragged_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    if "gluon" not in wk.available_backends()["gemm_mn"]:
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    case = Case(rows, 320, 5, width, "half")
    found = list(errors(case, dtype, "cuda", "gluon"))
    assert sum(what.startswith(("gemm_mn", "gated")) for what, _, _ in found) == 4
    assert [f"{what}: {error:.2e}" for what, error, bound in found if not error <= bound] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_beyond_2_to_the_31_elements_are_addressed_right(backend: str) -> None:
    rows, columns, width = 135_000, 16_384, 128
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(rows, columns // width, device="cuda") < 0.5
    layout = wk.route_layout(mask)
    if backend not in wk.available_backends()["gemm_mn"]:
        pytest.skip(f"{backend} does not run here")
    y = wk.gemm_mn(x, weight, layout, backend=backend)
    assert y.numel() > 2**31
    last = wk.gemm_mn(x[-100:], weight, mask=mask[-100:], backend="torch")
    torch.testing.assert_close(y[-100:], last, rtol=2e-2, atol=2e-2)
    down = torch.randn(64, columns, device="cuda", dtype=torch.bfloat16)
    z = wk.gemm_k(y, down, layout, accumulate="fp32", backend="triton")
    last = wk.gemm_k(y[-100:], down, mask=mask[-100:], backend="torch")
    torch.testing.assert_close(z[-100:], last, rtol=2e-2, atol=2.0)  # sums of 8192 products of size 64


@pytest.mark.parametrize("rows", [1, 48, 3000])
def test_what_stands_in_is_right_in_a_chain_of_overlapping_launches(rows: int) -> None:
    """As a layer has them: norm, gate and up, down; the last reads early what the first has made."""
    _, x, gate, up, _ = operands(Case(rows, 512, 16, 64, "half"), torch.bfloat16, "cuda")
    x, gate, up = (torch.nan_to_num(tensor) for tensor in (x, gate, up))
    down = gate.t().contiguous()
    standing = [torch.randn(*shape, device="cuda") for shape in ((16, 512), (512, 32))]
    weight = wk.stand_in_weight(*standing, 16, torch.bfloat16)
    bypass = (torch.randn(32, 512, device="cuda") / 512**0.5).bfloat16()
    norm = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    w1, w2 = torch.randn(32, 512, device="cuda") / 512**0.5, torch.randn(32, 32, device="cuda")
    router = (wk.in_pieces(w1, torch.bfloat16), *(torch.randn(n, device="cuda") for n in (32,)), w2, w2[0])

    def layers(x: torch.Tensor, backend: str) -> list[torch.Tensor]:
        found = [x]
        for _ in range(8):
            y, decided, reduced = wk.norm_route(
                found[-1], norm, *router, 1e-5, bypass=bypass, early=True, backend=backend
            )
            form = {"mask": decided} if rows <= 128 else {"layout": wk.route_layout(decided)}
            h = wk.gated_mlp_up(y, gate, up, **form, backend=backend)
            stand_in = wk.StandIn(weight, reduced)
            found.append(wk.gemm_k(h, down, residual=x, stand_in=stand_in, early=True, **form, backend=backend))
        return found[1:]

    layers(x, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = layers(x, "triton")
    for _ in range(3):
        x.normal_()
        graph.replay()
        for layer, (given, got) in enumerate(zip([x, *made[:-1]], made, strict=True)):
            # each layer from what the one before it really gave: errors do not add up, decisions do not flip on
            y, decided, reduced = wk.norm_route(given, norm, *router, 1e-5, bypass=bypass, backend="triton")
            h = wk.gated_mlp_up(y, gate, up, mask=decided, backend="torch")
            stand_in = wk.StandIn(weight, reduced)
            expected = wk.gemm_k(h, down, residual=x, mask=decided, stand_in=stand_in, backend="torch")
            # In bf16 from 4 segments on 3000 rows: 0.004. A row that lacks some of what it needs is far off by itself.
            assert relative_error(got, expected.double()) <= BF16_ACCUMULATION, where_wrong(layer, got, expected)


def where_wrong(layer: int, got: torch.Tensor, expected: torch.Tensor) -> str:
    """Which rows and columns are further off than rounding explains, as runs of adjacent numbers."""
    off = (got.float() - expected.float()).abs() > 0.05 * expected.float().square().mean().sqrt()

    def runs(numbers: torch.Tensor) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for number in numbers.tolist():
            if found and number == found[-1][1] + 1:
                found[-1] = (found[-1][0], number)
            else:
                found.append((number, number))
        return found

    rows = off.float().mean(1) > 0.2
    columns = off[rows].float().mean(0) > 0.2
    return f"layer {layer}: rows {runs(rows.nonzero().flatten())}, columns of these {runs(columns.nonzero().flatten())}"


@pytest.mark.parametrize("rows", [300, 3000, 16384])
@pytest.mark.parametrize("size", [512, 4096])
def test_what_norm_route_finds_of_many_rows_repeats_bit_by_bit_beside_other_work(rows: int, size: int) -> None:
    x, bypass = (torch.randn(n, size, device="cuda").bfloat16() for n in (rows, 32))
    norm = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    w1, w2 = torch.randn(32, size, device="cuda") / size**0.5, torch.randn(224, 32, device="cuda")
    router = (wk.in_pieces(w1, torch.bfloat16), torch.randn(32, device="cuda"), w2, w2[:, 0].contiguous())

    def found() -> tuple[torch.Tensor, ...]:
        return wk.norm_route(x, norm, *router, 1e-5, bypass=bypass, backend="triton")

    first = found()
    assert relative_error(first[2], reduced_reference(x.double(), bypass.double(), 1e-5)) <= TOLERANCE[torch.bfloat16]
    other, square = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda").bfloat16()
    differ = torch.zeros(3, device="cuda")
    for _ in range(200):
        with torch.cuda.stream(other):
            square @ square
        for i, (one, again) in enumerate(zip(first, found(), strict=True)):
            differ[i] += (one != again).any()
    assert differ.tolist() == [0, 0, 0], "launches of 200 whose norm, decisions, reduced differ"


@pytest.mark.parametrize("rows", [1, 48, 3000])
def test_a_captured_graph_follows_new_masks(rows: int) -> None:
    mask, x, gate, up, _ = operands(Case(rows, 512, 16, 64, "half"), torch.bfloat16, "cuda")
    x, gate, up = (torch.nan_to_num(tensor) for tensor in (x, gate, up))
    down = gate.t().contiguous()

    def ffn() -> torch.Tensor:
        layout = wk.route_layout(mask)
        return wk.gemm_k(wk.gated_mlp_up(x, gate, up, layout), down, layout, residual=x, deterministic=True)

    ffn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ffn()
    for density in (0.0, 0.3, 1.0):
        mask.copy_(torch.rand(mask.shape, device="cuda") < density)
        graph.replay()
        torch.testing.assert_close(y, ffn(), rtol=0, atol=0)


def test_everything_but_the_fast_gemm_k_repeats_bit_by_bit() -> None:
    mask, x, gate, up, h = operands(Case(5000, 512, 40, 64, "half"), torch.bfloat16, "cuda")
    down = gate.t().contiguous()
    layout = wk.route_layout(mask)
    for call in (
        lambda: wk.gated_mlp_up(x, gate, up, layout),
        lambda: wk.gemm_k(h, down, layout, deterministic=True),
        lambda: wk.gemm_k(h[:9], down, mask=mask[:9]),
    ):
        assert torch.equal(call(), call())


def test_compiled_with_inductor_the_ffn_is_the_same() -> None:
    mask, x, gate, up, _ = operands(Case(300, 256, 8, 64, "half"), torch.float16, "cuda")
    down = gate.t().contiguous()

    def ffn(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        layout = wk.route_layout(mask)
        return wk.gemm_k(wk.gated_mlp_up(x, gate, up, layout), down, layout, residual=x, deterministic=True)

    expected = ffn(x, mask)
    assert expected[mask.any(1)].isfinite().all(), "rows that run nothing are no numbers, and their residual with them"
    found = torch.compile(ffn, fullgraph=True)(x, mask)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_launches_of_one_capture_share_counters() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    counters("a test", device, 8)
    numbers, places = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            numbers.append({capture_number(stream) for _ in range(3)})
            places.append({counters("a test", device, 8).data_ptr() for _ in range(3)})
            torch.zeros(1, device=device)
    assert all(len(found) == 1 and None not in found for found in numbers) and numbers[0] != numbers[1]
    assert all(len(found) == 1 for found in places) and places[0] != places[1]
    assert capture_number(torch.cuda.current_stream().cuda_stream) is None


def test_few_rows_route_right_whatever_runs_beside_and_before() -> None:
    """Launches of other shapes in turn, on several streams; then graphs of launches that follow each other at once."""
    shapes = {(4096, 32, 112, 0): 8, (4096, 32, 112, 32): 3, (576, 16, 24, 5): 3, (2048, 64, 300, 0): 5}
    shapes |= {(4096, 32, 8, 128): 1, (4096, 32, 8, 32): 1, (4096, 32, 8, 0): 1}
    routers, bypasses = {}, {}
    for size, rank, groups, read in shapes:
        w1 = torch.randn(rank, size, device="cuda") / size**0.5
        given = [torch.randn(*s, device="cuda") for s in ((rank,), (2 * groups, rank), (2 * groups,))]
        norm = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        routers[size, rank, groups, read] = (norm, wk.in_pieces(w1, torch.bfloat16), *given, 1e-5)
        bypass = torch.randn(read, size, device="cuda", dtype=torch.bfloat16) / size**0.5
        bypasses[size, rank, groups, read] = bypass if read else None

    def check(
        key: tuple[int, ...], x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, *reduced: torch.Tensor
    ) -> None:
        norm, w1, *rest = routers[key]
        expected, decided = wk.norm_route(x, norm, w1, *rest, backend="torch")
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
        assert (mask != decided).float().mean() < 1e-3, "but for ties"
        assert len(reduced) == (key[-1] > 0)
        for read in reduced:
            torch.testing.assert_close(read, reduced_reference(x, bypasses[key], 1e-5), rtol=1e-2, atol=1e-2)

    def route(x: torch.Tensor, key: tuple[int, ...], early: bool) -> tuple[torch.Tensor, ...]:
        return wk.norm_route(x, *routers[key], bypass=bypasses[key], early=early, backend="triton")

    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for turn in range(70):
        key = list(shapes)[turn % len(shapes)]
        inputs = [torch.randn(shapes[key], key[0], device="cuda", dtype=torch.bfloat16) for _ in streams]
        torch.cuda.synchronize()
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    result = route(x, key, early=bool(turn % 2))
                found.append((key, x, *result))
    torch.cuda.synchronize()
    for case in found:
        check(*case)
    for key, rows in shapes.items():
        x = torch.randn(rows, key[0], device="cuda", dtype=torch.bfloat16)
        graph, chain, made = torch.cuda.CUDAGraph(), [x], []
        with torch.cuda.graph(graph):
            for _ in range(20):
                made.append(route(chain[-1], key, early=True))
                chain.append(made[-1][0].roll(1, -1))
        for _ in range(3):
            x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            for given, result in zip(chain, made, strict=False):
                check(key, given, *result)
