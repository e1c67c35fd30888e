"""SC-12: linear layers: packed weights beside the reference, the table that chooses, and layers that hold either.

Products are sums in another order, so they are compared within BOUND, which docs/operators.md states. Packing and
unpacking is compared to the bit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.errors import ConfigError
from megatron_ext.ops import cpp as operators
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.cpp import can_be_built
from megatron_ext.ops.linear import INT8, PackableLinear, choice_identity, choose, cpp, onednn, table
from megatron_ext.ops.linear.few_rows import rows_are_independent
from megatron_ext.ops.linear.table import MIB, row_for

BOUND = 8 * torch.finfo(torch.float32).eps  # times the sum of the absolute products
CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(onednn.problem() is not None, reason=f"{onednn.problem()}")
needs_compiler = pytest.mark.skipif(not can_be_built(), reason="there is no C++ compiler")
needs_bf16 = pytest.mark.skipif(not onednn.supports(torch.empty(1, 1).bfloat16()), reason="oneDNN: no bf16 on this CPU")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_within_bound(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """The bound of sums in fp32, and half a unit of the output's type, which 16 bits are rounded to once."""
    x, weight = x.double(), weight.double()
    exact = F.linear(x, weight, None if bias is None else bias.double())
    size = F.linear(x.abs(), weight.abs(), None if bias is None else bias.double().abs())
    assert found.shape == exact.shape
    rounded = 0.0 if found.dtype is torch.float32 else (torch.finfo(found.dtype).eps / 2) * exact.abs() + 1e-7
    assert ((found.double() - exact).abs() <= BOUND * size * (1 + 2**-7) + rounded).all()


class Product(NamedTuple):
    """Products of one backend with weights of one type."""

    make: Callable[[Tensor], Callable[..., Tensor]]
    dtype: torch.dtype


PACKED = {
    "onednn": (Product(onednn.OneDnnWeight, torch.float32), needs_onednn),
    "onednn-bf16": (Product(onednn.OneDnnWeight, torch.bfloat16), needs_bf16),
    "cpp-bf16": (Product(cpp.PanelWeight, torch.bfloat16), needs_compiler),
    "cpp-fp16": (Product(cpp.PanelWeight, torch.float16), needs_compiler),
}
PLAIN = Product(lambda weight: lambda x, bias=None: F.linear(x, weight, bias), torch.float32)
packed_products = pytest.mark.parametrize(
    "product", [pytest.param(product, id=name, marks=mark) for name, (product, mark) in PACKED.items()]
)
products = pytest.mark.parametrize(
    "product",
    [
        pytest.param(PLAIN, id="reference"),
        *(pytest.param(product, id=name, marks=mark) for name, (product, mark) in PACKED.items()),
    ],
)


@products
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (97, 61), (64, 512), (300, 1024), (40, 4096)])
@torch.inference_mode()
def test_every_product_is_within_the_stated_bound(product, outputs, inputs):
    """Products of any number of rows, with a bias and without."""
    weight, bias = numbers(outputs, inputs, dtype=product.dtype), numbers(outputs, dtype=product.dtype)
    multiply = product.make(weight.clone())
    for rows in (1, 2, 3, 5, 8, 13, 17, 64):
        x = numbers(rows, inputs, seed=1, dtype=product.dtype)
        assert_within_bound(multiply(x), x, weight)
        assert_within_bound(multiply(x, bias), x, weight, bias)


@products
@torch.inference_mode()
def test_shapes_and_layouts_of_inputs(product):
    """Packed tokens [T, 1, h], vectors, no rows, and inputs that are not contiguous."""
    weight = numbers(24, 16, dtype=product.dtype)
    multiply = product.make(weight.clone())
    for x in (
        numbers(5, 1, 16),
        numbers(16),
        numbers(0, 16),
        numbers(0, 1, 16),
        numbers(5, 40)[:, 8:24],
        numbers(16, 5).t(),
    ):
        given = torch.empty_strided(x.shape, x.stride(), dtype=product.dtype).copy_(x)
        found = multiply(given)
        assert found.dtype is product.dtype
        assert_within_bound(found, given, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(97, 256), (64, 1024), (97, 1025), (576, 1536), (64, 8192)])
def test_rows_of_16_bits_have_the_same_bits_in_every_layer(outputs, inputs, packs, dtype):
    """SP-1: by whatever computes a layer: a row alone, beside others that verify drafts, and in a prefill."""
    layer = PackableLinear(inputs, outputs, dtype=dtype)
    layer.weight.data, layer.bias.data = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype)
    if not rows_are_independent(layer.weight):
        pytest.skip("not measured on this CPU")
    if packs:
        backend = onednn.BACKEND if onednn.supports(layer.weight) else cpp.BACKEND
        if backend is cpp.BACKEND and not can_be_built():
            pytest.skip("nothing packs this weight here")
        layer.pack(backend)
    x = numbers(96, 1, inputs, dtype=dtype) * numbers(96, 1, inputs, seed=1, dtype=dtype).exp()  # some are great
    with torch.inference_mode():
        whole = layer(x)
        for rows in (1, 2, 3, 4, 5, 8, 9, 17, 33):
            for first in range(0, 96 - rows, rows):
                assert torch.equal(layer(x[first : first + rows]), whole[first : first + rows]), (rows, first)
        assert torch.equal(layer(x[5, 0]), whole[5, 0])


@needs_compiler
@pytest.mark.parametrize("dtype", cpp.DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(97, 61), (300, 1024), (2100, 130)])
@torch.inference_mode()
def test_rows_have_the_same_bits_however_they_are_batched(dtype, outputs, inputs):
    """C++ products: alone, in tiles of any size, in ranges of many tiles, and with any number of threads."""
    multiply = cpp.PanelWeight(numbers(outputs, inputs, dtype=dtype))
    x = numbers(801, inputs, dtype=dtype)
    whole = multiply(x)
    for rows in (*range(1, 27), 97, 400):
        assert torch.equal(multiply(x[:rows]), whole[:rows]), rows
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for rows in (1, 5, 30, 801):
            assert torch.equal(multiply(x[:rows]), whole[:rows]), rows
    finally:
        torch.set_num_threads(threads)


@needs_compiler
class TestInt8:
    SHAPES = pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (97, 61), (64, 512), (300, 1100)])

    @SHAPES
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_each_number_is_within_half_a_step(self, outputs, inputs, dtype):
        """A step is the largest number of an output's group of 128 inputs, divided by 127."""
        weight = numbers(outputs, inputs, dtype=dtype)
        weight[0, : inputs // 2] *= 1000
        found = cpp.Int8Weight(weight)(torch.eye(inputs)).T
        assert found.shape == weight.shape
        for first in range(0, inputs, 128):
            exact, group = weight[:, first : first + 128].float(), found[:, first : first + 128]
            steps = exact.abs().amax(1, keepdim=True) / 127
            assert ((group - exact).abs() <= 0.5001 * steps).all()

    @SHAPES
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @torch.inference_mode()
    def test_products_are_those_of_the_quantized_weight(self, outputs, inputs, dtype):
        """Within the bound of products in fp32, for any number of rows."""
        multiply, bias = cpp.Int8Weight(numbers(outputs, inputs)), numbers(outputs)
        for rows in (1, 2, 5, 17, 64):
            x = numbers(rows, inputs, seed=1, dtype=dtype)
            assert_within_bound(multiply(x, bias), x, multiply(torch.eye(inputs)).T, bias)

    def test_the_original_is_gone(self):
        """A layer refuses whatever needs its weight, and stays as it is."""
        layer = PackableLinear(40, 24)
        layer.pack(INT8)
        x = numbers(3, 40)
        with torch.inference_mode():
            before = layer(x)
        for use in (layer.unpack, layer.state_dict, lambda: layer(x)):
            with pytest.raises(ConfigError, match="--cpu-weight-quantization int8"):
                use()
        with torch.inference_mode():
            assert torch.equal(layer(x), before)

    def test_a_state_dict_replaces_it(self):
        """Only with a weight of the right shape; without one the layer keeps its weight."""
        layer = PackableLinear(40, 24)
        layer.pack(INT8)
        packed = layer.packed
        layer.load_state_dict({"bias": torch.zeros(24)}, strict=False)
        with pytest.raises(RuntimeError, match="size mismatch"):
            layer.load_state_dict({"weight": torch.zeros(24, 41)}, strict=False)
        assert layer.packed is packed
        new = numbers(24, 40, seed=5)
        layer.load_state_dict({"weight": new}, strict=False)
        assert layer.packed is None
        assert torch.equal(layer.weight, new)


def test_a_product_in_16_bits_is_outside_the_bound():
    """The control of the bound."""
    weight, x = numbers(48, 512), numbers(9, 512)
    with pytest.raises(AssertionError):
        assert_within_bound(F.linear(x.bfloat16(), weight.bfloat16()).float(), x, weight)


@needs_compiler
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no large pages on this system")
@pytest.mark.parametrize("name", ["onednn", "cpp-bf16", "int8"])
def test_packed_weights_ask_for_large_pages(name, monkeypatch):
    """For all of their memory but parts of pages at its ends, and with the same values."""
    make, dtype = (cpp.Int8Weight, torch.float32) if name == "int8" else PACKED[name][0]
    weight, moved, move = numbers(4096, 2048, dtype=dtype), [], operators.move_to_large_pages
    monkeypatch.setattr(operators, "move_to_large_pages", lambda one: moved.append(move(one)))
    packed = make(weight)
    size = 4096 * 2048 * (1 if name == "int8" else dtype.itemsize)
    assert size - 2**22 < moved.pop() <= size + 2**18
    make(weight[:16, :64])
    assert moved == [0]
    if name != "int8":
        assert torch.equal(packed.dense(), weight)


@needs_onednn
@needs_compiler
@pytest.mark.parametrize(("outputs", "inputs"), [(97, 61), (64, 512), (300, 1100), (2100, 130)])
@torch.inference_mode()
def test_few_rows_of_fp32_are_computed_from_the_memory_of_onednn(outputs, inputs):
    """A row has the same bits beside any few others and with any threads; more rows are within the bound."""
    if not onednn.few_rows_by_cpp():
        pytest.skip("oneDNN lays weights out in another way here")
    weight, bias, x = numbers(outputs, inputs), numbers(outputs), numbers(24, inputs, seed=1)
    multiply = onednn.OneDnnWeight(weight)
    assert multiply.panel_inputs >= inputs
    alone = torch.cat([multiply(x[row : row + 1], bias) for row in range(24)])
    assert_within_bound(alone, x, weight, bias)
    threads = torch.get_num_threads()
    try:
        for count in (threads, 3):
            torch.set_num_threads(count)
            for rows in range(1, onednn.FEW_ROWS + 1):
                for first in range(0, 24 - rows, rows):
                    assert torch.equal(multiply(x[first : first + rows], bias), alone[first : first + rows]), rows
    finally:
        torch.set_num_threads(threads)
    assert_within_bound(multiply(x[:9], bias), x[:9], weight, bias)


@needs_onednn
@needs_compiler
@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="oneDNN is lowered")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="another layout")
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="another oneDNN")
def test_the_layout_of_the_tested_torch_is_known():
    assert onednn.few_rows_by_cpp()


@needs_onednn
@needs_compiler
@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("make", [onednn.OneDnnWeight, cpp.PanelWeight, cpp.Int8Weight])
def test_other_shapes_are_refused(make, rows):
    """Nothing is read after the end of an input or a bias, however many rows there are."""
    multiply = make(numbers(200, 100, dtype=torch.bfloat16 if make is cpp.PanelWeight else torch.float32))
    assert multiply(numbers(rows, 100), numbers(200)).shape == (rows, 200)
    for inputs, outputs in ((50, 200), (112, 200), (100, 40), (100, 201)):
        with pytest.raises(RuntimeError):
            multiply(numbers(rows, inputs), numbers(outputs))


@needs_onednn
@needs_compiler
def test_another_layout_of_onednn_is_seen():
    """Where its numbers are not in our panels, oneDNN computes all rows."""
    if not onednn.few_rows_by_cpp():
        pytest.skip("oneDNN lays weights out in another way here")
    packed = onednn.OneDnnWeight(numbers(200, 100))._weight
    found = operators.kernels().onednn_panels
    assert found(packed, numbers(200, 100)) == 112
    for outputs, inputs in ((100, 200), (200, 99), (128, 100)):
        assert found(packed, numbers(outputs, inputs)) == 0
    changed = numbers(200, 100)
    changed[199, 99] += 1
    assert found(packed, changed) == found(packed, changed.double()) == found(changed, changed) == 0


@packed_products
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (97, 61), (64, 512), (1024, 300)])
def test_unpacking_is_exact(product, outputs, inputs):
    """Weights come back to the bit, numbers that arithmetic would change included."""
    weight = numbers(outputs, inputs, dtype=product.dtype)
    info = torch.finfo(product.dtype)
    bits = torch.int32 if product.dtype is torch.float32 else torch.int16
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, info.smallest_normal / 2, info.max])
    flat = weight.view(-1)
    flat[: min(6, flat.numel())] = special[: min(6, flat.numel())].to(product.dtype)
    payload = {torch.float32: 0x7FC12345, torch.bfloat16: 0x7FC1, torch.float16: 0x7E01}[product.dtype]
    flat[-1:] = torch.tensor([payload], dtype=bits).view(product.dtype)
    with torch.inference_mode():
        packed = product.make(weight)
        dense = packed.dense()
    assert torch.equal(dense.view(bits), weight.view(bits))
    assert dense.is_contiguous()
    assert not dense.is_inference(), "a parameter that is written in place later"
    assert dense.data_ptr() != weight.data_ptr()


class TestChoice:
    @pytest.fixture(autouse=True)
    def cpu(self, monkeypatch):
        """A CPU with an instruction set that the table has."""
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")

    @needs_onednn
    @pytest.mark.parametrize("has_kernel", [True, False])
    def test_the_table_decides_by_size(self, has_kernel, monkeypatch):
        """Without our kernel for few rows, oneDNN packs from 1 MiB on."""
        monkeypatch.setattr(onednn, "few_rows_by_cpp", lambda: has_kernel)
        row = row_for(torch.float32)
        assert row is not None
        least = (row.min_bytes if has_kernel else MIB) // (4 * row.min_inputs)
        for outputs, inputs, packs in (
            (least, row.min_inputs, True),
            (least - 1, row.min_inputs, False),
            (2 * least, row.min_inputs // 2, False),
            (row.min_inputs // 2, 2 * least, True),
        ):
            assert choose(torch.empty(outputs, inputs, device=CPU)).name == ("onednn" if packs else "reference")

    @needs_compiler
    @pytest.mark.parametrize("dtype", cpp.DTYPES)
    @pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
    def test_16_bits_take_our_kernels(self, monkeypatch, dtype, capability):
        """On CPUs without instructions for the type; below the table's size the reference computes."""
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
            monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
        assert choose(torch.empty(2048, 2048, dtype=dtype)).name == "cpp"
        assert choose(torch.empty(32, 64, dtype=dtype)).name == "reference"

    @pytest.mark.parametrize("name", ["_is_amx_tile_supported", "_is_avx512_bf16_supported"])
    def test_bf16_takes_onednn_where_the_cpu_has_instructions(self, monkeypatch, name):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        for one in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
            has = one == name or name.startswith("_is_amx")  # a CPU with AMX has both
            monkeypatch.setattr(torch.cpu, one, lambda has=has: has, raising=False)
        row = row_for(torch.bfloat16)
        assert row is not None
        assert row.backend == "onednn"
        found = choice_identity(onednn.BACKEND, torch.bfloat16, is_forced=False)
        assert ("AMX" if "amx" in name else "AVX512_BF16") in found.split()

    def test_a_lowered_cpu_has_no_instructions_for_bf16(self, monkeypatch):
        """The CPU still has them, and torch says so."""
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
            monkeypatch.setattr(torch.cpu, name, lambda: True, raising=False)
        assert table.instruction_sets(torch.bfloat16) == ("AVX2",)

    @needs_onednn
    def test_an_operator_backend_overrides_the_table(self):
        small, large = torch.empty(4, 4), torch.empty(2048, 2048)
        for name, expected in (("onednn", "onednn"), ("reference", "reference")):
            with preferring(name):
                assert [choose(one).name for one in (small, large)] == [expected, expected]
        with preferring("triton"):
            assert [choose(one).name for one in (small, large)] == ["reference", "onednn"]

    @pytest.mark.parametrize(
        "weight", [torch.empty(4, 4, dtype=torch.bfloat16), torch.empty(4, 4, device="meta")], ids=["type", "device"]
    )
    def test_what_cannot_be_packed_is_refused_where_packing_is_asked_for(self, weight):
        with preferring("onednn"), pytest.raises(ConfigError, match=r"--operator-backend onednn .*float32.*; auto and"):
            choose(weight)


@needs_onednn
class TestLayer:
    @pytest.fixture
    def layer(self) -> PackableLinear:
        made = PackableLinear(40, 24)
        with torch.no_grad():
            made.weight.copy_(numbers(24, 40))
        return made

    @staticmethod
    def packed(layer: PackableLinear) -> Tensor:
        """Pack the layer; return its weight."""
        weight = layer.weight.detach().clone()
        layer.pack(onednn.BACKEND)
        return weight

    def test_packed_weights_replace_the_original(self, layer):
        """The parameter stays the same object of the same shape, without memory and without values."""
        parameter, weight = layer.weight, self.packed(layer)
        assert layer.weight is parameter
        assert (parameter.shape, parameter.dtype, parameter.device) == (weight.shape, weight.dtype, weight.device)
        assert parameter.untyped_storage().nbytes() == 4
        assert parameter.isnan().all()
        x = numbers(7, 40)
        with torch.inference_mode():
            assert_within_bound(layer(x), x, weight, layer.bias)
            assert torch.equal(layer.product(x), layer.packed(x)), "the packed weight computes"

    @pytest.mark.parametrize("write", [lambda one: one.zero_(), lambda one: one.fill_(2.5)])
    def test_filling_with_one_number_is_kept(self, layer, write):
        """Filling a placeholder does not raise, so the number must not be lost."""
        self.packed(layer)
        assert layer.is_current
        with torch.no_grad():
            write(layer.weight)
        number = layer.weight[0, 0].item()
        assert not layer.is_current
        layer.pack(onednn.BACKEND)
        assert layer.is_current
        assert torch.equal(layer.packed.dense(), torch.full((24, 40), number))
        layer.unpack()
        assert torch.equal(layer.weight, torch.full((24, 40), number))
        assert layer.weight.is_contiguous()

    def test_another_parameter_computes_at_once(self, layer):
        self.packed(layer)
        new = nn.Parameter(numbers(24, 40, seed=5))
        layer.weight = new
        assert layer.packed is None
        assert torch.equal(layer.state_dict()["weight"], new)

    @pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
    def test_unpacking_restores_the_parameter(self, layer, mode):
        """An ordinary parameter again, whose edits are counted and which has gradients."""
        parameter, edits, weight = layer.weight, layer.weight._version, self.packed(layer)
        with mode():
            layer.unpack()
        assert layer.weight is parameter
        assert torch.equal(parameter, weight)
        assert layer.packed is None
        assert parameter._version == edits, "packing is no edit"
        layer(numbers(2, 40)).sum().backward()
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.mul_(2)
        assert parameter._version == edits + 1

    def test_a_state_dict_has_the_weight(self, layer):
        weight = self.packed(layer)
        others = []
        layer.register_state_dict_pre_hook(lambda *_: others.append("saving"))
        for _ in range(2):
            state = nn.Sequential(layer).state_dict()
            layer.pack(onednn.BACKEND)
            assert torch.equal(state["0.weight"], weight)
        assert others == ["saving"] * 2
        assert len(layer._state_dict_pre_hooks) == 2, "one of ours, however often it is packed"

    def test_gradients_need_the_parameter(self, layer):
        """A packed layer is unpacked where gradients are enabled."""
        weight = self.packed(layer)
        x = numbers(3, 40)
        layer(x).sum().backward()
        assert torch.allclose(layer.weight.grad, x.sum(0).expand(24, 40))
        assert torch.equal(layer.weight, weight)

    def test_a_weight_beside_keeps_its_values(self):
        layer, shared = PackableLinear(40, 24, bias=False), nn.Parameter(numbers(24, 40))
        layer.weight = None
        before = shared.detach().clone()
        layer.pack(onednn.BACKEND, beside=shared)
        assert torch.equal(shared, before)
        assert dict(layer.named_parameters()) == {}, "the shared parameter is another module's"
        x = numbers(3, 40)
        with torch.inference_mode():
            assert torch.equal(layer.product(x, None, shared), layer.packed(x))
        layer.state_dict()
        assert layer.packed is not None, "nothing of it is in a state dict"
        layer.unpack()
        assert layer.packed_beside == ()
        assert torch.equal(shared, before)
