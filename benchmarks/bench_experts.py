# SPDX-License-Identifier: Apache-2.0
"""How near to the limits of the machine are the router and the experts of a sparse layer, in each weight format?

    python -m benchmarks.bench_experts [--hidden 2048 --width 768 --experts 128 --chosen 8] [--layers 3] [--shared 0]
        [--quantization none wint4] [--rows 1 2 4 8 16 64 512] [--rounds 7] [--together]

Rows are random states, which route apart; with --together they are nearly equal and route to the same experts. The
baseline `floor` is max(bytes of the experts that have rows / read bandwidth, operations / peak of the format), measured
beside each call. `over_floor` is the median of the time of both products over it. The router is given as a percentage
of the layer's three operators.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import paddle

from benchmarks.report import Row, make_parser, print_report
from benchmarks.roofline import Reading, Roofline, add_clock_flag, integer_products, make_roofline
from fastdeploy.config.quantization import FORMATS
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.experts import (
    PackedExperts,
    RoutedRows,
    Router,
    RouterRule,
    SharedExpert,
    experts_down,
    experts_up,
    pack_experts,
    pack_gate,
    route,
)
from fastdeploy.ops.graph import Graph
from fastdeploy.ops.linear import WeightPiece, pack_linear
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.registry import selected_backend


@dataclass(frozen=True)
class Sizes:
    """Sizes of a sparse layer, as flags give them."""

    hidden: int
    width: int
    experts: int
    chosen: int
    shared: int


@dataclass
class Layer:
    """The weights of one layer; all experts have the same values in memory of their own."""

    router: Router
    gate_up: PackedExperts
    down: PackedExperts
    shared: SharedExpert | None


def make_layer(sizes: Sizes, quantization: str, seed: int, max_rows: int) -> Layer:
    """Return a layer whose router spreads random rows over the experts."""

    def weight(outputs: int, inputs: int) -> paddle.Tensor:
        return random_rows(outputs, inputs, "bfloat16", seed, inputs**-0.5)

    def experts(outputs: int, inputs: int, is_gated: bool) -> PackedExperts:
        matrix = weight(outputs, inputs)
        return pack_experts([[WeightPiece(matrix, 0, outputs)]] * sizes.experts, quantization, is_gated)

    hidden, width = sizes.hidden, sizes.width
    gate = random_rows(sizes.experts, hidden, "bfloat16", seed, 2 * hidden**-0.5)
    norm = NormParams(paddle.ones([hidden], "bfloat16"), 1e-6)
    rule = RouterRule(sizes.chosen, "softmax", normalisation="add", epsilon=1e-20)
    router = Router(pack_gate(gate), sizes.experts, None, rule, norm, paddle.zeros([2], "int32"))
    shared = None
    if sizes.shared:
        gate_up = pack_linear(weight(2 * sizes.shared, hidden), None, quantization, True)
        down = pack_linear(weight(hidden, sizes.shared), None, quantization)
        shared = SharedExpert(gate_up, down, paddle.zeros([max_rows, sizes.shared], "bfloat16"))
    return Layer(router, experts(2 * width, hidden, True), experts(hidden, width, False), shared)


class Bench:
    """Some layers, one after the other so that caches hold none of their weights, and their buffers."""

    def __init__(self, sizes: Sizes, quantization: str, num_layers: int, max_rows: int, is_together: bool) -> None:
        self._sizes, self._quantization = sizes, quantization
        layers = [make_layer(sizes, quantization, seed, max_rows) for seed in range(num_layers)]
        chosen = sizes.chosen
        self._routed = RoutedRows.allocate(max_rows, sizes.hidden, sizes.experts, chosen, "bfloat16")
        self._activated = paddle.zeros([max_rows * chosen, sizes.width], "bfloat16")
        states = random_rows(max_rows, sizes.hidden, "float32", 99)
        if is_together:
            states = states * 0.01 + states[0]
        self._states = states.astype("bfloat16")
        self._hidden = self._states.clone()
        self._layers = [(layer, *self._capture(layer, max_rows)) for layer in layers]

    def _capture(self, layer: Layer, max_rows: int) -> tuple[Graph, Graph]:
        """Return the router and both products as graphs, because a call through Paddle costs 10 us and more."""

        def products(rows: int, _: int) -> None:
            experts_up(self._routed, layer.gate_up, self._activated, rows, layer.shared)
            experts_down(self._routed, self._activated, layer.down, self._hidden, rows, layer.shared)

        def router(rows: int, _: int) -> None:
            route(self._hidden, layer.router, self._routed, rows)

        backend = selected_backend()
        return backend.capture(router, max_rows, 1), backend.capture(products, max_rows, 1)

    def time(self, roofline: Roofline, rows: int) -> tuple[float, float, float, float]:
        """Run each layer once; return the seconds of the router, of both products and of the floor, and the experts."""
        clock, router_s, products_s, floor_s, distinct = roofline.clock, 0.0, 0.0, 0.0, 0
        for layer, router, products in self._layers:
            paddle.assign(self._states, self._hidden)
            reading = roofline.measure()
            times = [clock()]
            router.replay(rows, 1)
            times.append(clock())
            products.replay(rows, 1)
            times.append(clock())
            router_s += times[1] - times[0]
            products_s += times[2] - times[1]
            touched = int(layer.router.load[0])
            distinct += touched
            floor_s += self._floor_s(reading, layer, rows, touched)
        return router_s, products_s, floor_s, distinct / len(self._layers)

    def _floor_s(self, reading: Reading, layer: Layer, rows: int, touched: int) -> float:
        sizes = self._sizes
        num_bytes = touched * (layer.gate_up.num_bytes + layer.down.num_bytes) / sizes.experts
        if layer.shared is not None:
            num_bytes += layer.shared.gate_up.num_bytes + layer.shared.down.num_bytes
        operations = 2.0 * rows * 3 * sizes.hidden * (sizes.chosen * sizes.width + sizes.shared)
        products = integer_products(self._quantization)
        return reading.floor_s(num_bytes, 0.0 if products else operations, products * operations)


def measure(bench: Bench, roofline: Roofline, rows: int, num_rounds: int) -> Row:
    """Return the medians of some rounds."""
    rounds = [bench.time(roofline, rows) for _ in range(num_rounds)]
    return {
        "rows": rows,
        "experts": statistics.fmean(experts for *_, experts in rounds),
        "router_us": 1e6 * statistics.median(router_s for router_s, *_ in rounds),
        "router_%": 100 * statistics.median(r / (r + p) for r, p, *_ in rounds),
        "products_us": 1e6 * statistics.median(p for _, p, *_ in rounds),
        "over_floor": statistics.median(p / floor_s for _, p, floor_s, _ in rounds),
    }


def main() -> None:
    """Print a table for all formats and numbers of rows."""
    parser = make_parser(__doc__)
    for name, size in (("hidden", 2048), ("width", 768), ("experts", 128), ("chosen", 8), ("shared", 0)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--quantization", nargs="+", choices=FORMATS, default=["none", "wint4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--together", action="store_true", help="rows that route to the same experts")
    add_clock_flag(parser)
    args = parser.parse_args()
    roofline = make_roofline(parser, args)
    sizes = Sizes(args.hidden, args.width, args.experts, args.chosen, args.shared)
    rows = []
    for quantization in args.quantization:
        bench = Bench(sizes, quantization, args.layers, max(args.rows), args.together)
        rows += [{"format": quantization, **measure(bench, roofline, count, args.rounds)} for count in args.rows]
        del bench
    print_report("experts", "Sparse layers over the machine's limits", rows, roofline=roofline.describe())


if __name__ == "__main__":
    main()
